"""Activation recompute under the recipe of the forward pass."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch.utils.checkpoint

from .autocast import autocast, current_recipe


def checkpoint(function: Callable[..., Any], *args: Any, use_reentrant: bool = False, **kwargs: Any) -> Any:
    """:func:`torch.utils.checkpoint.checkpoint` that recomputes under the recipe that is in force now.

    The recipe is copied, so neither leaving the ``autocast`` nor changing the recipe before backward changes what is
    recomputed.

    Parameters
    ----------
    function, *args, use_reentrant, **kwargs
        As torch's function takes them.
    """
    snapshot = copy.copy(current_recipe())

    def run(*inputs: Any, **named: Any) -> Any:
        with autocast(recipe=snapshot):
            return function(*inputs, **named)

    return torch.utils.checkpoint.checkpoint(run, *args, use_reentrant=use_reentrant, **kwargs)


def checkpoint_context_fn() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Do the same for torch's own checkpoint, which takes it as ``context_fn`` with ``use_reentrant=False``.

    Returns
    -------
    tuple
        Contexts for the forward pass and for its recomputation.
    """
    return contextlib.nullcontext(), autocast(recipe=copy.copy(current_recipe()))
