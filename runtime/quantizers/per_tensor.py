"""FP8 with one scale per tensor, or per group: current scaling and delayed scaling."""

from __future__ import annotations

import abc
from dataclasses import dataclass

import torch

from ..checks import require
from ..errors import UnsupportedError
from .base import Direction, Parts, QuantizedTensor, Quantizer
from .formats import E4M3, FP8_MAX, FP32_MAX, decode_fp8, encode_fp8
from .matrices import Matrices

_EXPONENT_BITS = 0x7F800000


def scale_of_amax(amax: torch.Tensor, largest: float, power_of_two: bool, if_infinite: float) -> torch.Tensor:
    """Factor that brings an amax to a format's largest value.

    Parameters
    ----------
    amax : Tensor, fp32
    largest
        Largest value of the format.
    power_of_two
        Round the factor down to a power of two.
    if_infinite
        Factor for an amax so small that the quotient is infinite in fp32.

    Returns
    -------
    Tensor, fp32
        1 where amax is 0 or infinite.
    """
    scale = torch.full_like(amax, largest) / amax  # a number / a tensor would multiply by the reciprocal
    scale = torch.where(scale.isinf(), if_infinite, scale)
    if power_of_two:
        scale = (scale.view(torch.int32) & _EXPONENT_BITS).view(torch.float32)
    return torch.where((amax == 0) | amax.isinf(), 1.0, scale)


@dataclass(frozen=True)
class _PerTensorQuantizer(Quantizer):
    """One scale for each matrix or group; data of both directions is the same, columnwise transposed."""

    has_alpha = True

    fp8_dtype: torch.dtype = E4M3

    def _problems(self) -> list[str]:
        return super()._problems() + fp8_problems(self.fp8_dtype)

    @property
    def data_dtype(self) -> torch.dtype:
        """E4M3 or E5M2."""
        return self.fp8_dtype

    @abc.abstractmethod
    def _scale(self, amax: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        """Factors of the matrices, from their amaxes or from outside."""

    def _quantize(
        self, x: torch.Tensor, matrices: Matrices, scale: torch.Tensor | None, rng: torch.Tensor | None
    ) -> Parts:
        amax = matrices.amax(x)
        scale = self._scale(amax, scale)
        scale_inv = scale.reciprocal()
        codes = encode_fp8(x.float() * matrices.per_row(scale), self.fp8_dtype)
        columns = matrices.pad(codes).transpose(1, 2) if self.columnwise else None
        return Parts(
            (codes, scale_inv) if self.rowwise else None,
            None if columns is None else (columns, scale_inv),
            amax,
            amax,
        )

    def values(self, q: QuantizedTensor, direction: Direction, compute: torch.dtype) -> torch.Tensor:
        """Elements alone."""
        return decode_fp8(q.oriented_codes(direction), self.fp8_dtype, compute)

    def alpha(self, q: QuantizedTensor, direction: Direction) -> torch.Tensor:
        """The scales, (count,)."""
        alpha = q.rowwise_scale_inv if direction == "rowwise" else q.columnwise_scale_inv
        assert alpha is not None  # there where the data is
        return alpha


@dataclass(frozen=True)
class Float8CurrentScalingQuantizer(_PerTensorQuantizer):
    """FP8 with the scale of the tensor at hand: the format's largest value over the amax.

    Parameters
    ----------
    fp8_dtype
        ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.
    force_pow_2_scales
        Round scales down to powers of two.

    Notes
    -----
    An amax of 0 or infinity gives scale 1; one so small that the quotient is infinite in fp32, fp32's largest number.
    NaN counts for nothing in the amax and stays NaN in the data; an infinity becomes the format's largest value.
    """

    force_pow_2_scales: bool = False

    def _scale(self, amax: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        if scale is not None:
            raise UnsupportedError("Float8CurrentScalingQuantizer.quantize(scale=...)", ["the scale is the tensor's"])
        return scale_of_amax(amax, FP8_MAX[self.fp8_dtype], self.force_pow_2_scales, FP32_MAX)


@dataclass(frozen=True)
class DelayedScalingQuantizer(_PerTensorQuantizer):
    """FP8 with a scale from outside, made of earlier steps' amaxes; the result's ``amax`` is what this step adds.

    Parameters
    ----------
    fp8_dtype
        ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.

    Notes
    -----
    What the scale brings past the format's largest value is cut to it.  NaN counts for nothing in the amax.
    """

    def _scale(self, amax: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        if scale is None:
            return torch.ones_like(amax)
        problems = []
        if scale.shape != amax.shape or scale.dtype != torch.float32:
            problems.append(f"scale is {scale.dtype} of shape {tuple(scale.shape)}, allowed: fp32 {tuple(amax.shape)}")
        if scale.device != amax.device:
            problems.append(f"scale is on {scale.device}, x is on {amax.device}")
        require("DelayedScalingQuantizer.quantize", problems)
        return scale


def fp8_problems(dtype: torch.dtype) -> list[str]:
    """Say what is wrong with a field fp8_dtype."""
    return [] if dtype in FP8_MAX else [f"fp8_dtype is {dtype}; allowed: {', '.join(map(str, FP8_MAX))}"]
