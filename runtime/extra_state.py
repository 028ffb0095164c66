"""What a state dict holds of an operation besides parameters and buffers: one tensor under ``_extra_state``.

torch asks a module for it with ``get_extra_state`` and gives it back to ``set_extra_state``.  Quantisation state is
packed into bytes, as Transformer Engine does it; the layout of GLU weights is a number.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from typing import Any

import torch

KEY = "_extra_state"


def packed(tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return tensors as one, uint8 on the CPU; of the same shapes it has the same size.  No tensors: an empty one.

    Parameters
    ----------
    tensors
        By name, on any device but the meta device.
    """
    if not tensors or any(t.is_meta for t in tensors.values()):
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    file = io.BytesIO()
    torch.save({name: t.detach().cpu().clone() for name, t in tensors.items()}, file)
    return torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)


def unpacked(state: Any) -> dict[str, torch.Tensor]:
    """Inverse of :func:`packed`; None and an empty tensor hold nothing.

    Parameters
    ----------
    state
        What a state dict holds.

    Raises
    ------
    ValueError
        If it is something else.
    """
    if not is_given(state):
        return {}
    if not isinstance(state, torch.Tensor) or state.dtype is not torch.uint8 or state.is_meta:
        got = (
            f"a tensor of {state.dtype} on {state.device}" if isinstance(state, torch.Tensor) else type(state).__name__
        )
        raise ValueError(f"it is {got}; allowed: a uint8 tensor, as state_dict() gives it")
    file = io.BytesIO(state.detach().cpu().contiguous().numpy().tobytes())
    try:
        found = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever torch, zipfile and pickle raise on bytes that are something else
        raise ValueError(f"it was not written by cute_grouped_mlp ({type(error).__name__})") from None
    if not isinstance(found, dict) or not all(isinstance(t, torch.Tensor) for t in found.values()):
        raise ValueError("it was not written by cute_grouped_mlp: it holds something else than tensors by name")
    return found


def is_given(state: Any) -> bool:
    """Whether a state dict holds something under the key; an empty tensor is nothing."""
    return state is not None and not (isinstance(state, torch.Tensor) and not state.numel())


class MissingKey(str):
    """A key that a state dict lacks; torch's error, which lists such keys, shows the advice behind it.

    Attributes
    ----------
    advice : str
    """

    advice = ""

    @classmethod
    def of(cls, key: str, advice: str) -> MissingKey:
        """Make one.

        Parameters
        ----------
        key, advice
            The key, and what to do.
        """
        made = cls(key)
        made.advice = advice
        return made

    def __format__(self, spec: str) -> str:
        return f"{self!s} ({self.advice})"


def require_loadable(module: torch.nn.Module, problems: Iterable[str]) -> None:
    """Raise what torch raises of a state dict that does not fit, before anything of the module is written.

    Parameters
    ----------
    module
        It is loaded into.
    problems
        What is wrong.

    Raises
    ------
    RuntimeError
        If something is.
    """
    if lines := list(problems):
        raise RuntimeError("\n\t".join([f"Error(s) in loading state_dict for {type(module).__name__}:", *lines]))
