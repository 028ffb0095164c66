"""The grouped MLP's kernels and its training step, against plain torch, in one call on a GPU.

    python3 benchmarks/grouped_mlp.py            # two shapes, balanced and zipf, every kernel and the step
    python3 benchmarks/grouped_mlp.py --shapes qwen3-16k --kernels fprop_act --tiles 128x256_2x1_co,128x192_1x1_pp

Every implementation of a row is timed in every round, in random order (see timing.py); inputs are random, outputs are
poisoned with NaN and compared with torch's before anything is timed.  README.md says how to read the results.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import ours
import plain_torch
import results
import torch
from timing import Times, interleave
from workload import DEFAULT_SHAPES, KERNELS, SHAPES, SPLITS, Workload, make_workload

from cute_grouped_mlp import kernels
from cute_grouped_mlp.codegen.spec import TileConfig

#: Largest rms(ours - torch) / rms(torch).  Each is within 5e-3 of exact arithmetic (docs/acceptance.md, E).
TOLERANCE = 1e-2
Call = Callable[[], Any]


def difference(got: torch.Tensor, expected: torch.Tensor) -> float:
    """rms(got - expected) / rms(expected); NaN if any element of either is."""
    total = error = 0.0
    for some, other in zip(got.flatten().split(1 << 28), expected.flatten().split(1 << 28), strict=True):
        total += float(other.double().square().sum())
        error += float((some.double() - other.double()).square().sum())
    return math.sqrt(error / total)


def poison(outputs: Iterable[torch.Tensor]) -> None:
    """Fill tensors of the same sizes with NaN and free them: what is allocated next holds NaN."""
    nan = [torch.full_like(t, math.nan) for t in outputs]
    del nan


def make_calls(kernel: str, w: Workload, impls: Sequence[str], tiles: Sequence[TileConfig]) -> dict[str, Call]:
    """The implementations of a row, by name, after comparing each of ours with torch.

    Raises
    ------
    ArithmeticError
        If an output of ours differs from torch's by more than :data:`TOLERANCE`.
    """
    peer = plain_torch.make_step(w) if kernel == "step" else lambda: plain_torch.run(kernel, w)
    calls: dict[str, Call] = {"torch": peer} if "torch" in impls else {}
    if "ours" not in impls:
        return calls
    expected = peer()
    chosen = ours.specs_of(w.shape, w.x.device)
    for tile in [None, *tiles] if kernel != "step" else [None]:
        name = "ours" if tile is None else f"ours-{tile}"
        if kernel == "step":
            call = ours.make_step(w)
            poison(expected.values())
            got = call()
        else:
            spec = ours.with_tile(getattr(chosen, kernel), tile)
            call, got = ours.make_kernel(kernel, spec, chosen.reduce, w)
            for tensor in got.values():
                tensor.fill_(math.nan)
            call()
        differences = {key: difference(got[key], tensor) for key, tensor in expected.items()}
        if not all(value <= TOLERANCE for value in differences.values()):  # not: any NaN is worse than any bound
            raise ArithmeticError(f"{name} differs from torch: {differences}")
        calls[name] = call
    return calls


def make_rows(kernel: str, w: Workload, times: dict[str, Times]) -> list[dict[str, Any]]:
    """Rows of the results file."""
    rows = []
    for impl, measured in times.items():
        row = {
            "shape": w.shape.name,
            "split": w.split,
            "kernel": kernel,
            "impl": impl,
            "ms": round(measured.median, 5),
            "tflops": round(w.shape.flops(kernel) / measured.median / 1e9, 1),
            "quartiles_ms": [round(value, 5) for value in measured.quartiles],
            "rounds": len(measured.ms),
            "launches": measured.launches,
        }
        if "torch" in times and impl != "torch":
            row["speed_over_torch"] = round(measured.speed_over(times["torch"]), 4)
        rows.append(row)
    return rows


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    """Print the results, one line a row."""
    width = max((len(row["impl"]) for row in rows), default=4)
    columns = f"{'shape':<11}{'split':<10}{'kernel':<11}{'impl':<{width}}{'ms':>9}{'TFLOP/s':>9}"
    print(f"\n{columns}  quartiles, ms    over torch")
    for row in rows:
        low, high = row["quartiles_ms"]
        over = f"{row['speed_over_torch']:10.3f}" if "speed_over_torch" in row else ""
        print(
            f"{row['shape']:<11}{row['split']:<10}{row['kernel']:<11}{row['impl']:<{width}}"
            f"{row['ms']:9.3f}{row['tflops']:9.0f}  {low:7.3f}-{high:<7.3f} {over}"
        )


def names(allowed: Iterable[str]) -> Callable[[str], list[str]]:
    """Parser of a comma-separated list of names."""
    known = list(allowed)

    def parse(text: str) -> list[str]:
        wrong = [name for name in text.split(",") if name not in known]
        if wrong:
            raise argparse.ArgumentTypeError(f"{', '.join(wrong)}; allowed: {', '.join(known)}")
        return text.split(",")

    return parse


def tile_list(text: str) -> list[TileConfig]:
    """Parse a comma-separated list of tile configs."""
    try:
        return [ours.parse_tile(part) for part in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description="Time the grouped MLP's kernels and step against plain torch.")
    parser.add_argument("--shapes", type=names(SHAPES), default=list(DEFAULT_SHAPES), help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--splits", type=names(SPLITS), default=list(SPLITS), help=f"of {', '.join(SPLITS)}")
    parser.add_argument("--kernels", type=names(KERNELS), default=list(KERNELS), help=f"of {', '.join(KERNELS)}")
    parser.add_argument("--impls", type=names(("ours", "torch")), default=["ours", "torch"], help="of ours, torch")
    parser.add_argument("--tiles", type=tile_list, default=[], help="also time these, like 128x256_2x1_co")
    parser.add_argument("--rounds", type=int, default=40, help="rounds for each row (default: %(default)s)")
    parser.add_argument(
        "--seconds", type=float, default=200.0, help="fewer rounds where this would be exceeded (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--commit", help="where there is no .git (default: $GIT_COMMIT, else git describe)")
    parser.add_argument("--out", type=Path, help="results file (default: benchmarks/results/<date>-<gpu>-bf16.json)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, write the results file, print the table; returns 1 if anything was wrong."""
    arguments = parse_arguments(argv)
    if not torch.cuda.is_available():
        print("grouped_mlp.py needs a CUDA GPU", file=sys.stderr)
        return 1
    started = time.monotonic()
    device = torch.device("cuda", torch.cuda.current_device())
    rng = random.Random(arguments.seed)
    result = results.environment(arguments.commit)
    rows: list[dict[str, Any]] = []
    failed = []

    if "ours" in arguments.impls:
        wanted = dict.fromkeys(spec for name in arguments.shapes for spec in ours.specs_of(SHAPES[name], device).all)
        for name, kernel, tile in product(arguments.shapes, arguments.kernels, arguments.tiles):
            if kernel != "step":
                wanted[ours.with_tile(getattr(ours.specs_of(SHAPES[name], device), kernel), tile)] = None
        kernels.provider().prepare(list(wanted), device)
        print(f"{len(wanted)} kernels ready after {time.monotonic() - started:.0f} s", flush=True)

    tasks = list(product(arguments.shapes, arguments.splits))
    left = len(tasks) * len(arguments.kernels)
    for shape, split in tasks:
        w = make_workload(SHAPES[shape], split, device, arguments.seed)
        for kernel in arguments.kernels:
            share = (arguments.seconds - (time.monotonic() - started)) / left
            left -= 1
            try:
                calls = make_calls(kernel, w, arguments.impls, arguments.tiles)
            except ArithmeticError as error:
                failed.append(f"{shape} {split} {kernel}: {error}")
                print(failed[-1], flush=True)
                continue
            times = interleave(calls, rounds=arguments.rounds, seconds=share, rng=rng)
            rows += make_rows(kernel, w, times)
            print(f"{shape} {split} {kernel}: {time.monotonic() - started:.0f} s", flush=True)
        del w, calls
        torch.cuda.empty_cache()

    result["rows"] = rows
    path = arguments.out or results.default_path(result, "bf16")
    results.write(result, path)
    print_table(rows)
    print(f"\n{path}: {len(rows)} rows in {time.monotonic() - started:.0f} s")
    for line in failed:
        print(f"WRONG {line}")
    return 1 if failed or results.problems(result) else 0


if __name__ == "__main__":
    sys.exit(main())
