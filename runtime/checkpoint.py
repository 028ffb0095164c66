"""Activation checkpointing that recomputes under everything that the forward pass ran under."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch.utils.checkpoint

from .autocast import autocast, in_force
from .config import settings
from .recipe_state import RecipeState
from .snapshot import Snapshot, snapshot

if TYPE_CHECKING:
    from .op import BasicOperation


class Replay:
    """What a checkpointed forward ran with, noted when it was first read, for every recomputation.

    Attributes
    ----------
    states : dict
        Operation and key of its recipe state -> the state.
    scales : dict
        The same -> scales of forward's tensors, by the index of their quantiser.
    """

    def __init__(self) -> None:
        self.states: dict[tuple[BasicOperation, Any], RecipeState] = {}
        self.scales: dict[tuple[BasicOperation, Any], dict[int, torch.Tensor]] = {}
        self._own: dict[BasicOperation, Snapshot | None] = {}
        self._entered: dict[int, tuple[Any, Any]] = {}  # with the recipe itself, so that its identity stays its own

    def own(self, op: BasicOperation) -> Snapshot | None:
        """Return an operation's own recipe as forward found it; None if it had none."""
        if op not in self._own:
            self._own[op] = None if op.recipe is None else snapshot(op.recipe)
        return self._own[op]

    def note(self, ops: Sequence[BasicOperation]) -> None:
        """Note the own recipes of operations that are about to run."""
        for op in ops:
            self.own(op)

    def differs(self) -> bool:
        """Whether an operation has another recipe of its own than it had."""
        return any(
            (op.recipe is None) != (then is None) or (then is not None and snapshot(op.recipe).text != then.text)
            for op, then in self._own.items()
        )

    def entered(self, recipe: Any) -> Any:
        """Return the recipe of an ``autocast`` inside of the checkpointed function as it was when first entered."""
        if recipe is None:
            return None
        return self._entered.setdefault(id(recipe), (recipe, snapshot(recipe).recipe))[1]


def checkpoint(function: Callable[..., Any], *args: Any, use_reentrant: bool = False, **kwargs: Any) -> Any:
    """:func:`torch.utils.checkpoint.checkpoint` that recomputes under all that is in force now.

    That is the recipe, each operation's own recipe, the settings, and quantisation state.  Recipes are copied: neither
    leaving the ``autocast`` nor changing a recipe before backward changes what is recomputed.  Nor do other calls in
    between, under this recipe (whose backward ends a step of delayed scaling, as in pipeline parallelism) or another
    one. A recipe that is entered inside of ``function`` counts as it is when it is entered first.

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
    # Inside of another checkpoint it is that one's: it recomputes this one, too.
    replay = Replay() if in_force.replay is None else in_force.replay
    recipe = None if in_force.recipe is None else snapshot(in_force.recipe).recipe
    group, values = in_force.amax_reduction_group, settings.values()

    @contextlib.contextmanager
    def again() -> Iterator[None]:
        changed = {name: value for name, value in values.items() if getattr(settings, name) != value}
        with settings.override(**changed), autocast(recipe=recipe, amax_reduction_group=group), _replaying(replay):
            yield

    return _replaying(replay), again


@contextlib.contextmanager
def _replaying(replay: Replay) -> Iterator[None]:
    """Run with what a replay notes."""
    outer, in_force.replay = in_force.replay, replay
    other = replay.differs()
    if other:
        settings.touch()  # plans are made with other recipes of the operations' own
    try:
        yield
    finally:
        in_force.replay = outer
        if other:
            settings.touch()
