"""Conversion of FC1's weight and bias between the layouts of gate and up rows."""

from __future__ import annotations

from typing import Any

import torch

from .errors import ShapeError


def interleave_glu(t: torch.Tensor, size: int = 32) -> torch.Tensor:
    """Return FC1's weight or bias with its gate and up rows in blocks that take turns, gate first.

    Parameters
    ----------
    t : Tensor (G, 2F, H) or (G, 2F)
        Weight or bias in the layout ``[gate | up]``: of Hugging Face, Megatron, and ``glu_interleave_size=None``.  One
        of a list of weights (2F, H) is passed as ``weight.unsqueeze(0)``.
    size
        Rows in a block; it must divide F.  Transformer Engine has 32.

    Returns
    -------
    Tensor
        A new one of the same shape, for ``glu_interleave_size=size``.

    Raises
    ------
    ShapeError
        If the shape or the size is wrong.
    """
    blocks = _checked("interleave_glu", t, size)
    return t.reshape(t.shape[0], 2, blocks, size, *t.shape[2:]).transpose(1, 2).reshape(t.shape).clone()


def deinterleave_glu(t: torch.Tensor, size: int = 32) -> torch.Tensor:
    """Inverse of :func:`interleave_glu`.

    Parameters
    ----------
    t : Tensor (G, 2F, H) or (G, 2F)
        Weight or bias in blocks of ``size`` rows.
    size
        Rows in a block.

    Returns
    -------
    Tensor
        A new one of the same shape, in the layout ``[gate | up]``.

    Raises
    ------
    ShapeError
        If the shape or the size is wrong.
    """
    blocks = _checked("deinterleave_glu", t, size)
    return t.reshape(t.shape[0], blocks, 2, size, *t.shape[2:]).transpose(1, 2).reshape(t.shape).clone()


def _checked(function: str, t: Any, size: Any) -> int:
    """Return the number of blocks of each half."""
    problems = []
    good_size = isinstance(size, int) and not isinstance(size, bool) and size > 0
    if not good_size:
        problems.append(f"size is {size!r}, allowed: a positive integer")
    if not isinstance(t, torch.Tensor) or t.dim() not in (2, 3):
        got = f"has shape {tuple(t.shape)}" if isinstance(t, torch.Tensor) else f"is {type(t).__name__}"
        problems.append(f"the tensor {got}, allowed: FC1's weight (G, 2F, H) or bias (G, 2F)")
    elif good_size and t.shape[1] % (2 * size):
        problems.append(f"the tensor has {t.shape[1]} output features, allowed: a multiple of 2 * size = {2 * size}")
    if problems:
        raise ShapeError(f"{function}: {'; '.join(problems)}")
    features: int = t.shape[1]
    return features // (2 * int(size))
