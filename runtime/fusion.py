"""Fusion functions: what they return, how they are registered, and the rule that their result must obey.

A fusion function is ``func(ops, *, recipe) -> ops``: it gets the pipeline's operations and returns them with some runs
replaced by fused operations.  It may return a :class:`Fusion` instead of a plain list, to say why it left runs alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from .config import settings
from .describe import qualified_name
from .errors import FusionError
from .op import BasicOperation, FusedOperation, FusibleOperation


@dataclass(frozen=True, slots=True)
class Match:
    """A run of operations fits a fusion; ``op`` replaces it."""

    op: FusedOperation


@dataclass(frozen=True, slots=True)
class Rejection:
    """A run of operations does not fit a fusion.

    Attributes
    ----------
    fusion
        What would have been fused.
    reasons
        Every condition that is not met.
    wanted
        Whether the caller may have hoped for this fusion, so that a fallback is worth a warning; False where the recipe
        or the settings forbid it.
    """

    fusion: str
    reasons: tuple[str, ...]
    wanted: bool = True

    def __str__(self) -> str:
        return f"{self.fusion}: " + "; ".join(self.reasons)


@dataclass(frozen=True, slots=True)
class Fusion:
    """Result of a fusion function: the operations, and why runs were left alone."""

    ops: list[FusibleOperation]
    rejections: tuple[Rejection, ...] = ()


class FusionFunction(Protocol):
    """A fusion function."""

    def __call__(self, ops: list[FusibleOperation], *, recipe: Any) -> list[FusibleOperation] | Fusion:
        """Return the operations with runs replaced by fused operations."""
        ...


@dataclass(frozen=True, slots=True)
class Registry:
    """Registered fusion functions, in the order in which they run."""

    joint: list[FusionFunction]
    forward: list[FusionFunction]
    backward: list[FusionFunction]

    def replace(self, other: Registry) -> None:
        """Take over another registry's functions (tests put things back with it)."""
        for mine, theirs in zip(
            (self.joint, self.forward, self.backward), (other.joint, other.forward, other.backward), strict=True
        ):
            mine[:] = theirs
        settings.touch()

    def copy(self) -> Registry:
        """Return an independent copy."""
        return Registry(list(self.joint), list(self.forward), list(self.backward))


#: The fusion functions of this process.
registry = Registry([], [], [])


def _register(functions: list[FusionFunction], func: FusionFunction, prepend: bool) -> None:
    functions.insert(0 if prepend else len(functions), func)
    settings.touch()  # plans made without it are stale


def register_forward_backward_fusion(func: FusionFunction, prepend: bool = False) -> None:
    """Register a fusion whose fused operation runs both forward and backward.

    Such fusions run before the others.  The fused operation's forward may save whatever its own backward understands.

    Parameters
    ----------
    func
        ``func(ops, *, recipe) -> ops``.
    prepend
        Run it before the functions registered so far instead of after them.
    """
    _register(registry.joint, func, prepend)


def register_forward_fusion(func: FusionFunction, prepend: bool = False) -> None:
    """Register a fusion of the forward pass: it must save what the unfused backward expects.

    Parameters
    ----------
    func, prepend
        As for :func:`register_forward_backward_fusion`.
    """
    _register(registry.forward, func, prepend)


def register_backward_fusion(func: FusionFunction, prepend: bool = False) -> None:
    """Register a fusion of the backward pass: it must take what the unfused forward saved.

    Parameters
    ----------
    func, prepend
        As for :func:`register_forward_backward_fusion`.
    """
    _register(registry.backward, func, prepend)


def sweep(
    ops: Sequence[FusibleOperation],
    length: int,
    attempt: Callable[[Sequence[FusibleOperation]], Match | Rejection | None],
) -> Fusion:
    """Try a fusion on every run of ``length`` operations, from the first on.

    Parameters
    ----------
    ops
        The pipeline.
    length
        Operations in a run.
    attempt
        Called with each run: a Match replaces it, a Rejection is kept, None says that the run is something else.
    """
    out: list[FusibleOperation] = []
    rejections: list[Rejection] = []
    at = 0
    while at < len(ops):
        window = ops[at : at + length]
        result = attempt(window) if len(window) == length else None
        if isinstance(result, Match):
            out.append(result.op)
            at += length
            continue
        if isinstance(result, Rejection):
            rejections.append(result)
        out.append(ops[at])
        at += 1
    return Fusion(out, tuple(rejections))


def apply(functions: Sequence[FusionFunction], ops: Sequence[FusibleOperation], recipe: Any) -> Fusion:
    """Run fusion functions one after the other.

    Raises
    ------
    FusionError
        If a function returns something that is not a list of operations.
    """
    current: list[FusibleOperation] = list(ops)
    rejections: list[Rejection] = []
    for function in functions:
        result = function(list(current), recipe=recipe)
        if isinstance(result, Fusion):
            rejections.extend(result.rejections)
            result = result.ops
        if not isinstance(result, (list, tuple)) or not all(isinstance(op, FusibleOperation) for op in result):
            raise FusionError(f"fusion {qualified_name(function)} returned {result!r}, not a list of operations")
        current = list(result)
    return Fusion(current, tuple(rejections))


def locate(
    fused: Sequence[FusibleOperation], basic_ops: Sequence[BasicOperation]
) -> list[tuple[FusibleOperation, tuple[int, ...]]]:
    """Each operation with the indices of the basic operations that it stands for.

    Raises
    ------
    FusionError
        If the operations do not expand to exactly ``basic_ops``, in order.
    """
    located: list[tuple[FusibleOperation, tuple[int, ...]]] = []
    expanded: list[Any] = []
    for op in fused:
        members = list(op.basic_ops) if isinstance(op, FusedOperation) else [op]
        located.append((op, tuple(range(len(expanded), len(expanded) + len(members)))))
        expanded.extend(members)
    if len(expanded) != len(basic_ops) or any(a is not b for a, b in zip(expanded, basic_ops, strict=True)):
        names = [[type(op).__name__ for op in ops] for ops in (fused, expanded, basic_ops)]
        raise FusionError(f"fused operations {names[0]} expand to {names[1]}, the pipeline is {names[2]}")
    return located
