"""Host time of the runtime's decisions: support checks, plan lookup, recipe strings, and a whole fused step on a GPU.

    python3 benchmarks/host_overhead.py [--out FILE]

Each figure is the median of nine runs.  What is compared is timed in turns, and a ratio is the median of those of the
turns: the speed of a host moves, by half on virtual machines.  Only the fused step needs a GPU.
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
#: Layers of the stack whose time is given per layer: one change of threads for all of them, as in a model.
LAYERS = 16
Figures = dict[str, float]


Turns = dict[str, list[float]]


def in_turns(repeated: dict[str, tuple[Callable[[], object], int]]) -> Turns:
    """Time of one call of each, less that of an empty loop, in each turn; with how often each is called."""

    def run(call: Callable[[], object], calls: int) -> float:
        start = time.perf_counter_ns()
        for _ in range(calls):
            call()
        return (time.perf_counter_ns() - start) / calls

    times: Turns = {name: [] for name in repeated}
    for turn in range(1 + RUNS):
        nothing = run(_nothing, 20_000)
        for name, (call, calls) in repeated.items():
            took = run(call, calls) - nothing
            if turn:  # the first warms up
                times[name].append(took)
    return times


def ratio(times: Turns, name: str, to: str) -> float:
    """Median over the turns of how much longer one call took than another."""
    return statistics.median(a / b for a, b in zip(times[name], times[to], strict=True))


def medians(times: Turns) -> Figures:
    """Medians over the turns, in nanoseconds."""
    return {f"{name}, ns": statistics.median(found) for name, found in times.items()}


def _nothing() -> None: ...


def measure_support(device: torch.device, calls: int) -> Figures:
    """Support predicates, and the lookup of a plan that exists, against a hit of ``functools.lru_cache``."""
    recipe, dtype = cgm.MXFP8BlockScaling(), torch.bfloat16

    @functools.lru_cache(maxsize=1024)
    def cached(kind: type, override: object, dtype: torch.dtype, alignment: int | None, device: torch.device) -> bool:
        return True

    kind = type(recipe)
    module, fuser = support.module_grouped_tensor_supported, support.fuser_grouped_tensor_supported
    mlp = cgm.GroupedMLP(8, HIDDEN, FFN, device=device, dtype=dtype)
    x = torch.randn(8 * ROWS_PER_GROUP, HIDDEN, device=device, dtype=dtype)
    plain, params, select = cgm.HighPrecision(), list(mlp.parameters()), mlp.fuser.select
    times = in_turns(
        {
            # Passed as arguments are: *key would hand over the very tuple that is the key, which skips comparisons.
            "lru_cache hit": (lambda: cached(kind, None, dtype, None, device), calls),
            "module predicate, cached": (lambda: module(recipe, dtype, device=device), calls),
            "module predicate, uncached": (lambda: module.uncached(recipe, dtype, device=device), calls // 10),
            "fuser predicate, cached": (lambda: fuser(recipe, dtype, device=device), calls),
            "fuser predicate, uncached": (lambda: fuser.uncached(recipe, dtype, device=device), calls // 10),
            "plan hit": (lambda: select(plain, 0, x, params), calls),
        }
    )
    figures = medians(times)
    for name in ("module", "fuser"):
        hit = f"{name} predicate, cached"
        figures[f"{hit} / lru_cache hit"] = ratio(times, hit, "lru_cache hit")
        figures[f"{name} predicate, uncached / cached"] = ratio(times, f"{name} predicate, uncached", hit)
    figures["plan hit / fuser predicate, cached"] = ratio(times, "plan hit", "fuser predicate, cached")
    return figures


def measure_recipe_string(calls: int) -> Figures:
    """``str(recipe)``: unchanged, and after an assignment, whose own time is taken off."""
    recipe = cgm.NVFP4BlockScaling()

    def assign() -> None:
        recipe.disable_rht = False

    def assign_and_read() -> None:
        recipe.disable_rht = False
        str(recipe)

    few = calls // 10
    times = in_turns({"read": (lambda: str(recipe), calls), "set": (assign, few), "both": (assign_and_read, few)})
    rebuilt = [both - alone for both, alone in zip(times["both"], times["set"], strict=True)]
    times = {"str(recipe), unchanged": times["read"], "str(recipe), rebuilt": rebuilt}
    factor = ratio(times, "str(recipe), rebuilt", "str(recipe), unchanged")
    return medians(times) | {"str(recipe), rebuilt / unchanged": factor}


def measure_plan(device: torch.device) -> Figures:
    """100 alternations of no-grad and grad."""
    mlp = cgm.GroupedMLP(8, HIDDEN, FFN, device=device, dtype=torch.bfloat16)
    recipe = cgm.HighPrecision()
    x = torch.randn(8 * ROWS_PER_GROUP, HIDDEN, device=device, dtype=torch.bfloat16)
    sizes = torch.full((8,), ROWS_PER_GROUP, device=device, dtype=torch.int32)
    fuser = mlp.fuser
    with cgm.autocast(recipe=recipe):
        mlp(x, sizes)
    fuser.plan_cache_clear()
    resets = fuser.recipe_state_resets
    for step in range(200):
        with torch.set_grad_enabled(step % 2 == 1), cgm.autocast(recipe=recipe):
            mlp(x, sizes)
    resets = fuser.recipe_state_resets - max(resets, 1)
    return {
        "plans built in 100 no-grad/grad alternations": float(fuser.plan_cache_info().misses),
        "state resets in them": float(resets),
    }


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
    times = in_turns(
        {
            "one launch": (lambda: launch(x, weight, sizes, y, status, ctas), min(calls, 1000)),
            "one new tensor": (lambda: torch.empty_like(x), calls // 10),
        }
    )
    return {f"{name}, us": statistics.median(found) / 1e3 for name, found in times.items()}


def by_hand(mlp: cgm.GroupedMLP, x: torch.Tensor, sizes: torch.Tensor, probs: torch.Tensor) -> Callable[..., Any]:
    """Return the step as one would write it out for these shapes: the same launches and tensors, and no question asked.

    What a step of this package takes longer is what it decides and checks.
    """
    _, planned = mlp.fuser.preview(None, True, x, mlp.pipeline_inputs(x, sizes, probs))
    sms, status = kernels.provider().sm_count(x.device), kernels.provider().status(x.device)
    specs = {step.role: step.spec for step in planned if step.spec is not None}
    launches = {role: (kernels.provider().get(spec), kernels.grid(spec, sms)) for role, spec in specs.items()}
    fprop_act, fprop, dgrad_act, wgrad2, dgrad, wgrad1, reduce_probs = (
        launches[role] for role in ("fprop_act", "fprop", "dgrad_act", "wgrad2", "dgrad", "wgrad1", "reduce_probs")
    )
    tokens, groups = len(x), len(sizes)

    class Step(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, w1: torch.Tensor, probs: torch.Tensor, w2: torch.Tensor) -> Any:
            y, z = x.new_empty(tokens, HIDDEN), x.new_empty(tokens, 2 * FFN)
            a = x.new_empty(tokens, FFN)
            fprop_act[0](x, w1, probs, sizes, z, a, status, fprop_act[1])
            fprop[0](a, w2, sizes, y, status, fprop[1])
            ctx.save_for_backward(x, w1, w2, z, probs)
            return y

        @staticmethod
        def backward(ctx: Any, dy: torch.Tensor) -> Any:
            x, w1, w2, z, probs = ctx.saved_tensors
            dz, a = dy.new_empty(tokens, 2 * FFN), dy.new_empty(tokens, FFN)
            partial = dy.new_empty(1, tokens, dtype=torch.float32)
            dgrad_act[0](dy, w2, z, probs, sizes, dz, a, partial, status, dgrad_act[1])
            dw2, dx = dy.new_empty(groups, HIDDEN, FFN), dy.new_empty(tokens, HIDDEN)
            wgrad2[0](dy, a, sizes, dw2, status, wgrad2[1])
            dgrad[0](dz, w1, sizes, dx, status, dgrad[1])
            dw1, dprobs = dy.new_empty(groups, 2 * FFN, HIDDEN), partial.new_empty(tokens)
            wgrad1[0](dz, x, sizes, dw1, status, wgrad1[1])
            reduce_probs[0](partial, dprobs, reduce_probs[1])
            return dx, dw1, dprobs, dw2

    def call(x: torch.Tensor, probs: torch.Tensor) -> Any:
        return Step.apply(x, mlp.fc1.weight, probs, mlp.fc2.weight)  # type: ignore[no-untyped-call]

    return call


def measure_step(groups: int, device: torch.device, steps: int) -> Figures:
    """Host time of forward and backward of the fused grouped MLP, without waiting for the GPU.

    Beside it the same kernels called by hand, and an empty autograd function.  Also per layer of a stack, which changes
    threads once; and with backward in the calling thread (``torch.autograd.set_multithreading_enabled(False)``): by
    default PyTorch runs it in a thread of the device, and waking threads is what the host's operating system does.
    """
    mlps = [cgm.GroupedMLP(groups, HIDDEN, FFN, device=device, dtype=torch.bfloat16) for _ in range(LAYERS)]
    tokens = groups * ROWS_PER_GROUP
    x = torch.randn(tokens, HIDDEN, device=device, dtype=torch.bfloat16, requires_grad=True)
    layers = [(mlp, torch.rand(tokens, device=device, requires_grad=True)) for mlp in mlps]
    sizes = torch.full((groups,), ROWS_PER_GROUP, device=device, dtype=torch.int32)
    dy = torch.randn_like(x)
    written_out = {mlp: by_hand(mlp, x, sizes, probs) for mlp, probs in layers}
    ways: dict[str, Callable[..., torch.Tensor]] = {
        "fused": lambda x, mlp, probs: mlp(x, sizes, probs),
        "by hand": lambda x, mlp, probs: written_out[mlp](x, probs),
        "empty autograd function": lambda x, mlp, probs: Nothing.apply(x, probs, *mlp.parameters()),
    }

    def microseconds(way: str, count: int) -> float:
        """Time of one layer's forward and backward in a stack of so many."""
        call, stack = ways[way], layers[:count]
        inputs = [x, *(t for mlp, probs in stack for t in (probs, *mlp.parameters()))]
        torch.cuda.synchronize()
        start = time.perf_counter_ns()
        for _ in range(steps // count):
            y = x
            for mlp, probs in stack:
                y = call(y, mlp, probs)
            torch.autograd.grad(y, inputs, dy)
        return (time.perf_counter_ns() - start) / (steps // count * count) / 1e3

    figures: Figures = {}
    for threads, several in (("", True), (", one thread", False)):
        for of, count in (("", 1), (f" per layer of {LAYERS}", LAYERS)):
            with torch.autograd.set_multithreading_enabled(several):
                # In turns: the host's speed moves, and ratios are those of a round.
                rounds = [{way: microseconds(way, count) for way in ways} for _ in range(1 + RUNS)][1:]
            name = f"{of}{threads}, G={groups}"
            for way in ways:
                figures[f"{way}{name}, us"] = statistics.median(r[way] for r in rounds)
            figures[f"fused / by hand{name}"] = statistics.median(r["fused"] / r["by hand"] for r in rounds)
    if not all(isinstance(mlp.fuser.last_plan.direct, cgm.FusedGroupedMLP) for mlp in mlps):
        raise RuntimeError(f"the module does not run fused:\n{cgm.explain(mlps[0], x, sizes, layers[0][1])}")
    return figures


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
    figures |= measure_plan(device)
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
