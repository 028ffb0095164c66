"""Activations between the two grouped linear layers, times the router's probability of each token."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from .. import checks, reference
from ..codegen.activations import ACTIVATIONS
from ..context import OperationContext, Tensors
from ..errors import ConfigError
from ..op import BasicOperation

_LAYOUT_KEY = "glu_interleave_size"
#: Parameters that make no sense at 0 or below, whatever the activation.
_POSITIVE = frozenset({"beta1", "beta2", "limit"})


class ScaledActivation(BasicOperation):
    """An activation of the activations table times the probability of each row.

    Takes one extra input, ``probs`` of shape (T,) in any floating-point type, or None for no scaling.  Computes in fp32
    and rounds once; the gradient of ``probs`` is summed in fp32 and returned in the type of ``probs``.

    Parameters
    ----------
    activation
        Entry of ``codegen.activations.ACTIVATIONS``.
    glu_interleave_size
        Layout of the gate and up columns: None for ``[gate | up]``, a number for blocks of that many columns in turn.
    **params
        The activation's parameters; the table has defaults.

    Raises
    ------
    ConfigError
        If the activation or a parameter does not exist, or a value makes no sense.
    """

    num_extra_inputs = 1

    def __init__(self, activation: str, *, glu_interleave_size: int | None = None, **params: float) -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ConfigError(f"activation is {activation!r}; allowed: {', '.join(sorted(ACTIVATIONS))}")
        entry = ACTIVATIONS[activation]
        defaults = dict(entry.params)
        problems = [f"unknown parameter {name!r}" for name in params if name not in defaults]
        values = {**defaults, **params}
        problems += [f"{name} is {v!r}, allowed: a finite number" for name, v in values.items() if not _finite(v)]
        problems += [
            f"{name} is {v!r}, allowed: a number greater than 0"
            for name, v in values.items()
            if name in _POSITIVE and _finite(v) and v <= 0
        ]
        if glu_interleave_size is not None:
            if not entry.glu:
                problems.append("glu_interleave_size has no meaning without a gate")
            elif not isinstance(glu_interleave_size, int) or glu_interleave_size < 1:
                problems.append(f"glu_interleave_size is {glu_interleave_size!r}, allowed: None or a positive integer")
        if problems:
            raise ConfigError(f"{type(self).__name__}({activation!r}): {'; '.join(problems)}")
        self.activation = activation
        self.glu = entry.glu
        self.glu_interleave_size = glu_interleave_size
        self.params = tuple(float(values[name]) for name in defaults)

    def extra_repr(self) -> str:
        """Say what ``repr`` shows."""
        names = [name for name, _ in ACTIVATIONS[self.activation].params]
        shown = [f"{name}={value}" for name, value in zip(names, self.params, strict=True)]
        return ", ".join([repr(self.activation), f"glu_interleave_size={self.glu_interleave_size}", *shown])

    def probs_problems(self, probs: torch.Tensor | None, z: torch.Tensor) -> list[str]:
        """Say what is wrong with probs for a pre-activation of shape (..., 2F)."""
        return [] if probs is None else checks.rows_problems("probs", probs, z.shape[:-1], z.device)

    def fuser_forward(
        self,
        basic_op_ctxs: list[OperationContext],
        input_: torch.Tensor,
        *,
        basic_op_extra_inputs: Sequence[Tensors],
        prev_op_grad_output_quantizer: Any,
        next_op_input_quantizer: Any,
        basic_op_kwargs: Sequence[dict[str, Any]],
    ) -> tuple[torch.Tensor, Sequence[Tensors]]:
        """Plain torch, in fp32."""
        ctx, probs = basic_op_ctxs[0], basic_op_extra_inputs[0][0]
        checks.no_keywords(type(self).__name__, basic_op_kwargs[0])
        block = 2 * (self.glu_interleave_size or 1) if self.glu else 1
        problems = self.probs_problems(probs, input_)
        if input_.dim() < 1 or input_.shape[-1] % block:
            problems.append(f"input has shape {tuple(input_.shape)}, allowed: a last dimension that {block} divides")
        if input_.dtype not in checks.FLOATS:
            problems.append(f"input is {input_.dtype}, allowed: a floating-point type")
        checks.require(type(self).__name__, problems)
        rows = None if probs is None else probs.reshape(input_.shape[:-1])
        z = input_.to(_math_dtype(input_.dtype))
        a = reference.activation_forward(self.activation, z, rows, self.glu_interleave_size, self.params)
        if ctx.requires_grad:
            ctx.save_for_backward(input_, probs)
            ctx.probs_require_grad = probs is not None and probs.requires_grad
        return a.to(input_.dtype), [()]

    def fuser_backward(
        self,
        basic_op_ctxs: list[OperationContext],
        grad_output: torch.Tensor,
        *,
        basic_op_grad_extra_outputs: Sequence[Tensors],
    ) -> tuple[torch.Tensor | None, Sequence[Iterable[torch.Tensor | None]], Sequence[Tensors]]:
        """Plain torch, in fp32."""
        ctx = basic_op_ctxs[0]
        z, probs = ctx.saved_tensors
        assert z is not None
        math_dtype = _math_dtype(z.dtype)
        rows = None if probs is None else probs.reshape(z.shape[:-1])
        dz, dprobs = reference.activation_backward(
            self.activation,
            grad_output.to(math_dtype),
            z.to(math_dtype),
            rows,
            self.glu_interleave_size,
            self.params,
        )
        if probs is None or dprobs is None or not ctx.probs_require_grad:
            dprobs = None
        else:
            dprobs = dprobs.to(probs.dtype).reshape(probs.shape)
        return (dz.to(z.dtype) if ctx.input_requires_grad else None), [()], [(dprobs,)]

    # The layout of the gate and up columns travels with the weights (docs/acceptance.md, N11).

    def extra_tensors(self) -> dict[str, torch.Tensor]:
        """Return the layout, where there are two halves."""
        layout = {_LAYOUT_KEY: torch.tensor(self.glu_interleave_size or 0)} if self.glu else {}
        return {**super().extra_tensors(), **layout}

    def load_extra_tensors(self, found: dict[str, torch.Tensor], errors: list[str]) -> set[str]:
        """Compare the layout; another one is an error, not a permutation.

        Parameters
        ----------
        found, errors
            As :meth:`BasicOperation.load_extra_tensors` takes them.
        """
        taken = super().load_extra_tensors(found, errors)
        if not self.glu or _LAYOUT_KEY not in found:
            return taken
        saved, own = int(found[_LAYOUT_KEY]), self.glu_interleave_size or 0
        if saved != own:
            names = [f"interleaved by {size}" if size else "contiguous" for size in (saved, own)]
            errors.append(f"the GLU weights were saved {names[0]}, this module has them {names[1]}")
        return taken | {_LAYOUT_KEY}


class ScaledSwiGLU(ScaledActivation):
    """SwiGLU times the probability of each row: a sigmoid(a) b s.

    Parameters
    ----------
    glu_interleave_size
        None for ``[gate | up]``, or 32 for Transformer Engine's blocks of 32 columns in turn.
    """

    def __init__(self, glu_interleave_size: int | None = None) -> None:
        super().__init__("swiglu", glu_interleave_size=glu_interleave_size)


class ScaledClampedQGeGLU(ScaledActivation):
    """Clamped QGeGLU of gpt-oss times the probability of each row: a sigmoid(alpha a) (b + offset) s, both clamped.

    Parameters
    ----------
    glu_interleave_size
        As for :class:`ScaledSwiGLU`.
    limit, alpha, glu_linear_offset
        Clamp of both halves (from above for the gate), slope of the sigmoid, and offset of the linear half.
    """

    def __init__(
        self,
        glu_interleave_size: int | None = None,
        *,
        limit: float = 7.0,
        alpha: float = 1.702,
        glu_linear_offset: float = 1.0,
    ) -> None:
        super().__init__(
            "clamped_qgeglu",
            glu_interleave_size=glu_interleave_size,
            limit=limit,
            alpha=alpha,
            glu_linear_offset=glu_linear_offset,
        )


class ScaledSiTUGLU(ScaledActivation):
    """SiTU-GLU times the probability of each row: beta1 tanh(a / beta1) sigmoid(a) beta2 tanh(b / beta2) s.

    Parameters
    ----------
    glu_interleave_size
        As for :class:`ScaledSwiGLU`.
    beta1, beta2
        Soft caps of the halves; finite and greater than 0.
    """

    def __init__(self, glu_interleave_size: int | None = None, *, beta1: float = 4.0, beta2: float = 25.0) -> None:
        super().__init__("situglu", glu_interleave_size=glu_interleave_size, beta1=beta1, beta2=beta2)


class ScaledSReLU(ScaledActivation):
    """Squared ReLU times the probability of each row; FC1 has F output features, there is no gate."""

    def __init__(self) -> None:
        super().__init__("srelu")


def _finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _math_dtype(dtype: torch.dtype) -> torch.dtype:
    """Type of the activation's arithmetic."""
    return torch.float64 if dtype is torch.float64 else torch.float32
