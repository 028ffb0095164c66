"""Interleaved timing: every implementation in every round, in random order, on a GPU that is warm."""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

#: A measurement spans as many launches as this takes, in milliseconds.
MEASUREMENT = 2.0
#: Time to run an implementation before its first measurement, in milliseconds.
WARM_UP = 50.0
MIN_ROUNDS = 5


@dataclass(frozen=True, slots=True)
class Times:
    """Milliseconds of one launch in each round.

    Attributes
    ----------
    ms
        One value a round, comparable between the implementations of a row.
    launches
        Launches that each value is the mean of.
    """

    ms: list[float]
    launches: int

    @property
    def median(self) -> float:
        """Median over the rounds."""
        return statistics.median(self.ms)

    @property
    def quartiles(self) -> tuple[float, float]:
        """First and third quartile over the rounds."""
        first, _, third = statistics.quantiles(self.ms, n=4, method="inclusive")
        return first, third

    def speed_over(self, other: Times) -> float:
        """Median over the rounds of the other's time divided by ours: above 1 if ours is faster."""
        return statistics.median(theirs / ours for ours, theirs in zip(self.ms, other.ms, strict=True))


def time_block(call: Callable[[], object], launches: int) -> Callable[[], float]:
    """Launch a call several times between two CUDA events.

    Returns
    -------
    Callable
        The milliseconds of one launch; waits for the GPU.
    """
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(launches):
        call()
    end.record()

    def milliseconds() -> float:
        end.synchronize()
        return begin.elapsed_time(end) / launches

    return milliseconds


def warm_up(call: Callable[[], object]) -> int:
    """Run a call for a while; returns how many launches fill a measurement."""
    call()
    once = max(time_block(call, 3)(), 1e-3)
    steady = max(time_block(call, math.ceil(WARM_UP / once))(), 1e-3)
    return math.ceil(MEASUREMENT / steady)


def interleave(
    calls: Mapping[str, Callable[[], object]], *, rounds: int, seconds: float, rng: random.Random
) -> dict[str, Times]:
    """Time several calls against one another.

    Parameters
    ----------
    calls
        What to time, by name.
    rounds
        Rounds to measure.
    seconds
        Stop earlier when this time is over, though not before :data:`MIN_ROUNDS`.
    rng
        Draws the order in each round.
    """
    deadline = time.monotonic() + seconds
    launches = {name: warm_up(call) for name, call in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for done in range(rounds):
        if done >= MIN_ROUNDS and time.monotonic() > deadline:
            break
        order = list(calls)
        rng.shuffle(order)
        pending = {name: time_block(calls[name], launches[name]) for name in order}
        for name, milliseconds in pending.items():
            times[name].append(milliseconds())
    return {name: Times(ms, launches[name]) for name, ms in times.items()}
