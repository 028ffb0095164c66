"""The recipe in force, and activation recompute under it (acceptance.md, B5)."""

import copy
import threading

import pytest
import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import cute_grouped_mlp as cgm
from cute_grouped_mlp import kernels
from cute_grouped_mlp.reference_kernels import ReferenceKernels

G, H, F = 3, 8, 16


def test_autocast_nests_and_can_be_disabled():
    outer, inner = cgm.HighPrecision(), cgm.MXFP8BlockScaling()
    assert cgm.current_recipe() is None
    with cgm.autocast(recipe=outer):
        assert cgm.current_recipe() is outer
        with cgm.autocast(recipe=inner):
            assert cgm.current_recipe() is inner
            with cgm.autocast(enabled=False, recipe=inner):
                assert cgm.current_recipe() is None
        assert cgm.current_recipe() is outer
    assert cgm.current_recipe() is None


def test_autocast_restores_after_an_exception_and_is_reusable():
    recipe = cgm.HighPrecision()
    block = cgm.autocast(recipe=recipe)
    with pytest.raises(ZeroDivisionError), block:
        1 / 0  # noqa: B018
    assert cgm.current_recipe() is None
    with block, block:
        assert cgm.current_recipe() is recipe
    assert cgm.current_recipe() is None


def test_autocast_decorates_functions():
    recipe = cgm.HighPrecision()

    @cgm.autocast(recipe=recipe)
    def depth(n):
        assert cgm.current_recipe() is recipe
        return 0 if n == 0 else 1 + depth(n - 1)

    assert depth(3) == 3
    assert cgm.current_recipe() is None


def test_autocast_belongs_to_its_thread():
    seen = []
    with cgm.autocast(recipe=cgm.HighPrecision()):
        thread = threading.Thread(target=lambda: seen.append(cgm.current_recipe()))
        thread.start()
        thread.join()
    assert seen == [None]


def test_autocast_takes_the_recipe_by_name_only():
    with pytest.raises(TypeError, match="recipe="):
        cgm.autocast(cgm.HighPrecision())


class Seen(cgm.BasicOperation):
    """Identity that notes the recipe in force in each forward."""

    def __init__(self):
        super().__init__()
        self.recipes = []

    def op_forward(self, ctx, input_, *, prev_op_grad_output_quantizer, next_op_input_quantizer):
        recipe = cgm.current_recipe()
        self.recipes.append(None if recipe is None else str(recipe))
        return input_.clone()

    def op_backward(self, ctx, grad_output):
        return grad_output, ()


@pytest.fixture
def pipeline():
    torch.manual_seed(0)
    seen = Seen()
    module = cgm.Sequential(
        seen,
        cgm.GroupedLinear(G, H, 2 * F, bias=False),
        cgm.ScaledSwiGLU(),
        cgm.GroupedLinear(G, F, H, bias=False),
    )
    x = torch.randn(12, H, requires_grad=True)
    sizes = torch.tensor([5, 0, 4])
    probs = torch.rand(12, requires_grad=True)
    return module, seen, (x, sizes, probs, sizes)


def grads_of(module, args, output):
    output.square().sum().backward()
    tensors = [args[0], args[2], *module.parameters()]
    found = [t.grad.clone() for t in tensors]
    for t in tensors:
        t.grad = None
    return found


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_b5_checkpoint_recomputes_under_the_forwards_recipe(pipeline, use_reentrant):
    module, seen, args = pipeline
    recipe = cgm.HighPrecision(enable_cutedsl_fused_grouped_mlp=False)
    text = str(recipe)
    with cgm.autocast(recipe=recipe):
        plain = module(*args)
    expected = grads_of(module, args, plain)
    with cgm.autocast(recipe=recipe):
        y = cgm.checkpoint(module, *args, use_reentrant=use_reentrant)
    recipe.enable_cutedsl_fused_grouped_mlp = None  # neither leaving autocast nor this may change what is recomputed
    assert torch.equal(y, plain)
    assert all(map(torch.equal, grads_of(module, args, y), expected))
    assert seen.recipes == [text] * 3


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_b5_nested_checkpoints(pipeline, use_reentrant):
    module, seen, args = pipeline
    recipe = cgm.HighPrecision()
    expected = grads_of(module, args, module(*args))
    x, sizes, probs, _ = args

    def inner(x, probs):
        return module(x, sizes, probs, sizes)

    def outer(x, probs):
        return cgm.checkpoint(inner, x, probs, use_reentrant=use_reentrant)

    with cgm.autocast(recipe=recipe):
        y = cgm.checkpoint(outer, x, probs, use_reentrant=use_reentrant)
    assert all(map(torch.equal, grads_of(module, args, y), expected))
    assert set(seen.recipes[1:]) == {str(recipe)}


