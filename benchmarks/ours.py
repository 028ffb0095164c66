"""This project's kernels and module on a workload."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable

import torch
from workload import Shape, Workload

import cute_grouped_mlp as cgm
from cute_grouped_mlp import kernels
from cute_grouped_mlp.codegen.select import StepSpecs, step_specs
from cute_grouped_mlp.codegen.spec import DType, GluLayout, KernelSpec, Schedule, TileConfig
from cute_grouped_mlp.codegen.tiles import check

Outputs = dict[str, torch.Tensor]
_TILE = re.compile(r"(\d+)x(\d+)_(\d+)x(\d+)_(co|pp)")


def parse_tile(text: str) -> TileConfig:
    """Inverse of ``str(TileConfig)``: ``"128x256_2x1_co"``."""
    match = _TILE.fullmatch(text)
    if match is None:
        raise ValueError(f"tile {text!r} is not like 128x256_2x1_co: tile, cluster, co (cooperative) or pp (pingpong)")
    schedule = {"co": Schedule.COOPERATIVE, "pp": Schedule.PINGPONG}[match[5]]
    return TileConfig(*map(int, match.group(1, 2, 3, 4)), schedule)


def specs_of(shape: Shape, device: torch.device) -> StepSpecs:
    """The kernels that the runtime chooses for a training step."""
    return step_specs(
        kernels.provider().arch(device),
        "bf16",
        "swiglu",
        GluLayout.CONTIGUOUS,
        DType.FP32,
        tokens=kernels.bucket_tokens(kernels.rows_bucket(shape.tokens, shape.groups), shape.groups),
        groups=shape.groups,
        hidden=shape.hidden,
        ffn=shape.ffn,
        backward=True,
    )


def with_tile(spec: KernelSpec, tile: TileConfig | None) -> KernelSpec:
    """The spec with another tile config.

    Raises
    ------
    ValueError
        If that tile config is not valid for the kernel, with every reason.
    """
    if tile is None:
        return spec
    spec = dataclasses.replace(spec, tile=tile)
    if problems := check(spec):
        raise ValueError(f"{tile} is not valid for {spec.kernel.value}: {'; '.join(problems)}")
    return spec


def make_kernel(kernel: str, spec: KernelSpec, reduce: KernelSpec, w: Workload) -> tuple[Callable[[], None], Outputs]:
    """A call that launches one kernel on preallocated outputs, and these outputs.

    ``dgrad_act`` is followed by the sum of its partial dprobs: torch's peer computes dprobs too.
    """
    shape, device = w.shape, w.x.device
    provider = kernels.provider()
    launch, status = provider.get(spec), provider.status(device)
    ctas = kernels.grid(spec, provider.sm_count(device))
    tokens, hidden, ffn, groups = shape.tokens, shape.hidden, shape.ffn, shape.groups

    def empty(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    if kernel == "fprop_act":
        out = {"z": empty(tokens, 2 * ffn), "a": empty(tokens, ffn)}
        return lambda: launch(w.x, w.w1, w.probs, w.sizes, out["z"], out["a"], status, ctas), out
    if kernel == "fprop":
        out = {"y": empty(tokens, hidden)}
        return lambda: launch(w.a, w.w2, w.sizes, out["y"], status, ctas), out
    if kernel == "dgrad":
        out = {"dx": empty(tokens, hidden)}
        return lambda: launch(w.dz, w.w1, w.sizes, out["dx"], status, ctas), out
    if kernel == "wgrad1":
        out = {"dw1": empty(groups, 2 * ffn, hidden)}
        return lambda: launch(w.dz, w.x, w.sizes, out["dw1"], status, ctas), out
    if kernel == "wgrad2":
        out = {"dw2": empty(groups, hidden, ffn)}
        return lambda: launch(w.dy, w.a, w.sizes, out["dw2"], status, ctas), out
    if kernel != "dgrad_act" or spec.tile is None:
        raise ValueError(f"unknown kernel {kernel!r}")

    out = {
        "dz": empty(tokens, 2 * ffn),
        "a": empty(tokens, ffn),
        "dprobs": empty(tokens, dtype=torch.float32),
    }
    partial = empty(-(-ffn // spec.tile.tile_n), tokens, dtype=torch.float32)
    launch_reduce = provider.get(reduce)
    ctas_reduce = kernels.grid(reduce, provider.sm_count(device))

    def dgrad_act() -> None:
        launch(w.dy, w.w2, w.z, w.probs, w.sizes, out["dz"], out["a"], partial, status, ctas)
        launch_reduce(partial, out["dprobs"], ctas_reduce)

    return dgrad_act, out


def make_step(w: Workload) -> Callable[[], Outputs]:
    """A call that runs forward and backward of the module and returns y and every gradient.

    Raises
    ------
    RuntimeError
        If the module's plan is not the fused one; says why.
    """
    shape = w.shape
    mlp = cgm.GroupedMLP(shape.groups, shape.hidden, shape.ffn, device="meta", dtype=torch.bfloat16)
    mlp.fc1.weight = torch.nn.Parameter(w.w1)
    mlp.fc2.weight = torch.nn.Parameter(w.w2)
    x, probs = (t.detach().requires_grad_() for t in (w.x, w.probs))
    wanted = (x, probs, mlp.fc1.weight, mlp.fc2.weight)

    def step() -> Outputs:
        y = mlp(x, w.sizes, probs)
        dx, dprobs, dw1, dw2 = torch.autograd.grad(y, wanted, w.dy)
        return {"y": y.detach(), "dx": dx, "dprobs": dprobs, "dw1": dw1, "dw2": dw2}

    step()
    if not isinstance(mlp.fuser.last_plan.forward_ops[0][0], cgm.FusedGroupedMLP):
        raise RuntimeError(f"the module does not run fused:\n{cgm.explain(mlp, x, w.sizes, probs)}")
    return step
