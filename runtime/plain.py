"""Which tensors kernels may be given: plain ones, whose address is that of their data.

A ``DTensor`` has no data of its own, and neither has a fake tensor or another subclass that redefines every operation:
an address taken of one is 0, and a kernel that is launched on it takes the process with it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from .errors import ShapeError

#: What tensors are as a rule.
PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, type(None)})


def is_plain(t: torch.Tensor) -> bool:
    """Whether a tensor holds its own data: its class redefines no operation below autograd."""
    return type(t) in PLAIN or type(t).__torch_dispatch__ is torch.Tensor.__torch_dispatch__


def is_sharded(t: Any) -> bool:
    """Whether something is a ``DTensor``; without importing what defines it."""
    return type(t).__name__ == "DTensor" and hasattr(t, "placements") and hasattr(t, "to_local")


def local(t: Any, name: str = "a parameter") -> Any:
    """Return what a parameter holds in this process: itself, or the part of a ``DTensor`` that is sharded by experts.

    Differentiable: the gradient of the part comes back as a ``DTensor`` of the same placement.

    Parameters
    ----------
    t
        A tensor, or None.
    name
        For the message.

    Raises
    ------
    ShapeError
        If it is a ``DTensor`` with another placement than ``Shard(0)`` over one dimension of a mesh.
    """
    if type(t) in PLAIN or not is_sharded(t):
        return t
    placements = tuple(t.placements)
    if len(placements) == 1 and placements[0].is_shard(0):
        return t.to_local()
    raise ShapeError(
        f"{name} is a DTensor with placements {placements}; allowed: Shard(0) over one dimension of a mesh, experts by "
        "process. Apply fully_shard to the GroupedMLP (or to a module around it), not to fc1, fc2 or their parameters; "
        "of another placement pass .full_tensor() or .to_local()"
    )


def like_parameter(part: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return a gradient of what :func:`local` gave as the parameter takes it."""
    if not is_sharded(parameter):
        return part
    sharded: Any = parameter
    made: torch.Tensor = type(sharded).from_local(part, sharded.device_mesh, sharded.placements)
    return made


def arrived(t: Any) -> Any:
    """Return the result of a collective that may be under way as a plain tensor; anything else as it is."""
    return t.clone() if type(t).__name__ == "AsyncCollectiveTensor" else t


def require_plain(named: Iterable[tuple[str, Any]]) -> None:
    """Check that tensors hold their own data.

    Parameters
    ----------
    named
        Names and tensors; what is no tensor is somebody else's to refuse.

    Raises
    ------
    ShapeError
        If some do not; names all of them, and what to do.
    """
    problems = []
    for name, t in named:
        if type(t) in PLAIN or not isinstance(t, torch.Tensor) or is_plain(t):
            continue
        advice = "pass .to_local()" if is_sharded(t) else "pass a plain tensor"
        problems.append(f"{name} is a {type(t).__name__}, which kernels cannot read: {advice}")
    if problems:
        raise ShapeError("; ".join(problems))


def has_memory(t: torch.Tensor) -> bool:
    """Whether there is memory behind a tensor: not on the meta device, not freed by ``storage.resize_(0)``."""
    return not t.numel() or bool(t.data_ptr())


def require_memory(named: Iterable[tuple[str, Any]]) -> None:
    """Check that there is memory behind plain tensors.

    Parameters
    ----------
    named
        Names and tensors; what is no tensor is somebody else's to refuse.

    Raises
    ------
    ShapeError
        If there is none behind some; names all of them, and what to do.
    """
    problems = []
    for name, t in named:
        if not isinstance(t, torch.Tensor) or has_memory(t):
            continue
        advice = "is on the meta device" if t.is_meta else "has no memory behind it"
        problems.append(f"{name} {advice}, where kernels cannot read")
    if problems:
        raise ShapeError(
            "; ".join(problems) + ". Allowed: tensors with data. fully_shard frees gathered parameters after the "
            "forward of the module that it was applied to: call that module; one on the meta device needs to_empty()"
        )


def readable_gradient(grad: torch.Tensor) -> torch.Tensor:
    """Return the gradient of an output as kernels can read it.

    Parameters
    ----------
    grad
        As autograd gives it.

    Raises
    ------
    ShapeError
        If there is no data of its own behind it.
    """
    if type(grad) in PLAIN and has_memory(grad):
        return grad
    grad = arrived(grad)
    require_plain([("the gradient of the output", grad)])
    require_memory([("the gradient of the output", grad)])
    return grad
