"""What ``train_moe.py`` measures and prints."""

from __future__ import annotations

import itertools
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import cute_grouped_mlp as cgm
from cute_grouped_mlp.codegen.compile import compile_many
from cute_grouped_mlp.codegen.select import step_specs
from cute_grouped_mlp.codegen.spec import Arch, DType, GluLayout, KernelSpec
from cute_grouped_mlp.recipe import FLAG

#: Largest difference of the two losses in nats, at any step, that rounding explains.
LOSS_BOUND = 0.05
#: Floating-point operations of the kernels of a training step, in units of T·H·F.
KERNEL_FLOPS = {"fprop_act": 4, "fprop": 2, "dgrad_act": 2, "dgrad": 4, "wgrad": 6}
STEP_FLOPS = sum(KERNEL_FLOPS.values())

#: What the experts get: rows (T, H), split sizes (G,), probs (T,).
Inputs = tuple[Tensor, Tensor, Tensor]

console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)


class TimedKernels:
    """The kernels that ``cgm`` runs, with a CUDA event before and after each launch."""

    def __init__(self) -> None:
        self.kernels = cgm.kernels.provider()
        self.launches: list[tuple[KernelSpec, torch.cuda.Event, torch.cuda.Event]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.kernels, name)

    def get(self, spec: KernelSpec) -> Callable[..., None]:
        """Return the kernel of a spec, timed."""
        launch = self.kernels.get(spec)

        def timed(*args: Any) -> None:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            launch(*args)
            end.record()
            self.launches.append((spec, begin, end))

        return timed


def expert_step(experts: nn.Module, inputs: Inputs) -> None:
    """Run forward and backward of the experts alone."""
    x, split_sizes, probs = inputs
    y = experts(x, split_sizes, probs)
    torch.autograd.grad(y, (x, probs, *experts.parameters()), x.detach())


def time_steps(all_experts: Sequence[nn.Module], inputs: Inputs, rounds: int) -> list[float]:
    """Return the median milliseconds of a step of each of the experts, measured in turn."""
    wait = torch.cuda.synchronize if inputs[0].is_cuda else lambda: None
    times: list[list[float]] = [[] for _ in all_experts]
    for _ in range(rounds + 1):
        for experts, its_times in zip(all_experts, times, strict=True):
            wait()
            start = time.perf_counter()
            expert_step(experts, inputs)
            wait()
            its_times.append(1e3 * (time.perf_counter() - start))
    return [statistics.median(its_times[1:]) for its_times in times]


