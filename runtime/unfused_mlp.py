"""GroupedLinear, activation, GroupedLinear step by step, as functions of tensors: what operators run without fusion."""

from __future__ import annotations

from typing import Any

import torch

from . import checks, grouped_gemm
from .ops.activation import ScaledActivation
from .ops.grouped_linear import GroupedLinear
from .step import NEED_B1, NEED_B2, NEED_SCALE, NEED_W1, NEED_W2, NEED_X, NEED_Z

NAME = "grouped MLP"


class UnfusedGroupedMLP:
    """Forward and backward, with the numbers that the three operations compute one after the other.

    Parameters
    ----------
    fc1, activation, fc2
        The operations; of their parameters only shapes, types and devices are read.
    """

    def __init__(self, fc1: GroupedLinear, activation: ScaledActivation, fc2: GroupedLinear) -> None:
        self._fc1, self._activation, self._fc2 = fc1, activation, fc2

    def functional_forward(
        self,
        x: torch.Tensor,
        w1: torch.Tensor,
        b1: torch.Tensor | None,
        probs: torch.Tensor | None,
        sizes1: torch.Tensor,
        w2: torch.Tensor,
        b2: torch.Tensor | None,
        scale: torch.Tensor | None,
        sizes2: torch.Tensor,
        needs: int,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """As :meth:`FusedGroupedMLP.functional_forward`, and as if there were kernels for every shape and type.

        Raises
        ------
        ShapeError
            That names every argument that is wrong.
        """
        fc1, activation, fc2 = self._fc1, self._activation, self._fc2
        problems = fc1.input_problems(x, (sizes1,), w1.dtype) + activation.probs_problems(probs, x)
        problems += [f"second {p}" for p in checks.splits_problems(sizes2, fc2.num_groups, x.device)]
        if fc2.scale_bias:
            problems += checks.rows_problems("scale", scale, x.shape[:-1], x.device)
        checks.require(NAME, problems)
        z = self._gemm(fc1, w1).fprop(x, w1, sizes1, b1)
        a = activation.values(z, probs)
        checks.require(NAME, fc2.input_problems(a, (sizes2, scale), w2.dtype))
        y = self._gemm(fc2, w2).fprop(a, w2, sizes2, b2, scale)
        return y, (z if needs & NEED_Z else None), (a if needs & NEED_W2 and not needs & NEED_Z else None)

    def functional_backward(
        self,
        dy: torch.Tensor,
        x: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        b2: torch.Tensor | None,
        z: torch.Tensor | None,
        a: torch.Tensor | None,
        probs: torch.Tensor | None,
        scale: torch.Tensor | None,
        sizes1: torch.Tensor,
        sizes2: torch.Tensor,
        needs: int,
    ) -> tuple[torch.Tensor | None, ...]:
        """As :meth:`FusedGroupedMLP.functional_backward`; where z is there a is computed from it once more."""
        activation = self._activation
        first, second = self._gemm(self._fc1, w1), self._gemm(self._fc2, w2)
        dx = dw1 = db1 = dprobs = dw2 = db2 = dscale = None
        grad = None if z is None else second.dgrad(dy, w2, sizes2)
        if needs & NEED_W2:
            kept: Any = a if z is None else activation.values(z, probs)
            dw2 = second.wgrad(dy, kept, sizes2)
        if needs & (NEED_B2 | NEED_SCALE):
            db2, dscale = second.bias_grad(dy, sizes2, scale, b2 if needs & NEED_SCALE else None)
        if z is None or grad is None:
            return dx, dw1, db1, dprobs, dw2, db2, dscale
        dz, dprobs = activation.gradients(grad, z, probs)
        if needs & NEED_X:
            dx = first.dgrad(dz, w1, sizes1)
        if needs & NEED_W1:
            dw1 = first.wgrad(dz, x, sizes1)
        if needs & NEED_B1:
            db1, _ = first.bias_grad(dz, sizes1, None, None)
        return dx, dw1, db1, dprobs, dw2, db2, dscale

    def _gemm(self, fc: GroupedLinear, w: torch.Tensor) -> grouped_gemm.GroupedGemm:
        return grouped_gemm.choose(fc.shape(w.dtype))
