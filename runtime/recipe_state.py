"""What an operation remembers between steps under a recipe.

When state is made anew is the fuser's business, and has nothing to do with which plan runs (acceptance.md, row B4).
Quantisers hang off this state; of today's recipes only delayed scaling keeps tensors in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch

from .recipe import DelayedScaling, recipe_kind


class QuantizedOperation(Protocol):
    """What recipe state asks of an operation."""

    def num_quantizers(self, mode: str) -> int:
        """Return the number of quantised tensors in ``"forward"`` or ``"backward"``."""
        ...


class RecipeState:
    """Quantisation state of one operation under one recipe.

    Parameters
    ----------
    recipe
        The recipe.
    num_quantizers
        Quantised tensors per mode, ``"forward"`` and ``"backward"``.

    Attributes
    ----------
    updates : int
        Steps whose end was reported with :meth:`update`.
    """

    def __init__(self, recipe: Any, num_quantizers: Mapping[str, int]) -> None:
        self.recipe = recipe
        self.num_quantizers = dict(num_quantizers)
        self.updates = 0

    def take_over(self, previous: RecipeState) -> None:
        """Keep what stays valid of the state before a reset."""

    def update(self) -> None:
        """End of a backward pass."""
        self.updates += 1

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Tensors that a checkpoint must hold."""
        return {}

    def load_state_dict(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Inverse of :meth:`state_dict`."""


class DelayedScalingState(RecipeState):
    """Amax history and scales of delayed scaling.

    Row 0 of a history is the amax of the step that runs now; :meth:`update` turns it into a scale and moves on.

    Attributes
    ----------
    amax_history : dict of str to Tensor (amax_history_len, num_quantizers), fp32
    scale : dict of str to Tensor (num_quantizers,), fp32
    """

    recipe: DelayedScaling

    def __init__(self, recipe: DelayedScaling, num_quantizers: Mapping[str, int], device: torch.device) -> None:
        super().__init__(recipe, num_quantizers)
        rows = recipe.amax_history_len
        self.amax_history = {m: torch.zeros(rows, n, device=device) for m, n in num_quantizers.items()}
        self.scale = {m: torch.ones(n, device=device) for m, n in num_quantizers.items()}

    def take_over(self, previous: RecipeState) -> None:
        """Keep scales and as much history as fits."""
        if not isinstance(previous, DelayedScalingState) or previous.num_quantizers != self.num_quantizers:
            return
        for mode, history in self.amax_history.items():
            rows = min(len(history), len(previous.amax_history[mode]))
            history[:rows] = previous.amax_history[mode][:rows]
            self.scale[mode].copy_(previous.scale[mode])

    @torch.no_grad()
    def update(self) -> None:
        """Compute scales from the history: format maximum / amax / 2^margin; then open a new row."""
        super().update()
        for mode, history in self.amax_history.items():
            amax = self._amax(history)
            limit = getattr(self.recipe.fp8_format.value, "max_fwd" if mode == "forward" else "max_bwd")
            scale = self.scale[mode]
            if self.recipe.scaling_factor_compute_algo is not None:
                scale.copy_(self.recipe.scaling_factor_compute_algo(amax, scale, limit, self.recipe))
            else:
                usable = (amax > 0) & torch.isfinite(amax)
                scale.copy_(torch.where(usable, limit / amax / 2.0**self.recipe.margin, scale))
            history.copy_(history.roll(1, 0))
            history[0].zero_()

    def _amax(self, history: torch.Tensor) -> torch.Tensor:
        algorithm = self.recipe.amax_compute_algo
        if callable(algorithm):
            amax: torch.Tensor = algorithm(history)
            return amax
        return history.amax(0) if algorithm == "max" else history[0]

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Histories and scales of both modes."""
        tensors = {f"amax_history_{m}": t for m, t in self.amax_history.items()}
        return tensors | {f"scale_{m}": t for m, t in self.scale.items()}

    def load_state_dict(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take histories and scales that fit; a history of another length is cut or filled with zeros."""
        for mode, history in self.amax_history.items():
            saved, scale = tensors.get(f"amax_history_{mode}"), tensors.get(f"scale_{mode}")
            if saved is None or scale is None or saved.shape[1:] != history.shape[1:]:
                continue
            rows = min(len(history), len(saved))
            history.zero_()
            history[:rows] = saved[:rows]
            self.scale[mode].copy_(scale)


def make_recipe_state(recipe: Any, op: QuantizedOperation, previous: RecipeState | None) -> RecipeState | None:
    """Return the state of an operation under a recipe, or None where nothing is quantised.

    Parameters
    ----------
    recipe
        None, one of ours, or a foreign one.
    op
        The operation.
    previous
        The state until now, of which the new one keeps what stays valid.
    """
    counts = {mode: op.num_quantizers(mode) for mode in ("forward", "backward")}
    kind = recipe_kind(recipe)
    if kind == "high_precision" or not any(counts.values()):
        return None
    state: RecipeState
    if kind == "delayed":
        device = next((p.device for p in op.parameters()), torch.device("cpu"))  # type: ignore[attr-defined]
        state = DelayedScalingState(recipe, counts, device)
    else:
        state = RecipeState(recipe, counts)
    if previous is not None and recipe_kind(previous.recipe) == kind:
        state.take_over(previous)
    return state


def state_key(recipe: Any) -> tuple[Any, ...]:
    """Say what a reset of recipe state depends on: the recipe's type, backward override and amax history length."""
    kind = recipe_kind(recipe)
    if kind == "high_precision":
        return (kind, getattr(recipe, "backward_override", None), None)
    length = getattr(recipe, "amax_history_len", None) if kind == "delayed" else None
    return (type(recipe), getattr(recipe, "backward_override", None), length)
