"""Recipes: how a pipeline computes.  Classes, fields and defaults follow Transformer Engine.

A recipe is a mutable dataclass whose text, ``str(recipe)``, is the key under which plans are found.  The text is
derived from the declared fields and from every other public attribute, and kept until one of them changes.  A plan is
made from a frozen copy of the recipe, so that it depends on nothing that its key does not say.
"""

from __future__ import annotations

import dataclasses
import difflib
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar, Literal, NamedTuple

from . import recipe_text
from .errors import ConfigError
from .recipe_text import FROZEN, NOT_COPIED, TEXT

FLAG = "enable_cutedsl_fused_grouped_mlp"


class _Range(NamedTuple):
    """Largest magnitudes of a format's elements in forward and backward."""

    max_fwd: float
    max_bwd: float


class Format(Enum):
    """Element formats of quantised tensors; the values are the largest magnitudes, forward and backward."""

    E2M1 = _Range(6.0, 6.0)
    E4M3 = _Range(448.0, 448.0)
    E5M2 = _Range(57344.0, 57344.0)
    HYBRID = _Range(448.0, 57344.0)


@dataclass(frozen=True)
class MMParams:
    """Options of one GEMM.

    Attributes
    ----------
    use_split_accumulator
        Promote partial sums to fp32 registers outside the tensor core.
    """

    use_split_accumulator: bool = True


class Rule(NamedTuple):
    """What a field may hold."""

    allowed: str
    valid: Callable[[Any], bool]


def _rule(allowed: str, valid: Callable[[Any], bool]) -> dict[str, Rule]:
    """Metadata of a dataclass field."""
    return {"rule": Rule(allowed, valid)}


def _one_of(*values: Any) -> dict[str, Rule]:
    names = [v.name if isinstance(v, Enum) else repr(v) for v in values]
    same = [(type(v), v) for v in values]  # 1 is not True here
    return _rule(f"one of {', '.join(names)}", lambda v: any(type(v) is t and v == a for t, a in same))


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


_BOOL = _one_of(False, True)
_INT = _rule("an integer", _is_int)
_POSITIVE = _rule("an integer of at least 1", lambda v: _is_int(v) and v >= 1)
_CALLABLE = _rule("a callable", callable)
_OPTIONAL_CALLABLE = _rule("a callable or None", lambda v: v is None or callable(v))
_AMAX_ALGO = _rule(
    "'max', 'most_recent' or a callable", lambda v: callable(v) or (isinstance(v, str) and v in ("max", "most_recent"))
)
_MM = _rule("MMParams", lambda v: isinstance(v, MMParams))
_MM_SPLIT = _rule(
    "MMParams(use_split_accumulator=True)", lambda v: isinstance(v, MMParams) and v.use_split_accumulator is True
)
_FP8 = _one_of(Format.E4M3, Format.HYBRID)


#: Classes of this package's recipes and those derived from them: a proxy of a recipe is of none.
OURS: set[type] = set()


