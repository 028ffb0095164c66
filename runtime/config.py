"""The settings of the package: one typed object for all ``CUTE_GROUPED_MLP_*`` environment variables.

The environment is read once, when this module is imported.  A bad value is said then, and is an error where the
setting is used: importing never fails.  Afterwards settings change by assignment (``settings.fuse = False``) or for a
while with :meth:`Settings.override`.  Both are process-wide.
"""

from __future__ import annotations

import contextlib
import difflib
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .codegen.folders import expand_user
from .errors import ConfigError

PREFIX = "CUTE_GROUPED_MLP_"
logger = logging.getLogger("cute_grouped_mlp")


@dataclass(frozen=True, slots=True)
class Setting:
    """Declaration of one setting.

    Attributes
    ----------
    default
        Value when neither the environment nor code sets it.
    parse
        Text of the environment variable -> value; raises ValueError.
    valid
        Whether a value is allowed.
    allowed
        What is allowed, for messages and for the table of settings.
    doc
        What the setting does.
    """

    default: Any
    parse: Callable[[str], Any]
    valid: Callable[[Any], bool]
    allowed: str
    doc: str


_TRUE, _FALSE = frozenset({"1", "on", "true", "yes"}), frozenset({"0", "off", "false", "no"})
_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


def _parse_bool(text: str) -> bool:
    word = text.strip().lower()
    if word not in _TRUE | _FALSE:
        raise ValueError(text)
    return word in _TRUE


def _parse_paths(text: str) -> tuple[Path, ...]:
    return tuple(expand_user(part) for part in text.split(os.pathsep) if part)


def _is_paths(value: Any) -> bool:
    return isinstance(value, tuple) and all(isinstance(part, Path) for part in value)


def _switch(default: bool, doc: str) -> Setting:
    return Setting(default, _parse_bool, lambda v: isinstance(v, bool), "True or False (on or off)", doc)


#: Every setting.  The variable of ``name`` is ``CUTE_GROUPED_MLP_NAME``.
SETTINGS: dict[str, Setting] = {
    "fuse": _switch(True, "Policy of recipes whose enable_cutedsl_fused_grouped_mlp is None."),
    "jit": _switch(True, "Whether a kernel that is not built yet is compiled at first use; off: an error instead."),
    "cache_dir": Setting(
        None,
        expand_user,
        lambda v: v is None or isinstance(v, Path),
        "a Path, or None for the platform's user cache folder",
        "Folder of the on-disk store of compiled kernels.",
    ),
    "aot_dirs": Setting(
        (),
        _parse_paths,
        _is_paths,
        "a tuple of Paths (separated by ':' in the environment)",
        "Folders made by `cute-grouped-mlp build`, searched before the store.",
    ),
    "debug_checks": _switch(False, "Read the device's status word after each call (synchronises) and raise."),
    "check_range": _switch(
        True, "Report operands of emulated recipes outside of bfloat16's normal numbers to the device's status word."
    ),
    "sm100": Setting(
        "off",
        str.lower,
        lambda v: v in ("off", "unverified"),
        "'off' or 'unverified'",
        "Whether native SM100 kernels, which never ran, may be chosen.",
    ),
    "log_level": Setting(
        None,
        str.upper,
        lambda v: v is None or v in _LEVELS,
        f"one of {', '.join(_LEVELS)}, or None to leave logging to the application",
        "Level of the logger 'cute_grouped_mlp'; setting it also sends its lines to stderr.",
    ),
    "plan_cache_size": Setting(
        64, int, lambda v: isinstance(v, int) and v >= 1, "an integer of at least 1", "Plans kept by each fuser (LRU)."
    ),
}


