"""What quantisers share: the call, its checks, and the tensor that it makes.

Inside, everything is *oriented*: (B, outer, n), where B counts matrices and n runs along the contraction of the GEMM
that will read it.  Rowwise that is (B, R, C), columnwise (B, C, slots).  Data is uint8 until the end, because torch
cannot index narrow types.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass, field
from typing import ClassVar, Literal, NamedTuple

import torch

from ..checks import INTEGERS, require
from ..codegen.typed import field_problems
from ..errors import ConfigError, UnsupportedError
from . import layout
from .matrices import Groups, Matrices, make_groups

Direction = Literal["rowwise", "columnwise"]
FLOATS = (torch.bfloat16, torch.float16, torch.float32)


class Parts(NamedTuple):
    """What a quantiser makes of a tensor (B, R, C): oriented data and scales of each direction, and amaxes."""

    rowwise: tuple[torch.Tensor, torch.Tensor] | None
    columnwise: tuple[torch.Tensor, torch.Tensor] | None
    amax: torch.Tensor
    columnwise_amax: torch.Tensor


@dataclass(frozen=True)
class Quantizer(abc.ABC):
    """Turns tensors into a narrow format: plain torch, any device, nothing read by the host.

    Parameters
    ----------
    rowwise, columnwise
        Directions that are wanted: blocks along the last dimension, and along the rows (tokens).
    group_alignment
        In the columnwise direction of a grouped tensor each group starts at, and is filled up with zeros to, a multiple
        of this many rows: the K tile of the wgrad kernel that reads it.
    """

    #: Elements that share a scale; 1 where scales are per tensor.
    block: ClassVar[int] = 1
    #: What the last dimension must be a multiple of.
    divisor: ClassVar[int] = 1
    #: Whether columnwise data and scales are kept transposed, the contraction last.
    transposed: ClassVar[bool] = True
    #: Whether scales can be swizzled into 128x4 tiles.
    tiled_scales: ClassVar[bool] = False
    #: Type of scales.
    scale_dtype: ClassVar[torch.dtype] = torch.float32
    #: Whether :meth:`alpha` is ever anything but 1.
    has_alpha: ClassVar[bool] = False

    rowwise: bool = field(default=True, kw_only=True)
    columnwise: bool = field(default=True, kw_only=True)
    group_alignment: int = field(default=128, kw_only=True)

    def __post_init__(self) -> None:
        if problems := self._problems():
            raise ConfigError(f"{type(self).__name__}: {'; '.join(problems)}")

    def _problems(self) -> list[str]:
        """Fields that are not allowed."""
        if problems := field_problems(self):
            return problems
        if not (self.rowwise or self.columnwise):
            problems.append("rowwise and columnwise are False; allowed: one of them")
        if self.group_alignment < 1 or self.group_alignment % self.block:
            problems.append(f"group_alignment is {self.group_alignment}; allowed: a multiple of {self.block}")
        return problems

    @property
    @abc.abstractmethod
    def data_dtype(self) -> torch.dtype:
        """Type of the data; uint8 where two elements share a byte."""

    @property
    def outer_dim_major_scales(self) -> bool:
        """Whether scales (outer, blocks) lie with the outer dimension innermost: strides (1, outer)."""
        return False

    @property
    def exact_in_bf16(self) -> bool:
        """Whether an element times its block scale has at most the eight significant bits of bf16."""
        return True

    @torch.no_grad()
    def quantize(
        self,
        x: torch.Tensor,
        split_sizes: torch.Tensor | None = None,
        *,
        batched: bool = False,
        swizzled: bool = False,
        scale: torch.Tensor | None = None,
        rng: torch.Tensor | None = None,
    ) -> QuantizedTensor:
        """Quantise a tensor.

        Parameters
        ----------
        x : Tensor (..., C), bf16, fp16 or fp32
            Leading dimensions are flattened to T rows.
        split_sizes : Tensor (G,), int32 or int64, optional
            Rows of each group, read on the device only.  Each group is quantised as if it were alone.  Rows past the
            sum come out 0, whatever they hold.  Negative sizes count as 0 and the sum is cut at T, as kernels do.
        batched
            ``x`` is (B, R, C): matrices quantised as if each were alone, as the weights of a grouped linear layer are.
        swizzled
            Scales in 128x4 tiles rather than compact.
        scale : Tensor (count,), fp32, optional
            For delayed scaling: the factor of the tensor, or of each group or matrix; 1 by default.
        rng : Tensor (2,), int64, optional
            For stochastic rounding: seed and offset, on the device of ``x``; by default the quantiser's seed, and 0.

        Returns
        -------
        QuantizedTensor

        Raises
        ------
        ShapeError
            Naming every argument whose shape, type or device is wrong.
        UnsupportedError
            If scales of this recipe are never swizzled, or it takes no ``scale``.
        """
        require(f"{type(self).__name__}.quantize", self._argument_problems(x, split_sizes, batched, swizzled))
        if swizzled and not self.tiled_scales:
            raise UnsupportedError(f"{type(self).__name__}(swizzled=True)", ["only one-byte block scales have tiles"])
        matrices = self._matrices(x, split_sizes, batched)
        flat = matrices.clean(x.reshape(matrices.batch, matrices.rows, x.shape[-1]))
        parts = self._quantize(flat, matrices, scale, rng)
        row_data, row_scale = parts.rowwise or (None, None)
        column_data, column_scale = parts.columnwise or (None, None)
        if swizzled and row_scale is not None:
            row_scale = layout.swizzle(matrices.tile_rows(row_scale))
        if swizzled and column_scale is not None:
            column_scale = layout.swizzle(column_scale)

        def stored(t: torch.Tensor | None, dtype: torch.dtype, transpose: bool = False) -> torch.Tensor | None:
            if t is None or t.dim() == 1:  # one scale per matrix
                return t
            t = (t.transpose(1, 2) if transpose else t).contiguous()
            return (t if matrices.stacked else t[0]).view(dtype)

        def stored_scale(t: torch.Tensor | None, transpose: bool = False) -> torch.Tensor | None:
            t = stored(t, self.scale_dtype, transpose != self.outer_dim_major_scales)
            return t.mT if t is not None and self.outer_dim_major_scales else t

        as_rows = not self.transposed
        data = stored(row_data, self.data_dtype)
        return QuantizedTensor(
            shape=x.shape,
            dtype=x.dtype,
            quantizer=self,
            matrices=matrices,
            rowwise_data=None if data is None else data.reshape(*x.shape[:-1], data.shape[-1]),
            rowwise_scale_inv=stored_scale(row_scale),
            columnwise_data=stored(column_data, self.data_dtype, as_rows),
            columnwise_scale_inv=stored_scale(column_scale, as_rows and not swizzled),
            amax=parts.amax,
            columnwise_amax=parts.columnwise_amax,
            swizzled=swizzled,
        )

    @abc.abstractmethod
    def _quantize(
        self, x: torch.Tensor, matrices: Matrices, scale: torch.Tensor | None, rng: torch.Tensor | None
    ) -> Parts:
        """Quantise (B, R, C), whose rows of no group are 0."""

    @abc.abstractmethod
    def values(self, q: QuantizedTensor, direction: Direction, compute: torch.dtype) -> torch.Tensor:
        """Elements times block scales, oriented, in fp32 or fp64; without the factors of :meth:`alpha`."""

    def alpha(self, q: QuantizedTensor, direction: Direction) -> torch.Tensor:
        """Factors of whole matrices, groups, rows or columns that :meth:`values` leaves out, fp32."""
        return torch.ones(q.matrices.count, dtype=torch.float32, device=q.device)

    def spread_alpha(self, q: QuantizedTensor, direction: Direction, alpha: torch.Tensor) -> torch.Tensor:
        """Alpha in a shape that broadcasts against (B, R, C), or (B, slots, C)."""
        return q.matrices.per_row(alpha) if direction == "rowwise" else q.matrices.per_slot(alpha)

    def untransform(self, slots: torch.Tensor) -> torch.Tensor:
        """Undo what was done to (B, slots, C) before it was quantised columnwise."""
        return slots

    def _argument_problems(
        self, x: torch.Tensor, split_sizes: torch.Tensor | None, batched: bool, swizzled: bool
    ) -> list[str]:
        problems = []
        if x.dtype not in FLOATS:
            problems.append(f"x is {x.dtype}, allowed: {', '.join(map(str, FLOATS))}")
        if x.dim() < 2 or x.shape[-1] % self.divisor:
            allowed = f"two dimensions at least, the last a multiple of {self.divisor}"
            problems.append(f"x has shape {tuple(x.shape)}, allowed: {allowed}")
        if batched and (x.dim() != 3 or split_sizes is not None):
            problems.append("batched is True, allowed: with x of shape (B, R, C) and without split_sizes")
        if split_sizes is not None:
            if split_sizes.dim() != 1 or split_sizes.shape[0] < 1 or split_sizes.dtype not in INTEGERS:
                got = f"{split_sizes.dtype} of shape {tuple(split_sizes.shape)}"
                problems.append(f"split_sizes is {got}, allowed: int32 or int64 of shape (G,)")
            if split_sizes.device != x.device:
                problems.append(f"split_sizes is on {split_sizes.device}, x is on {x.device}")
            if swizzled and self.group_alignment % layout.TILE_ROWS:
                allowed = f"a multiple of {layout.TILE_ROWS} for swizzled scales of groups"
                problems.append(f"group_alignment is {self.group_alignment}, allowed: {allowed}")
        return problems

    def _matrices(self, x: torch.Tensor, split_sizes: torch.Tensor | None, batched: bool) -> Matrices:
        batch, rows = (x.shape[0], x.shape[1]) if batched else (1, x.shape[:-1].numel())
        if split_sizes is not None:
            return make_groups(split_sizes, rows, self.group_alignment)
        return Matrices(batch, rows, batch, -(-rows // self.block) * self.block, batched)


@dataclass(frozen=True, eq=False)
class QuantizedTensor:
    """A tensor in a narrow format, in one or both directions.

    Below, T is the tensor's rows with leading dimensions flattened, C its columns, b the block, and P the rows of the
    columnwise direction: T rounded up to b, or the slots of a grouped tensor (:mod:`.matrices`).  What was quantised as
    a batch has the dimension of the batch in front of each of these shapes.

    Attributes
    ----------
    shape : torch.Size
        The shape of what was quantised.
    dtype : torch.dtype
        Its type, and the default of :meth:`dequantize`.
    quantizer : Quantizer
        What made it, and knows what its bits mean.
    matrices : Matrices
        Which rows belong together.
    rowwise_data
        Of the tensor's shape; E2M1 has two elements in a byte, and so half the last dimension.
    rowwise_scale_inv
        (T, C / b), b elements of a row to each, also where blocks are two-dimensional; of 128x128 blocks
        (P / 128, C / 128).  Per tensor: (count,), one for each matrix or group.  Contiguous, but those of FP8 in 1x128
        blocks are outer-dim-major, as ``torch._scaled_mm`` takes them: strides (1, T), in a batch (T * C / 128, 1, T).
    columnwise_data
        Transposed, (C, P); of MXFP8, whose tensor cores take either order, (P, C).
    columnwise_scale_inv
        (C, P / b); of MXFP8 (P / b, C), of 128x128 blocks (C / 128, P / 128).  Per tensor: (count,).  Of 1x128 blocks
        outer-dim-major too, with strides (1, C).
    amax : Tensor (count,), fp32
        Largest magnitude of each matrix or group, 0 where it is empty; NaN counts for nothing.  One a row, (T,) or
        (B * R,), where activations are row-scaled.
    columnwise_amax : Tensor, fp32
        The same of the columnwise direction, which differs after a Hadamard transform; (count, C) where row-scaled.
    swizzled : bool
        Scales stand in 128x4 tiles (:mod:`.layout`), those of MXFP8 as (C, P / b).  A grouped tensor's rowwise scales
        then stand at slots, (P, C / b), so that a tile has scales of one group only.
    """

    shape: torch.Size
    dtype: torch.dtype
    quantizer: Quantizer
    matrices: Matrices
    rowwise_data: torch.Tensor | None
    rowwise_scale_inv: torch.Tensor | None
    columnwise_data: torch.Tensor | None
    columnwise_scale_inv: torch.Tensor | None
    amax: torch.Tensor
    columnwise_amax: torch.Tensor
    swizzled: bool = False

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self.amax.device

    @property
    def columnwise_sizes(self) -> torch.Tensor | None:
        """Rows of each group in :meth:`operand`'s columnwise order, (G,) int32 on the device; None without groups."""
        return self.matrices.sizes

    def operand(self, direction: Direction, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return the numbers that a GEMM computes with.

        Parameters
        ----------
        direction
            ``"rowwise"`` or ``"columnwise"``.
        dtype
            ``torch.float64`` gives exact products of elements and all their scales; less is computed in fp32.

        Returns
        -------
        Tensor (T, C), or columnwise (P, C)
            Columnwise rows are slots, as many to a group as ``columnwise_sizes`` says, and a Hadamard transform is left
            in place.

        Raises
        ------
        UnsupportedError
            If this direction was not quantised.
        """
        values = self._operand(direction, dtype)
        return values if self.matrices.stacked else values[0]

    def dequantize(self, direction: Direction = "rowwise", dtype: torch.dtype | None = None) -> torch.Tensor:
        """Approximate what was quantised: its shape, its order of rows, and a Hadamard transform undone.

        Parameters
        ----------
        direction
            From which data.
        dtype
            Of the result; by default that of what was quantised.

        Raises
        ------
        UnsupportedError
            If this direction was not quantised.
        """
        dtype = self.dtype if dtype is None else dtype
        values = self._operand(direction, torch.float64 if dtype == torch.float64 else torch.float32)
        if direction == "columnwise":
            values = self.matrices.unpad(self.quantizer.untransform(values))
        return values.to(dtype).reshape(self.shape)

    def oriented_codes(self, direction: Direction) -> torch.Tensor:
        """Bit patterns of the data, oriented, as uint8."""
        data = self.rowwise_data if direction == "rowwise" else self.columnwise_data
        if data is None:
            raise UnsupportedError(f"reading the {direction} direction", ["it was not quantised"])
        data = data.view(torch.uint8)
        if direction == "rowwise":
            return data.reshape(self.matrices.batch, self.matrices.rows, data.shape[-1])
        data = data if self.matrices.stacked else data.unsqueeze(0)
        return data if self.quantizer.transposed else data.transpose(1, 2)

    def oriented_scales(self, direction: Direction) -> torch.Tensor:
        """Scales of blocks, oriented and compact; bytes as uint8."""
        scales = self.rowwise_scale_inv if direction == "rowwise" else self.columnwise_scale_inv
        assert scales is not None  # there where the data is
        scales = scales if scales.dtype == torch.float32 else scales.view(torch.uint8)
        scales = scales if self.matrices.stacked else scales.unsqueeze(0)
        if not self.swizzled:
            return scales.transpose(1, 2) if direction == "columnwise" and not self.quantizer.transposed else scales
        if direction == "columnwise":
            return layout.unswizzle(scales, self.shape[-1], self.matrices.slots // self.quantizer.block)
        grouped = isinstance(self.matrices, Groups)
        rows = self.matrices.slots if grouped else self.matrices.rows
        scales = layout.unswizzle(scales, rows, self.shape[-1] // self.quantizer.block)
        return self.matrices.unpad(scales) if grouped else scales

    def _operand(self, direction: Direction, dtype: torch.dtype) -> torch.Tensor:
        """(B, R, C) or (B, slots, C)."""
        compute = torch.float64 if dtype == torch.float64 else torch.float32
        values = self.quantizer.values(self, direction, compute)
        values = values if direction == "rowwise" else values.transpose(1, 2)
        alpha = self.quantizer.spread_alpha(self, direction, self.quantizer.alpha(self, direction))
        return (values * alpha.to(compute)).to(dtype)
