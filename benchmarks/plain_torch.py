"""The peer: grouped GEMMs of torch and a compiled activation, written as a careful user of plain torch would."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from workload import Workload

Outputs = dict[str, torch.Tensor]


def activation(z: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
    """a (T, F) of z (T, 2F), contiguous [gate | up], in fp32 and rounded once."""
    gate, up = z.float().chunk(2, -1)
    return (F.silu(gate) * up * probs[:, None]).to(z.dtype)


def activation_gradient(da: torch.Tensor, z: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """dz (T, 2F) and dprobs (T,)."""
    gate, up = z.float().chunk(2, -1)
    da = da.float()
    sigmoid = gate.sigmoid()
    silu = gate * sigmoid
    scaled = da * probs[:, None]
    dgate = scaled * up * (sigmoid + silu * (1 - sigmoid))
    dz = torch.cat((dgate, scaled * silu), -1).to(z.dtype)
    return dz, (da * silu * up).sum(-1)


def activation_gradient_and_a(da: torch.Tensor, z: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """dz (T, 2F), dprobs (T,) and a (T, F) once more: what this project's ``dgrad_act`` writes."""
    return *activation_gradient(da, z, probs), activation(z, probs)


@functools.cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function with torch's compiler, once for each shape."""
    return torch.compile(function, dynamic=False)


def grouped_mm(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """One grouped GEMM, in bf16."""
    return torch._grouped_mm(a, b, offs=offs)


def run(kernel: str, w: Workload) -> Outputs:
    """Compute what a kernel of this project computes.

    ``wgrad`` of torch writes nothing for an empty group, but there are none in these workloads.
    """
    if kernel == "fprop_act":
        z = grouped_mm(w.x, w.w1.transpose(1, 2), w.offs)
        return {"z": z, "a": compiled(activation)(z, w.probs)}
    if kernel == "fprop":
        return {"y": grouped_mm(w.a, w.w2.transpose(1, 2), w.offs)}
    if kernel == "dgrad_act":
        da = grouped_mm(w.dy, w.w2, w.offs)
        dz, dprobs, a = compiled(activation_gradient_and_a)(da, w.z, w.probs)
        return {"dz": dz, "dprobs": dprobs, "a": a}
    if kernel == "dgrad":
        return {"dx": grouped_mm(w.dz, w.w1, w.offs)}
    if kernel == "wgrad1":
        return {"dw1": grouped_mm(w.dz.t(), w.x, w.offs)}
    if kernel == "wgrad2":
        return {"dw2": grouped_mm(w.dy.t(), w.a, w.offs)}
    raise ValueError(f"unknown kernel {kernel!r}")


class GroupedMLPFunction(torch.autograd.Function):
    """Forward and backward of the grouped MLP.  Keeps a from the forward: cheaper here than another pass."""

    @staticmethod
    def forward(
        ctx,
        x: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        probs: torch.Tensor,
        offs: torch.Tensor,
    ) -> torch.Tensor:
        """Return y (T, H)."""
        z = grouped_mm(x, w1.transpose(1, 2), offs)
        a = compiled(activation)(z, probs)
        ctx.save_for_backward(x, w1, w2, probs, offs, z, a)
        return grouped_mm(a, w2.transpose(1, 2), offs)

    @staticmethod
    def backward(ctx, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return dx, dw1, dw2, dprobs."""
        x, w1, w2, probs, offs, z, a = ctx.saved_tensors
        dz, dprobs = compiled(activation_gradient)(grouped_mm(dy, w2, offs), z, probs)
        dw2 = grouped_mm(dy.t(), a, offs)
        dx = grouped_mm(dz, w1, offs)
        return dx, grouped_mm(dz.t(), x, offs), dw2, dprobs, None


def make_step(w: Workload):
    """A call that runs forward and backward and returns y and every gradient."""
    x, probs, w1, w2 = (t.detach().requires_grad_() for t in (w.x, w.probs, w.w1, w.w2))

    def step() -> Outputs:
        y = GroupedMLPFunction.apply(x, w1, w2, probs, w.offs)
        dx, dprobs, dw1, dw2 = torch.autograd.grad(y, (x, probs, w1, w2), w.dy)
        return {"y": y.detach(), "dx": dx, "dprobs": dprobs, "dw1": dw1, "dw2": dw2}

    return step
