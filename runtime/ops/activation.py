"""Activations between the two grouped linear layers, times the router's probability of each token."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from .. import checks, extra_state, reference
from ..codegen.activations import ACTIVATIONS
from ..context import OperationContext, Tensors
from ..errors import ConfigError
from ..op import BasicOperation
from ..plain import require_memory

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
        if not input_.is_meta:  # plain torch works there
            require_memory((("the input", input_), ("probs", probs)))
        if ctx.requires_grad:
            ctx.save_for_backward(input_, probs)
            ctx.probs_require_grad = probs is not None and probs.requires_grad
        return self.values(input_, probs), [()]

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
        dz, dprobs = self.gradients(grad_output, z, probs)
        return (dz if ctx.input_requires_grad else None), [()], [(dprobs if ctx.probs_require_grad else None,)]

    def values(self, z: torch.Tensor, probs: torch.Tensor | None) -> torch.Tensor:
        """Compute a in fp32 and round it once, to the type of z.

        Parameters
        ----------
        z : Tensor (..., 2F), or (..., F) without a gate
        probs : Tensor with an element for each row, or None
        """
        rows = None if probs is None else probs.reshape(z.shape[:-1])
        wide = z.to(_math_dtype(z.dtype))
        a = reference.activation_forward(self.activation, wide, rows, self.glu_interleave_size, self.params)
        return a.to(z.dtype)

    def gradients(
        self, grad: torch.Tensor, z: torch.Tensor, probs: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute dz in fp32, rounded once to the type of z, and dprobs in the type of probs; None without probs.

        Parameters
        ----------
        grad : Tensor (..., F)
            Gradient of a.
        z, probs
            As :meth:`values` takes them.
        """
        wide = _math_dtype(z.dtype)
        rows = None if probs is None else probs.reshape(z.shape[:-1])
        dz, dprobs = reference.activation_backward(
            self.activation, grad.to(wide), z.to(wide), rows, self.glu_interleave_size, self.params
        )
        if probs is None or dprobs is None:
            return dz.to(z.dtype), None
        return dz.to(z.dtype), dprobs.to(probs.dtype).reshape(probs.shape)

    # The layout of the gate and up columns travels with the weights (docs/acceptance.md, N11).

    def get_extra_state(self) -> torch.Tensor:
        """Return the layout, ``glu_interleave_size`` or 0, as an int64 number; empty without a gate."""
        if not self.glu:
            return super().get_extra_state()
        return torch.tensor(self.glu_interleave_size or 0, dtype=torch.int64, device="cpu")

    def set_extra_state(self, state: torch.Tensor | None) -> None:
        """Compare the layout; another one is an error, not a permutation.

        Parameters
        ----------
        state
            What :meth:`get_extra_state` gave; None or an empty tensor: nobody knows.

        Raises
        ------
        ConfigError
            If it is another layout.
        """
        if not self.glu:
            super().set_extra_state(state)
        elif problems := self.extra_state_problems(state):
            raise ConfigError(f"{type(self).__name__}: {'; '.join(problems)}")

    def extra_state_problems(self, state: Any) -> list[str]:
        """Say what is wrong with a layout.

        Parameters
        ----------
        state
            As :meth:`set_extra_state` takes it.
        """
        if not self.glu:
            return super().extra_state_problems(state)
        if not extra_state.is_given(state):
            return []
        if not isinstance(state, torch.Tensor) or state.dtype is not torch.int64 or state.numel() != 1 or state.is_meta:
            return [f"{extra_state.KEY}: allowed: the layout of the GLU weights as an int64 number; got {state!r}"]
        saved, own = int(state.item()), self.glu_interleave_size or 0
        if saved == own:
            return []
        names = [f"interleaved by {size}" if size else "contiguous" for size in (saved, own)]
        change = [f"deinterleave_glu(t, {saved})"] * (saved > 0) + [f"interleave_glu(t, {own})"] * (own > 0)
        return [
            f"{extra_state.KEY}: the GLU weights were saved {names[0]}, this module has them {names[1]}; make it with "
            f"glu_interleave_size={saved or None}, or convert FC1's weight and bias with {' and '.join(change)} of "
            f"cute_grouped_mlp and set this key to torch.tensor({own})"
        ]

    def _extra_state_is_missing(self, key: str, missing_keys: list[str], with_weights: bool) -> None:
        """Of a layout that nobody knows: a missing key, with advice."""
        if self.glu:
            missing_keys.append(extra_state.MissingKey.of(key, self.missing_layout()))

    def missing_layout(self) -> str:
        """Say what to do about a state dict that does not say how its GLU weights are laid out."""
        own = self.glu_interleave_size or 0
        return (
            f"the layout of FC1's gate and up rows: 0 for [gate | up], 32 for blocks of 32; this module's is {own}. If "
            f"the weights are in it, add torch.tensor({own}) under this key or load with strict=False; else convert "
            "them first with interleave_glu or deinterleave_glu of cute_grouped_mlp"
        )


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