def test_b5_context_fn_for_torchs_own_checkpoint(pipeline):
    module, seen, args = pipeline
    recipe = cgm.HighPrecision()
    with cgm.autocast(recipe=recipe):
        y = torch_checkpoint(module, *args, use_reentrant=False, context_fn=cgm.checkpoint_context_fn)
    grads_of(module, args, y)
    assert seen.recipes == [str(recipe)] * 2


# What a checkpoint recomputes under ------------------------------------------------------------------------


def of_checkpoint(
    change, *, recipe, own=(None, None), between=None, use_reentrant=False, checkpointed=True, inside=False
):
    """Gradients of one step; ``change(recipe, module)`` is called between forward and backward."""
    torch.manual_seed(0)
    recipe = copy.deepcopy(recipe)
    module = cgm.GroupedMLP(G, 64, 64, dtype=torch.bfloat16)
    module.fc1.recipe, module.fc2.recipe = map(copy.deepcopy, own)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(12, 64, generator=generator).to(torch.bfloat16).requires_grad_()
    sizes, probs = torch.tensor([5, 0, 7]), torch.rand(12, generator=generator).requires_grad_()

    def call(x, probs):
        if not inside:
            return module(x, sizes, probs)
        with cgm.autocast(recipe=recipe):
            return module(x, sizes, probs)

    torch.manual_seed(3)
    for _ in range(2):  # so that delayed scaling has scales
        with cgm.autocast(recipe=recipe):
            module(x, sizes, probs).sum().backward()
    module.zero_grad()
    x.grad = probs.grad = None
    with cgm.autocast(recipe=recipe):
        y = cgm.checkpoint(call, x, probs, use_reentrant=use_reentrant) if checkpointed else call(x, probs)
    if between is not None:
        with cgm.autocast(recipe=between):
            (3 * module((2 * x).detach().requires_grad_(), sizes, probs.detach())).square().sum().backward()
        module.zero_grad()
    fused = cgm.settings.fuse
    try:
        change(recipe, module)
        y.square().sum().backward()
    finally:
        cgm.settings.fuse = fused
    return [y.detach(), x.grad, probs.grad, *[p.grad for p in module.parameters()]]


def flip_rht(recipe, module):
    recipe.disable_rht = not recipe.disable_rht
    module.reset_recipe_state()


def list_item(recipe, module):
    recipe.layers.append(2)


def with_layers():
    recipe = cgm.NVFP4BlockScaling()
    recipe.layers = [1]
    return recipe


