"""What determines a kernel: architecture, pass, numerics, activation, layout and tile config.

A :class:`KernelSpec` is frozen, hashable and printable.  Its canonical JSON identifies it on disk (artifact store, AOT
manifests) and its :attr:`~KernelSpec.name` identifies it to people and as a Python module under ``generated/``.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from enum import Enum
from typing import Any

from .errors import FieldTypeError
from .typed import field_problems


class Arch(str, Enum):
    """Target architecture, as ``cute.compile --gpu-arch`` spells it."""

    SM90A = "sm_90a"
    SM100A = "sm_100a"

    @property
    def folder(self) -> str:
        """Name of the architecture's folder under ``templates/`` and ``generated/``."""
        return {Arch.SM90A: "sm90", Arch.SM100A: "sm100"}[self]


class Pass(str, Enum):
    """The role of a kernel in a training step (docs/kernels.md)."""

    FPROP_ACT = "fprop_act"
    FPROP = "fprop"
    DGRAD_ACT = "dgrad_act"
    DGRAD = "dgrad"
    WGRAD = "wgrad"
    BIAS_GRAD = "bias_grad"
    REDUCE = "reduce"
    AMAX = "amax"
    QUANTIZE = "quantize"

    @property
    def is_gemm(self) -> bool:
        """Whether the kernel is a grouped GEMM, which has a tile config."""
        return self not in (Pass.BIAS_GRAD, Pass.REDUCE, Pass.AMAX, Pass.QUANTIZE)

    @property
    def quantizes(self) -> bool:
        """Whether the kernel turns a tensor into a narrow format, or measures it for that."""
        return self in (Pass.AMAX, Pass.QUANTIZE)

    @property
    def has_activation(self) -> bool:
        """Whether the activation or its gradient is part of the epilogue."""
        return self in (Pass.FPROP_ACT, Pass.DGRAD_ACT)

    @property
    def contracts_tokens(self) -> bool:
        """Whether the contraction runs over a group's tokens (varlen K) instead of features."""
        return self is Pass.WGRAD


class DType(str, Enum):
    """Element types of tensors that kernels read and write."""

    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"

    @property
    def bits(self) -> int:
        """Width of one element in bits."""
        return {DType.BF16: 16, DType.FP16: 16, DType.FP32: 32}[self]

    @property
    def cutlass(self) -> str:
        """Name of the type in the ``cutlass`` namespace."""
        return {DType.BF16: "BFloat16", DType.FP16: "Float16", DType.FP32: "Float32"}[self]


@dataclass(frozen=True, slots=True)
class Numerics:
    """Operand and storage types of a recipe's kernels.  Accumulation is always fp32.

    Attributes
    ----------
    name
        Short name used in variant names.
    operand
        Type of both GEMM operands.
    storage
        Type of z, a, y and of the gradients.
    """

    name: str
    operand: DType
    storage: DType

    @property
    def tile_k(self) -> int:
        """Depth of one mainloop stage: 128 bytes, one swizzle atom."""
        return 1024 // self.operand.bits

    @property
    def alignment(self) -> int:
        """Features must be a multiple of this: TMA needs a pitch of 16 bytes."""
        return 128 // self.operand.bits


NUMERICS: dict[str, Numerics] = {
    "bf16": Numerics("bf16", DType.BF16, DType.BF16),
    "fp16": Numerics("fp16", DType.FP16, DType.FP16),
}


class Schedule(str, Enum):
    """How the math warpgroups of a CTA share output tiles."""

    COOPERATIVE = "cooperative"
    PINGPONG = "pingpong"


class GluLayout(str, Enum):
    """Order of the 2F rows of a GLU layer's FC1 weight (and columns of z)."""

    CONTIGUOUS = "contiguous"
    INTERLEAVED32 = "interleaved32"


@dataclass(frozen=True, slots=True)
class TileConfig:
    """Output tile of a CTA, cluster shape and warp schedule of a GEMM kernel.

    ``tile_n`` counts accumulator columns: in a GLU ``fprop_act`` a tile yields ``tile_n / 2`` columns of a.
    Which combinations are valid is stated once, in :func:`codegen.tiles.check`.
    """

    tile_m: int
    tile_n: int
    cluster_m: int = 1
    cluster_n: int = 1
    schedule: Schedule = Schedule.COOPERATIVE

    def __post_init__(self) -> None:
        _require_types(self)

    def __str__(self) -> str:
        suffix = {Schedule.COOPERATIVE: "co", Schedule.PINGPONG: "pp"}[self.schedule]
        return f"{self.tile_m}x{self.tile_n}_{self.cluster_m}x{self.cluster_n}_{suffix}"


