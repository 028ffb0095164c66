"""E10: what torch.compile compiles anew, and what not: equal blocks, recipes, settings, numbers of tokens."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import cute_grouped_mlp as cgm
from cute_grouped_mlp import kernels
from cute_grouped_mlp.reference_kernels import ReferenceKernels

# torch 2.13 looks at .grad of an input that is no leaf
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

G, H, F, T = 3, 16, 24, 20


@pytest.fixture(autouse=True, params=["kernels", "plain torch"])
def provider(request):
    torch.compiler.reset()
    if request.param == "plain torch":
        yield None
        return
    with kernels.using(ReferenceKernels()) as found:
        yield found


class Block(torch.nn.Module):
    """What a model repeats."""

    def __init__(self, **options):
        super().__init__()
        self.norm = torch.nn.LayerNorm(H, dtype=torch.bfloat16)
        self.experts = cgm.GroupedMLP(G, H, F, dtype=torch.bfloat16, **options)

    def forward(self, x, sizes, probs):
        return x + self.experts(self.norm(x), sizes, probs)


def operands(tokens=T):
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, H, generator=generator).to(torch.bfloat16).requires_grad_()
    return x, torch.tensor([tokens // 2, 0, tokens // 4]), torch.rand(tokens, generator=generator).requires_grad_()


def counting():
    return CompileCounterWithBackend("aot_eager")


def train(blocks, tokens=T):
    """Output, and gradients of everything."""
    x, sizes, probs = operands(tokens)
    of_each = [probs.detach().clone().requires_grad_() for _ in blocks]  # sums over blocks would round in another order
    y = x
    for block, p in zip(blocks, of_each, strict=True):
        y = block(y, sizes, p)
    parameters = [p for block in blocks for p in block.parameters()]
    return [y.detach(), *torch.autograd.grad(y, (x, *of_each, *parameters), torch.ones_like(y))]


def assert_same(one, other):
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize(
    "options",
    [{}, {"bias": True, "scale_bias": True}, {"single_grouped_weight": False}, {"activation": "situglu", "beta1": 3.0}],
    ids=str,
)
def test_e10_twelve_equal_blocks_have_one_graph(options):
    """More blocks than torch.compile compiles a function anew (8 times): the last ones would run without it."""
    blocks, counter = [Block(**options) for _ in range(12)], counting()
    graphs = [torch.compile(block, backend=counter, fullgraph=True) for block in blocks]
    assert_same(train(graphs), train(blocks))
    assert counter.frame_count == 1


def test_e10_blocks_that_differ_have_graphs_of_their_own():
    blocks = [Block(), Block(activation="situglu", beta1=3.0), Block(activation="situglu", beta1=2.0), Block(bias=True)]
    counter = counting()
    graphs = [torch.compile(block, backend=counter, fullgraph=True) for block in blocks]
    assert_same(train(graphs), train(blocks))
    assert counter.frame_count == 4


def test_e10_a_graph_outlives_the_module_that_it_was_made_of():
    counter, found = counting(), []
    for _ in range(3):
        block = Block()
        found.append(train([torch.compile(block, backend=counter, fullgraph=True)]))
        assert_same(found[-1], train([block]))
        del block
    assert counter.frame_count == 1


def test_e10_equal_recipes_have_one_graph_and_flags_their_own():
    block, counter = Block(), counting()
    graph = torch.compile(block, backend=counter, fullgraph=True)
    for _ in range(2):
        for flag in (None, False):
            with cgm.autocast(recipe=cgm.HighPrecision(enable_cutedsl_fused_grouped_mlp=flag)):
                assert_same(train([graph]), train([block]))
    assert counter.frame_count == 2


def test_e10_a_recipe_whose_text_is_not_kept():
    """It was changed since the last call, which no other call needs to have built its text anew for."""
    block, counter, recipe = Block(), counting(), cgm.HighPrecision()
    graph = torch.compile(block, backend=counter, fullgraph=True)
    with cgm.autocast(recipe=recipe):
        for note in range(4):
            recipe.note = f"step {note}"
            if note % 2:
                assert str(recipe).endswith(f"note='step {note}')")  # which keeps the text
            train([graph])
    assert counter.frame_count == 1


def test_e10_a_foreign_recipe_that_quantises_nothing():
    class HighPrecision:
        enable_cutedsl_fused_grouped_mlp = None

    block, counter, recipe = Block(), counting(), HighPrecision()
    graph = torch.compile(block, backend=counter, fullgraph=True)
    with cgm.autocast(recipe=recipe):
        assert_same(train([graph]), train([block]))
        recipe.enable_cutedsl_fused_grouped_mlp = False
        assert_same(train([graph]), train([block]))
    assert counter.frame_count == 2


def test_e10_an_operations_own_recipe_counts(provider):
    block = Block()
    block.experts.fc1.recipe = block.experts.fc2.recipe = cgm.HighPrecision(enable_cutedsl_fused_grouped_mlp=False)
    with cgm.autocast(recipe=cgm.MXFP8BlockScaling()):
        found = train([torch.compile(block, backend="aot_eager", fullgraph=True)])
        assert provider is None or "fprop_act" not in provider.names()
        assert_same(found, train([block]))


def test_e10_settings_that_change_nothing_in_the_graph_leave_it_alone(provider):
    block, counter = Block(), counting()
    graph = torch.compile(block, backend=counter, fullgraph=True)
    for _ in range(3):
        cgm.settings.touch()  # as moving any module does
        train([graph])
    assert counter.frame_count == 1
    with cgm.settings.override(fuse=False):
        train([graph])
    assert counter.frame_count == 2


@pytest.mark.parametrize("how", ["automatic", "dynamic", "mark_dynamic"])
def test_e10_the_number_of_tokens_is_dynamic(how):
    """By default torch.compile takes the first T for constant and the second for the sign that T is dynamic."""
    block, counter = Block(activation="situglu", beta1=3.0).experts, counting()  # dynamic=True looks at floats, too
    graph = torch.compile(block, backend=counter, fullgraph=True, dynamic=True if how == "dynamic" else None)
    for tokens in (T, 24, 64, 7, 33, 1000):
        x, sizes, probs = operands(tokens)
        if how == "mark_dynamic":
            torch._dynamo.mark_dynamic(x, 0)  # an error if it is specialised
            torch._dynamo.mark_dynamic(probs, 0)
        y = graph(x, sizes, probs)
        found = torch.autograd.grad(y, (x, probs, *block.parameters()), torch.ones_like(y))
        assert_same([y.detach(), *found], train([block], tokens))
    assert counter.frame_count == (2 if how == "automatic" else 1)


def test_e10_is_first_microbatch_without_a_quantising_recipe():
    """Megatron passes it always; without quantised weights there is nothing to keep."""
    block, counter = Block(), counting()

    def call(x, sizes, probs, first):
        return block.experts(x, sizes, probs, is_first_microbatch=first)

    graph = torch.compile(call, backend=counter, fullgraph=True)
    for first in (True, False):
        assert torch.equal(graph(*operands(), first), call(*operands(), first))