DELAYED, NVFP4, MXFP8 = cgm.DelayedScaling(), cgm.NVFP4BlockScaling(), cgm.MXFP8BlockScaling()
CHANGES = {
    "rht flipped and state reset": (flip_rht, {"recipe": NVFP4}),
    "margin": (lambda r, m: setattr(r, "margin", 8), {"recipe": MXFP8}),
    "margin, inside": (lambda r, m: setattr(r, "margin", 8), {"recipe": MXFP8, "inside": True}),
    "a list in place": (list_item, {"recipe": with_layers()}),
    "own recipe in place": (lambda r, m: setattr(m.fc1.recipe, "margin", 8), {"recipe": None, "own": (MXFP8, MXFP8)}),
    "own recipe taken": (lambda r, m: setattr(m.fc1, "recipe", None), {"recipe": MXFP8, "own": (NVFP4, None)}),
    "own recipe given": (lambda r, m: setattr(m.fc2, "recipe", NVFP4), {"recipe": MXFP8}),
    "delayed, another call": (lambda r, m: None, {"recipe": DELAYED, "between": DELAYED}),
    "delayed, a call under another recipe": (lambda r, m: None, {"recipe": DELAYED, "between": MXFP8}),
    "delayed, a call without a recipe": (lambda r, m: None, {"recipe": DELAYED, "between": cgm.HighPrecision()}),
    "delayed, state reset": (lambda r, m: m.reset_recipe_state(), {"recipe": DELAYED}),
    "settings": (lambda r, m: setattr(cgm.settings, "fuse", False), {"recipe": MXFP8}),
}


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("name", CHANGES)
def test_b5_a_checkpoint_recomputes_under_all_that_forward_ran_under(path, name, use_reentrant):
    change, options = CHANGES[name]
    expected = of_checkpoint(change, **options, checkpointed=False)
    got = of_checkpoint(change, **options, use_reentrant=use_reentrant)
    assert all(map(torch.equal, got, expected))


@pytest.mark.parametrize("setting", ["fuse", "check_range", "debug_checks"])
def test_b5_settings_are_those_of_the_forward_while_it_is_recomputed_and_no_longer(setting):
    seen = []

    def function(x):
        seen.append(getattr(cgm.settings, setting))
        return x.exp()

    before = getattr(cgm.settings, setting)
    y = cgm.checkpoint(function, torch.ones(2, requires_grad=True))
    with cgm.settings.override(**{setting: not before}):
        y.sum().backward()
        assert getattr(cgm.settings, setting) is not before
    assert seen == [before, before]


# Several calls in one checkpointed function ---------------------------------------------------------------


def several_calls(calls, *, own=None, checkpointed=True, use_reentrant=False, before=None):
    """Gradients of a function that calls a module once for each of ``calls(module, recipes)``, a generator."""
    torch.manual_seed(0)
    module = cgm.GroupedMLP(G, 64, 64, dtype=torch.bfloat16)
    module.fc1.recipe = copy.deepcopy(own)
    recipes = [cgm.MXFP8BlockScaling(), cgm.DelayedScaling()]
    x = torch.randn(12, 64, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16).requires_grad_()
    sizes, probs = torch.tensor([5, 0, 7]), torch.rand(12, generator=torch.Generator().manual_seed(2))

    if before is not None:
        module(x, sizes, probs)
        before(module)

    def function(x):
        for recipe in calls(module, recipes):
            with cgm.autocast(recipe=recipe):
                x = module(x, sizes, probs)
        return x

    y = cgm.checkpoint(function, x, use_reentrant=use_reentrant) if checkpointed else function(x)
    y.square().sum().backward()
    return [y.detach(), x.grad, *[p.grad for p in module.parameters()]]


def recipe_changed_between(module, recipes):
    yield recipes[0]
    recipes[0].margin = 9  # a recomputation finds it so from the start, and would quantise both calls with it
    yield recipes[0]


def own_recipe_changed_between(module, recipes):
    yield None
    module.fc1.recipe.margin = 9
    yield None


def own_recipe_given_between(module, recipes):
    module.fc1.recipe = None
    yield recipes[0]
    module.fc1.recipe = cgm.MXFP8BlockScaling(margin=9)
    yield recipes[0]