class Scaling(str, Enum):
    """Which elements share a scale, and of which kind."""

    MXFP8 = "mxfp8"
    NVFP4 = "nvfp4"
    BLOCK_FP8 = "block_fp8"
    PER_TENSOR = "per_tensor"

    @property
    def block(self) -> int:
        """Elements along one side of a block; 1 where scales are per tensor."""
        return {Scaling.MXFP8: 32, Scaling.NVFP4: 16, Scaling.BLOCK_FP8: 128, Scaling.PER_TENSOR: 1}[self]


class Element(str, Enum):
    """Narrow formats of elements."""

    E4M3 = "e4m3"
    E5M2 = "e5m2"
    E2M1 = "e2m1"

    @property
    def largest(self) -> float:
        """Largest finite value."""
        return {Element.E4M3: 448.0, Element.E5M2: 57344.0, Element.E2M1: 6.0}[self]


@dataclass(frozen=True, slots=True)
class Quantization:
    """What ``quantize`` and ``amax`` do to a tensor; the numbers are those of ``runtime/quantizers``.

    Attributes
    ----------
    scaling, element
        The recipe and the format; None in ``amax``.
    rowwise, columnwise
        Directions that ``quantize`` writes.
    emulate
        Write elements times block scales as bf16 numbers, rather than bytes and scales.
    batched
        The tensor is (G, R, C), matrices of equal size; else (T, C), of groups whose sizes the device knows.
    two_dimensional
        Blocks are square, and both directions hold the same numbers.
    power_of_two
        ``block_fp8``: scales are powers of two.
    margin
        ``mxfp8``: scales leave this many powers of two of headroom.
    rht
        ``nvfp4`` and ``amax``: transform each 16 rows with a Hadamard matrix, columnwise.
    stochastic
        ``nvfp4``: round elements up or down by chance.
    amax
        ``per_tensor``: also raise an amax for each group to that of the tensor, for delayed scaling.
    """

    scaling: Scaling | None = None
    element: Element | None = None
    rowwise: bool = True
    columnwise: bool = True
    emulate: bool = True
    batched: bool = False
    two_dimensional: bool = False
    power_of_two: bool = True
    margin: int = 0
    rht: bool = False
    stochastic: bool = False
    amax: bool = False

    def __post_init__(self) -> None:
        _require_types(self)

    def __str__(self) -> str:
        parts = [] if self.scaling is None else [self.scaling.value]
        parts += [] if self.element is None else [self.element.value]
        flags = {
            "2d": self.two_dimensional,
            "fp32": not self.power_of_two,
            f"m{self.margin}".replace("-", "minus"): self.margin != 0,
            "rht": self.rht,
            "sr": self.stochastic,
            "amax": self.amax,
            "row": self.rowwise and self.scaling is not None,
            "col": self.columnwise and self.scaling is not None,
            "packed": not self.emulate,
            "batched": self.batched,
        }
        return "_".join(parts + [flag for flag, on in flags.items() if on])


