"""Can the grouped path run natively?  Two predicates: for a lone GroupedLinear, and inside a pipeline.

Emulation is another question (docs/recipes.md).  Answers are cached under exactly what they were computed from:
the recipe's class and the settings of it that each predicate reads, dtype, split alignment and device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Protocol, cast

import torch

from . import kernels
from .caching import CacheInfo
from .codegen.spec import NUMERICS, Arch
from .config import settings
from .errors import ConfigError
from .recipe import class_kind
from .snapshot import require_supported, snapshot

#: Kind of recipe, and dtype -> key of NUMERICS whose kernels run it natively, by architecture.
_NATIVE: dict[Arch, dict[tuple[str, torch.dtype], str]] = {
    Arch.SM90A: {("high_precision", dtype): name for dtype, name in kernels.NUMERICS_OF.items() if name in NUMERICS},
    Arch.SM100A: {},
}


@dataclass(frozen=True, slots=True)
class Support:
    """An answer: true, or false with every reason.

    Attributes
    ----------
    reasons
        Why not; empty if supported.
    """

    reasons: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return not self.reasons

    def __str__(self) -> str:
        return "supported" if self else "not supported: " + "; ".join(self.reasons)


class Predicate(Protocol):
    """A support check whose answers are kept."""

    uncached: Callable[..., Support]
    cache_info: Callable[[], CacheInfo]
    cache_clear: Callable[[], None]
    __name__: str

    def __call__(
        self,
        recipe: Any,
        dtype: torch.dtype,
        *,
        split_alignment: int | None = None,
        device: torch.device | str | int | None = None,
    ) -> Support:
        """See the predicate's own documentation."""
        ...


class _Readers(dict[type, "Callable[[Any], Any] | None"]):
    """Class of a recipe -> function that reads the settings that a predicate looks at; None for none."""

    def __init__(self, names_of: Callable[[str], tuple[str, ...]]) -> None:
        self._names_of = names_of

    def __missing__(self, cls: type) -> Callable[[Any], Any] | None:
        names = self._names_of("high_precision" if cls is type(None) else class_kind(cls))
        self[cls] = reader = attrgetter(*names) if names else None
        return reader


def _predicate(name: str, where: str, names_of: Callable[[str], tuple[str, ...]]) -> Predicate:
    """Make a predicate that reads the settings ``names_of(kind)`` of a recipe of a kind.

    The answer is a function of the key alone, so a lookup costs a hit of ``functools.lru_cache`` and little more.
    """
    readers = _Readers(names_of)
    indexed = torch.device  # names of this function are found faster than those of modules

    def answer(cls: type, read: Any, dtype: torch.dtype, split_alignment: int | None, device: torch.device) -> Support:
        kind = "high_precision" if cls is type(None) else class_kind(cls)
        names = names_of(kind)
        values = dict(zip(names, (read,) if len(names) == 1 else read or (), strict=True))
        return _answer(kind, cls, values, dtype, split_alignment, device)

    lookup = functools.lru_cache(maxsize=1024)(answer)
    settings.on_change("sm100", lookup.cache_clear)  # read by few answers, and part of the key of none
    kernels.on_new_provider(lookup.cache_clear)

    def predicate(
        recipe: Any,
        dtype: torch.dtype,
        *,
        split_alignment: int | None = None,
        device: torch.device | str | int | None = None,
    ) -> Support:
        if device.__class__ is not indexed or device.index is None:
            device = _resolve(device)
        cls = recipe.__class__
        reader = readers[cls]
        try:
            read = None if reader is None else reader(recipe)
        except AttributeError:
            read = _read_foreign(recipe, names_of)
        return lookup(cls, read, dtype, split_alignment, device)

    def uncached(
        recipe: Any,
        dtype: torch.dtype,
        *,
        split_alignment: int | None = None,
        device: torch.device | str | int | None = None,
    ) -> Support:
        reader = readers[recipe.__class__]
        try:
            read = None if reader is None else reader(recipe)
        except AttributeError:
            read = _read_foreign(recipe, names_of)
        return answer(recipe.__class__, read, dtype, split_alignment, _resolve(device))

    found = cast(Predicate, predicate)
    found.uncached = uncached
    found.cache_info = lambda: CacheInfo._make(lookup.cache_info())
    found.cache_clear = lookup.cache_clear
    found.__name__ = name
    found.__doc__ = _DOC.format(where=where)
    return found