def state_reset_between(module, recipes):
    yield recipes[1]
    module.reset_recipe_state()
    yield recipes[1]


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize(
    ("calls", "own"),
    [
        (recipe_changed_between, None),
        (own_recipe_changed_between, cgm.MXFP8BlockScaling()),
        (own_recipe_given_between, None),
        (state_reset_between, None),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_b5_each_call_is_recomputed_under_what_it_ran_under(path, calls, own, use_reentrant):
    expected = several_calls(calls, own=own, checkpointed=False)
    got = several_calls(calls, own=own, use_reentrant=use_reentrant)
    assert all(map(torch.equal, got, expected))


def test_b5_a_call_that_the_forward_did_not_make_runs_under_what_is_in_force():
    module = cgm.GroupedMLP(G, 64, 64, dtype=torch.bfloat16)
    x = torch.randn(12, 64, dtype=torch.bfloat16).requires_grad_()
    sizes, runs = torch.tensor([5, 0, 7]), []

    def function(x):
        runs.append(None)
        y = module(x, sizes, torch.ones(12))
        if len(runs) == 2:
            module.fc1.recipe = cgm.HighPrecision()
            module(x.detach(), sizes, torch.ones(12))
            texts.append([None if own is None else own.text for own in module.fuser._plans.own])
        return y

    texts = []
    with cgm.autocast(recipe=cgm.MXFP8BlockScaling()):
        y = cgm.checkpoint(function, x, use_reentrant=True)
    y.sum().backward()
    assert len(runs) == 2
    assert texts == [[str(cgm.HighPrecision()), None, None]]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_b5_a_call_that_ran_again_as_its_plan_was_stale_counts_once(use_reentrant):
    """Somebody assigned to ``.data``: the call finds its plan stale in the middle, and runs again."""

    def assign(module):
        for weight in (module.fc1.weight, module.fc2.weight):
            weight.data = weight.data.mT.contiguous().mT

    def calls(module, recipes):
        yield None
        yield recipes[0]

    with kernels.using(ReferenceKernels()):
        expected = several_calls(calls, checkpointed=False, before=assign)
        got = several_calls(calls, use_reentrant=use_reentrant, before=assign)
    assert all(map(torch.equal, got, expected))


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # the outer forward is without gradients
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_b5_an_inner_checkpoint_recomputes_its_own_part_of_the_calls(use_reentrant):
    results = []
    for checkpointed in (False, True):
        torch.manual_seed(0)
        module = cgm.GroupedMLP(G, 64, 64, dtype=torch.bfloat16)
        x = torch.randn(12, 64, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16).requires_grad_()
        sizes, probs = torch.tensor([5, 0, 7]), torch.ones(12)
        keep = (lambda f, x: cgm.checkpoint(f, x, use_reentrant=use_reentrant)) if checkpointed else (lambda f, x: f(x))

        def call(x, recipe, module=module, sizes=sizes, probs=probs):
            with cgm.autocast(recipe=recipe):
                return module(x, sizes, probs)

        def inner(x, call=call):
            return call(x, cgm.MXFP8BlockScaling(margin=9))

        def outer(x, call=call, keep=keep, inner=inner):
            return call(keep(inner, call(x, cgm.MXFP8BlockScaling())), None)

        y = keep(outer, x)
        y.square().sum().backward()
        results.append([y.detach(), x.grad])  # those of weights are sums, in another order where nested
    assert all(map(torch.equal, *results))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # dynamo looks at it after a graph break
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_b5_compiled_modules_in_a_checkpointed_function_that_enters_a_recipe(use_reentrant):
    """The recipe is changed before backward: a recomputation in a graph would read it as it is then."""
    results = []
    for checkpointed in (False, True):
        torch.manual_seed(0)
        torch.compiler.reset()
        module = cgm.GroupedMLP(G, 64, 64, dtype=torch.bfloat16)
        compiled = torch.compile(module, backend="eager")
        x = torch.randn(12, 64, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16).requires_grad_()
        sizes, probs, recipe = torch.tensor([5, 0, 7]), torch.ones(12), cgm.MXFP8BlockScaling()

        def function(x, compiled=compiled, recipe=recipe, sizes=sizes, probs=probs):
            with cgm.autocast(recipe=recipe):
                return compiled(x, sizes, probs)

        y = cgm.checkpoint(function, x, use_reentrant=use_reentrant) if checkpointed else function(x)
        recipe.margin = 9
        y.square().sum().backward()
        results.append([y.detach(), x.grad, *[p.grad for p in module.parameters()]])
    assert all(map(torch.equal, *results))
