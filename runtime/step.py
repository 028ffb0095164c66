"""What describes one step of the fused grouped MLP: gradients wanted, its kernels, what forward leaves for backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from . import kernels
from .codegen.spec import GluLayout
from .kernels import Launch
from .op import Tensors

# What a backward has to return, as bits: one small integer is part of the key of the kernels to launch.
NEED_X, NEED_W1, NEED_B1, NEED_PROBS, NEED_W2, NEED_B2, NEED_SCALE = (1 << bit for bit in range(7))
#: Any of these needs dz, hence dgrad_act, hence z from forward.
NEED_Z = NEED_X | NEED_W1 | NEED_B1 | NEED_PROBS

#: GLU layouts that kernels have, by glu_interleave_size.
LAYOUTS = {None: GluLayout.CONTIGUOUS, 32: GluLayout.INTERLEAVED32}


@dataclass(frozen=True, slots=True)
class Variant:
    """All that the kernels of a step depend on, besides what a plan fixes.

    Attributes
    ----------
    bucket
        Of rows per group: see :func:`kernels.rows_bucket`.
    probs, scale
        Types of probs and of the scale of FC2's bias; None without.
    needs
        NEED_* bits.
    main_grads
        For FC1 and FC2: type of the main_grad that wgrad writes to, and whether it accumulates; None for a new tensor.
    """

    bucket: int
    probs: torch.dtype | None
    scale: torch.dtype | None
    needs: int
    main_grads: tuple[tuple[torch.dtype, bool] | None, tuple[torch.dtype, bool] | None]


@dataclass(frozen=True, slots=True)
class StepKernels:
    """The kernels of a step, ready to launch.

    Attributes
    ----------
    launches
        By role, each with the number of CTAs.
    columns
        Columns of z that one partial sum of dprobs covers.
    main_grads
        As :class:`Variant` has them.
    status
        The device's status word.
    """

    launches: dict[str, tuple[Launch, int]]
    columns: int
    main_grads: tuple[tuple[torch.dtype, bool] | None, tuple[torch.dtype, bool] | None]
    status: torch.Tensor


#: Shape and type of a gradient that backward returns.
Like = tuple[torch.Size, torch.dtype] | None


class Saved(NamedTuple):
    """What forward hands to backward besides tensors.

    Attributes
    ----------
    step
        The kernels; None where there were no tokens.
    needs, tokens, shape
        NEED_* bits, T, and the input's shape.
    grad_input
        The caller's buffer for dx.
    probs, scale
        Shapes and types of dprobs and dscale.
    """

    step: StepKernels | None
    needs: int
    tokens: int
    shape: torch.Size
    grad_input: torch.Tensor | None
    probs: Like
    scale: Like


#: Extra outputs of the three operations.
NO_OUTPUTS: list[Tensors] = [(), (), ()]


def launchable(t: torch.Tensor | None) -> torch.Tensor | None:
    """:func:`kernels.launchable` of a tensor that may be missing."""
    return None if t is None else kernels.launchable(t)


def given(*tensors: torch.Tensor | None) -> list[torch.Tensor]:
    """Leave out what a kernel's spec leaves out."""
    return [t for t in tensors if t is not None]


def like_of(t: torch.Tensor | None) -> Like:
    """Shape and type of the gradient of a tensor."""
    return None if t is None else (t.shape, t.dtype)


def rows_of(t: torch.Tensor | None) -> torch.Tensor | None:
    """Return probs or scales as kernels read them: (T,), contiguous, in a type that kernels have."""
    if t is None:
        return None
    if t.dim() != 1 or t.dtype not in kernels.DTYPES:
        t = t.reshape(-1).to(row_dtype(t))
    return t if t.is_contiguous() else t.contiguous()


def row_dtype(t: torch.Tensor) -> torch.dtype:
    """Return the type in which kernels read probs or scales: their own, or float32 for one that kernels do not have."""
    return t.dtype if t.dtype in kernels.DTYPES else torch.float32