@dataclass(frozen=True, slots=True)
class KernelSpec:
    """Everything that determines a kernel.

    Attributes
    ----------
    arch, kernel
        Target and role.
    numerics
        Key of :data:`NUMERICS`.
    tile
        Tile config; None for kernels that are not GEMMs.
    activation
        Key of :data:`codegen.activations.ACTIVATIONS`; None where the epilogue has none.
    glu_layout
        Layout of the GLU weight; only read by kernels with a GLU activation.
    probs
        Type of the router's probabilities that scale a (and of dprobs in ``reduce``); None for no scaling.
    bias
        ``fprop_act`` and ``fprop``: whether a bias is added (in ``fprop`` times ``probs`` where that is set).
    alpha
        GEMMs: whether the product of each group is multiplied by a factor, which undoes the scales of its operands.
    store_z
        ``fprop_act``: whether z is written because a backward will read it.
    store_act
        ``dgrad_act``: whether a is recomputed and written because a weight gradient will read it.
    sum_probs
        ``dgrad_act`` with probs: whether the partial sums of dprobs are written.
    out
        ``wgrad``, ``bias_grad``: type of the gradient; None for the storage type.
    accumulate
        ``wgrad``, ``bias_grad``: whether the gradient is added to what is there instead of overwriting it.
    quantization
        ``quantize``, ``amax``: what is done; None elsewhere, and then it is no part of the JSON.
    """

    arch: Arch
    kernel: Pass
    numerics: str = "bf16"
    tile: TileConfig | None = None
    activation: str | None = None
    glu_layout: GluLayout = GluLayout.CONTIGUOUS
    probs: DType | None = None
    bias: bool = False
    alpha: bool = False
    store_z: bool = False
    store_act: bool = True
    sum_probs: bool = True
    out: DType | None = None
    accumulate: bool = False
    quantization: Quantization | None = None

    def __post_init__(self) -> None:
        _require_types(self)

    @property
    def types(self) -> Numerics:
        """Operand and storage types."""
        return NUMERICS[self.numerics]

    @property
    def name(self) -> str:
        """Variant name: readable, unique for the spec, and a valid Python module name."""
        parts = [self.arch.value.replace("_", ""), self.numerics, self.kernel.value]
        if self.activation is not None:
            parts.append(self.activation)
            if self.glu_layout is not GluLayout.CONTIGUOUS:
                parts.append(self.glu_layout.value)
        if self.probs is not None:
            parts.append(f"p{self.probs.value}")
        flags = {
            "alpha": self.alpha,
            "bias": self.bias,
            "z": self.store_z,
            "no_a": not self.store_act,
            "no_dp": not self.sum_probs,
            f"to_{self.out.value if self.out else ''}": self.out is not None,
            "acc": self.accumulate,
        }
        parts += [flag for flag, on in flags.items() if on]
        if self.quantization is not None and str(self.quantization):
            parts.append(str(self.quantization))
        if self.tile is not None:
            parts.append(str(self.tile))
        return "_".join(parts)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, with enums as their values: what JSON holds."""
        data = dataclasses.asdict(self, dict_factory=_plain)
        if self.quantization is None:
            del data["quantization"]
        return data

    def to_json(self) -> str:
        """Canonical JSON: sorted keys, no spaces."""
        return json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> KernelSpec:
        """Inverse of :meth:`to_dict`.

        Raises
        ------
        KeyError, TypeError, ValueError
            If a field is missing, unknown or holds an unknown value.
        """
        tile, quantization = data.get("tile"), data.get("quantization")
        return cls(
            **{
                **data,
                "arch": Arch(data["arch"]),
                "kernel": Pass(data["kernel"]),
                "glu_layout": GluLayout(data["glu_layout"]),
                "probs": None if data["probs"] is None else DType(data["probs"]),
                "out": None if data["out"] is None else DType(data["out"]),
                "tile": None if tile is None else TileConfig(**{**tile, "schedule": Schedule(tile["schedule"])}),
                "quantization": None if quantization is None else _quantization(quantization),
            }
        )

    @property
    def digest(self) -> str:
        """SHA-256 of the canonical JSON, hexadecimal."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def __str__(self) -> str:
        return self.name


def _require_types(value: Any) -> None:
    """Raise FieldTypeError if a field holds something else than its annotation says; it names all such fields."""
    if problems := field_problems(value):
        raise FieldTypeError(f"{type(value).__name__}: {'; '.join(problems)}")


def _quantization(data: dict[str, Any]) -> Quantization:
    scaling, element = data["scaling"], data["element"]
    return Quantization(
        **{
            **data,
            "scaling": None if scaling is None else Scaling(scaling),
            "element": None if element is None else Element(element),
        }
    )


def _plain(items: list[tuple[str, Any]]) -> dict[str, Any]:
    return {key: value.value if isinstance(value, Enum) else value for key, value in items}


def check_quantization(spec: KernelSpec) -> list[str]:
    """Every reason why a spec's quantisation is not valid; an empty list if it is."""
    q = spec.quantization
    if not spec.kernel.quantizes:
        return [] if q is None else [f"{spec.kernel.value} takes no quantization"]
    if q is None:
        return [f"{spec.kernel.value} needs a quantization"]
    name, problems = spec.kernel.value, []
    if spec.numerics != "bf16":
        problems.append(f"numerics is {spec.numerics}, {name} reads bf16")
    if spec.kernel is Pass.AMAX:
        if q != Quantization(batched=q.batched, columnwise=q.rht, rht=q.rht):
            problems.append("amax takes batched and rht, and is columnwise where it transforms")
        return problems
    if q.scaling is None or q.element is None:
        return [*problems, "quantize needs scaling and element"]
    if not (q.rowwise or q.columnwise):
        problems.append("quantize is rowwise, columnwise or both")
    if (q.element is Element.E2M1) != (q.scaling is Scaling.NVFP4):
        problems.append(f"{q.scaling.value} has no elements {q.element.value}")
    nvfp4 = q.scaling is Scaling.NVFP4
    if (q.rht or q.stochastic) and (not nvfp4 or q.two_dimensional):
        problems.append("rht and stochastic belong to nvfp4 with blocks of one dimension")
    if q.rht and not q.columnwise:
        problems.append("rht is columnwise")
    if q.two_dimensional and q.scaling is Scaling.PER_TENSOR:
        problems.append("per_tensor has no blocks")
    if not q.power_of_two and q.scaling is not Scaling.BLOCK_FP8:
        problems.append("power_of_two belongs to block_fp8")
    if q.margin and q.scaling is not Scaling.MXFP8:
        problems.append("margin belongs to mxfp8")
    if q.amax and q.scaling is not Scaling.PER_TENSOR:
        problems.append("amax belongs to per_tensor")
    return problems