class Settings:
    """Typed settings; see :data:`SETTINGS` for what each does.

    Attributes
    ----------
    generation : int
        Grows by one with each change.  Part of what a plan depends on.
    stamp : str
        The same as text: torch.compile takes numbers that change for dynamic ones.
    """

    fuse: bool
    jit: bool
    cache_dir: Path | None
    aot_dirs: tuple[Path, ...]
    debug_checks: bool
    check_range: bool
    sm100: str
    log_level: str | None
    plan_cache_size: int
    generation: int
    stamp: str
    _watchers: dict[str, list[Callable[[], None]]]
    _problems: dict[str, str]

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.__dict__["_problems"] = {}
        self.__dict__["generation"] = 0
        self.__dict__["stamp"] = "0"
        self.__dict__["_watchers"] = {}
        for name, setting in SETTINGS.items():
            text = environ.get(PREFIX + name.upper())
            if not text:
                self.__dict__[name] = setting.default
                continue
            try:
                self._store(name, setting.parse(text))
            except ValueError:  # ours among them
                self._problems[name] = f"{PREFIX}{name.upper()} is {text!r}; allowed: {setting.allowed}"
                logger.warning("%s. Whatever needs it will fail", self._problems[name])
        known = {PREFIX + name.upper() for name in SETTINGS}
        for variable in sorted(v for v in environ if v not in known and _is_meant_for_us(v, known)):
            warnings.warn(f"{variable} is not a setting of cute_grouped_mlp{_hint(variable, known)}", stacklevel=3)

    def __getattr__(self, name: str) -> Any:
        """Raise for a setting whose variable has a bad value, at its first use: importing the package never fails."""
        problem = self.__dict__.get("_problems", {}).get(name)
        if problem is not None:
            raise ConfigError(problem)
        raise AttributeError(f"no setting {name!r}{_hint(name, SETTINGS)}")

    def problems(self) -> dict[str, str]:
        """Return what is wrong with settings whose variables have bad values, by setting; until it is assigned to."""
        return dict(self._problems)

    def __setattr__(self, name: str, value: Any) -> None:
        self._store(name, value)

    def _store(self, name: str, value: Any) -> None:
        if name not in SETTINGS:
            raise AttributeError(f"no setting {name!r}{_hint(name, SETTINGS)}")
        if not SETTINGS[name].valid(value):
            raise ConfigError(f"settings.{name} is {value!r}; allowed: {SETTINGS[name].allowed}")
        self.__dict__[name] = value
        self._problems.pop(name, None)
        self.touch()
        if name == "log_level":
            _configure_logging(value)
        for function in self._watchers.get(name, ()):
            function()

    def touch(self) -> None:
        """Grow :attr:`generation`: every plan is made anew at its next use."""
        self.__dict__["generation"] += 1
        self.__dict__["stamp"] = str(self.generation)

    def on_change(self, name: str, function: Callable[[], None]) -> None:
        """Call a function after each change of a setting.

        Parameters
        ----------
        name, function
            The setting, and what to call.
        """
        self._watchers.setdefault(name, []).append(function)

    def values(self) -> dict[str, Any]:
        """Return each setting's value by its name."""
        return {name: getattr(self, name) for name in SETTINGS}

    @contextlib.contextmanager
    def override(self, **values: Any) -> Iterator[Settings]:
        """Change settings for the duration of a ``with`` block.

        Raises
        ------
        AttributeError
            If a name is not a setting.
        ConfigError
            If a value is not allowed.
        """
        before = {name: self.__dict__.get(name) for name in values}
        problems = {name: problem for name, problem in self._problems.items() if name in values}
        try:
            for name, value in values.items():
                self._store(name, value)
            yield self
        finally:
            self._problems.update(problems)
            for name, value in before.items():
                if name in problems:
                    self.__dict__.pop(name, None)
                elif name in SETTINGS:
                    self._store(name, value)

    def __repr__(self) -> str:
        values = {name: self.__dict__.get(name, "not valid") for name in SETTINGS}
        return f"Settings({', '.join(f'{name}={value!r}' for name, value in values.items())})"


def _is_meant_for_us(variable: str, known: set[str]) -> bool:
    """Whether a variable that we do not know has our prefix, or a name much like that of one that we know."""
    name = variable.upper()
    if name.startswith(PREFIX):
        return True
    return ("MLP" in name or "GROUPED" in name) and bool(difflib.get_close_matches(name, known, n=1, cutoff=0.9))


def _hint(name: str, known: Mapping[str, Any] | set[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1) or difflib.get_close_matches(name.upper(), known, n=1)
    return f"; did you mean {close[0]}?" if close else f"; there are: {', '.join(sorted(known))}"


def _configure_logging(level: str | None) -> None:
    for handler in [h for h in logger.handlers if h.name == __name__]:
        logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET if level is None else level)
    if level is not None:
        handler = logging.StreamHandler()
        handler.name = __name__
        handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
        logger.addHandler(handler)


#: The settings of this process.
settings = Settings(os.environ)
