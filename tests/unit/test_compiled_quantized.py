"""E10 under quantising recipes: one graph where earlier steps leave nothing and no kernel runs, else a graph break."""

import pytest
import torch
from torch._dynamo.exc import Unsupported
from torch._dynamo.testing import CompileCounterWithBackend

import cute_grouped_mlp as cgm
from cute_grouped_mlp import kernels
from cute_grouped_mlp.reference_kernels import ReferenceKernels

# torch 2.13 looks at .grad of the output when it resumes after a graph break
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

G, H, F, T = 3, 128, 128, 50
RECIPES = {
    "mxfp8": lambda: cgm.MXFP8BlockScaling(margin=1),
    "current": lambda: cgm.Float8CurrentScaling(use_power_2_scales=True),
    "block": cgm.Float8BlockScaling,
    "nvfp4": lambda: cgm.NVFP4BlockScaling(disable_stochastic_rounding=True),
    "dequantized": lambda: cgm.MXFP8BlockScaling(backward_override="dequantized"),
    "high_precision": lambda: cgm.Float8BlockScaling(backward_override="high_precision"),
}


@pytest.fixture(autouse=True)
def reset():
    torch.compiler.reset()


def make(**options):
    torch.manual_seed(0)
    return cgm.GroupedMLP(G, H, F, dtype=torch.bfloat16, **options)


def step(call, module, recipe, parameters=None, **kwargs):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(T, H, generator=generator).bfloat16().requires_grad_()
    probs = torch.rand(T, generator=generator).requires_grad_()
    with cgm.autocast(recipe=recipe):
        y = call(x, torch.tensor([20, 0, 23]), probs, **kwargs)
    wanted = module.parameters() if parameters is None else parameters
    return [y.detach(), *torch.autograd.grad(y, (x, probs, *wanted), torch.ones_like(y))]


def assert_same(one, other):
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("options", [{}, {"bias": True, "scale_bias": True}, {"single_grouped_weight": False}], ids=str)
def test_e10_stateless_recipes_in_one_graph(recipe, options):
    module, recipe = make(**options), RECIPES[recipe]()
    graph = torch.compile(module, backend="aot_eager", fullgraph=True)
    assert_same(step(graph, module, recipe), step(module, module, recipe))


@pytest.mark.parametrize("frozen", ["fc1", "fc2", "both"])
def test_e10_only_what_is_needed_is_quantised(frozen, monkeypatch):
    """Nor does anything that is not read report numbers out of range: memory that holds just anything, for one."""
    module, recipe = make(), cgm.MXFP8BlockScaling()
    for name in ("fc1", "fc2"):
        module.get_parameter(f"{name}.weight").requires_grad_(frozen not in (name, "both"))
    trained = [p for p in module.parameters() if p.requires_grad]
    graph = torch.compile(module, backend="aot_eager", fullgraph=True)
    empty = torch.Tensor.new_empty
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *args, **kwargs: empty(*args, **kwargs).fill_(1e-39))
    with cgm.settings.override(debug_checks=True):
        assert_same(step(graph, module, recipe, trained), step(module, module, recipe, trained))


def test_e10_fields_of_recipes_are_guarded_on():
    modules, counter = [make() for _ in range(3)], CompileCounterWithBackend("aot_eager")
    for margin in (0, 1, 0, 1):
        for module in modules:
            recipe = cgm.MXFP8BlockScaling(margin=margin)
            graph = torch.compile(module, backend=counter, fullgraph=True)
            assert_same(step(graph, module, recipe), step(module, module, recipe))
    assert counter.frame_count == 2


def test_e10_a_layer_that_is_not_quantised_among_quantised_ones():
    module = make()
    module.fc2.recipe = cgm.HighPrecision()
    graph = torch.compile(module, backend="aot_eager", fullgraph=True)
    assert_same(step(graph, module, cgm.MXFP8BlockScaling()), step(module, module, cgm.MXFP8BlockScaling()))


def test_e10_features_that_no_block_divides_are_said():
    module = cgm.GroupedMLP(G, H, 24, dtype=torch.bfloat16)
    with pytest.raises(cgm.UnsupportedError, match="out_features is 48, allowed: a multiple of 32"):
        step(torch.compile(module, backend="aot_eager", fullgraph=True), module, cgm.MXFP8BlockScaling())


@pytest.mark.parametrize("recipe", [cgm.DelayedScaling, cgm.NVFP4BlockScaling], ids=lambda cls: cls.__name__)
def test_e10_recipes_with_state_are_a_graph_break_that_says_so(recipe):
    module, other = make(), make()
    with pytest.raises(Unsupported, match="an amax history, random numbers"):
        step(torch.compile(module, backend="aot_eager", fullgraph=True), module, recipe())
    torch.compiler.reset()
    torch.manual_seed(2)
    found = [step(torch.compile(module, backend="aot_eager"), module, recipe()) for _ in range(3)]
    torch.manual_seed(2)
    expected = [step(other, other, recipe()) for _ in range(3)]
    for one, two in zip(found, expected, strict=True):
        assert_same(one, two)


def test_e10_quantised_weights_that_are_kept_are_a_graph_break():
    module = make()
    graph = torch.compile(module, backend="aot_eager", fullgraph=True)
    with pytest.raises(Unsupported, match="weights kept from the first micro-batch"):
        step(graph, module, cgm.MXFP8BlockScaling(), is_first_microbatch=True)


def test_e10_where_kernels_run_it_fused_it_is_a_graph_break():
    """And where the recipe forbids to fuse it is one graph there, too."""
    with kernels.using(ReferenceKernels()) as provider:
        module = make()
        with pytest.raises(Unsupported, match="kernels run it fused"):
            step(torch.compile(module, backend="aot_eager", fullgraph=True), module, cgm.MXFP8BlockScaling())
        recipe = cgm.MXFP8BlockScaling(enable_cutedsl_fused_grouped_mlp=False)
        found = step(torch.compile(module, backend="aot_eager", fullgraph=True), module, recipe)
        assert "fprop" in provider.names()
        assert_same(found, step(module, module, recipe))
