"""The plans of one structural stamp, and whether a call still has that stamp."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from . import kernels
from .caching import LRUCache
from .config import settings
from .op import BasicOperation
from .pipeline import Plan
from .snapshot import Snapshot, snapshot

_any_autocast = torch._C._is_any_autocast_enabled


class Plans:
    """The plans of one structural stamp.

    Parameters
    ----------
    x, params
        Input and parameters that the stamp is taken from; no input: a stamp that fits nothing.
    ops
        The pipeline.

    Attributes
    ----------
    cache : LRUCache of Plan
        By recipe text and backward boundary.
    last : Plan or None
        The one that was asked for last.
    own : tuple of (Snapshot or None)
        Each operation's own recipe.
    """

    __slots__ = (
        "_autocast",
        "_extra",
        "_generation",
        "_ids",
        "_more",
        "_owners",
        "_params",
        "_shapes",
        "_stamped",
        "cache",
        "last",
        "own",
    )

    def __init__(self, x: torch.Tensor | None, params: Sequence[torch.Tensor], ops: Sequence[BasicOperation]) -> None:
        self.cache: LRUCache[Plan] = LRUCache(settings.plan_cache_size)
        self.last: Plan | None = None
        self._generation = -1 if x is None else settings.generation
        self._autocast = None if x is None else kernels.autocast_dtype(x.device)
        # The parameters that were seen last, and what every parameter must be.  One that is the same object has not
        # changed: moving a module grows the generation (BasicOperation._apply), and an operation that sees that
        # somebody assigned to .data raises StalePlan.  Of the input a plan depends on nothing: operations check it.
        self._watch(params)
        self._shapes = _shapes_of(params)
        stamps = [(op, op.fuser_stamp()) for op in ops]
        self._stamped = [op for op, stamp in stamps if stamp is not None]
        self._extra = [stamp for _, stamp in stamps if stamp is not None]
        self.own = tuple(map(own_recipe, ops))
        self._owners = [(op, own) for op, own in zip(ops, self.own, strict=True) if own is not None]
        self._more = bool(self._owners or self._stamped)

    def _watch(self, params: Sequence[torch.Tensor]) -> None:
        """Remember parameters by their identity."""
        # References that keep them alive, so that no other gets their identity.  Weak ones would not do: tensors that
        # have some are refused by torch.utils.swap_tensors, with which modules may be moved and loaded.
        self._ids, self._params = [*map(id, params)], [*params]

    def expire(self) -> None:
        """Fit nothing from now on."""
        self._generation = -1

    def fit(self, x: torch.Tensor, params: Sequence[torch.Tensor]) -> bool:
        """Whether a call has this stamp: settings, parameters' types, device and shapes, own recipes and autocast."""
        if self._generation != settings.generation:
            return False
        if [*map(id, params)] != self._ids:
            if _shapes_of(params) != self._shapes:
                return False
            self._watch(params)
        if _any_autocast() or self._autocast is not None:
            if kernels.autocast_dtype(x.device) is not self._autocast:
                return False
        return not self._more or self._more_fits()

    def _more_fits(self) -> bool:
        """Whether operations' own recipes, and what they say of themselves, are the same."""
        for op, then in self._owners:
            now = own_recipe(op)
            if now is None or now.text != then.text or now.refusals:
                return False
        return self._extra == [op.fuser_stamp() for op in self._stamped]

    def packed(self, params: Sequence[torch.Tensor]) -> bool:
        """Whether parameters, of which ``data`` may have been assigned, are contiguous where they were."""
        return [p.is_contiguous() for p in params] == [contiguous for *_, contiguous in self._shapes]


def _shapes_of(params: Sequence[torch.Tensor]) -> list[tuple[Any, ...]]:
    return [(p.shape, p.dtype, p.device, p.is_contiguous()) for p in params]


def own_recipe(op: BasicOperation) -> Snapshot | None:
    """Return an operation's own recipe; None if it has none."""
    return None if op.recipe is None else snapshot(op.recipe)
