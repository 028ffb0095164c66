"""Values as text that depends on what they hold, never on where they are in memory.

The text of a recipe's fields is the key of its plans, so equal values need equal texts and different values different
ones.  Not every Python object allows that; :class:`Description` says how far the text can be trusted.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import types
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

import torch

_PACKAGE = __name__.rpartition(".")[0]
_ATOMS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)
_MAX_DEPTH = 16


class Description:
    """Builds the text of values and notes how far it can be trusted.

    Attributes
    ----------
    volatile : bool
        A value may change without an attribute being set (a list, a captured variable): build the text anew each time.
    opaque : bool
        Some value cannot be told from others by its text (a tensor, a bare ``object()``): do not use it as a key.
    """

    def __init__(self) -> None:
        self.volatile = False
        self.opaque = False
        self._inside: list[int] = []

    def text(self, value: Any) -> str:
        """Return the text of one value."""
        if isinstance(value, Enum):
            return f"{type_name(type(value))}.{value.name}"
        if isinstance(value, _ATOMS):
            return repr(value)
        if id(value) in self._inside or len(self._inside) >= _MAX_DEPTH:
            self.opaque = True
            return "..."
        self._inside.append(id(value))
        try:
            return self._compound(value)
        finally:
            self._inside.pop()

    def _compound(self, value: Any) -> str:
        if isinstance(value, tuple):
            return f"({', '.join(map(self.text, value))})"
        if isinstance(value, frozenset):
            return f"{{{', '.join(sorted(map(self.text, value)))}}}"
        if isinstance(value, type):
            return type_name(value)
        if isinstance(value, types.ModuleType):
            return value.__name__
        if isinstance(value, functools.partial):
            return f"partial({self.text(value.func)}, {self.text(value.args)}, {self._mapping(value.keywords)})"
        if isinstance(value, types.MethodType):
            return f"{self.text(value.__self__)}.{self.text(value.__func__)}"
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, types.BuiltinFunctionType):
            return f"{value.__module__}.{value.__qualname__}"
        if dataclasses.is_dataclass(value):
            if not getattr(value, "__dataclass_params__").frozen:  # noqa: B009 - unknown to type checkers
                self.volatile = True
            fields = {f.name: getattr(value, f.name, None) for f in dataclasses.fields(value)}
            return f"{type_name(type(value))}{self._arguments(fields)}"
        self.volatile = True
        if isinstance(value, list):
            return f"[{', '.join(map(self.text, value))}]"
        if isinstance(value, Mapping):
            return self._mapping(value)
        if isinstance(value, set):
            return f"set({{{', '.join(sorted(map(self.text, value)))}}})"
        return self._object(value)

    def _function(self, function: types.FunctionType) -> str:
        """Return module and qualified name; a function not findable by them also shows its code and captured values."""
        name = f"{function.__module__}.{function.__qualname__}"
        if "<" in name or function.__module__ == "__main__":
            name += f"#{code_digest(function.__code__)[:12]}"
        captured: dict[str, Any] = {}
        if function.__closure__:
            self.volatile = True  # a captured variable can be bound to another value at any time
            for variable, cell in zip(function.__code__.co_freevars, function.__closure__, strict=True):
                try:
                    captured[variable] = cell.cell_contents
                except ValueError:  # not bound yet
                    self.opaque = True
        if function.__defaults__:
            captured["defaults"] = function.__defaults__
        if function.__kwdefaults__:
            captured["kwdefaults"] = function.__kwdefaults__
        return name + (self._mapping(captured) if captured else "")

    def _object(self, value: Any) -> str:
        """Return the repr of an object of any other class if it says what the object holds, else the object's state."""
        cls = type(value)
        if isinstance(value, torch.Tensor):
            self.opaque = True
            return f"{type_name(cls)}(shape={tuple(value.shape)}, dtype={value.dtype})"
        if getattr(cls, "__repr__") is not object.__repr__:  # noqa: B009 - unknown to type checkers
            text = repr(value)
            if " at 0x" not in text:
                return text
        state = attributes(value)
        if not state:
            self.opaque = True
        return f"{type_name(cls)}{self._arguments(state)}"

    def _arguments(self, values: Mapping[str, Any]) -> str:
        return f"({', '.join(f'{name}={self.text(item)}' for name, item in values.items())})"

    def _mapping(self, values: Mapping[Any, Any]) -> str:
        return "{" + ", ".join(sorted(f"{self.text(key)}: {self.text(item)}" for key, item in values.items())) + "}"


def type_name(cls: type) -> str:
    """Qualified name of a class, with its module unless it is one of this package's."""
    module = cls.__module__
    if module == "builtins" or module.partition(".")[0] == _PACKAGE:
        return cls.__qualname__
    return f"{module}.{cls.__qualname__}"


def attributes(value: Any) -> dict[str, Any]:
    """Instance attributes of an object, from its ``__dict__`` and its slots."""
    found: dict[str, Any] = {}
    for cls in type(value).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                found[name] = getattr(value, name)
    found.update(getattr(value, "__dict__", {}))
    return found


def code_digest(code: types.CodeType) -> str:
    """SHA-256 of what a function's code does, nested functions included; no file, no line, no address."""
    constants = [code_digest(c) if isinstance(c, types.CodeType) else repr(c) for c in code.co_consts]
    parts = (code.co_code.hex(), repr(constants), repr(code.co_names), repr(code.co_freevars))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def qualified_name(function: Callable[..., Any]) -> str:
    """Return module and qualified name of a callable, for messages."""
    return f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', type(function).__qualname__)}"
