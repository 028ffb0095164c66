"""A training step of the grouped MLP under a quantising recipe in float64: the yardstick of quantised paths.

As :func:`.reference.grouped_mlp`, with every quantisation point replayed: operands are the exact numbers that the
quantisers make of tensors as they are stored, products and sums are float64.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from . import reference
from .quantizers.base import Direction, Quantizer
from .recipe_state import DelayedScalingState, RecipeState

_PLACES = {"input": ("forward", 0), "weight": ("forward", 1), "grad_output": ("backward", 0)}


@dataclass(frozen=True)
class LinearReplay:
    """How a grouped linear layer quantises in one step.

    Attributes
    ----------
    quantizers
        By role: ``"input"``, ``"weight"``, ``"grad_output"``; without one a tensor is not quantised.
    backward_override
        That of the recipe.
    scales
        Of delayed scaling, by role: (G,).
    rng
        Of stochastic rounding.
    """

    quantizers: Mapping[str, Quantizer | None] = field(default_factory=dict)
    backward_override: str | None = None
    scales: Mapping[str, torch.Tensor] = field(default_factory=dict)
    rng: torch.Tensor | None = None

    @classmethod
    def of_state(cls, state: RecipeState) -> LinearReplay:
        """Take what a layer's state says now, before a step.

        Parameters
        ----------
        state
            The state; later changes of it do not matter.
        """
        made = {role: state.quantizers.by_mode[mode][index] for role, (mode, index) in _PLACES.items()}
        scales = {}
        if isinstance(state, DelayedScalingState):
            count = state.num_scales
            for role, (mode, index) in _PLACES.items():
                scales[role] = state.scale[mode][index * count : (index + 1) * count].clone()
        rng = None if state.rng is None else state.rng.clone()
        return cls(made, state.quantizers.backward_override, scales, rng)

    def rows(self, role: str, x: torch.Tensor, sizes: torch.Tensor, direction: Direction) -> torch.Tensor:
        """Quantise grouped rows (T, C) and give them back in float64, a Hadamard transform left in place.

        Parameters
        ----------
        role
            ``"input"`` or ``"grad_output"``.
        x, sizes
            The tensor as stored, and rows of each group.
        direction
            ``"rowwise"``: (T, C).  ``"columnwise"``: each group's tokens filled up with zeros to its slots.
        """
        quantizer = self.quantizers.get(role)
        if quantizer is None:
            return x.double()
        rng = self.rng if getattr(quantizer, "stochastic_rounding", False) else None
        return quantizer.quantize(x, sizes, scale=self.scales.get(role), rng=rng).operand(direction, torch.float64)

    def weight(self, w: torch.Tensor, direction: Direction) -> torch.Tensor:
        """Quantise weights (G, N, K) and give them back in float64."""
        quantizer = self.quantizers.get("weight")
        if quantizer is None:
            return w.double()
        q = quantizer.quantize(w, batched=True, scale=self.scales.get("weight"))
        return q.operand(direction, torch.float64)[:, : w.shape[1]]

    def slots(self, sizes: torch.Tensor, tokens: int) -> list[int]:
        """Offsets of the groups in the columnwise direction."""
        quantizer = self.quantizers.get("input")
        if quantizer is None or self.backward_override is not None:
            return reference.offsets(sizes, tokens)[0]
        alignment = quantizer.group_alignment
        ends = reference.offsets(sizes, tokens)[0]
        padded = [-(-(end - start) // alignment) * alignment for start, end in itertools.pairwise(ends)]
        return [0, *itertools.accumulate(padded)]


def _fprop(
    replay: LinearReplay, x: torch.Tensor, w: torch.Tensor, sizes: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    ends, _ = reference.offsets(sizes, len(x))
    y = reference.fprop(replay.rows("input", x, sizes, "rowwise"), replay.weight(w, "rowwise"), ends)
    if bias is not None:
        y[: ends[-1]] += bias.double()[reference.group_of_rows(ends, len(x), x.device)[: ends[-1]]]
    return y


def _dgrad(replay: LinearReplay, dy: torch.Tensor, w: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    ends, _ = reference.offsets(sizes, len(dy))
    if replay.backward_override == "high_precision":
        return reference.dgrad(dy.double(), w.double(), ends)
    if replay.backward_override == "dequantized":
        return reference.dgrad(dy.double(), replay.weight(w, "rowwise"), ends)
    return reference.dgrad(replay.rows("grad_output", dy, sizes, "rowwise"), replay.weight(w, "columnwise"), ends)


def _wgrad(replay: LinearReplay, dy: torch.Tensor, x: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    ends = replay.slots(sizes, len(x))
    if replay.backward_override == "high_precision":
        return reference.wgrad(dy.double(), x.double(), ends)
    if replay.backward_override == "dequantized":
        return reference.wgrad(dy.double(), replay.rows("input", x, sizes, "rowwise"), ends)
    columns = replay.rows("grad_output", dy, sizes, "columnwise"), replay.rows("input", x, sizes, "columnwise")
    return reference.wgrad(*columns, ends)


@torch.no_grad()
def grouped_mlp(
    x: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    sizes: torch.Tensor,
    probs: torch.Tensor | None,
    dy: torch.Tensor,
    *,
    fc1: LinearReplay,
    fc2: LinearReplay,
    activation: str = "swiglu",
    interleave: int | None = None,
    params: Sequence[float] = (),
    b1: torch.Tensor | None = None,
    b2: torch.Tensor | None = None,
    round_grad: bool = False,
) -> reference.Step:
    """One training step of the grouped MLP in float64, replaying rounding and quantisation.

    Parameters
    ----------
    x, w1, w2, probs, dy, activation, interleave, params, b1, b2, round_grad
        As :func:`.reference.grouped_mlp` takes them; tensors are stored in the type of ``x``.
    sizes : Tensor (G,)
    fc1, fc2
        How both layers quantise.

    Returns
    -------
    Step
        db1 and db2 are sums of unquantised gradients; ``dscale`` is None.
    """
    store, tokens = x.dtype, len(x)
    ends, _ = reference.offsets(sizes, tokens)
    total = ends[-1]

    def stored(t: torch.Tensor) -> torch.Tensor:
        return t.to(store)

    def padded(t: torch.Tensor) -> torch.Tensor:
        return torch.cat((t, t.new_zeros(tokens - total, *t.shape[1:])))

    def sums(t: torch.Tensor) -> torch.Tensor:
        return torch.stack([t[start:end].double().sum(0) for start, end in itertools.pairwise(ends)])

    p = None if probs is None else probs[:total].double()
    z = stored(_fprop(fc1, x, w1, sizes, b1))
    a = padded(stored(reference.activation_forward(activation, z[:total].double(), p, interleave, params)))
    y = _fprop(fc2, a, w2, sizes, b2)
    grad = _dgrad(fc2, dy, w2, sizes)[:total]
    grad = stored(grad).double() if round_grad else grad
    dz, dprobs = reference.activation_backward(activation, grad, z[:total].double(), p, interleave, params)
    dz = padded(stored(dz))
    return reference.Step(
        y=stored(y).double(),
        z=z.double(),
        a=a.double(),
        dx=stored(_dgrad(fc1, dz, w1, sizes)).double(),
        dz=dz.double(),
        dw1=stored(_wgrad(fc1, dz, x, sizes)).double(),
        dw2=stored(_wgrad(fc2, dy, a, sizes)).double(),
        dprobs=None if probs is None or dprobs is None else padded(dprobs.to(probs.dtype).double()),
        db1=None if b1 is None else stored(sums(dz)).double(),
        db2=None if b2 is None else stored(sums(dy)).double(),
    )
