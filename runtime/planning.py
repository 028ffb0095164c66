"""What fusion functions are told while a plan is made: each operation's recipe and quantisers, read once."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .errors import UnsupportedError
from .recipe import Recipe
from .recipe_state import Quantizers
from .snapshot import snapshot

if TYPE_CHECKING:
    from .op import BasicOperation


@dataclass(frozen=True, slots=True)
class Planned:
    """How an operation will compute.

    Attributes
    ----------
    recipe : Recipe
        The recipe that counts for it, its own or the one in force: a frozen copy.
    quantizers : Quantizers or None
        None: nothing is quantised.
    error : UnsupportedError or None
        Why there are no quantisers although the recipe asks for some: what a call raises.
    """

    recipe: Recipe
    quantizers: Quantizers | None = None
    error: UnsupportedError | None = None


class _Table(threading.local):
    """What is being planned in each thread."""

    def __init__(self) -> None:
        self.planned: Mapping[BasicOperation, Planned] = {}


_table = _Table()


@contextlib.contextmanager
def planning(planned: Mapping[BasicOperation, Planned]) -> Iterator[None]:
    """Have :func:`planned_for` answer from a table, inside a ``with`` block."""
    before, _table.planned = _table.planned, planned
    try:
        yield
    finally:
        _table.planned = before


def planned_for(op: BasicOperation, recipe: Any) -> Planned:
    """Return how an operation will compute in the plan that is being made; outside of planning, how it would.

    Parameters
    ----------
    op
        The operation.
    recipe
        The recipe in force: None, one of ours, or a foreign one.
    """
    found = _table.planned.get(op)
    return plan_operation(op, snapshot(recipe if op.recipe is None else op.recipe).recipe) if found is None else found


def plan_operation(op: BasicOperation, recipe: Recipe) -> Planned:
    """Make the quantisers of an operation.

    Parameters
    ----------
    op
        The operation.
    recipe
        The recipe that counts for it, of a snapshot.
    """
    try:
        return Planned(recipe, op.make_quantizers(recipe))
    except UnsupportedError as error:
        return Planned(recipe, error=error)
