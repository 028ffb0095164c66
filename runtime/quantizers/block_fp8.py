"""FP8 with one scale for each 1x128 or 128x128 block."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .base import Direction, Parts, QuantizedTensor
from .blocks import BlockQuantizer, tile_amax
from .formats import E4M3, FP8_MAX, decode_fp8, encode_fp8
from .matrices import Matrices
from .per_tensor import fp8_problems, scale_of_amax


@dataclass(frozen=True)
class Float8BlockQuantizer(BlockQuantizer):
    """FP8 with fp32 scales of blocks; the last block of a row, or column, may be short.

    Parameters
    ----------
    fp8_dtype
        ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.
    force_pow_2_scales
        Round factors down to powers of two, and so the scales that are stored, their inverses, up.
    block_scaling_dim
        1: blocks of 1x128 along either direction.  2: blocks of 128x128, whose scales are kept once for each block.

    Notes
    -----
    Scales of 1x128 blocks have a compact shape and the strides of their transpose, outer-dim-major, as PyTorch's scaled
    GEMM takes them; Transformer Engine keeps the same for cuBLAS, padded to four rows.  A block whose amax is 0 or
    infinite has scale 1.  NaN counts for nothing in the amax and stays NaN; an infinity becomes the largest element.
    Where 448 / amax is infinite in fp32, the factor is the largest number of the input's type.
    """

    block = 128

    fp8_dtype: torch.dtype = E4M3
    force_pow_2_scales: bool = True
    block_scaling_dim: int = 2

    def _problems(self) -> list[str]:
        problems = super()._problems() + fp8_problems(self.fp8_dtype)
        if self.block_scaling_dim not in (1, 2):
            problems.append(f"block_scaling_dim is {self.block_scaling_dim}; allowed: 1, 2")
        return problems

    @property
    def data_dtype(self) -> torch.dtype:
        """E4M3 or E5M2."""
        return self.fp8_dtype

    @property
    def two_dimensional(self) -> bool:
        """Whether blocks are 128x128."""
        return self.block_scaling_dim == 2

    @property
    def outer_dim_major_scales(self) -> bool:
        """Of 1x128 blocks: a GEMM then reads the scales of a tile's rows as one piece of memory."""
        return not self.two_dimensional

    @property
    def exact_in_bf16(self) -> bool:
        """Only powers of two keep an element's few significant bits."""
        return self.force_pow_2_scales

    def _quantize(
        self, x: torch.Tensor, matrices: Matrices, scale: torch.Tensor | None, rng: torch.Tensor | None
    ) -> Parts:
        parts = super()._quantize(x, matrices, scale, rng)
        if not self.two_dimensional:
            return parts
        tiles, _ = self._block_scale(tile_amax(matrices.pad(x), self.block), parts.amax, x.dtype)
        return parts._replace(
            rowwise=parts.rowwise and (parts.rowwise[0], tiles),
            columnwise=parts.columnwise and (parts.columnwise[0], tiles.transpose(1, 2)),
        )

    def _block_scale(
        self, amax: torch.Tensor, outer: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        factor = scale_of_amax(amax, FP8_MAX[self.fp8_dtype], self.force_pow_2_scales, torch.finfo(dtype).max)
        return factor.reciprocal(), factor

    def _encode(self, x: torch.Tensor, noise: torch.Tensor | None) -> torch.Tensor:
        return encode_fp8(x, self.fp8_dtype)

    def _decode(self, codes: torch.Tensor, compute: torch.dtype) -> torch.Tensor:
        return decode_fp8(codes, self.fp8_dtype, compute)

    def _decode_scale(self, scale: torch.Tensor, compute: torch.dtype) -> torch.Tensor:
        return scale.to(compute)

    def _scales_of(self, q: QuantizedTensor, direction: Direction) -> torch.Tensor:
        scales = super()._scales_of(q, direction)
        if not self.two_dimensional:
            return scales
        scales = scales.repeat_interleave(self.block, 1)
        return q.matrices.unpad(scales) if direction == "rowwise" else scales[:, : q.shape[-1]]
