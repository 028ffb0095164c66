"""What planning knows of a recipe: a snapshot, read once, and the only thing that plans are made from.

A foreign recipe (Transformer Engine's, or any object with the same attributes) is read as this package's class of the
same name: its setters cannot be hooked, so it is read anew at each call.  What it asks for beyond that class's fields
is refused by name where it would change numbers.
"""

from __future__ import annotations

import dataclasses
from types import MemberDescriptorType
from typing import Any, NamedTuple

from . import recipe_text
from .describe import detached, type_name
from .errors import ConfigError, UnsupportedError
from .recipe import CLASSES, FLAG, OURS, Format, HighPrecision, MMParams, Recipe, class_kind
from .recipe_text import FROZEN, NAME, PROBLEMS, TEXT, recipe_name, recipe_problems

_MISSING = object()


@dataclasses.dataclass(repr=False, eq=False)
class UnknownRecipe(Recipe):
    """A foreign recipe whose class has no name that this package knows."""


class Snapshot(NamedTuple):
    """A recipe as it was at one moment.

    Attributes
    ----------
    recipe : Recipe
        A frozen copy, always of one of this package's classes.
    text : str
        Its text: the key of plans.
    refusals : tuple of str
        Why the text is not good as a key; empty if it is.
    """

    recipe: Recipe
    text: str
    refusals: tuple[str, ...] = ()


def snapshot(recipe: Any) -> Snapshot:
    """Read a recipe.

    Parameters
    ----------
    recipe
        None, one of ours, or a foreign one.

    Raises
    ------
    ConfigError
        If the fusion flag of a foreign recipe is not None, True or False.
    """
    if recipe is None:
        return _NO_RECIPE
    if not is_ours(recipe):
        copy = _read_foreign(recipe)
    elif FROZEN in vars(recipe):
        copy = recipe
    else:
        copy = recipe_text.frozen_copy(recipe)
    text = vars(copy).get(TEXT)
    return Snapshot(copy, *recipe_text.describe(copy)) if text is None else Snapshot(copy, text)


def is_ours(recipe: Any) -> bool:
    """Whether an object really is of one of this package's classes; a proxy is not, whatever its ``__class__`` says."""
    return type(recipe) in OURS


def kept_text(recipe: Any) -> str | None:
    """Text of a recipe that nothing can have changed since it was built; None if it must be built anew."""
    if recipe is None:
        return _NO_RECIPE.text
    return recipe.__dict__.get(TEXT) if is_ours(recipe) else None


def recipe_key(recipe: Any) -> tuple[str, bool]:
    """Return the text of a recipe (None, ours or foreign), and whether it is good as a key."""
    text = kept_text(recipe)
    if text is not None:
        return text, True
    if is_ours(recipe):
        text, refusals = recipe_text.describe(recipe)
        return text, not refusals
    now = snapshot(recipe)
    return now.text, not now.refusals


def fusion_flag(recipe: Any) -> bool | None:
    """Return the recipe's ``enable_cutedsl_fused_grouped_mlp``, also where it was attached to a foreign recipe.

    Raises
    ------
    ConfigError
        If it is not None, True or False.
    """
    flag = getattr(recipe, FLAG, None)
    if flag is None or isinstance(flag, bool):
        return flag
    raise ConfigError(f"{type(recipe).__name__}.{FLAG} is {flag!r}; allowed: None, True, False")


def require_supported(recipe: Recipe) -> None:
    """Check that quantising under a recipe does all that the recipe asks for.

    Parameters
    ----------
    recipe
        One of ours, or what a foreign one was read as.

    Raises
    ------
    UnsupportedError
        If not; names every field that is missing, or asks for something else.
    """
    if problems := recipe_problems(recipe):
        raise UnsupportedError(f"quantising under {recipe_name(recipe)}", problems)


# Foreign recipes ------------------------------------------------------------------------------------------------------

#: Fields that quantising reads and that a foreign recipe of a kind must have; others may be missing in older versions.
_REQUIRED = {
    "delayed": ("fp8_format", "margin", "amax_history_len", "amax_compute_algo", "scaling_factor_compute_algo"),
    "float8_current": ("fp8_format", "use_power_2_scales"),
    "float8_block": (
        "fp8_format",
        "use_f32_scales",
        "x_block_scaling_dim",
        "w_block_scaling_dim",
        "grad_block_scaling_dim",
    ),
    "mxfp8": ("fp8_format", "margin"),
    "nvfp4": ("disable_rht", "disable_stochastic_rounding", "disable_2d_quantization"),
    "custom": ("qfactory",),
}
#: Fields of Transformer Engine's recipes that change nothing here: attention, and details of what is off.
_WITHOUT_EFFECT = {"fp8_dpa", "fp8_mha", "nvfp4_4over6_e4m3_use_256", "nvfp4_4over6_err_mode"}
_FP8_QUANT = ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad")
_FP4_QUANT = ("fp4_quant_fwd_inp", "fp4_quant_fwd_weight", "fp4_quant_bwd_grad")
#: What a field of Transformer Engine must be, where there is one, for this package to do what it says.
_ONLY = {"nvfp4_4over6": "none", "override_linear_precision": (False, False, False)}
#: Fields of its ``QParams``, each with the value that asks for nothing.
_QPARAMS = {
    "power_2_scale": False,
    "amax_epsilon": 0.0,
    "random_hadamard_transform": False,
    "stochastic_rounding": False,
    "fp4_2d_quantization": False,
}


