"""One small cache for everything whose key is computed by hand: bounded, inspectable, clearable."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, NamedTuple, TypeVar

V = TypeVar("V")


class CacheInfo(NamedTuple):
    """Counters of a cache, with the names that :func:`functools.lru_cache` uses."""

    hits: int
    misses: int
    maxsize: int
    currsize: int


class LRUCache(Generic[V]):
    """A mapping that drops the least recently used entry once it is full, and counts.

    Lookups take no lock: each step is one atomic operation of a dict.

    Parameters
    ----------
    maxsize
        Entries kept.
    """

    __slots__ = ("_data", "hits", "maxsize", "misses")

    def __init__(self, maxsize: int) -> None:
        self.maxsize = maxsize
        self.hits = 0
        self.misses = 0
        self._data: OrderedDict[Hashable, V] = OrderedDict()

    def get(self, key: Hashable) -> V | None:
        """Return the value of ``key``, now the most recently used; None (and a miss) if there is none."""
        data = self._data
        try:
            value = data[key]
            data.move_to_end(key)
        except KeyError:
            self.misses += 1
            return None
        self.hits += 1
        return value

    def peek(self, key: Hashable) -> V | None:
        """Return the value of ``key`` without counting and without renewing it."""
        return self._data.get(key)

    def put(self, key: Hashable, value: V) -> V:
        """Store ``value`` unless ``key`` has one already; returns what is stored."""
        value = self._data.setdefault(key, value)
        while len(self._data) > self.maxsize:
            self._data.popitem(last=False)
        return value

    def info(self) -> CacheInfo:
        """Return the counters."""
        return CacheInfo(self.hits, self.misses, self.maxsize, len(self._data))

    def clear(self) -> None:
        """Forget every entry and reset the counters."""
        self._data.clear()
        self.hits = self.misses = 0


def get_or_make(cache: LRUCache[V], key: Hashable, make: Callable[[], V]) -> V:
    """Return the value of ``key``, made by ``make()`` where there is none."""
    value = cache.get(key)
    return cache.put(key, make()) if value is None else value