@dataclass(repr=False, eq=False)
class Recipe:
    """Base of all recipes.

    Parameters
    ----------
    backward_override
        None: backward as the recipe says.  ``"high_precision"``: backward from the unquantised operands.
        ``"dequantized"``: backward from the dequantised operands that forward saved.
    enable_cutedsl_fused_grouped_mlp
        None: follow ``settings.fuse``.  True: fuse where supported, and warn with every reason where not.
        False: never fuse.

    Raises
    ------
    ConfigError
        If a field gets a value that is not allowed, when constructed or assigned; names the field and what is allowed.
    """

    kind: ClassVar[str] = "unknown"

    backward_override: Literal["high_precision", "dequantized"] | None = field(
        default=None, kw_only=True, metadata=_one_of(None, "high_precision", "dequantized")
    )
    enable_cutedsl_fused_grouped_mlp: bool | None = field(
        default=None, kw_only=True, metadata=_one_of(None, True, False)
    )

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        OURS.add(cls)

    def __post_init__(self) -> None:
        problems = [p for f in dataclasses.fields(self) if (p := self._violation(f.name, getattr(self, f.name)))]
        problems += self._conflicts()
        if problems:
            raise ConfigError("; ".join(problems))
        self.__dict__["_ready"] = True

    def _violation(self, name: str, value: Any) -> str | None:
        """Say what is wrong with a value for a declared field, or None."""
        declared = type(self).__dataclass_fields__.get(name)
        rule = None if declared is None else declared.metadata.get("rule")
        if rule is None or rule.valid(value):
            return None
        return f"{type(self).__name__}.{name} is {value!r}; allowed: {rule.allowed}"

    def _conflicts(self) -> list[str]:
        """Conditions that tie several fields together; the ones not met."""
        return []

    def __setattr__(self, name: str, value: Any) -> None:
        with recipe_text.lock:
            state = self.__dict__
            if FROZEN in state:
                raise ConfigError(f"{name}: this copy of a recipe belongs to a plan; change the recipe itself")
            if "_ready" in state and (problem := self._violation(name, value)):
                raise ConfigError(problem)
            known, before = name in state, state.get(name)
            object.__setattr__(self, name, value)
            state.pop(TEXT, None)
            if "_ready" in state and name[:1] != "_":
                if conflicts := self._conflicts():
                    if known:
                        object.__setattr__(self, name, before)
                    else:
                        object.__delattr__(self, name)
                    raise ConfigError("; ".join(conflicts))
                if not known:
                    self._warn_of_typo(name)

    def __delattr__(self, name: str) -> None:
        with recipe_text.lock:
            if FROZEN in self.__dict__:
                raise ConfigError(f"{name}: this copy of a recipe belongs to a plan; change the recipe itself")
            object.__delattr__(self, name)
            self.__dict__.pop(TEXT, None)

    def _warn_of_typo(self, name: str) -> None:
        """Warn about a new attribute that is nearly a field: it has no effect."""
        declared = type(self).__dataclass_fields__
        if name not in declared and (close := difflib.get_close_matches(name, list(declared), n=1, cutoff=0.85)):
            warnings.warn(
                f"{type(self).__name__} has no field {name!r}, which has no effect; did you mean {close[0]!r}?",
                stacklevel=3,
            )

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in NOT_COPIED}

    def __str__(self) -> str:
        text = self.__dict__.get(TEXT)
        return text if text is not None else recipe_text.describe(self)[0]

    __repr__ = __str__

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and recipe_text.equal(self, other)

    __hash__ = None  # type: ignore[assignment]

    @classmethod
    def delayed(cls) -> bool:
        """Whether this is delayed scaling."""
        return cls.kind == "delayed"

    @classmethod
    def float8_current_scaling(cls) -> bool:
        """Whether this is per-tensor current scaling."""
        return cls.kind == "float8_current"

    @classmethod
    def float8_per_tensor_scaling(cls) -> bool:
        """Whether scales are per tensor."""
        return cls.kind in ("delayed", "float8_current")

    @classmethod
    def float8_block_scaling(cls) -> bool:
        """Whether this is FP8 with 128-element blocks."""
        return cls.kind == "float8_block"

    @classmethod
    def mxfp8(cls) -> bool:
        """Whether this is MXFP8."""
        return cls.kind == "mxfp8"

    @classmethod
    def nvfp4(cls) -> bool:
        """Whether this is NVFP4."""
        return cls.kind == "nvfp4"

    @classmethod
    def custom(cls) -> bool:
        """Whether quantisers come from the user's factory."""
        return cls.kind == "custom"


@dataclass(repr=False, eq=False)
class HighPrecision(Recipe):
    """BF16 or FP16 without quantisation: a recipe so that it can carry the fusion flag.  ``recipe=None`` equals it."""

    kind: ClassVar[str] = "high_precision"


@dataclass(repr=False, eq=False)
class DelayedScaling(Recipe):
    """FP8 with per-tensor scales taken from the amax history of earlier steps.

    Parameters
    ----------
    margin
        Scales are divided by 2^margin.
    fp8_format
        E4M3 or HYBRID.
    amax_history_len
        Steps of history.
    amax_compute_algo
        ``"max"``, ``"most_recent"`` or a function of the history.
    scaling_factor_compute_algo
        None or a function (amax, old scale, format maximum, recipe) -> scale.
    reduce_amax
        Take the maximum over the process group.
    fp8_dpa, fp8_mha
        Attention in FP8; carried for Transformer Engine, no effect here.
    """

    kind: ClassVar[str] = "delayed"

    margin: int = field(default=0, metadata=_INT)
    fp8_format: Format = field(default=Format.HYBRID, metadata=_FP8)
    amax_history_len: int = field(default=1024, metadata=_POSITIVE)
    amax_compute_algo: Literal["max", "most_recent"] | Callable[..., Any] = field(default="max", metadata=_AMAX_ALGO)
    scaling_factor_compute_algo: Callable[..., Any] | None = field(default=None, metadata=_OPTIONAL_CALLABLE)
    reduce_amax: bool = field(default=True, metadata=_BOOL)
    fp8_dpa: bool = field(default=False, metadata=_BOOL)
    fp8_mha: bool = field(default=False, metadata=_BOOL)

    def _conflicts(self) -> list[str]:
        if self.backward_override is None:
            return []
        return [f"DelayedScaling.backward_override is {self.backward_override!r}; allowed: None"]


@dataclass(repr=False, eq=False)
class Float8CurrentScaling(Recipe):
    """FP8 with per-tensor scales of the tensor at hand.

    Parameters
    ----------
    use_power_2_scales
        Round scales to powers of two.
    fp8_format
        E4M3 or HYBRID.
    fp8_gemm_fprop, fp8_gemm_dgrad, fp8_gemm_wgrad
        Split accumulation of each pass.
    """

    kind: ClassVar[str] = "float8_current"

    use_power_2_scales: bool = field(default=False, metadata=_BOOL)
    fp8_format: Format = field(default=Format.HYBRID, metadata=_FP8)
    fp8_gemm_fprop: MMParams = field(default=MMParams(False), metadata=_MM)
    fp8_gemm_dgrad: MMParams = field(default=MMParams(True), metadata=_MM)
    fp8_gemm_wgrad: MMParams = field(default=MMParams(True), metadata=_MM)


