"""Quantised operands in bf16, exactly, for kernels that compute in bf16."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch

from ..errors import GroupedMLPError, UnsupportedError
from ..kernels import OUT_OF_RANGE
from . import launch
from .base import Direction, QuantizedTensor, Quantizer


@dataclass(frozen=True, slots=True)
class EmulatedOperand:
    """One operand of a GEMM as kernels read it: bf16 numbers, and what they are multiplied by.

    Attributes
    ----------
    values : Tensor, bf16, contiguous
        As :meth:`QuantizedTensor.operand` has them, without the factors.
    alpha : Tensor, fp32, or None
        (count,), a factor for each matrix or group; None: all are 1.  Where NVFP4 is row-scaled (T,), columnwise
        (count, C).
    sizes : Tensor (G,), int32, or None
        Rows of each group: slots in the columnwise direction.  None: those of the split sizes, or no groups.
    """

    values: torch.Tensor
    alpha: torch.Tensor | None = None
    sizes: torch.Tensor | None = None


@torch.no_grad()
def emulated_operands(
    quantizer: Quantizer,
    x: torch.Tensor,
    split_sizes: torch.Tensor | None = None,
    *,
    batched: bool = False,
    rowwise: bool = False,
    columnwise: bool = False,
    scale: torch.Tensor | None = None,
    rng: torch.Tensor | None = None,
    amax: torch.Tensor | None = None,
    status: torch.Tensor | None = None,
) -> tuple[EmulatedOperand | None, EmulatedOperand | None]:
    """Quantise a tensor and write what was quantised as bf16 operands, :func:`emulate` of each direction.

    Parameters
    ----------
    quantizer
        Says how; which directions are wanted is said here.
    x, split_sizes, batched, scale, rng
        As :meth:`Quantizer.quantize` takes them.
    rowwise, columnwise
        Directions that are wanted.
    amax : Tensor (count,), fp32, optional
        Raised to the amaxes of ``x``: the history of delayed scaling.
    status : Tensor (1,), int32, optional
        Gets the bit ``OUT_OF_RANGE`` if a product is outside of bf16's normal numbers, without waiting.

    Returns
    -------
    rowwise, columnwise : EmulatedOperand or None
        None where not wanted.  Exact if ``quantizer.exact_in_bf16``, else rounded to bf16.

    Notes
    -----
    Generated kernels do it where they can (:func:`.launch.specs_of`), in one read of ``x``, with the same bits.
    """
    where = {"batched": batched, "rowwise": rowwise, "columnwise": columnwise, "amax": amax is not None}
    if (scale is None or quantizer.block == 1) and (specs := launch.specs_of(quantizer, x, split_sizes, **where)):
        made = launch.emulated(
            quantizer, specs, x, split_sizes, batched=batched, scale=scale, rng=rng, amax=amax, status=status
        )
        first, second = (None if operand is None else EmulatedOperand(*operand) for operand in made)
        return first, second
    q = _in_directions(quantizer, rowwise, columnwise).quantize(x, split_sizes, batched=batched, scale=scale, rng=rng)
    if amax is not None:
        torch.maximum(amax, q.amax, out=amax)

    def operand(direction: Direction, wanted: bool) -> EmulatedOperand | None:
        if not wanted:
            return None
        values, alpha = emulate(q, direction, exact=False, status=status)
        sizes = q.columnwise_sizes if direction == "columnwise" else None
        return EmulatedOperand(values, alpha if quantizer.has_alpha else None, sizes)

    return operand("rowwise", rowwise), operand("columnwise", columnwise)


@functools.lru_cache(maxsize=256)
def _in_directions(quantizer: Quantizer, rowwise: bool, columnwise: bool) -> Quantizer:
    return replace(quantizer, rowwise=rowwise, columnwise=columnwise)


def out_of_range(values: torch.Tensor) -> torch.Tensor:
    """Whether any fp32 value is neither 0, NaN nor a normal number of bf16: (1,) bool on the device."""
    bf16 = torch.finfo(torch.bfloat16)
    size = values.abs()
    return (((size < bf16.tiny) & (size != 0)) | (size > bf16.max)).any().reshape(1)


@torch.no_grad()
def emulate(
    q: QuantizedTensor,
    direction: Direction = "rowwise",
    *,
    exact: bool = True,
    check: bool = False,
    status: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Write a quantised operand as bf16 numbers and factors: ``bf16 * alpha`` are the dequantised values, exactly.

    An element times the scale of its block has few significant bits (E4M3 times a power of two 4, E2M1 times E4M3 6),
    so bf16 holds it.  Everything that scales a whole matrix, group, row or column goes into alpha.

    Parameters
    ----------
    q
        The operand.
    direction
        Which of its directions.
    exact
        False rounds to bf16 where scales of blocks are not powers of two (Float8BlockQuantizer with
        ``force_pow_2_scales=False``), which cannot be exact; True raises there.
    check
        Raise if a product is outside of bf16's normal numbers, 2^-126 to 3.39e38, where tensor cores may differ from
        Blackwell's.  Waits for the device.
    status : Tensor (1,), int32, optional
        Gets the bit ``OUT_OF_RANGE`` in that case, without waiting.

    Returns
    -------
    values : Tensor (T, C) bf16, or columnwise (P, C)
        As :meth:`QuantizedTensor.operand`: columnwise rows are slots, ``q.columnwise_sizes`` of each group.
    alpha : Tensor, fp32
        (count,), a factor for each matrix or group; (T,) or columnwise (count, C) where NVFP4 is row-scaled.

    Raises
    ------
    UnsupportedError
        If this direction was not quantised, or bf16 cannot hold its numbers.
    GroupedMLPError
        If ``check`` finds a product out of range.
    """
    if exact and not q.quantizer.exact_in_bf16:
        raise UnsupportedError(
            "exact emulation", ["scales of blocks are any fp32 number; allowed: force_pow_2_scales=True, exact=False"]
        )
    values = q.quantizer.values(q, direction, torch.float32)
    if check or status is not None:
        outside = out_of_range(values)
        if status is not None:
            status.bitwise_or_(outside.to(status.dtype) * OUT_OF_RANGE)
        if check and outside.item():
            raise GroupedMLPError(
                f"emulating {type(q.quantizer).__name__} in bf16: a {direction} element times its scale is outside of "
                f"bf16's normal numbers ({torch.finfo(torch.bfloat16).tiny} to {torch.finfo(torch.bfloat16).max})"
            )
    values = values if direction == "rowwise" else values.transpose(1, 2)
    values = values.to(torch.bfloat16).contiguous()
    values = values if q.matrices.stacked else values[0]
    return values, q.quantizer.alpha(q, direction)
