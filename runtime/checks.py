"""Checks of arguments: one error that names every violation at once, and mere comparisons where there is none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from .errors import ShapeError

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
INTEGERS = (torch.int32, torch.int64)


def input_problems(x: torch.Tensor, features: int, dtype: torch.dtype, device: torch.device) -> list[str]:
    """Say what is wrong with an operation's input of shape (..., features)."""
    problems = []
    if x.dim() < 2 or x.shape[-1] != features:
        problems.append(f"input has shape {tuple(x.shape)}, allowed: (tokens, {features}) or more leading dimensions")
    if x.dtype != dtype:
        problems.append(f"input is {x.dtype}, the weight is {dtype}")
    if x.device != device:
        problems.append(f"input is on {x.device}, the weight is on {device}")
    return problems


def splits_problems(sizes: torch.Tensor | None, groups: int, device: torch.device) -> list[str]:
    """Say what is wrong with split sizes of shape (G,)."""
    if not isinstance(sizes, torch.Tensor):
        return [f"split_sizes is {type(sizes).__name__}, allowed: an int32 or int64 tensor of shape ({groups},)"]
    problems = []
    if sizes.dim() != 1 or sizes.shape[0] != groups:
        problems.append(f"split_sizes has shape {tuple(sizes.shape)}, allowed: ({groups},)")
    if sizes.dtype not in INTEGERS:
        problems.append(f"split_sizes is {sizes.dtype}, allowed: torch.int32, torch.int64")
    if sizes.device != device:
        problems.append(f"split_sizes is on {sizes.device}, the weight is on {device}")
    return problems


def rows_problems(name: str, t: torch.Tensor | None, leading: torch.Size, device: torch.device) -> list[str]:
    """Say what is wrong with a tensor of one floating-point value per row (probs, or a bias's scale)."""
    if not isinstance(t, torch.Tensor):
        return [f"{name} is {type(t).__name__}, allowed: a floating-point tensor of shape {tuple(leading)}"]
    problems = []
    if t.shape != leading and tuple(t.shape) != (leading.numel(),):
        allowed = sorted({(leading.numel(),), tuple(leading)}, key=len)
        problems.append(f"{name} has shape {tuple(t.shape)}, allowed: {' or '.join(map(str, allowed))}")
    if t.dtype not in FLOATS:
        problems.append(f"{name} is {t.dtype}, allowed: a floating-point type")
    if t.device != device:
        problems.append(f"{name} is on {t.device}, the weight is on {device}")
    return problems


def buffer_problems(
    name: str, t: torch.Tensor, shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> list[str]:
    """Say what is wrong with a caller's buffer for an output."""
    if not isinstance(t, torch.Tensor):
        return [f"{name} is {type(t).__name__}, allowed: a tensor of shape {tuple(shape)}"]
    problems = []
    if tuple(t.shape) != tuple(shape):
        problems.append(f"{name} has shape {tuple(t.shape)}, the result has {tuple(shape)}")
    if t.dtype != dtype:
        problems.append(f"{name} is {t.dtype}, the result is {dtype}")
    if t.device != device:
        problems.append(f"{name} is on {t.device}, the result is on {device}")
    if not t.is_contiguous():
        problems.append(f"{name} is not contiguous")
    if t.requires_grad:
        problems.append(f"{name} requires a gradient, a buffer must not")
    return problems


def require(operation: str, problems: Sequence[str]) -> None:
    """Raise ShapeError if there are problems."""
    if problems:
        raise ShapeError(f"{operation}: " + "; ".join(problems))


def into_buffer(operation: str, name: str, buffer: torch.Tensor | None, result: torch.Tensor) -> torch.Tensor:
    """Copy a result into the caller's buffer after checking it; returns what the caller gets."""
    if buffer is None:
        return result
    require(operation, buffer_problems(name, buffer, result.shape, result.dtype, result.device))
    return buffer.copy_(result)


def buffer_or_empty(
    operation: str, name: str, t: torch.Tensor | None, shape: Sequence[int], like: torch.Tensor
) -> torch.Tensor:
    """Return the caller's buffer after checking it, or a new tensor of the type and device of ``like``."""
    if t is None:
        return torch.empty(tuple(shape), dtype=like.dtype, device=like.device)
    require(operation, buffer_problems(name, t, shape, like.dtype, like.device))
    return t


def first_microbatch(value: bool | None) -> bool | None:
    """Return ``is_first_microbatch`` as it is.

    Raises
    ------
    TypeError
        If it is not True, False or None.
    """
    if value is None or isinstance(value, bool):
        return value
    raise TypeError(f"is_first_microbatch is {value!r}; allowed: True, False, None")


def no_keywords(operation: str, keywords: Mapping[str, object]) -> None:
    """Raise TypeError if an operation that takes no keyword arguments got some."""
    if keywords:
        raise TypeError(f"{operation} takes no keywords, got {', '.join(sorted(keywords))}")
