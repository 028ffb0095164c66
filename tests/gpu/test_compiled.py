"""E10 on a Hopper GPU: torch.compile of a module that contains the fused grouped MLP."""

import statistics
import time

import pytest
import torch

import cute_grouped_mlp as cgm

# importing Inductor warns about torch's own use of torch.jit
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

SPLITS, HIDDEN, FFN = (0, 70, 129, 1), 128, 96


class Layer(torch.nn.Module):
    """What a model has around its experts."""

    def __init__(self, **options):
        super().__init__()
        torch.manual_seed(0)
        self.norm = torch.nn.LayerNorm(HIDDEN, device="cuda", dtype=torch.bfloat16)
        self.experts = cgm.GroupedMLP(len(SPLITS), HIDDEN, FFN, device="cuda", dtype=torch.bfloat16, **options)

    def forward(self, x, sizes, probs):
        return x + self.experts(self.norm(x), sizes, probs)


def operands(splits=SPLITS):
    generator = torch.Generator("cuda").manual_seed(sum(splits))
    tokens = sum(splits)
    x = torch.randn(tokens, HIDDEN, device="cuda", generator=generator).bfloat16().requires_grad_()
    probs = torch.rand(tokens, device="cuda", generator=generator).requires_grad_()
    return x, torch.tensor(splits, dtype=torch.int32, device="cuda"), probs


def gradients(call, module, x, sizes, probs):
    y = call(x, sizes, probs)
    return [y.detach(), *torch.autograd.grad(y, (x, probs, *module.parameters()), torch.ones_like(y))]


def assert_same(one, other):
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("options", [{}, {"bias": True}], ids=str)
def test_e10_no_graph_break_and_the_same_numbers(options):
    torch.compiler.reset()
    module = Layer(**options)
    graph = torch.compile(module, backend="aot_eager", fullgraph=True)
    for splits in (SPLITS, (5, 0, 64, 31), (0,) * len(SPLITS)):
        assert_same(gradients(graph, module, *operands(splits)), gradients(module, module, *operands(splits)))


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # torch captures nothing to find its memory pool
def test_e10_with_the_default_backend():
    """Inductor's LayerNorm rounds otherwise than eager's, so the experts are compiled alone."""
    torch.compiler.reset()
    module = Layer().experts
    graph = torch.compile(module, fullgraph=True)
    assert_same(gradients(graph, module, *operands()), gradients(module, module, *operands()))
    graph = torch.compile(module, fullgraph=True, mode="reduce-overhead")
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        found = [t.clone() for t in gradients(graph, module, *operands())]
        assert_same(found, gradients(module, module, *operands()))


def test_e10_opcheck():
    torch.compiler.reset()
    module = Layer().experts
    args = operands()
    gradients(torch.compile(module, backend="aot_eager", fullgraph=True), module, *args)
    fuser, (fc1, _, fc2) = module.fuser, module.fuser.basic_ops
    ((index, _),) = fuser.compiled.items()
    choice = ((fuser.number << 16) + index << 8) + 0b11011
    arguments = (args[0], fc1.weight, None, args[2], args[1], fc2.weight, None, None, args[1], choice)
    torch.library.opcheck(torch.ops.cute_grouped_mlp.mlp_forward, arguments)


def test_e10_eager_calls_do_not_become_slower():
    """The check for torch.compile is one call of a function that returns False: below a tenth of a call's time."""
    module = Layer().experts
    args = operands()
    module(*args)

    def seconds(function, calls=300):
        times = []
        for _ in range(7):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(calls):
                function()
            times.append((time.perf_counter() - start) / calls)
        return statistics.median(times)

    assert seconds(torch.compiler.is_dynamo_compiling) < 0.1 * seconds(lambda: module(*args))
