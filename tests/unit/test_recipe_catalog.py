"""A recipe's catalog holds what real steps ask for under it, and nothing else."""

import itertools
from pathlib import Path

import pytest
import torch

import cute_grouped_mlp as cgm
from cute_grouped_mlp import kernels
from cute_grouped_mlp.codegen.catalog import default_catalog, shapes
from cute_grouped_mlp.codegen.spec import Arch
from cute_grouped_mlp.quantizers import launch
from cute_grouped_mlp.recipe_catalog import _Target, recipe_catalog
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


def planned(
    recipe, *, probs=torch.float32, probs_grad=True, frozen=(), main_grad=None, dtype=torch.bfloat16, **settings
):
    """Kernels of a training step of a fused grouped MLP on a Hopper GPU."""
    settings["accumulate_into_main_grad"] = main_grad is not None
    with torch.device("meta"):
        module = cgm.GroupedMLP(2, 64, 128, dtype=dtype, **settings)
        for parameter in module.parameters():
            parameter.main_grad = torch.zeros_like(parameter, dtype=main_grad)
        for index in frozen:
            module[index].weight.requires_grad_(False)
        x = torch.empty(16, 64, dtype=dtype, requires_grad=True)
        rows = torch.empty(16, dtype=probs, requires_grad=probs_grad)
        with kernels.using(_Target(Arch.SM90A)):
            explanation = cgm.explain(module, x, torch.empty(2, dtype=torch.int32), rows, recipe=recipe)
    assert explanation.fused
    steps = [kernel.step for pipeline in explanation.pipelines for kernel in pipeline.kernels]
    return {step.spec for step in steps if step.spec is not None}


@pytest.mark.parametrize(
    "recipe", [None, cgm.MXFP8BlockScaling(), cgm.NVFP4BlockScaling()], ids=["plain", "mxfp8", "nvfp4"]
)
@pytest.mark.parametrize("frozen", [(), (0,), (2,), (0, 2)])
def test_the_default_catalog_is_enough_for_steps_in_the_default_settings(recipe, frozen):
    catalog = set(default_catalog(Arch.SM90A))
    for probs in (torch.float32, torch.bfloat16, torch.float64):
        assert planned(recipe, probs=probs, frozen=frozen) <= catalog


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"dtype": torch.float16}, "FP16 models"),
        ({"bias": True}, "bias"),
        ({"activation": "silu"}, "other activations"),
        ({"glu_interleave_size": 32}, "`glu_interleave_size=32`"),
        ({"probs": torch.float16}, "probs in fp16"),
        ({"probs_grad": False}, "or (in training) without a gradient"),
        ({"main_grad": torch.float32}, "into an fp32 `main_grad`"),
        ({"main_grad": torch.bfloat16}, "added to one of any type (`accumulate_into_main_grad`)"),
        ({"recipe": cgm.Float8CurrentScaling()}, "the FP8 recipes"),
        ({"recipe": cgm.DelayedScaling()}, "the FP8 recipes"),
        ({"recipe": cgm.Float8BlockScaling()}, "the FP8 recipes"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_the_readme_tells_what_the_default_catalog_lacks(settings, told):
    assert planned(**{"recipe": None, **settings}) - set(default_catalog(Arch.SM90A))
    text = " ".join((Path(__file__).parents[2] / "README.md").read_text().split())
    assert told in text[text.index("It lacks") : text.index("What it lacks")]
    if "recipe" not in settings and "dtype" not in settings:
        name = next(iter(settings)).removesuffix("_grad") if "activation" not in settings else "activations"
        assert name in recipe_catalog.__doc__
