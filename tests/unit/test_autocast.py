"""The recipe in force, and activation recompute under it (acceptance.md, B5)."""

import threading

import pytest
import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import cute_grouped_mlp as cgm

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
