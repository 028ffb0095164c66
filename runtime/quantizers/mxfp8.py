"""MXFP8: E4M3 or E5M2 elements, one power of two (E8M0) for each 32."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .blocks import BlockQuantizer
from .formats import E4M3, FP8_MAX, decode_e8m0, decode_fp8, encode_e8m0, encode_fp8, reciprocal_e8m0
from .per_tensor import fp8_problems


@dataclass(frozen=True)
class MXFP8Quantizer(BlockQuantizer):
    """MXFP8: blocks of 1x32, or 32x32, with scales that are powers of two.

    Parameters
    ----------
    fp8_dtype
        ``torch.float8_e4m3fn``, or ``torch.float8_e5m2`` for gradients under HYBRID.
    with_2d_quantization
        Blocks of 32x32: both directions hold the same numbers.  Scales are kept once for each row (or column).
    margin
        Scales leave this many powers of two of headroom.

    Notes
    -----
    The scale is amax / 448 (/ 57344 for E5M2) rounded **up** to a power of two, as Transformer Engine and torchao's
    RCEIL mode do and the OCP specification, which rounds amax's exponent down, does not: no element is ever cut off.

    ============================  ===================================================================================
    block                         becomes
    ============================  ===================================================================================
    all zero                      scale 2^-127 (code 0), elements 0 with their signs
    amax up to 2^-127 x 448       scale 2^-127, elements times 2^127 (torchao: times 1)
    with an infinity              scale 2^127 (code 254); the infinity is the largest element, the rest is nearly 0
    with NaN                      NaN counts for nothing in the scale and stays NaN (torchao: the whole block is NaN)
    ============================  ===================================================================================
    """

    block = 32
    divisor = 32
    transposed = False
    tiled_scales = True
    scale_dtype = torch.float8_e8m0fnu

    fp8_dtype: torch.dtype = E4M3
    with_2d_quantization: bool = False
    margin: int = 0

    def _problems(self) -> list[str]:
        return super()._problems() + fp8_problems(self.fp8_dtype)

    @property
    def data_dtype(self) -> torch.dtype:
        """E4M3 or E5M2."""
        return self.fp8_dtype

    @property
    def two_dimensional(self) -> bool:
        """Whether blocks are 32x32."""
        return self.with_2d_quantization

    def _block_scale(
        self, amax: torch.Tensor, outer: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # A number that fp32 holds only nearly: the product is rounded as Transformer Engine's is.
        code = encode_e8m0(amax * (2.0**self.margin / FP8_MAX[self.fp8_dtype]))
        return code, reciprocal_e8m0(code)

    def _encode(self, x: torch.Tensor, noise: torch.Tensor | None) -> torch.Tensor:
        return encode_fp8(x, self.fp8_dtype)

    def _decode(self, codes: torch.Tensor, compute: torch.dtype) -> torch.Tensor:
        return decode_fp8(codes, self.fp8_dtype, compute)

    def _decode_scale(self, scale: torch.Tensor, compute: torch.dtype) -> torch.Tensor:
        return decode_e8m0(scale, compute)
