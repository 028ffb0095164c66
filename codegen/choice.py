"""What the commands ``list`` and ``build`` are asked for: their options, and the kernels that these choose."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperOption

from .activations import ACTIVATIONS
from .catalog import DEFAULT_ACTIVATIONS, default_catalog, full_catalog, in_order
from .errors import GroupedMLPError
from .interpreter import answer_of, module_command
from .recipe_names import ALLOWED, RECIPES
from .spec import Arch, KernelSpec, Pass
from .variants import named

ActivationName = Enum("ActivationName", {name: name for name in ACTIVATIONS}, type=str)  # type: ignore[misc]


class Command(TyperCommand):
    """A command that refuses an option which is given twice and takes one value; the parser would drop the first."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse, after counting."""
        _, _, order = self.make_parser(ctx).parse_args(args=list(args))
        for option, count in Counter(order).items():
            if count > 1 and isinstance(option, TyperOption) and not (option.multiple or option.is_flag):
                ctx.fail(f"{max(option.opts, key=len)} is given {count} times; it takes one value")
        return super().parse_args(ctx, args)


def _recipes(texts: list[str] | None) -> list[str] | None:
    """Return the keys of RECIPES that a user means."""
    wrong = [repr(text) for text in texts or () if text.lower() not in RECIPES]
    if wrong:
        raise typer.BadParameter(f"{', '.join(wrong)} is no recipe; allowed, in any case: {ALLOWED}")
    return [text.lower() for text in texts or ()]


ArchOption = Annotated[Arch, typer.Option("--arch", help="Target architecture.")]
RecipeOption = Annotated[
    list[str] | None,
    typer.Option(
        "--recipe",
        metavar="RECIPE",
        callback=_recipes,
        help="The kernels of a step of the fused MLP under a recipe with its defaults, in training and forward alone, "
        f"in place of the default catalog; may be repeated: {ALLOWED}.",
    ),
]
PassOption = Annotated[list[Pass] | None, typer.Option("--pass", help="Only kernels of this pass; may be repeated.")]
ActivationOption = Annotated[
    list[ActivationName] | None, typer.Option("--activation", help="Only kernels with it; may be repeated.")
]


def select(
    arch: Arch,
    recipes: Sequence[str] | None = None,
    passes: Sequence[Pass] | None = None,
    activations: Sequence[ActivationName] | None = None,
) -> list[KernelSpec]:
    """Return the kernels of the default catalog or of recipes, filtered.

    Other activations than the catalog's are swept as it sweeps its own.  A pass that the default settings never launch,
    such as ``bias_grad``, is taken from all that the runtime may choose.

    Raises
    ------
    GroupedMLPError
        If none is left, or a recipe cannot be asked.
    """
    names = tuple(activation.value for activation in activations or ())
    swept = names or DEFAULT_ACTIVATIONS

    def wanted(specs: Iterable[KernelSpec]) -> list[KernelSpec]:
        return [s for s in specs if (not passes or s.kernel in passes) and (not names or s.activation in names)]

    if recipes:
        found = wanted(in_order(spec for recipe in recipes for spec in _of_recipe(arch, recipe, swept)))
        of = f"the kernels of {' and '.join(recipes)} with the recipes' defaults"
    else:
        found = wanted(default_catalog(arch, swept)) or wanted(full_catalog(arch))
        of = "the catalog"
    missing = [p.value for p in passes or () if all(spec.kernel is not p for spec in found)]
    if found and missing and not recipes:  # one of several passes
        found = list(in_order([*found, *(s for s in wanted(full_catalog(arch)) if s.kernel.value in missing)]))
    if found:
        return found
    filters = [f"--arch {arch.value}", *(f"--pass {p.value}" for p in passes or ())]
    filters += [f"--activation {name}" for name in names]
    raise GroupedMLPError(f"{of} has no such kernel: {' '.join(filters)}; all: cute-grouped-mlp list --arch sm_90a")


def by_name(
    names: Sequence[str],
    arch: Arch,
    recipes: Sequence[str] | None,
    passes: Sequence[Pass] | None,
    activations: Sequence[ActivationName] | None,
) -> list[KernelSpec]:
    """Return the kernels with these names, without duplicates.

    Raises
    ------
    typer.BadParameter
        If filters of the catalog are given beside them.
    GroupedMLPError
        If there is none with a name: with what is wrong with each.
    """
    options = {"--recipe": recipes, "--pass": passes, "--activation": activations}
    if beside := [option for option, value in options.items() if value]:
        raise typer.BadParameter(f"{' and '.join(beside)} beside --variant, which names kernels one by one: leave one")
    specs, problems = [], []
    for name in dict.fromkeys(names):
        try:
            specs.append(named(name, arch))
        except GroupedMLPError as error:
            problems.append(str(error))
    if problems:
        raise GroupedMLPError("\n".join(problems))
    return specs


def _of_recipe(arch: Arch, recipe: str, activations: Sequence[str]) -> list[KernelSpec]:
    """Kernels of a recipe.  In a process of its own: recipes are the runtime's, which this package does not import."""
    arguments = (*RECIPES[recipe], arch.value, *activations)
    try:
        answer = answer_of(module_command("cute_grouped_mlp.recipe_catalog", *arguments))
    except GroupedMLPError as error:
        raise GroupedMLPError(f"the kernels of {recipe} cannot be listed: {error}") from None
    return [KernelSpec.from_dict(data) for data in json.loads(answer)]
