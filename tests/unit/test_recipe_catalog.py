"""A recipe's catalog holds what real steps ask for under it, and nothing else."""

import itertools

import pytest
import torch

import cute_grouped_mlp as cgm
from cute_grouped_mlp import kernels
from cute_grouped_mlp.codegen.catalog import default_catalog, shapes
from cute_grouped_mlp.codegen.spec import Arch
from cute_grouped_mlp.quantizers import launch
from cute_grouped_mlp.recipe_catalog import recipe_catalog
from cute_grouped_mlp.reference_kernels import ReferenceKernels

RECIPES = (
    cgm.HighPrecision,
    cgm.DelayedScaling,
    cgm.Float8CurrentScaling,
    cgm.Float8BlockScaling,
    cgm.MXFP8BlockScaling,
    cgm.NVFP4BlockScaling,
)
#: T, G, H, F beside the representatives of the sweep.
SHAPES = [(40, 3, 256, 384), (7, 2, 448, 96), (130, 1, 96, 576)]
PROBS = (torch.float32, torch.bfloat16, None)


@pytest.fixture
def asked(monkeypatch):
    """Kernels that are asked for: GEMMs, and those that quantise, which plain torch then stands in for."""
    found = set()

    class Recorder(ReferenceKernels):
        def prepare(self, specs, device):
            found.update(specs)

    def specs_of(quantizer, x, split_sizes, *, rowwise, columnwise, emulate=True, amax=False, batched):
        specs = launch._specs(Arch.SM90A, quantizer, rowwise, columnwise, split_sizes is None, emulate, amax)
        found.update(spec for spec in specs if spec is not None)

    monkeypatch.setattr(launch, "specs_of", specs_of)
    with kernels.using(Recorder()):
        yield found


def step(recipe, tokens, groups, hidden, ffn, probs, training):
    module = cgm.GroupedMLP(groups, hidden, ffn, dtype=torch.bfloat16)
    x = torch.randn(tokens, hidden, dtype=torch.bfloat16, requires_grad=training)
    sizes = torch.full((groups,), tokens // groups)
    rows = None if probs is None else torch.rand(tokens, dtype=probs, requires_grad=training)
    with cgm.autocast(recipe=recipe), torch.set_grad_enabled(training):
        y = module(x, sizes, rows)
    if training:
        y.sum().backward()
    assert len(module.fuser.last_plan.forward_ops) == 1


@pytest.mark.parametrize("cls", RECIPES, ids=lambda cls: cls.__name__)
def test_real_steps_ask_for_the_recipes_catalog_and_nothing_else(asked, cls):
    recipe = cls()
    catalog = set(recipe_catalog(recipe))
    for shape, probs, training in itertools.product(SHAPES, PROBS, (True, False)):
        step(recipe, *shape, probs, training)
        assert asked <= catalog, (shape, probs, {str(spec) for spec in asked - catalog})
    divisor = {"mxfp8": 32, "nvfp4": 16}.get(cls.kind, 8)
    for shape, probs, training in itertools.product(shapes(Arch.SM90A, divisor), PROBS, (True, False)):
        step(recipe, *shape, probs, training)
    assert asked == catalog


def test_the_default_catalog_holds_those_of_bf16_mxfp8_and_nvfp4():
    catalog = set(default_catalog(Arch.SM90A))
    recipes = (cgm.HighPrecision(), cgm.MXFP8BlockScaling(), cgm.NVFP4BlockScaling())
    gemms = {spec for recipe in recipes for spec in recipe_catalog(recipe) if not spec.kernel.quantizes}
    assert gemms == {spec for spec in catalog if not spec.kernel.quantizes}
    assert all(set(recipe_catalog(recipe)) <= catalog for recipe in recipes)
