"""Checks of arguments: one error that names every violation at once, and mere comparisons where there is none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from .errors import ShapeError
from .plain import is_plain

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
    name: str,
    t: torch.Tensor,
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    *,
    aligned: bool = False,
) -> list[str]:
    """Say what is wrong with a caller's buffer for an output.

    Parameters
    ----------
    name, t
        The buffer.
    shape, dtype, device
        Of the result.
    aligned
        Whether a kernel writes to it, which needs an address that is a multiple of 16 bytes.
    """
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
        expected = tuple(torch.empty(tuple(t.shape), device="meta", dtype=t.dtype).stride())
        problems.append(f"{name} is not contiguous: its strides are {tuple(t.stride())}, allowed: {expected}")
    elif aligned and not is_plain(t):
        problems.append(f"{name} is a {type(t).__name__}, allowed: a plain tensor")
    elif aligned and t.numel() and t.data_ptr() % 16:
        problems.append(f"{name} starts {t.data_ptr() % 16} bytes behind a multiple of 16, where kernels write")
    if t.requires_grad:
        problems.append(f"{name} requires a gradient, a buffer must not")
    return problems


def apart_problems(buffers: Mapping[str, object], others: Mapping[str, object]) -> list[str]:
    """Say which buffers of the caller share memory with one another or with something else that a call reads.

    Parameters
    ----------
    buffers, others
        Tensors by name; what is no tensor counts for nothing.
    """
    problems, seen = [], dict(others)
    for name, buffer in buffers.items():
        for other, tensor in seen.items():
            if isinstance(buffer, torch.Tensor) and isinstance(tensor, torch.Tensor) and share_memory(buffer, tensor):
                problems.append(f"{name} shares memory with {other}, allowed: a buffer of its own")
        seen[name] = buffer
    return problems


def share_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether the bytes between the first and the last element of two tensors overlap."""
    if not (is_plain(a) and is_plain(b)) or a.device != b.device or a.is_meta or not (a.numel() and b.numel()):
        return False
    (first, end), (other, other_end) = _extent(a), _extent(b)
    return first < other_end and other < end


def _extent(t: torch.Tensor) -> tuple[int, int]:
    last = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
    return t.data_ptr(), t.data_ptr() + (last + 1) * t.element_size()


def require(operation: str, problems: Sequence[str]) -> None:
    """Raise ShapeError if there are problems."""
    if problems:
        raise ShapeError(f"{operation}: " + "; ".join(problems))


def into_buffer(buffer: torch.Tensor | None, result: torch.Tensor) -> torch.Tensor:
    """Copy a result into the caller's buffer, which was checked before; returns what the caller gets."""
    return result if buffer is None else buffer.copy_(result)


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
