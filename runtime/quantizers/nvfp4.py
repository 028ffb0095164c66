"""NVFP4: E2M1 elements, one E4M3 scale for each 16, and an fp32 scale for each matrix, group or row."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .base import Direction, QuantizedTensor
from .blocks import BlockQuantizer
from .formats import (
    E2M1_MAX,
    E4M3,
    FP8_MAX,
    FP32_MAX,
    decode_e2m1,
    decode_fp8,
    encode_e2m1,
    encode_e2m1_stochastic,
    encode_fp8,
    pack_e2m1,
    unpack_e2m1,
)
from .matrices import Matrices
from .philox import random_bytes

#: Signs of the random Hadamard transform: fixed, the same for both operands of wgrad, which therefore cancel.
HADAMARD_SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
_LARGEST = E2M1_MAX * FP8_MAX[E4M3]


@dataclass(frozen=True)
class NVFP4Quantizer(BlockQuantizer):
    """NVFP4: scales on two levels.

    Parameters
    ----------
    with_rht
        Columnwise, transform each 16 rows with a Hadamard matrix first (:func:`hadamard`).
    with_2d_quantization
        Blocks of 16x16, for weights: both directions hold the same numbers.
    stochastic_rounding
        Round elements up or down by chance, for gradients.
    row_scaled_nvfp4
        The second level has a scale for each row, and columnwise for each column of each group, rather than for the
        whole: for activations.
    seed
        Of stochastic rounding, where a call brings no ``rng``.

    Notes
    -----
    With S = 448 * 6 / amax on the second level, a block's scale is E4M3(amax_b * (S / 6)) and an element is
    E2M1(x * (1 / (scale / S))), every operation in fp32 as Transformer Engine has them; its value is element * scale *
    ``alpha``, alpha = amax * (1 / 2688).  amax is that of what is quantised: columnwise, after the transform.

    ===========================  ====================================================================================
    case                         becomes
    ===========================  ====================================================================================
    amax 0                       S is 1, alpha 0: every value is 0
    amax infinite                S is 1, alpha infinite: every value is infinite or NaN
    a block of zeros             scale 0, elements 0 (torchao: the scale is the least normal E4M3)
    a block far below the rest   scale may round to 0: its elements are codes of 6, worth 0
    NaN                          counts for nothing in an amax, and becomes +6: the format has no NaN
    an infinity                  6 with its sign
    ===========================  ====================================================================================

    Stochastic rounding: 8 rows, counted from the first of a matrix or group, and 2 columns share the 16 bytes that
    :func:`.philox.random_bytes` gives for r * C + c, the first row (of all) and column; one column's come first.  An
    element has the same byte in both directions.  Eight slots past a group's last row, which the transform fills, count
    as a series of their own, 1 rather than 0, so that no other group's rows have their bytes.  Transformer Engine draws
    other bits.
    """

    block = 16
    divisor = 16
    tiled_scales = True
    scale_dtype = E4M3
    has_alpha = True

    with_rht: bool = False
    with_2d_quantization: bool = False
    stochastic_rounding: bool = False
    row_scaled_nvfp4: bool = False
    seed: int = 0

    def _problems(self) -> list[str]:
        problems = super()._problems()
        if self.with_2d_quantization and (self.with_rht or self.row_scaled_nvfp4 or self.stochastic_rounding):
            problems.append(
                "with_2d_quantization is True; allowed: without with_rht, row_scaled_nvfp4, stochastic_rounding"
            )
        return problems

    @property
    def data_dtype(self) -> torch.dtype:
        """Bytes of two elements."""
        return torch.uint8

    @property
    def two_dimensional(self) -> bool:
        """Whether blocks are 16x16."""
        return self.with_2d_quantization

    def alpha(self, q: QuantizedTensor, direction: Direction) -> torch.Tensor:
        """Scales of the second level: (count,); row-scaled (T,), and columnwise (count, C)."""
        return (q.amax if direction == "rowwise" else q.columnwise_amax) * (1 / _LARGEST)

    def spread_alpha(self, q: QuantizedTensor, direction: Direction, alpha: torch.Tensor) -> torch.Tensor:
        """Alpha in a shape that broadcasts against (B, R, C), or (B, slots, C)."""
        if self.row_scaled_nvfp4 and direction == "rowwise":
            return alpha.reshape(q.matrices.batch, q.matrices.rows, 1)
        return super().spread_alpha(q, direction, alpha)

    def untransform(self, slots: torch.Tensor) -> torch.Tensor:
        """Undo the Hadamard transform, if there was one."""
        return hadamard(slots, inverse=True) if self.with_rht else slots

    def _transform(self, slots: torch.Tensor) -> torch.Tensor:
        if not self.with_rht:
            return slots
        return hadamard(slots.float()).to(torch.bfloat16 if slots.dtype == torch.bfloat16 else torch.float32)

    def _outer_amax(self, x: torch.Tensor, matrices: Matrices, direction: Direction) -> torch.Tensor:
        if not self.row_scaled_nvfp4:
            return super()._outer_amax(x, matrices, direction)
        if direction == "columnwise":
            return matrices.amax(x, in_slots=True, per_column=True)
        return Matrices(x.shape[1], 1, x.shape[1], 1, False).amax(x.reshape(-1, 1, x.shape[-1]))

    def _spread_outer(self, amax: torch.Tensor, matrices: Matrices, direction: Direction) -> torch.Tensor:
        if self.row_scaled_nvfp4 and direction == "rowwise":
            return amax.reshape(matrices.batch, matrices.rows, 1)
        return super()._spread_outer(amax, matrices, direction)

    def _block_scale(
        self, amax: torch.Tensor, outer: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        encode = (torch.full_like(outer, _LARGEST) / outer).clamp(max=FP32_MAX)
        encode = torch.where((outer == 0) | (encode == 0), 1.0, encode)
        scale = encode_fp8((amax * (encode * (1 / E2M1_MAX))).clamp(max=FP32_MAX), E4M3)
        factor = (decode_fp8(scale, E4M3) * encode.reciprocal()).reciprocal().clamp(max=FP32_MAX)
        return scale, factor

    def _encode(self, x: torch.Tensor, noise: torch.Tensor | None) -> torch.Tensor:
        return pack_e2m1(encode_e2m1(x) if noise is None else encode_e2m1_stochastic(x, noise))

    def _draw(self, x: torch.Tensor, matrices: Matrices, rng: torch.Tensor | None) -> torch.Tensor | None:
        if not self.stochastic_rounding:
            return None
        rng = self.default_rng(x.device) if rng is None else rng
        columns = x.shape[-1]
        # Counted by 16: of those the first slot has a row if any has, and after the transform all 16 are numbers.
        first = matrices.first_rows(16, x.device).unsqueeze(-1) + torch.arange(
            0, 16, 8, dtype=torch.int64, device=x.device
        )
        first = first.flatten(1).unsqueeze(-1) * columns
        padding = matrices.starts_empty(8, x.device).long().unsqueeze(-1)
        drawn = random_bytes(rng, first + torch.arange(0, columns, 2, dtype=torch.int64, device=x.device), padding)
        return torch.unflatten(drawn, -1, (2, 8)).permute(0, 1, 4, 2, 3).flatten(3, 4).flatten(1, 2)

    def default_rng(self, device: torch.device) -> torch.Tensor:
        """Seed and offset of a call that brings none, (2,) int64; written on the device."""
        rng = torch.zeros(2, dtype=torch.int64, device=device)
        rng[0].fill_(self.seed)
        return rng

    def _decode(self, codes: torch.Tensor, compute: torch.dtype) -> torch.Tensor:
        return decode_e2m1(unpack_e2m1(codes), compute)

    def _decode_scale(self, scale: torch.Tensor, compute: torch.dtype) -> torch.Tensor:
        return decode_fp8(scale, E4M3, compute)


def hadamard(slots: torch.Tensor, *, inverse: bool = False) -> torch.Tensor:
    """Randomised Hadamard transform of each 16 rows: y = H diag(signs) x / 4, with the Sylvester matrix H.

    Parameters
    ----------
    slots : Tensor (B, slots, C), fp32 or fp64
        ``slots`` a multiple of 16.
    inverse
        The inverse, which is the transpose.

    Returns
    -------
    Tensor, like ``slots``
        Additions are those of the fast transform of quarters: sums and differences of rows 1, 2, 4 and 8 apart, in this
        order.
    """
    index = torch.arange(16, dtype=torch.int64, device=slots.device)
    mask = sum(1 << i for i, sign in enumerate(HADAMARD_SIGNS) if sign < 0)
    signs = (1 - 2 * (mask >> index & 1)).to(slots.dtype).unsqueeze(-1)
    x = torch.unflatten(slots, 1, (slots.shape[1] // 16, 16))
    x = x * (0.25 if inverse else signs * 0.25)
    for distance in (1, 2, 4, 8):
        first, second = torch.unflatten(x, 2, (8 // distance, 2, distance)).unbind(3)
        x = torch.stack((first + second, first - second), 3).flatten(2, 4)
    return (x * signs if inverse else x).flatten(1, 2)