def _read_foreign(recipe: Any, names_of: Callable[[str], tuple[str, ...]]) -> Any:
    """Read settings of a recipe that lacks some: newer ones have the value that turns them off, else it is an error."""
    read = snapshot(recipe).recipe
    require_supported(read)
    values = tuple(getattr(read, name, None) for name in names_of(class_kind(type(recipe))))
    return values[0] if len(values) == 1 else values


def _answer(
    kind: str,
    cls: type,
    read: dict[str, Any],
    dtype: torch.dtype,
    split_alignment: int | None,
    device: torch.device,
) -> Support:
    """Collect the reasons against native kernels."""
    if split_alignment is not None and (not isinstance(split_alignment, int) or split_alignment < 1):
        raise ConfigError(f"split_alignment is {split_alignment!r}; allowed: None or a positive integer")
    name = "no recipe" if cls is type(None) else cls.__name__
    reasons = [f"{name} with {setting}={value!r} has no grouped path" for setting, value in read.items() if value]
    if problem := type_problem(dtype):
        reasons.append(problem)
    provider = kernels.provider()
    if unsupported := provider.unsupported(device):
        return Support((*reasons, *unsupported))
    arch = provider.arch(device)
    if dtype in kernels.NUMERICS_OF and (kind, dtype) not in _NATIVE[arch]:
        reasons.append(f"there are no native {arch.value} kernels for {name} yet")
    return Support(tuple(reasons))


def type_problem(dtype: torch.dtype, *, quantized: bool = False) -> str | None:
    """Say why no kernel runs in a type, and in which types kernels run; None if one does.

    Parameters
    ----------
    dtype
        Type of unquantised inputs and of results.
    quantized
        Whether operands are quantised, and emulated.
    """
    names = " and ".join(str(t).removeprefix("torch.") for t in kernels.NUMERICS_OF)
    if not quantized:
        return None if dtype in kernels.NUMERICS_OF else f"kernels exist for {names}, the type is {dtype}"
    if dtype is torch.bfloat16:
        return None
    return f"kernels for quantised operands exist for bfloat16, the type is {dtype}; without quantising, for {names}"


@functools.lru_cache(maxsize=256)
def emulation_reasons(dtype: torch.dtype, device: torch.device) -> tuple[str, ...]:
    """Say why quantising recipes cannot run emulated, by this project's bfloat16 kernels; empty if they can.

    Answers are kept until other kernels are used.

    Parameters
    ----------
    dtype
        Type of the unquantised tensors.
    device
        Their device, with its index.
    """
    reasons = list(kernels.provider().unsupported(device))
    problem = type_problem(dtype, quantized=True)
    return tuple(reasons) if problem is None else (*reasons, problem)


settings.on_change("sm100", emulation_reasons.cache_clear)
kernels.on_new_provider(emulation_reasons.cache_clear)


def _resolve(device: torch.device | str | int | None) -> torch.device:
    """Return a device with its index; the current one, asked for now, where none is given."""
    if device is None:
        device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
    elif isinstance(device, int):
        device = torch.device("cuda", device)
    else:
        device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return device


_DOC = """Whether {where} can run the grouped path natively.

    Parameters
    ----------
    recipe
        None, one of ours, or a foreign one.
    dtype
        Type of the unquantised tensors.
    split_alignment
        A multiple that the caller promises all split sizes to be.
    device
        The tensors' device; the current one, asked for at each call, by default.

    Returns
    -------
    Support
        True, or false with every reason.  ``.uncached`` computes it anew; ``.cache_info()`` and ``.cache_clear()`` are
        as in functools.
    """


def _fuser_reads(kind: str) -> tuple[str, ...]:
    return ("disable_rht", "row_scaled_activation") if kind == "nvfp4" else ()


def _module_reads(kind: str) -> tuple[str, ...]:
    return () if kind == "high_precision" else ("backward_override", *_fuser_reads(kind))


module_grouped_tensor_supported = _predicate("module_grouped_tensor_supported", "a lone GroupedLinear", _module_reads)
fuser_grouped_tensor_supported = _predicate(
    "fuser_grouped_tensor_supported", "a pipeline (Sequential, GroupedMLP)", _fuser_reads
)
