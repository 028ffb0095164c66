"""Fields of dataclasses hold what their annotations say: True, 1 and 1.0 are equal, and would share a cache entry."""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from typing import Any

#: Types of which a subclass, or an equal value of another type, is another value.
_EXACT = (bool, int, float, str)


def field_problems(value: Any) -> list[str]:
    """Say which fields of a dataclass instance hold something else than their annotation says.

    Parameters
    ----------
    value
        An instance of a dataclass whose fields are simple types, classes, or those or None.
    """
    problems = []
    cls: Any = type(value)
    for name, allowed in _allowed(cls).items():
        held = getattr(value, name)
        if not any(type(held) is t if t in _EXACT else isinstance(held, t) for t in allowed):
            kinds = " or ".join("None" if t is types.NoneType else t.__name__ for t in allowed)
            problems.append(f"{name} is {held!r}; allowed: {kinds}")
    return problems


@functools.lru_cache(maxsize=64)
def _allowed(cls: Any) -> dict[str, tuple[type, ...]]:
    hints = typing.get_type_hints(cls)
    return {f.name: typing.get_args(hints[f.name]) or (hints[f.name],) for f in dataclasses.fields(cls)}
