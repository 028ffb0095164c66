"""E10 without a GPU: torch.compile traces the fused path through torch.library operators, kernels in plain torch."""

import pytest
import torch

import cute_grouped_mlp as cgm
from cute_grouped_mlp import kernels
from cute_grouped_mlp.reference_kernels import ReferenceKernels

# torch 2.13 looks at .grad of the output when it resumes after a graph break
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

G, H, F, T = 3, 16, 24, 20


@pytest.fixture(autouse=True)
def provider():
    torch.compiler.reset()
    with kernels.using(ReferenceKernels()) as found:
        yield found


def make(**kwargs):
    torch.manual_seed(0)
    return cgm.GroupedMLP(G, H, F, dtype=torch.bfloat16, **kwargs)


def inputs(tokens=T, requires_grad=True):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(tokens, H, generator=generator).to(torch.bfloat16).requires_grad_(requires_grad)
    probs = torch.rand(tokens, generator=generator).requires_grad_(requires_grad)
    return x, torch.tensor([tokens // 2, 0, tokens // 4]), probs


def step(call, module, *arguments):
    """Output, and gradients of whatever requires one."""
    y = call(*arguments)
    wanted = [t for t in (*arguments, *module.parameters()) if t is not None and t.requires_grad]
    grads = torch.autograd.grad(y, wanted, torch.ones_like(y)) if wanted else ()
    return [y.detach(), *grads]


def compiled(module, **kwargs):
    return torch.compile(module, backend="aot_eager", **kwargs)


def assert_same(one, other):
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bias": True},
        {"bias": True, "scale_bias": True},
        {"activation": "srelu"},
        {"activation": "clamped_qgeglu", "limit": 5.0},
    ],
    ids=str,
)
def test_e10_no_graph_break_and_the_same_numbers(options):
    module = make(**options)
    graph = compiled(module, fullgraph=True)
    for tokens in (T, T + 4, 0):
        assert_same(step(graph, module, *inputs(tokens)), step(module, module, *inputs(tokens)))


@pytest.mark.parametrize("frozen", [("fc1.weight",), ("fc2.weight",), ("fc1.weight", "fc2.weight")], ids=str)
@pytest.mark.parametrize("x_requires_grad", [True, False])
def test_e10_only_what_is_needed(provider, frozen, x_requires_grad):
    module = make()
    for name in frozen:
        module.get_parameter(name).requires_grad_(False)
    x, sizes, probs = inputs()
    arguments = (x.detach().requires_grad_(x_requires_grad), sizes, probs.detach())
    expected = step(module, module, *arguments)
    launches = provider.names()
    provider.launches.clear()
    assert_same(step(compiled(module, fullgraph=True), module, *arguments), expected)
    assert provider.names() == launches


