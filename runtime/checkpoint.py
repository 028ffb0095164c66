"""Activation recompute under the recipe of the forward pass."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch.utils.checkpoint

from .autocast import autocast, current_recipe, in_force


def checkpoint(function: Callable[..., Any], *args: Any, use_reentrant: bool = False, **kwargs: Any) -> Any:
    """:func:`torch.utils.checkpoint.checkpoint` that recomputes under the recipe that is in force now.

    The recipe is copied, so neither leaving the ``autocast`` nor changing the recipe before backward changes what is
    recomputed.  Nor do steps of delayed scaling that end in between (several forwards before their backwards, as in
    pipeline parallelism): the scales of the forward are kept.

    Parameters
    ----------
    function, *args, use_reentrant, **kwargs
        As torch's function takes them.
    """
    again = _recomputing(_scales())

    def run(*inputs: Any, **named: Any) -> Any:
        with again():
            return function(*inputs, **named)

    return torch.utils.checkpoint.checkpoint(run, *args, use_reentrant=use_reentrant, **kwargs)


def checkpoint_context_fn() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Do the same for torch's own checkpoint, which takes it as ``context_fn`` with ``use_reentrant=False``.

    Returns
    -------
    tuple
        Contexts for the forward pass and for its recomputation.
    """
    scales = _scales()
    return _same_scales(scales), _recomputing(scales)()


def _scales() -> dict[Any, Any]:
    """Return where scales are kept: inside of another checkpoint with that one's, which recomputes this one, too."""
    return {} if in_force.scales is None else in_force.scales


@contextlib.contextmanager
def _same_scales(scales: dict[Any, Any]) -> Iterator[None]:
    """Quantise with the scales in a dictionary, which those that it lacks are put into."""
    outer, in_force.scales = in_force.scales, scales
    try:
        yield
    finally:
        in_force.scales = outer


def _recomputing(scales: dict[Any, Any]) -> Callable[[], AbstractContextManager[None]]:
    """Return what puts in force again what is in force now."""
    recipe, group = copy.copy(current_recipe()), in_force.amax_reduction_group

    @contextlib.contextmanager
    def again() -> Iterator[None]:
        with autocast(recipe=recipe, amax_reduction_group=group), _same_scales(scales):
            yield

    return again
