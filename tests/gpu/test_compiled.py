"""E10 on a Hopper GPU: torch.compile of a module that contains the fused grouped MLP."""

import statistics
import time

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import cute_grouped_mlp as cgm
from cute_grouped_mlp.operators import Configuration
from cute_grouped_mlp.step import NEED_PROBS, NEED_W1, NEED_W2, NEED_X

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


def configuration(module):
    activation = module.activation
    return str(Configuration(activation.activation, activation.glu_interleave_size, activation.params))


def test_e10_opcheck():
    module = Layer().experts
    x, sizes, probs = operands()
    needs = NEED_X | NEED_W1 | NEED_PROBS | NEED_W2
    arguments = (x, [module.fc1.weight], None, probs, sizes, [module.fc2.weight], None, None, sizes)
    torch.library.opcheck(torch.ops.cute_grouped_mlp.mlp_forward, (*arguments, configuration(module), needs))


def test_e10_twelve_equal_blocks_have_one_graph():
    torch.compiler.reset()
    counter, blocks = CompileCounterWithBackend("aot_eager"), [Layer() for _ in range(12)]
    for block in blocks:
        graph = torch.compile(block, backend=counter, fullgraph=True)
        assert_same(gradients(graph, block, *operands()), gradients(block, block, *operands()))
    assert counter.frame_count == 1


def test_e10_a_functional_call_of_a_module_on_the_meta_device():
    """F15: it is planned for the device of the tensors, where kernels run, and not for the module's own."""
    torch.compiler.reset()
    real, module = Layer().experts, Layer().experts.to("meta")
    parameters = {name: p.detach().clone().requires_grad_() for name, p in real.named_parameters()}

    def call(*args):
        return torch.func.functional_call(module, parameters, args)

    x, sizes, probs = operands()
    y = torch.compile(call, backend="aot_eager", fullgraph=True)(x, sizes, probs)
    found = [y.detach(), *torch.autograd.grad(y, (x, probs, *parameters.values()), torch.ones_like(y))]
    assert_same(found, gradients(real, real, x, sizes, probs))


@pytest.mark.parametrize(("hidden", "ffn"), [(32, 37), (32, 12), (128, 96)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_e10_features_and_types_that_no_kernel_takes(hidden, ffn, dtype, mode):
    """Plain torch may read the split sizes on the host there: that operator is no part of a CUDA graph."""
    torch.compiler.reset()
    torch.manual_seed(0)
    module = cgm.GroupedMLP(len(SPLITS), hidden, ffn, device="cuda", dtype=dtype)
    _, sizes, probs = operands()
    x = torch.randn(sum(SPLITS), hidden, device="cuda").to(dtype).requires_grad_()
    graph = torch.compile(module, fullgraph=True, mode=mode)
    expected = gradients(module, module, x, sizes, probs)
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        assert_same([t.clone() for t in gradients(graph, module, x, sizes, probs)], expected)


def test_e10_weights_as_a_list():
    torch.compiler.reset()
    module = Layer(single_grouped_weight=False)
    graph = torch.compile(module, backend="aot_eager", fullgraph=True)
    assert_same(gradients(graph, module, *operands()), gradients(module, module, *operands()))


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
