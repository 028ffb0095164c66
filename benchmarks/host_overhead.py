"""Host time of the runtime's decisions: support checks, plan lookup, recipe strings, and a whole fused step on a GPU.

    python3 benchmarks/host_overhead.py [--out FILE]

Each figure is the median of nine runs; ratios compare figures of the same process.  Only the fused step needs a GPU.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import results
import torch

import cute_grouped_mlp as cgm
from cute_grouped_mlp import kernels, support
from cute_grouped_mlp.codegen.select import linear_specs

RUNS = 9
#: The fused step's shape: kernels so short that the host is what takes the time.
HIDDEN, FFN, ROWS_PER_GROUP = 128, 128, 16
STEP_GROUPS = (8, 64, 256)
Figures = dict[str, float]


def nanoseconds(call: Callable[[], object], calls: int) -> float:
    """Median over the runs of the time of one call, less that of an empty loop."""

    def run(repeated: Callable[[], object]) -> float:
        start = time.perf_counter_ns()
        for _ in range(calls):
            repeated()
        return (time.perf_counter_ns() - start) / calls

    run(call)
    nothing = statistics.median(run(_nothing) for _ in range(RUNS))
    return statistics.median(run(call) for _ in range(RUNS)) - nothing


def _nothing() -> None: ...


def measure_support(device: torch.device, calls: int) -> Figures:
    """Support predicates: cached and uncached, against a hit of ``functools.lru_cache`` on an equal key."""
    recipe, dtype = cgm.MXFP8BlockScaling(), torch.bfloat16

    @functools.lru_cache(maxsize=1024)
    def cached(kind: type, override: object, dtype: torch.dtype, alignment: int | None, device: torch.device) -> bool:
        return True

    kind = type(recipe)
    # Passed as arguments are: *key would hand over the very tuple that is the key, and skip comparing what is in it.
    figures = {"lru_cache hit, ns": nanoseconds(lambda: cached(kind, None, dtype, None, device), calls)}
    predicates = {
        "module": support.module_grouped_tensor_supported,
        "fuser": support.fuser_grouped_tensor_supported,
    }
    for name, predicate in predicates.items():
        hit = nanoseconds(lambda ask=predicate: ask(recipe, dtype, device=device), calls)
        miss = nanoseconds(lambda ask=predicate.uncached: ask(recipe, dtype, device=device), calls // 10)
        figures[f"{name} predicate, cached, ns"] = hit
        figures[f"{name} predicate, uncached, ns"] = miss
        figures[f"{name} predicate, cached / lru_cache hit"] = hit / figures["lru_cache hit, ns"]
        figures[f"{name} predicate, uncached / cached"] = miss / hit
    return figures


def measure_recipe_string(calls: int) -> Figures:
    """``str(recipe)``: unchanged, and after an assignment, whose own time is taken off."""
    recipe = cgm.NVFP4BlockScaling()
    unchanged = nanoseconds(lambda: str(recipe), calls)

    def assign() -> None:
        recipe.disable_rht = False

    def assign_and_read() -> None:
        recipe.disable_rht = False
        str(recipe)

    rebuilt = nanoseconds(assign_and_read, calls // 10) - nanoseconds(assign, calls // 10)
    return {
        "str(recipe), unchanged, ns": unchanged,
        "str(recipe), rebuilt, ns": rebuilt,
        "str(recipe), rebuilt / unchanged": rebuilt / unchanged,
    }


def measure_plan(device: torch.device, calls: int) -> Figures:
    """Lookup of a plan that exists, and 100 alternations of no-grad and grad."""
    mlp = cgm.GroupedMLP(8, HIDDEN, FFN, device=device, dtype=torch.bfloat16)
    recipe = cgm.HighPrecision()
    x = torch.randn(8 * ROWS_PER_GROUP, HIDDEN, device=device, dtype=torch.bfloat16)
    sizes = torch.full((8,), ROWS_PER_GROUP, device=device, dtype=torch.int32)
    fuser, params = mlp.fuser, list(mlp.parameters())
    figures = {"plan hit, ns": nanoseconds(lambda: fuser.select(recipe, 0, x, params), calls)}
    fuser.plan_cache_clear()
    resets = fuser.recipe_state_resets
    for step in range(200):
        with torch.set_grad_enabled(step % 2 == 1), cgm.autocast(recipe=recipe):
            mlp(x, sizes)
    resets = fuser.recipe_state_resets - max(resets, 1)
    figures["plans built in 100 no-grad/grad alternations"] = float(fuser.plan_cache_info().misses)
    figures["state resets in them"] = float(resets)
    return figures


class Nothing(torch.autograd.Function):
    """What any operation costs that autograd sees as one node with these inputs: the floor of a step's host time."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
        """Return the input."""
        ctx.save_for_backward(x, *inputs)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return what needs no computing as gradients."""
        _, *inputs = ctx.saved_tensors
        return (dy, *inputs)


def measure_pieces(device: torch.device, calls: int) -> Figures:
    """What a step is made of besides Python: launches (7 in it), and tensors (10 in it)."""
    mlp = cgm.GroupedMLP(8, HIDDEN, FFN, device=device, dtype=torch.bfloat16)
    x = torch.randn(8 * ROWS_PER_GROUP, HIDDEN, device=device, dtype=torch.bfloat16)
    sizes = torch.full((8,), ROWS_PER_GROUP, device=device, dtype=torch.int32)
    spec = linear_specs(
        kernels.provider().arch(device), "bf16", tokens=len(x), groups=8, in_features=FFN, out_features=HIDDEN
    ).fprop
    launch, ctas = kernels.provider().get(spec), kernels.grid(spec, kernels.provider().sm_count(device))
    status, weight, y = kernels.provider().status(device), mlp.fc2.weight.detach(), torch.empty_like(x)
    launched = nanoseconds(lambda: launch(x, weight, sizes, y, status, ctas), min(calls, 1000)) / 1e3
    return {
        "one launch, us": launched,
        "one new tensor, us": nanoseconds(lambda: torch.empty_like(x), calls // 10) / 1e3,
    }


def measure_step(groups: int, device: torch.device, steps: int) -> Figures:
    """Host time of forward and backward of the fused grouped MLP, without waiting for the GPU.

    Also with backward in the calling thread (``torch.autograd.set_multithreading_enabled(False)``): by default PyTorch
    runs it in a thread of the device, and waking threads is what the host's operating system does.
    """
    mlp = cgm.GroupedMLP(groups, HIDDEN, FFN, device=device, dtype=torch.bfloat16)
    tokens = groups * ROWS_PER_GROUP
    x = torch.randn(tokens, HIDDEN, device=device, dtype=torch.bfloat16, requires_grad=True)
    probs = torch.rand(tokens, device=device, requires_grad=True)
    sizes = torch.full((groups,), ROWS_PER_GROUP, device=device, dtype=torch.int32)
    dy = torch.randn_like(x)
    inputs = (x, probs, *mlp.parameters())

    def microseconds(call: Callable[[], torch.Tensor]) -> tuple[float, float]:
        torch.cuda.synchronize()
        forward = backward = 0
        for _ in range(steps):
            start = time.perf_counter_ns()
            y = call()
            middle = time.perf_counter_ns()
            torch.autograd.grad(y, inputs, dy)
            backward += time.perf_counter_ns() - middle
            forward += middle - start
        return forward / steps / 1e3, backward / steps / 1e3

    def fused() -> torch.Tensor:
        return mlp(x, sizes, probs)

    def nothing() -> torch.Tensor:
        return Nothing.apply(*inputs)  # type: ignore[no-untyped-call,no-any-return]

    microseconds(fused)
    runs = [microseconds(fused) for _ in range(RUNS)]
    floor = [sum(microseconds(nothing)) for _ in range(RUNS)]
    with torch.autograd.set_multithreading_enabled(False):
        single = [sum(microseconds(fused)) for _ in range(RUNS)]
        single_floor = [sum(microseconds(nothing)) for _ in range(RUNS)]
    if not isinstance(mlp.fuser.last_plan.forward_ops[0][0], cgm.FusedGroupedMLP):
        raise RuntimeError(f"the module does not run fused:\n{cgm.explain(mlp, x, sizes, probs)}")
    return {
        f"fused forward, G={groups}, us": statistics.median(forward for forward, _ in runs),
        f"fused backward, G={groups}, us": statistics.median(backward for _, backward in runs),
        f"fused forward + backward, G={groups}, us": statistics.median(map(sum, runs)),
        f"empty autograd function, same inputs, G={groups}, us": statistics.median(floor),
        f"fused forward + backward, one thread, G={groups}, us": statistics.median(single),
        f"empty autograd function, one thread, G={groups}, us": statistics.median(single_floor),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the table, write the results file if asked to."""
    parser = argparse.ArgumentParser(description="Measure the host time of the runtime's decisions.")
    parser.add_argument("--calls", type=int, default=200_000, help="calls in each run (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=200, help="fused steps in each run (default: %(default)s)")
    parser.add_argument("--commit", help="where there is no .git (default: $GIT_COMMIT, else git describe)")
    parser.add_argument("--out", type=Path, help="results file, for example benchmarks/results/DATE-GPU-host.json")
    arguments = parser.parse_args(argv)

    gpu = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu", 0)
    figures = measure_support(device, arguments.calls)
    figures |= measure_recipe_string(arguments.calls)
    figures |= measure_plan(device, arguments.calls)
    predicate = figures["fuser predicate, cached, ns"]
    figures["plan hit / fuser predicate, cached"] = figures["plan hit, ns"] / predicate
    figures |= measure_pieces(device, arguments.calls) if gpu else {}
    for groups in STEP_GROUPS if gpu else ():
        figures |= measure_step(groups, device, arguments.steps)

    for name, value in figures.items():
        print(f"{name:<56}{value:12.2f}")
    if not gpu:
        print("no GPU: the fused step was not measured")
    if arguments.out:
        result = results.environment(arguments.commit)
        result["rows"] = [{"figure": name, "value": round(value, 4)} for name, value in figures.items()]
        results.write(result, arguments.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