@dataclass(repr=False, eq=False)
class Float8BlockScaling(Recipe):
    """FP8 with one scale per 1x128 or 128x128 block.

    Parameters
    ----------
    use_f32_scales
        Any fp32 scale instead of powers of two.
    fp8_format
        E4M3 or HYBRID.
    x_block_scaling_dim, w_block_scaling_dim, grad_block_scaling_dim
        1 (1x128) or 2 (128x128) for inputs, weights and gradients; at most one of them is 2.
    fp8_gemm_fprop, fp8_gemm_dgrad, fp8_gemm_wgrad
        Split accumulation, required everywhere.
    """

    kind: ClassVar[str] = "float8_block"

    use_f32_scales: bool = field(default=False, metadata=_BOOL)
    fp8_format: Format = field(default=Format.E4M3, metadata=_FP8)
    x_block_scaling_dim: int = field(default=1, metadata=_one_of(1, 2))
    w_block_scaling_dim: int = field(default=2, metadata=_one_of(1, 2))
    grad_block_scaling_dim: int = field(default=1, metadata=_one_of(1, 2))
    fp8_gemm_fprop: MMParams = field(default=MMParams(True), metadata=_MM_SPLIT)
    fp8_gemm_dgrad: MMParams = field(default=MMParams(True), metadata=_MM_SPLIT)
    fp8_gemm_wgrad: MMParams = field(default=MMParams(True), metadata=_MM_SPLIT)

    def _conflicts(self) -> list[str]:
        names = ("x_block_scaling_dim", "w_block_scaling_dim", "grad_block_scaling_dim")
        square = [name for name in names if getattr(self, name) == 2]
        if len(square) < 2:
            return []
        return [f"Float8BlockScaling: {' and '.join(square)} are 2; allowed: at most one of {', '.join(names)}"]


@dataclass(repr=False, eq=False)
class MXFP8BlockScaling(Recipe):
    """MXFP8: one e8m0 scale per 32 elements.

    Parameters
    ----------
    margin
        Scales are divided by 2^margin.
    fp8_format
        E4M3 or HYBRID.
    enable_2d_quantization
        32x32 blocks for weights.
    """

    kind: ClassVar[str] = "mxfp8"

    margin: int = field(default=0, metadata=_INT)
    fp8_format: Format = field(default=Format.E4M3, metadata=_FP8)
    enable_2d_quantization: bool = field(default=False, metadata=_BOOL)


@dataclass(repr=False, eq=False)
class NVFP4BlockScaling(Recipe):
    """NVFP4: one e4m3 scale per 16 elements and one fp32 scale per tensor.

    Parameters
    ----------
    disable_rht
        No random Hadamard transform of columnwise operands.
    disable_stochastic_rounding
        Round gradients to nearest.
    disable_2d_quantization
        1x16 blocks for weights instead of 16x16.
    row_scaled_activation
        One fp32 scale per row of forward activations.
    fp4_format, fp8_format
        E2M1 elements, E4M3 scales.
    """

    kind: ClassVar[str] = "nvfp4"

    disable_rht: bool = field(default=False, metadata=_BOOL)
    disable_stochastic_rounding: bool = field(default=False, metadata=_BOOL)
    disable_2d_quantization: bool = field(default=False, metadata=_BOOL)
    row_scaled_activation: bool = field(default=False, metadata=_BOOL)
    fp4_format: Format = field(default=Format.E2M1, metadata=_one_of(Format.E2M1))
    fp8_format: Format = field(default=Format.E4M3, metadata=_one_of(Format.E4M3))


@dataclass(repr=False, eq=False)
class CustomRecipe(Recipe):
    """Quantisers from the user's factory.

    Parameters
    ----------
    qfactory
        Called with the role of each tensor; returns its quantiser.
    quantization_alignment
        Largest alignment that any of those quantisers needs.
    """

    kind: ClassVar[str] = "custom"

    qfactory: Callable[..., Any] = field(metadata=_CALLABLE)
    quantization_alignment: int = field(default=128, metadata=_POSITIVE)


#: The class of each kind of recipe.
CLASSES: dict[str, type[Recipe]] = {
    cls.kind: cls
    for cls in (
        HighPrecision,
        DelayedScaling,
        Float8CurrentScaling,
        Float8BlockScaling,
        MXFP8BlockScaling,
        NVFP4BlockScaling,
        CustomRecipe,
    )
}
_KINDS = {cls.__name__: kind for kind, cls in CLASSES.items()}


def recipe_kind(recipe: Any) -> str:
    """Say what a recipe is, by its class: ``"high_precision"``, ``"mxfp8"``, ...; foreign classes go by their name."""
    return "high_precision" if recipe is None else class_kind(type(recipe))


def class_kind(cls: type) -> str:
    """:func:`recipe_kind` of a recipe's class."""
    if issubclass(cls, Recipe):
        return cls.kind
    return next((_KINDS[base.__name__] for base in cls.__mro__ if base.__name__ in _KINDS), "unknown")
