"""The kernels of each recipe: ``python -m cute_grouped_mlp.recipe_catalog RECIPE NUMERICS ARCH`` prints them as JSON.

More arguments are names of activations, in place of the catalog's.

``cute-grouped-mlp list --recipe`` and ``build --recipe`` run this in a process of its own: ``codegen`` knows no
recipe.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
from collections.abc import Sequence
from typing import Any

import torch

from . import kernels
from . import recipe as recipes
from .codegen.catalog import DEFAULT_ACTIVATIONS, DEFAULT_LAYOUTS, DEFAULT_PROBS, in_order, shapes
from .codegen.interpreter import answer
from .codegen.spec import NUMERICS, Arch, KernelSpec
from .config import settings
from .explain import explain
from .mlp import GroupedMLP
from .ops.grouped_linear import GroupedLinear
from .quantizers.select import ROLES, quantizer_for
from .step import LAYOUTS

_TYPES = {name: dtype for dtype, name in kernels.NUMERICS_OF.items()}
_PROBS = {dtype: t for t, dtype in kernels.DTYPES.items()}


class _Target(kernels.KernelCache):
    """Kernels of an architecture, on any device: to plan with, not to run."""

    def __init__(self, arch: Arch) -> None:
        super().__init__()
        self._arch = arch

    def unsupported(self, device: torch.device) -> tuple[str, ...]:
        """Nothing."""
        return ()

    def arch(self, device: torch.device) -> Arch:
        """Return the architecture."""
        return self._arch

    def locate(self, spec: KernelSpec) -> str:
        """Do not look for it."""
        return ""


def recipe_catalog(
    recipe: Any,
    numerics: str = "bf16",
    arch: Arch = Arch.SM90A,
    activations: Sequence[str] = DEFAULT_ACTIVATIONS,
) -> tuple[KernelSpec, ...]:
    """Every kernel that a step of the fused grouped MLP in its default settings launches, whatever the shapes.

    Not written down but asked: modules of a sweep of shapes are planned as :func:`explain` plans them, with the
    settings of the default catalog (activation, order of FC1's rows, types of probs, no bias).  Gradients of x, of
    probs and of both weights are wanted, or none: forward alone.

    So some may be missing for bias, other activations, ``glu_interleave_size=32``, probs in fp16, weight gradients
    into an fp32 ``main_grad`` or added to one of any type (``accumulate_into_main_grad``), and steps that leave out
    gradients of probs or of weights.

    Parameters
    ----------
    recipe
        None, one of ours, or a foreign one.
    numerics
        Key of :data:`codegen.spec.NUMERICS`: the type of the model.
    arch
        Target; empty for one that has no kernels.
    activations
        Those of the fused MLP, in place of the default.

    Returns
    -------
    tuple of KernelSpec
        Without duplicates, sorted by pass and name.

    Raises
    ------
    UnsupportedError
        If the recipe asks for what there is not.
    """
    specs: dict[KernelSpec, None] = {}
    interleave = {layout: size for size, layout in LAYOUTS.items()}
    with kernels.using(_Target(arch)), settings.override(fuse=True):
        for (tokens, groups, hidden, ffn), activation, layout in itertools.product(
            shapes(arch, _divisor(recipe, numerics)), activations, DEFAULT_LAYOUTS
        ):
            module = GroupedMLP(
                groups, hidden, ffn,
                activation=activation, glu_interleave_size=interleave[layout], device="meta", dtype=_TYPES[numerics],
            )  # fmt: skip
            for probs, training in itertools.product(DEFAULT_PROBS, (True, False)):
                specs.update(dict.fromkeys(_of_call(module, recipe, tokens, probs, training)))
    return in_order(specs)


def _divisor(recipe: Any, numerics: str) -> int:
    """What H and F are multiples of."""
    made = [quantizer_for(recipe, role) for role in ROLES]
    return math.lcm(NUMERICS[numerics].alignment, *(q.divisor for q in made if q is not None))


def _of_call(module: GroupedMLP, recipe: Any, tokens: int, probs: Any, training: bool) -> list[KernelSpec]:
    """Kernels of a call, and of its backward in training."""
    fc1: GroupedLinear = module[0]
    x = torch.empty(tokens, fc1.in_features, dtype=fc1.weight.dtype, device="meta", requires_grad=training)
    sizes = torch.empty(fc1.num_groups, dtype=torch.int32, device="meta")
    rows = None
    if probs is not None:
        rows = torch.empty(tokens, dtype=_PROBS[probs], device="meta", requires_grad=training)
    with torch.set_grad_enabled(training):
        report = explain(module, x, sizes, rows, recipe=recipe)
    steps = [kernel.step for pipeline in report.pipelines for kernel in pipeline.kernels]
    return [step.spec for step in steps if step.spec is not None] if report.fused else []


def main() -> None:
    """Print the canonical data of each spec, in one list."""
    name, numerics, arch, *activations = sys.argv[1:]
    specs = recipe_catalog(getattr(recipes, name)(), numerics, Arch(arch), activations or DEFAULT_ACTIVATIONS)
    answer(json.dumps([spec.to_dict() for spec in specs]))


if __name__ == "__main__":
    main()