def show_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table."""
    table = Table(*columns, title=title, title_justify="left")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def show_machine(device: torch.device) -> None:
    """Print what this machine has."""
    if device.type == "cuda":
        machine = torch.cuda.get_device_name(device)
    else:
        machine = f"no GPU in use, so plain torch runs; {os.cpu_count()} processor cores"
    console.print(f"{machine}; torch {torch.__version__}, Python {platform.python_version()}")


def show_losses(losses: Tensor, *, judged: bool = True) -> bool:
    """Print both loss curves, (steps, 2), side by side; returns whether they agree, and prints it where judged."""
    steps = sorted({*range(0, len(losses), 5), len(losses) - 1})
    pairs = [(step + 1, *losses[step].tolist()) for step in steps]
    rows = [(str(step), f"{ours:.4f}", f"{theirs:.4f}", f"{ours - theirs:+.4f}") for step, ours, theirs in pairs]
    show_table("loss, nats per byte", ("step", "cute_grouped_mlp", "plain torch", "difference"), rows)
    largest = (losses[:, 0] - losses[:, 1]).abs().max().item()
    agree = largest <= LOSS_BOUND  # false for NaN
    verdict = "the curves agree" if agree else "the curves DISAGREE"
    console.print(f"largest difference {largest:.4f}" + (f", bound {LOSS_BOUND}: {verdict}" if judged else ""))
    return agree


def show_kernels(mlp: cgm.GroupedMLP, inputs: Inputs, unit: int, steps: int = 10) -> None:
    """Print which kernels ran in a training step, and how fast; ``unit`` is T·H·F."""
    timed = TimedKernels()
    with cgm.kernels.using(timed):
        expert_step(mlp, inputs)
        timed.launches.clear()
        for _ in range(steps):
            expert_step(mlp, inputs)
        torch.cuda.synchronize()
    rows = []
    for spec in dict.fromkeys(spec for spec, _, _ in timed.launches):
        ms = sum(begin.elapsed_time(end) for launched, begin, end in timed.launches if launched == spec) / steps
        flops = KERNEL_FLOPS.get(spec.kernel.value, 0) * unit
        rows.append((spec.name, f"{ms:.3f}", f"{flops / ms / 1e9:.0f}" if flops else ""))
    show_table("kernels of one training step", ("kernel", "ms", "TFLOP/s"), rows)


def show_speed(ours: nn.Module, theirs: nn.Module, inputs: Inputs, unit: int) -> None:
    """Print the speed of forward plus backward of both experts; ``unit`` is T·H·F."""
    on_gpu = inputs[0].is_cuda
    times = time_steps((ours, theirs), inputs, rounds=30 if on_gpu else 5)
    baseline = "torch._grouped_mm, compiled activation" if on_gpu else "a loop over the groups"
    names = ("cute_grouped_mlp", f"plain torch: {baseline}")
    rows = [(name, f"{ms:.2f}", f"{STEP_FLOPS * unit / ms / 1e9:.3g}") for name, ms in zip(names, times, strict=True)]
    show_table("experts alone, forward and backward", ("", "ms", "TFLOP/s"), rows)
    if on_gpu:
        console.print(f"{times[1] / times[0]:.2f} times the speed of plain torch")
    else:
        console.print("both are plain torch here, so their times say nothing about the kernels: those need a GPU")


def show_switch(mlp: cgm.GroupedMLP, inputs: Inputs) -> None:
    """Switch the fusion of one recipe off and on again: each flag has its plan, and going back builds none."""
    recipe = cgm.HighPrecision()
    mlp.fuser.plan_cache_clear()
    rows = []
    for flag in (None, False, None):
        recipe.enable_cutedsl_fused_grouped_mlp = flag
        with cgm.autocast(recipe=recipe):
            expert_step(mlp, inputs)
        ops = ", ".join(type(op).__name__ for op, _ in mlp.fuser.last_plan.forward_ops)
        cache = mlp.fuser.plan_cache_info()
        rows.append((str(flag), ops, f"{cache.misses} built, {cache.hits} found"))
    show_table("one recipe, its switch flipped and flipped back", (FLAG, "forward runs", "plans so far"), rows)


def show_cross_compiled(tokens: int, groups: int, hidden: int, ffn: int) -> None:
    """Generate the kernels that a training step of a layer runs on Hopper, and compile them on this machine."""
    shape = {"tokens": tokens, "groups": groups, "hidden": hidden, "ffn": ffn}
    step = step_specs(Arch.SM90A, "bf16", "swiglu", GluLayout.CONTIGUOUS, DType.FP32, **shape, backward=True)
    console.print(f"generating the {len(step.all)} kernels that a GPU would run for {shape}, and compiling them")
    done = itertools.count(1)

    def tell(spec: KernelSpec, result: object) -> None:
        console.print(f"compiled {next(done)} of {len(step.all)}: {spec.name}")

    with tempfile.TemporaryDirectory() as folder:
        compiled = compile_many(step.all, Path(folder), progress=tell)
    rows = []
    for spec, result in compiled.items():
        if isinstance(result, cgm.CompileError):
            raise result
        used = result.report
        smem = "?" if used.smem is None else f"{used.smem / 1024:.0f} KiB"
        mma = ", ".join(name.split(".")[0] for name in used.mma)
        rows.append((spec.name, str(used.registers), f"{used.spill_stores} B", smem, mma, f"{used.seconds:.1f} s"))
    columns = ("kernel", "registers", "spills", "shared memory", "tensor core", "compiled in")
    show_table("kernels compiled for sm_90a on this machine", columns, rows)
