"""The recipe in force: :class:`autocast` sets it, :func:`current_recipe` reads it."""

from __future__ import annotations

import contextlib
import threading
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .checkpoint import Replay


class _InForce(threading.local):
    """What is in force in each thread.  Not context variables: torch.compile guards on attributes of an instance.

    Attributes
    ----------
    recipe
        The recipe.
    amax_reduction_group
        Process group over which amaxes of delayed scaling are reduced; None: the default one.
    replay : Replay or None
        The pass through a checkpointed function that is under way; None outside of checkpoints.
    entered_inside : bool
        Whether the recipe was entered inside of that function.
    """

    def __init__(self) -> None:
        self.recipe: Any = None
        self.amax_reduction_group: Any = None
        self.replay: Replay | None = None
        self.entered_inside = False


in_force = _InForce()


def current_recipe() -> Any:
    """Return the recipe in force in this thread, or None: no recipe."""
    return in_force.recipe


class autocast(contextlib.ContextDecorator):
    """Run the operations of this package under a recipe, inside a ``with`` block or a decorated function.

    The recipe belongs to the current thread.  Backward needs no ``autocast``: it runs as its forward was
    planned.  Blocks nest, and one object can be entered again.

    Parameters
    ----------
    enabled
        False: no recipe, whatever an enclosing block says.
    recipe
        One of this package's recipes, or an object with the same attributes.  None equals ``HighPrecision()``.
    amax_reduction_group
        Process group over which ``DelayedScaling(reduce_amax=True)`` takes the maximum of amaxes when backward ends;
        None: the default group.  Under expert parallelism it must be a group whose processes hold the same experts.

    Raises
    ------
    TypeError
        If ``enabled`` is not a bool, or ``amax_reduction_group`` neither None nor a process group.
    """

    def __init__(self, enabled: bool = True, *, recipe: Any = None, amax_reduction_group: Any = None) -> None:
        if not isinstance(enabled, bool):
            raise TypeError(f"autocast: enabled is {enabled!r}, allowed: True or False; pass the recipe as recipe=")
        if amax_reduction_group is not None and not _is_process_group(amax_reduction_group):
            raise TypeError(
                f"autocast: amax_reduction_group is {amax_reduction_group!r}, allowed: None or a process group "
                "that this process belongs to"
            )
        self._recipe = recipe if enabled else None
        self._group = amax_reduction_group
        self._outer: list[tuple[Any, Any, bool]] = []

    def __enter__(self) -> autocast:
        self._outer.append((in_force.recipe, in_force.amax_reduction_group, in_force.entered_inside))
        in_force.recipe, in_force.amax_reduction_group = self._recipe, self._group
        in_force.entered_inside = in_force.replay is not None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        in_force.recipe, in_force.amax_reduction_group, in_force.entered_inside = self._outer.pop()

    def _recreate_cm(self) -> autocast:
        # Each call of a decorated function gets a block of its own, so that it may recurse and run in several threads.
        return autocast(recipe=self._recipe, amax_reduction_group=self._group)


def _is_process_group(value: Any) -> bool:
    import torch.distributed

    return torch.distributed.is_available() and isinstance(value, torch.distributed.ProcessGroup)
