"""Values as text that depends on what they hold, never on where they are in memory.

The text of a recipe's fields is the key of its plans, so equal values need equal texts and different values different
ones.  Values that cannot be described exactly are refused: :class:`Description` says which, and why.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import sys
import threading
import types
import weakref
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

import torch

_PACKAGE = __name__.rpartition(".")[0]
_ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device})
_MAX_DEPTH = 16


class Description:
    """Builds the text of values and notes how far it can be trusted.

    Attributes
    ----------
    volatile : bool
        A value may change without an attribute being set (an item of a list): build the text anew each time.
    refusals : list of str
        Values that cannot be told from others by their text (a lambda, a tensor), each with the reason: while there are
        any, do not use the text as a key.
    """

    def __init__(self) -> None:
        self.volatile = False
        self.refusals: list[str] = []
        self._inside: list[int] = []

    def text(self, value: Any) -> str:
        """Return the text of one value."""
        cls = type(value)
        if cls in _ATOMS:
            return repr(value)
        if isinstance(value, Enum):
            return f"{type_name(cls)}.{value.name}" if value.name else f"{type_name(cls)}({value.value!r})"
        if id(value) in self._inside or len(self._inside) >= _MAX_DEPTH:
            return self._refused("...", "it contains itself, or is nested too deeply")
        self._inside.append(id(value))
        try:
            return self._compound(value, cls)
        finally:
            self._inside.pop()

    def _compound(self, value: Any, cls: type) -> str:
        if issubclass(cls, tuple) and not getattr(value, "__dict__", None):
            return ("" if cls is tuple else type_name(cls)) + f"({', '.join(map(self.text, value))})"
        if cls is frozenset:
            return f"{{{', '.join(sorted(map(self.text, value)))}}}"
        if isinstance(value, type):
            return type_name(value)
        if cls is types.ModuleType:
            return str(value.__name__)
        if cls is functools.partial:
            return f"partial({self.text(value.func)}, {self.text(value.args)}, {self._mapping(value.keywords)})"
        if cls is types.MethodType:
            return f"{self.text(value.__self__)}.{value.__func__.__qualname__}"
        if cls is types.FunctionType:
            return self._function(value)
        if cls is types.BuiltinFunctionType and isinstance(value.__self__, (types.ModuleType, type(None))):
            return f"{value.__module__}.{value.__qualname__}"
        if dataclasses.is_dataclass(cls):
            self.volatile |= not cls.__dataclass_params__.frozen  # type: ignore[attr-defined]  # unknown to mypy
            fields = {f.name: getattr(value, f.name, None) for f in dataclasses.fields(cls)}
            more = {n: v for n, v in getattr(value, "__dict__", {}).items() if n not in fields and n[:1] != "_"}
            return f"{type_name(cls)}{self._arguments({**fields, **more})}"
        self.volatile = True
        if cls is list:
            return f"[{', '.join(map(self.text, value))}]"
        if cls in (dict, types.MappingProxyType):
            return self._mapping(value)
        if cls is set:
            return f"set({{{', '.join(sorted(map(self.text, value)))}}})"
        state = plain_state(value)
        if not state:
            return self._refused(type_name(cls), "its class does not say what it holds")
        return f"{type_name(cls)}{self._arguments(state)}"

    def _function(self, function: types.FunctionType) -> str:
        """Return module and qualified name of a function to which these lead, and its defaults."""
        name = f"{function.__module__}.{function.__qualname__}"
        if _found(function.__module__, function.__qualname__) is not function:
            return self._refused(name, "it is a lambda, a local function or one whose name leads to something else")
        if function.__dict__:
            return self._refused(name, f"it has the attributes {', '.join(sorted(function.__dict__))}")
        name = _numbered(function, name)
        defaults: dict[str, Any] = {}
        if function.__defaults__:
            defaults["defaults"] = function.__defaults__
        if function.__kwdefaults__:
            defaults["kwdefaults"] = function.__kwdefaults__
        if not defaults:
            return name
        self.volatile = True  # they can be assigned to
        return name + self._mapping(defaults)

    def _refused(self, what: str, why: str) -> str:
        self.refusals.append(f"{what}: {why}")
        return f"<{what}>"

    def _arguments(self, values: Mapping[str, Any]) -> str:
        return f"({', '.join(f'{name}={self.text(item)}' for name, item in values.items())})"

    def _mapping(self, values: Mapping[Any, Any]) -> str:
        # In their order, which code that looks for the first match sees, too.
        return "{" + ", ".join(f"{self.text(key)}: {self.text(item)}" for key, item in values.items()) + "}"


_OWN_PICKLING = ("__getnewargs__", "__getnewargs_ex__", "__getstate__", "__reduce__", "__reduce_ex__")


def plain_state(value: Any) -> dict[str, Any] | None:
    """Attributes of an object that holds nothing else; None where its class may hold more, or says so itself.

    That is what pickling an object of a plain Python class would store: classes written in C, those that derive from a
    container or a number, and those that say themselves what to store are left out.
    """
    cls = type(value)
    if any(getattr(cls, name, None) is not getattr(object, name, None) for name in _OWN_PICKLING):
        return None
    try:
        _, _, state, *items = value.__reduce_ex__(2)
    except TypeError:  # "cannot pickle": there is more in it than attributes
        return None
    if any(item is not None for item in items):
        return None
    if isinstance(state, tuple):  # (__dict__, slots)
        return {**(state[0] or {}), **state[1]}
    return dict(state or {})


def detached(value: Any) -> Any:
    """Return a value that changes no more when the given one is changed in place; what is refused stays as it is."""
    cls = type(value)
    if cls in (list, set, tuple, frozenset):
        return cls(map(detached, value))
    if cls is dict:
        return {key: detached(item) for key, item in value.items()}
    if cls is functools.partial:
        return functools.partial(value.func, *map(detached, value.args), **detached(value.keywords))
    if cls is types.MethodType and not isinstance(value.__self__, type):
        return types.MethodType(value.__func__, detached(value.__self__))
    if cls in _ATOMS or isinstance(value, (Enum, type, types.FunctionType)):
        return value
    state = plain_state(value)
    if not state:
        return value
    twin = copy.copy(value)
    for name, item in state.items():
        object.__setattr__(twin, name, detached(item))
    return twin


# Names: one that several functions or classes have had gets a number from the second of them on.
_numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
_counts: dict[str, int] = {}
_lock = threading.Lock()


def _numbered(named: Any, name: str) -> str:
    number = _numbers.get(named)
    if number is None:
        with _lock:
            number = _numbers.get(named)
            if number is None:
                number = _numbers[named] = _counts[name] = _counts.get(name, 0) + 1
    return name if number == 1 else f"{name}#{number}"


def _found(module: str, qualname: str) -> Any:
    """Return what a module has under a qualified name, or None."""
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        found = getattr(found, part, None)
    return found


def type_name(cls: type) -> str:
    """Qualified name of a class, with its module unless it is one of this package's; no two classes have the same."""
    module = cls.__module__
    if module == "builtins" or module.partition(".")[0] == _PACKAGE:
        return cls.__qualname__
    return _numbered(cls, f"{module}.{cls.__qualname__}")


def qualified_name(function: Callable[..., Any]) -> str:
    """Return module and qualified name of a callable, for messages."""
    return f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', type(function).__qualname__)}"
