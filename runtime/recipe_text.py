"""The text of a recipe, and copies of it that never change.

The text shows every declared field and every other public attribute, read once each, whether it is set on the instance,
on its class or given by a property.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import threading
from collections.abc import Collection
from typing import Any

from .describe import Description, detached, type_name

#: Where a recipe keeps its text while nothing can change it unseen.
TEXT = "_cute_grouped_mlp_text"
#: Where the object is kept that was the text before, so that it comes back while nothing changes.
_PREVIOUS = "_previous"
#: In copies of :func:`frozen_copy`.
FROZEN = "_frozen"
#: Where a recipe that was read from a foreign one, or copied, has the name of the class that it was.
NAME = "_name"
#: Where a recipe that was read from a foreign one has what this package does not do.
PROBLEMS = "_problems"
#: What copies of a recipe do without.
NOT_COPIED = frozenset({TEXT, _PREVIOUS, FROZEN})

#: Held while a recipe is set or read as a whole; reading a kept text takes none.
lock = threading.RLock()
_MISSING = object()


def recipe_name(recipe: Any) -> str:
    """Name of a recipe's class, or of the foreign class that it was read from."""
    return vars(recipe).get(NAME) or type_name(type(recipe))


def recipe_problems(recipe: Any) -> tuple[str, ...]:
    """Why nothing can be quantised under a recipe: what a foreign one asks for and this package does not do."""
    found: tuple[str, ...] = vars(recipe).get(PROBLEMS, ())
    return found


def values(recipe: Any) -> tuple[dict[str, Any], bool]:
    """Read each declared field and public attribute once.

    Parameters
    ----------
    recipe
        A dataclass instance of :class:`.recipe.Recipe`.

    Returns
    -------
    values : dict
        Declared fields first, then the others sorted.
    stable : bool
        Whether all of them change only by being set on the instance.
    """
    state = vars(recipe)
    cls: Any = type(recipe)
    declared, ours = _fields_of(cls)
    of_class = () if ours else class_attributes(cls, declared)
    others = [name for name in (*state, *of_class) if name[:1] != "_" and name not in declared]
    read = {name: getattr(recipe, name, _MISSING) for name in (*declared, *sorted(set(others)))}
    stable = not of_class and state.keys() >= declared.keys()
    return {name: value for name, value in read.items() if value is not _MISSING}, stable


@functools.lru_cache(maxsize=64)
def _fields_of(cls: type) -> tuple[dict[str, None], bool]:
    """Return the declared fields of a class in the order of its constructor, and whether it and its bases are ours."""
    declared = {f.name: None for f in sorted(dataclasses.fields(cls), key=lambda f: f.kw_only is True)}
    return declared, all(base is object or is_of_package(base) for base in cls.__mro__)


def is_of_package(cls: type) -> bool:
    """Whether a class is one of this package's recipes."""
    return cls.__module__.rpartition(".")[0] == __name__.rpartition(".")[0]


def class_attributes(cls: type, declared: Collection[str] = ()) -> list[str]:
    """Return public attributes that a class from elsewhere, or a base of it, has beside methods: data and properties.

    Parameters
    ----------
    cls
        The class; bases of this package's own are left out.
    declared
        Names of dataclass fields: of these only data descriptors count, as properties and slots.
    """
    found: dict[str, None] = {}
    for base in cls.__mro__:
        if base is object or is_of_package(base):
            continue
        for name, value in vars(base).items():
            data = not callable(value) and not isinstance(value, (classmethod, staticmethod))
            if name[:1] != "_" and data and (name not in declared or is_data_descriptor(value)):
                found[name] = None
    return list(found)


def is_data_descriptor(value: Any) -> bool:
    """Whether what a class has under a name (a property, a slot) answers for its instances, whatever they hold."""
    return hasattr(type(value), "__set__")


def describe(recipe: Any) -> tuple[str, tuple[str, ...]]:
    """Build the text of a recipe anew; it is kept if nothing can change it unseen.

    Returns
    -------
    text : str
    refusals : tuple of str
        Why it is not good as a key, as :attr:`Description.refusals`; empty if it is.
    """
    with lock:
        state = vars(recipe)
        read, stable = values(recipe)
        notes = Description()
        parts = [f"{name}={notes.text(value)}" for name, value in read.items()]
        parts += [f"not supported: {problem}" for problem in recipe_problems(recipe)]
        text = f"{recipe_name(recipe)}({', '.join(parts)})"
        if state.get(_PREVIOUS) == text:
            text = state[_PREVIOUS]
        state[_PREVIOUS] = text
        if not notes.refusals and (FROZEN in state or (stable and not notes.volatile)):
            state[TEXT] = text
        return text, tuple(notes.refusals)


def equal(a: Any, b: Any) -> bool:
    """Whether two recipes of one class say the same; values without an exact text must be the same objects."""
    (mine, refused), (theirs, _) = describe(a), describe(b)
    if mine != theirs or not refused:
        return mine == theirs

    def same(x: Any, y: Any) -> bool:
        notes = Description()
        return x is y or (notes.text(x) == notes.text(y) and not notes.refusals)

    return all(map(same, values(a)[0].values(), values(b)[0].values()))


def frozen_copy(recipe: Any) -> Any:
    """Return a copy of a recipe that never changes, not even in place: what a plan is made from."""
    with lock:
        cls = type(recipe)
        read, _ = values(recipe)
        if any(is_data_descriptor(inspect.getattr_static(cls, name, None)) for name in read):
            # It would be read again, and hide what was read: the copy is of the nearest class of this package.
            cls = next(filter(is_of_package, cls.__mro__))
        twin = object.__new__(cls)
        state = {name: value for name, value in vars(recipe).items() if name[:1] == "_" and name not in NOT_COPIED}
        state |= {name: detached(value) for name, value in read.items()}
        vars(twin).update({**state, NAME: recipe_name(recipe), FROZEN: True})
        return twin
