"""GroupedLinear, activation, GroupedLinear step by step, as functions of tensors: what operators run without fusion.

Under a quantising recipe backward quantises x, a and the weights once more: the shapes of quantised operands depend on
their format, and an operator can hand over only what has a known shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from . import checks, grouped_gemm
from .context import OperationContext
from .ops.activation import ScaledActivation
from .ops.grouped_linear import GroupedLinear
from .recipe_state import QuantizedCall
from .step import NEED_B1, NEED_B2, NEED_SCALE, NEED_W1, NEED_W2, NEED_X, NEED_Z

if TYPE_CHECKING:  # imported where it is needed: without a quantising recipe nothing needs it
    from .ops.quantized_linear import Arguments

NAME = "grouped MLP"


class _Layer:
    """The passes of a grouped linear layer.

    Parameters
    ----------
    fc
        The layer; of its parameters only shapes, types and devices are read.
    call
        Its quantisation, which has no state between steps; None without.
    """

    def __init__(self, fc: GroupedLinear, call: QuantizedCall | None) -> None:
        self._fc, self._call = fc, call

    def forward(
        self,
        x: torch.Tensor,
        w: torch.Tensor,
        sizes: torch.Tensor,
        bias: torch.Tensor | None,
        scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return y; takes what :meth:`GroupedGemm.fprop` takes."""
        shape = self._fc.shape(w.dtype)
        if self._call is None:
            return grouped_gemm.choose(shape).fprop(x, w, sizes, bias, scale)
        from .ops import quantized_linear as quantized

        alone = OperationContext(False, False)  # nothing is kept
        _, y, _ = quantized.forward(
            alone, self._call, shape, x, w, sizes, bias, scale, wgrad=False, input_=x, is_first_microbatch=None
        )
        return y

    def backward(
        self, dy: torch.Tensor, x: torch.Tensor | None, w: torch.Tensor, sizes: torch.Tensor, *, dgrad: bool
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return dx where it is wanted, and dW where there is x.

        Parameters
        ----------
        dy, x, w, sizes
            (T, N), (T, K) or None, (G, N, K) and (G,).
        dgrad
            Whether dx is wanted.
        """
        shape = self._fc.shape(w.dtype)
        gemm = grouped_gemm.choose(shape)
        for_dgrad: Arguments = (dy, w, sizes, None) if dgrad else None
        for_wgrad: Arguments = None if x is None else (dy, x, sizes, None)
        if self._call is not None and (dgrad or x is not None):
            from .ops import quantized_linear as quantized

            # An x that nobody reads is quantised all the same: of zeros there is nothing to report.
            given = dy.new_zeros(len(dy), w.shape[2]) if x is None else x
            operands = quantized.forward_operands(
                self._call, given, w, sizes, wgrad=x is not None, dgrad=dgrad, record=False
            )
            for_dgrad, for_wgrad = quantized.backward_arguments(self._call, dy, dy, sizes, operands.to_save())
            if self._call.quantizers.backward_override != "high_precision":
                gemm = quantized.gemm_of(shape, self._call.quantizers)
        dx = None if for_dgrad is None else gemm.dgrad(*for_dgrad)
        if for_wgrad is None:
            return dx, None
        dy_w, x_w, slots, alpha = for_wgrad
        return dx, gemm.wgrad(dy_w, x_w, slots, None, False, alpha)

    def bias_grad(
        self, dy: torch.Tensor, sizes: torch.Tensor, scale: torch.Tensor | None = None, bias: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return db and the gradient of its scale, as :meth:`GroupedGemm.bias_grad`: never quantised."""
        return grouped_gemm.choose(self._fc.shape(dy.dtype)).bias_grad(dy, sizes, scale, bias)


class UnfusedGroupedMLP:
    """Forward and backward, with the numbers that the three operations compute one after the other.

    Parameters
    ----------
    fc1, activation, fc2
        The operations; of their parameters only shapes, types and devices are read.
    calls
        Quantisation of both layers, which has no state between steps; None without.
    """

    def __init__(
        self,
        fc1: GroupedLinear,
        activation: ScaledActivation,
        fc2: GroupedLinear,
        calls: Sequence[QuantizedCall | None] = (None, None),
    ) -> None:
        self._fc1, self._activation, self._fc2 = fc1, activation, fc2
        self._first, self._second = _Layer(fc1, calls[0]), _Layer(fc2, calls[1])

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
        """As :meth:`FusedGroupedMLP.functional_forward`, for every shape and type.

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
        z = self._first.forward(x, w1, sizes1, b1)
        a = activation.values(z, probs)
        checks.require(NAME, fc2.input_problems(a, (sizes2, scale), w2.dtype))
        y = self._second.forward(a, w2, sizes2, b2, scale)
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
        dx = dw1 = db1 = dprobs = db2 = dscale = None
        if needs & NEED_W2 and z is not None:
            a = self._activation.values(z, probs)
        grad, dw2 = self._second.backward(dy, a, w2, sizes2, dgrad=z is not None)
        if needs & (NEED_B2 | NEED_SCALE):
            db2, dscale = self._second.bias_grad(dy, sizes2, scale, b2 if needs & NEED_SCALE else None)
        if z is not None and grad is not None:
            dz, dprobs = self._activation.gradients(grad, z, probs)
            kept = x if needs & NEED_W1 else None
            dx, dw1 = self._first.backward(dz, kept, w1, sizes1, dgrad=bool(needs & NEED_X))
            if needs & NEED_B1:
                db1, _ = self._first.bias_grad(dz, sizes1)
        return dx, dw1, db1, dprobs, dw2, db2, dscale
