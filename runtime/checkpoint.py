"""Activation checkpointing that recomputes under everything that the forward pass ran under."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch.utils.checkpoint

from .autocast import autocast, in_force
from .config import settings
from .plans import own_recipe
from .recipe_state import RecipeState
from .snapshot import snapshot

if TYPE_CHECKING:
    from .op import BasicOperation


class RecordedCall:
    """What one call of a pipeline ran with in a checkpointed forward: its recomputation runs with the same.

    Parameters
    ----------
    ops
        The pipeline.

    Attributes
    ----------
    recipe : Recipe or None
        A frozen copy of the recipe in force.
    amax_reduction_group
        As in force.
    own : tuple of (Snapshot or None)
        Each operation's own recipe.
    states : dict
        Operation -> the recipe state that it quantised with.
    scales : dict
        The same -> scales of forward's tensors, by the index of their quantiser.
    replayed : bool
        Whether this is a recomputation: everything above is given, and nothing is to be read from elsewhere.
    """

    def __init__(self, ops: Sequence[BasicOperation]) -> None:
        self.recipe = None if in_force.recipe is None else snapshot(in_force.recipe).recipe
        self.amax_reduction_group = in_force.amax_reduction_group
        self.own = tuple(map(own_recipe, ops))
        self.states: dict[BasicOperation, RecipeState] = {}
        self.scales: dict[BasicOperation, dict[int, torch.Tensor]] = {}
        self.replayed = False

    def differs(self, ops: Sequence[BasicOperation]) -> bool:
        """Whether the operations' own recipes are no longer those, or cannot be told from them by their texts."""
        for then, now in zip(self.own, map(own_recipe, ops), strict=True):
            if (then is None) != (now is None):
                return True
            if then is not None and now is not None and (then.text != now.text or bool(then.refusals)):
                return True
        return False


class Replay:
    """One pass through a checkpointed function: the forward, which records its calls, or a recomputation of it.

    Parameters
    ----------
    calls
        Calls of each pipeline in the order of the forward, shared by all passes; it is named by its operations.
    start
        How many of them came before what this pass recomputes; None: it is the forward.
    """

    def __init__(
        self, calls: dict[tuple[BasicOperation, ...], list[RecordedCall]], start: dict[Any, int] | None = None
    ) -> None:
        self.calls = calls
        self.done = dict(start or {})
        self._records = start is None

    def call(self, ops: tuple[BasicOperation, ...]) -> RecordedCall:
        """Return what the next call of a pipeline runs with: in a recomputation, what it ran with in the forward."""
        calls, index = self.calls.setdefault(ops, []), self.done.get(ops, 0)
        self.done[ops] = index + 1
        if self._records:
            calls.append(RecordedCall(ops))
            return calls[-1]
        if index >= len(calls):  # a call that the forward did not make
            return RecordedCall(ops)
        calls[index].replayed = True
        return calls[index]


def checkpoint(function: Callable[..., Any], *args: Any, use_reentrant: bool = False, **kwargs: Any) -> Any:
    """:func:`torch.utils.checkpoint.checkpoint` that recomputes under all that is in force now.

    That is the recipe, each operation's own recipe, the settings, and quantisation state.  Recipes are copied: neither
    leaving the ``autocast`` nor changing a recipe before backward changes what is recomputed.  Nor do other calls in
    between, under this recipe (whose backward ends a step of delayed scaling, as in pipeline parallelism) or another
    one.  Each call of a module inside of ``function`` is recomputed under the recipes that it ran under, also where
    ``function`` enters or changes recipes itself.

    Parameters
    ----------
    function, *args, use_reentrant, **kwargs
        As torch's function takes them.
    """
    forward, again = _contexts()
    contexts = iter([forward])

    def run(*inputs: Any, **named: Any) -> Any:
        with next(contexts, None) or again():
            return function(*inputs, **named)

    return torch.utils.checkpoint.checkpoint(run, *args, use_reentrant=use_reentrant, **kwargs)


def checkpoint_context_fn() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Do the same for torch's own checkpoint, which takes it as ``context_fn`` with ``use_reentrant=False``.

    Returns
    -------
    tuple
        Contexts for the forward pass and for its recomputation.
    """
    forward, again = _contexts()
    return forward, again()


def _contexts() -> tuple[AbstractContextManager[None], Callable[[], AbstractContextManager[None]]]:
    """Return a context for the forward, and what makes those of its recomputations."""
    recipe = None if in_force.recipe is None else snapshot(in_force.recipe).recipe
    group, values = in_force.amax_reduction_group, settings.values()
    # Inside of another checkpoint it is a part of that one's pass, which recomputes this one, too.
    outer = in_force.replay
    replay = Replay({}) if outer is None else outer
    start = dict(replay.done)

    @contextlib.contextmanager
    def again() -> Iterator[None]:
        changed = {name: value for name, value in values.items() if getattr(settings, name) != value}
        with settings.override(**changed), autocast(recipe=recipe, amax_reduction_group=group):
            with _replaying(Replay(replay.calls, start)):
                yield

    return _replaying(replay), again


@contextlib.contextmanager
def _replaying(replay: Replay) -> Iterator[None]:
    """Run as a pass of a replay."""
    outer = in_force.replay, in_force.entered_inside
    in_force.replay, in_force.entered_inside = replay, False
    try:
        yield
    finally:
        in_force.replay, in_force.entered_inside = outer