def test_e10_no_grad_keeps_nothing(provider):
    module = make()
    graph = compiled(module, fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(graph(*inputs()), module(*inputs()), rtol=0, atol=0)
    assert not any(spec.store_z for spec in provider.launches)


def test_e10_without_probs_and_with_leading_dimensions():
    module = make()
    x, sizes, probs = inputs()
    graph = compiled(module, fullgraph=True)
    assert_same(step(graph, module, x, sizes), step(module, module, x, sizes))
    arguments = (x.detach().view(4, 5, H).requires_grad_(), sizes, probs.detach().view(4, 5).requires_grad_())
    assert_same(step(graph, module, *arguments), step(module, module, *arguments))


def test_e10_the_flag_is_guarded_on(provider):
    """Toggling the recipe's flag takes the other path at once, and back again without another trace."""
    module, recipe = make(), cgm.HighPrecision()
    graph = compiled(module)

    def launches():
        with cgm.autocast(recipe=recipe):
            expected = step(module, module, *inputs())
            provider.launches.clear()
            assert_same(step(graph, module, *inputs()), expected)
        return provider.names()

    fused = launches()
    assert "fprop_act" in fused
    recipe.enable_cutedsl_fused_grouped_mlp = False
    assert "fprop_act" not in launches()
    recipe.enable_cutedsl_fused_grouped_mlp = True
    assert launches() == fused
    with cgm.settings.override(fuse=False):
        recipe.enable_cutedsl_fused_grouped_mlp = None
        assert "fprop_act" not in launches()


def test_e10_recipes_of_threads_are_their_own(provider):
    """A graph that another thread's recipe made is not taken."""
    import threading

    module = make()
    graph = compiled(module)
    names = {}

    def work(flag):
        recipe = cgm.HighPrecision(enable_cutedsl_fused_grouped_mlp=flag)
        with cgm.autocast(recipe=recipe), torch.no_grad():
            graph(*inputs())
            provider.launches.clear()
            graph(*inputs())
            names[flag] = provider.names()

    for flag in (True, False, True):
        thread = threading.Thread(target=work, args=(flag,))
        thread.start()
        thread.join()
    assert "fprop_act" in names[True]
    assert "fprop_act" not in names[False]


@pytest.mark.parametrize("flag", [None, False])
def test_e10_autocast_inside_what_is_compiled(provider, flag):
    """The recipe that is entered while tracing decides, not the one in force outside; made outside, in one graph."""
    module, recipe = make(), cgm.HighPrecision(enable_cutedsl_fused_grouped_mlp=flag)

    def call(*arguments):
        with cgm.autocast(recipe=recipe):
            return module(*arguments)

    expected = step(call, module, *inputs())
    launches = provider.names()
    provider.launches.clear()
    with cgm.autocast(recipe=cgm.MXFP8BlockScaling()):
        found = step(torch.compile(call, backend="aot_eager", fullgraph=True), module, *inputs())
    assert_same(found, expected)
    assert provider.names() == launches
    assert ("fprop_act" in launches) is (flag is None)


def test_e10_a_recipe_that_is_made_inside_what_is_compiled():
    """Its checks take a lock, which torch.compile does not trace: a graph break, and the same numbers."""
    module = make()

    def call(*arguments):
        with cgm.autocast(recipe=cgm.HighPrecision()):
            return module(*arguments)

    assert_same(step(torch.compile(call, backend="aot_eager"), module, *inputs()), step(module, module, *inputs()))


def test_e10_torch_autocast():
    torch.manual_seed(0)
    module = cgm.GroupedMLP(G, H, F, dtype=torch.float32)
    x, sizes, probs = inputs()
    arguments = (x.detach().float().requires_grad_(), sizes, probs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = step(module, module, *arguments)
        found = step(compiled(module, fullgraph=True), module, *arguments)
    assert_same(found, expected)


@pytest.mark.parametrize("what", ["main_grad", "delayed"])
def test_e10_what_no_operator_covers_runs_as_before(what):
    options = {
        "main_grad": {"accumulate_into_main_grad": True},
        "delayed": {"delay_wgrad_compute": True},
    }[what]
    results = []
    for wrap in (lambda module: module, compiled):
        module = make(**options)
        for p in module.parameters():
            p.main_grad = torch.zeros_like(p, dtype=torch.float32)
        y = wrap(module)(*inputs())
        y.sum().backward()
        module.backward_dw()
        results.append([y.detach(), *[p.main_grad if what == "main_grad" else p.grad for p in module.parameters()]])
    assert_same(*results)


@pytest.mark.parametrize("option", ["accumulate_into_main_grad", "delay_wgrad_compute"])
def test_e10_options_set_after_compiling_are_guarded_on(option):
    module = make()
    graph = compiled(module)
    graph(*inputs()).sum().backward()
    weight = module.fc1.weight
    expected, weight.grad, weight.main_grad = weight.grad, None, torch.zeros_like(weight)
    setattr(module.fc1, option, True)
    graph(*inputs()).sum().backward()
    assert weight.grad is None
    module.fc1.backward_dw()
    assert torch.equal(expected, weight.grad if option == "delay_wgrad_compute" else weight.main_grad)


def test_e10_wrong_inputs_name_the_argument():
    module = make()
    x, _, probs = inputs()
    with pytest.raises(cgm.ShapeError, match="split_sizes"):
        compiled(module, fullgraph=True)(x, torch.tensor([1, 2]), probs)


def test_e10_bad_splits_are_reported():
    module = make()
    x, _, probs = inputs()
    with cgm.settings.override(debug_checks=True), pytest.raises(cgm.ShapeError, match="negative"):
        compiled(module, fullgraph=True)(x, torch.tensor([T, T, T]), probs)


def test_e10_an_operation_that_prepares_each_forward_is_asked_to(provider):
    calls = []

    class Preparing(cgm.GroupedLinear):
        def pre_fuser_forward(self, *, requires_grad):
            calls.append(requires_grad)

    torch.manual_seed(0)
    first, second = Preparing(G, H, 2 * F, dtype=torch.bfloat16), cgm.GroupedLinear(G, F, H, dtype=torch.bfloat16)
    module = cgm.Sequential(first, cgm.ScaledSwiGLU(), second)
    x, sizes, probs = inputs()
    graph = compiled(module)
    for _ in range(3):
        graph(x, sizes, probs, sizes)
    assert "fprop_act" in provider.names()
    assert calls == [True] * 3


def test_e10_hooks_of_operations_are_run(provider):
    """They run with the operation's own call, after a graph break; without them it is one graph again."""
    module, seen = make(), []
    expected = module(*inputs())
    graph = compiled(module)
    hook = module.activation.register_forward_hook(lambda _, args, out: seen.append(out.shape))
    provider.launches.clear()
    assert graph(*inputs()).shape == expected.shape
    assert seen == [(T, F)]
    assert "fprop_act" not in provider.names()
    torch.compiler.reset()  # what is compiled already is taken with fullgraph, too
    with pytest.raises(torch._dynamo.exc.Unsupported, match="an operation has hooks of its own"):
        compiled(module, fullgraph=True)(*inputs())
    hook.remove()
    torch.testing.assert_close(compiled(module, fullgraph=True)(*inputs()), expected, rtol=0, atol=0)
    assert len(seen) == 1


def test_e10_other_modules_among_operations():
    """Operations around another module, or around a place that is empty, are pipelines of their own."""
    torch.manual_seed(0)
    linears = [cgm.GroupedLinear(G, *features, dtype=torch.bfloat16) for features in ((H, 2 * F), (F, H), (H, 2 * F))]
    first, second, third = linears
    names = {
        "fc1": first,
        "act": cgm.ScaledSwiGLU(),
        "fc2": second,
        "norm": torch.nn.LayerNorm(H, dtype=torch.bfloat16),
    }
    module = cgm.Sequential({**names, "fc3": third})
    module.add_module("nothing", None)
    module.add_module("act2", cgm.ScaledSwiGLU())
    x, sizes, probs = inputs()
    arguments = (x, sizes, probs, sizes, sizes, probs)
    assert_same(step(compiled(module), module, *arguments), step(module, module, *arguments))


def test_e10_a_lone_operation_is_a_graph_break():
    linear = cgm.GroupedLinear(G, H, F, dtype=torch.bfloat16)
    x, sizes, _ = inputs()
    torch.testing.assert_close(compiled(linear)(x, sizes), linear(x, sizes), rtol=0, atol=0)
    torch.compiler.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="operators exist for GroupedLinear, activation"):
        compiled(linear, fullgraph=True)(x, sizes)
