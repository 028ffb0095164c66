"""Narrow number formats in plain torch: E4M3, E5M2, E2M1 elements and E8M0 scales.

Encoding follows the conversions of NVIDIA GPUs (``cvt.rn.satfinite``): to nearest, ties to even, and anything larger
than the largest finite value, infinities too, becomes that value with its sign.  The sign of zero is kept.  What
differs is NaN: E4M3 and E5M2 have one and get ``0x7F`` whatever the NaN's sign; E2M1 has none and gets +6.

=====  =========================  ========  ============  ==================
name   exponent, mantissa bits    largest   least normal  least subnormal
=====  =========================  ========  ============  ==================
E4M3   4, 3 (no infinities)       448       2^-6          2^-9
E5M2   5, 2                       57344     2^-14         2^-16
E2M1   2, 1 (no NaN, no inf)      6         1             0.5
E8M0   8, 0 (unsigned, no zero)   2^127     2^-127        none
=====  =========================  ========  ============  ==================
"""

from __future__ import annotations

import torch

E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2
#: Largest finite values.
FP8_MAX = {E4M3: 448.0, E5M2: 57344.0}
E2M1_MAX = 6.0
FP32_MAX = torch.finfo(torch.float32).max

_FP8_NAN = 0x7F
_E2M1_NAN = 7
# Halfway points between neighbouring magnitudes of E2M1; a tie goes to the even code, so every other one is reached.
_E2M1_HALFWAY = ((0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False))


def encode_fp8(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round fp32 values to E4M3 or E5M2.

    Parameters
    ----------
    x : Tensor, fp32
    dtype
        ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.

    Returns
    -------
    Tensor, uint8
        Bit patterns, which torch can index where it cannot a float8 tensor; ``view(dtype)`` gives the numbers.
    """
    limit = FP8_MAX[dtype]
    codes = x.clamp(-limit, limit).to(dtype).view(torch.uint8)
    return torch.where(x.isnan(), _FP8_NAN, codes)


def decode_fp8(codes: torch.Tensor, dtype: torch.dtype, out: torch.dtype = torch.float32) -> torch.Tensor:
    """Values of E4M3 or E5M2 bit patterns."""
    return codes.view(dtype).to(torch.float32).to(out)


def encode_e2m1(x: torch.Tensor) -> torch.Tensor:
    """Round fp32 values to E2M1; returns codes 0 to 15 in uint8, one to an element, of which 8 is the sign."""
    size = x.abs()
    code = torch.zeros_like(x, dtype=torch.uint8)
    for halfway, reached in _E2M1_HALFWAY:
        code += (size >= halfway) if reached else (size > halfway)
    code += x.signbit().to(torch.uint8) << 3
    return torch.where(x.isnan(), _E2M1_NAN, code)


def encode_e2m1_stochastic(x: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """Round fp32 values to E2M1, up or down by chance.

    Parameters
    ----------
    x : Tensor, fp32
    bits : Tensor of integers, of x's shape
        A random number from 0 to 255 for each element, as many bits as ``cvt.rs.satfinite.e2m1x4.f32`` takes.

    Returns
    -------
    Tensor, uint8
        Codes, as :func:`encode_e2m1`.

    Notes
    -----
    ``bits`` / 256 of the distance between neighbouring numbers is added to the magnitude, and the sum cut off: the mean
    is the magnitude cut down to 1/256 of that distance.  Times 2^-126 a magnitude has its code in the bits from 22
    upwards of its fp32 pattern, 0.5 being subnormal, so that both are done to the pattern as an integer.  Of magnitudes
    below 1 what lies below 2^-23 is cut off before.
    """
    size = torch.where(x.isnan(), E2M1_MAX, x.abs().clamp(max=E2M1_MAX))
    normal, subnormal = size.view(torch.int32) - (126 << 23), (size * 2.0**23).to(torch.int32)
    code = (torch.where(size < 1.0, subnormal, normal) + (bits.to(torch.int32) << 14)) >> 22
    negative = x.signbit() & ~x.isnan()
    return code.to(torch.uint8) + (negative.to(torch.uint8) << 3)


def decode_e2m1(codes: torch.Tensor, out: torch.dtype = torch.float32) -> torch.Tensor:
    """Values of E2M1 codes, one to an element."""
    size = codes.to(torch.int32) & 7
    normal = ((size >> 1) + 126) << 23 | (size & 1) << 22
    subnormal = size * 0x3F000000  # codes 0 and 1 are 0 and 0.5
    values = torch.where(size > 1, normal, subnormal).view(torch.float32)
    return torch.where(codes > 7, -values, values).to(out)


def pack_e2m1(codes: torch.Tensor) -> torch.Tensor:
    """Two codes to a byte along the last dimension, the first in the low half; the last dimension is even."""
    pairs = torch.unflatten(codes, -1, (codes.shape[-1] // 2, 2))
    return pairs[..., 0] | pairs[..., 1] << 4


def unpack_e2m1(packed: torch.Tensor) -> torch.Tensor:
    """Inverse of :func:`pack_e2m1`."""
    return torch.stack((packed & 0xF, packed >> 4), -1).flatten(-2)


def encode_e8m0(x: torch.Tensor) -> torch.Tensor:
    """Round non-negative fp32 values up to powers of two.

    Parameters
    ----------
    x : Tensor, fp32
        Not negative.  Zero, and all up to 2^-127, give 2^-127; above 2^127, infinity too, 2^127; NaN gives NaN.

    Returns
    -------
    Tensor, uint8
        Exponents, biased by 127; 255 is NaN.  As ``cvt.rp.satfinite.ue8m0x2.f32`` has it.
    """
    bits = x.view(torch.int32)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    # Of the subnormal numbers, 2^-127 is the one with mantissa 0x400000.
    above = torch.where(exponent == 0, mantissa > 0x400000, mantissa > 0)
    code = (exponent + above).clamp(max=254)
    return torch.where(x.isnan(), 255, code).to(torch.uint8)


def decode_e8m0(codes: torch.Tensor, out: torch.dtype = torch.float32) -> torch.Tensor:
    """Powers of two of E8M0 codes; in fp32 2^-127 is a subnormal number."""
    return _power_of_two(codes.to(torch.int32)).to(out)


def reciprocal_e8m0(codes: torch.Tensor) -> torch.Tensor:
    """One over the powers of two of E8M0 codes, exactly, in fp32."""
    exponent = codes.to(torch.int32)
    return _power_of_two(torch.where(exponent == 255, exponent, 254 - exponent))


def _power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """2^(exponent - 127) for int32 exponents from 0 to 254, NaN for 255."""
    bits = torch.where(exponent == 0, 0x400000, exponent << 23)
    return torch.where(exponent == 255, 0x7FC00000, bits).view(torch.float32)