def _read_foreign(recipe: Any) -> Recipe:
    """Read each attribute once, into an instance of this package's class of the same name."""
    kind = class_kind(type(recipe))
    cls = CLASSES.get(kind, UnknownRecipe)
    declared = {f.name: f.default for f in dataclasses.fields(cls)}
    known = (*declared, *_FP8_QUANT, *_FP4_QUANT, *_ONLY)
    others = (
        _attached(recipe) | set(recipe_text.class_attributes(type(recipe), known)) | {f.name for f in _fields(recipe)}
    )
    names = [*known, *sorted(name for name in others - set(known) if name[:1] != "_")]
    read = {name: value for name in names if (value := getattr(recipe, name, _MISSING)) is not _MISSING}
    values = {name: _converted(value) if name in declared else value for name, value in read.items()}
    flag = values.get(FLAG)
    if flag is not None and not isinstance(flag, bool):
        raise ConfigError(f"{type(recipe).__name__}.{FLAG} is {flag!r}; allowed: None, True, False")
    twin = object.__new__(cls)
    state = vars(twin)
    required = _REQUIRED.get(kind, ())
    state.update({name: value for name, value in declared.items() if name not in required and name not in values})
    state.update({name: detached(value) for name, value in values.items()})
    state[NAME] = type_name(type(recipe))
    missing = [name for name in required if name not in values]
    problems = [f"the recipe lacks the fields {', '.join(missing)}"] if missing else []
    if kind not in ("high_precision", "unknown"):
        problems += [p for name in values if name in declared and (p := twin._violation(name, values[name]))]
        problems += [] if problems else [*twin._conflicts(), *_not_done(recipe, twin, {*known, *_WITHOUT_EFFECT})]
    state.update({PROBLEMS: tuple(problems), FROZEN: True})
    return twin


def _fields(recipe: Any) -> tuple[dataclasses.Field[Any], ...]:
    """Dataclass fields of a foreign recipe, also of one that a proxy stands for; none if it is no dataclass."""
    try:
        return dataclasses.fields(recipe)
    except TypeError:
        return ()


def _attached(recipe: Any) -> set[str]:
    """Names of an instance's attributes, in its ``__dict__`` and its slots."""
    slots = {
        name
        for cls in type(recipe).__mro__
        for name, value in vars(cls).items()
        if isinstance(value, MemberDescriptorType)
    }
    return slots | set(getattr(recipe, "__dict__", ()))


def _converted(value: Any) -> Any:
    """Formats go by their names, GEMM options by their field: those of another package become ours."""
    name = getattr(value, "name", None)
    if not isinstance(value, Format) and isinstance(name, str) and name in Format.__members__:
        return Format[name]
    split = getattr(value, "use_split_accumulator", None)
    return MMParams(split) if isinstance(split, bool) else value


def _not_done(recipe: Any, twin: Any, known: set[str]) -> list[str]:
    """Name the settings of a foreign recipe that change numbers there and would not here."""
    found = []
    for name, only in _ONLY.items():
        if (value := getattr(twin, name, only)) != only:
            found.append(f"{name} is {value!r}, only {only!r} is implemented")
    for name, meant in _quantization_of(twin).items():
        params = getattr(twin, name, None)
        for field, neutral in _QPARAMS.items():
            here = meant.get(field, neutral)
            if params is not None and (value := getattr(params, field, here)) != here:
                found.append(f"{name}.{field} is {value!r}, by the other fields it is {here!r}")
    for its in _fields(recipe):
        if its.name in known:
            continue
        default = its.default if its.default_factory is dataclasses.MISSING else its.default_factory()
        if (value := getattr(twin, its.name, default)) != default:  # one without a default always asks for something
            found.append(f"{its.name} is {value!r}, a setting that is not implemented")
    return found


def _quantization_of(twin: Any) -> dict[str, dict[str, Any]]:
    """What Transformer Engine's ``QParams`` of a recipe must say for its other fields to be the whole truth."""
    if twin.kind == "float8_current":
        return {name: {"power_2_scale": twin.use_power_2_scales} for name in _FP8_QUANT}
    if twin.kind == "float8_block":
        return {name: {"power_2_scale": not twin.use_f32_scales} for name in _FP8_QUANT}
    if twin.kind != "nvfp4":
        return {}
    x, w, dy = _FP4_QUANT
    rht = {"random_hadamard_transform": not twin.disable_rht}
    return {
        x: rht,
        w: {"fp4_2d_quantization": not twin.disable_2d_quantization},
        dy: {**rht, "stochastic_rounding": not twin.disable_stochastic_rounding},
    }


def _of_no_recipe() -> Snapshot:
    copy = recipe_text.frozen_copy(HighPrecision())
    return Snapshot(copy, recipe_text.describe(copy)[0])


_NO_RECIPE = _of_no_recipe()
#: The text of ``recipe=None``.
NO_RECIPE = _NO_RECIPE.text
