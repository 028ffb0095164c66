"""Bandwidth of the kernels that quantise, against torch copying as many bytes.

    python3 benchmarks/quantize.py                                   # every variant, two widths
    python3 benchmarks/quantize.py --variants mxfp8,nvfp4 --columns 7168

A row of a kernel counts the bytes that it reads and writes; its ``torch`` row is ``y.copy_(x)`` of as many bytes, half
of them read and half written, timed in the same rounds.  ``over_copy`` is the ratio of the two times within a round.
``tflops`` counts one operation an element.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import results
import torch
from timing import interleave
from workload import make_splits

from cute_grouped_mlp import kernels
from cute_grouped_mlp import quantization as cgq
from cute_grouped_mlp.codegen.spec import KernelSpec
from cute_grouped_mlp.quantizers import launch

E5M2 = torch.float8_e5m2
#: Quantisers of (T, C) with split sizes: activations and gradients.
GROUPED = {
    "mxfp8": cgq.MXFP8Quantizer(),
    "nvfp4": cgq.NVFP4Quantizer(with_rht=True),
    "nvfp4-no-rht": cgq.NVFP4Quantizer(),
    "nvfp4-sr": cgq.NVFP4Quantizer(with_rht=True, stochastic_rounding=True),
    "block-fp8": cgq.Float8BlockQuantizer(block_scaling_dim=1),
    "current": cgq.Float8CurrentScalingQuantizer(),
}
#: Quantisers of (G, N, K): weights.
BATCHED = {
    "mxfp8-weights": cgq.MXFP8Quantizer(),
    "mxfp8-2d-weights": cgq.MXFP8Quantizer(with_2d_quantization=True),
    "nvfp4-2d-weights": cgq.NVFP4Quantizer(with_2d_quantization=True),
    "block-fp8-2d-weights": cgq.Float8BlockQuantizer(),
}
VARIANTS = GROUPED | BATCHED
DIRECTIONS = {"row": (True, False), "col": (False, True), "both": (True, True)}
GROUPS = 64


class Recorder:
    """A provider whose kernels are recorded with their arguments as they are launched."""

    def __init__(self, provider: kernels.KernelProvider) -> None:
        self._provider = provider
        self.launches: list[tuple[KernelSpec, Callable[[], object], int]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._provider, name)

    def get(self, spec: KernelSpec) -> Callable[..., object]:
        """Return the kernel of a spec, which records its call."""
        kernel = self._provider.get(spec)

        def call(*arguments: Any) -> object:
            moved = sum(a.numel() * a.element_size() for a in arguments if isinstance(a, torch.Tensor))
            self.launches.append((spec, lambda: kernel(*arguments), moved))
            return kernel(*arguments)

        return call


def record(name: str, x: torch.Tensor, sizes: torch.Tensor | None, direction: str, emulate: bool) -> Recorder:
    """Quantise once; returns the launches."""
    rowwise, columnwise = DIRECTIONS[direction]
    quantizer, batched = VARIANTS[name], name in BATCHED
    where = {"batched": batched, "rowwise": rowwise, "columnwise": columnwise}
    specs = launch.specs_of(quantizer, x, sizes, emulate=emulate, **where)
    assert specs is not None
    recorder = Recorder(kernels.provider())
    with kernels.using(recorder):
        run = launch.emulated if emulate else launch.quantized
        run(quantizer, specs, x, sizes, batched=batched)
    return recorder


def measure(
    label: str, shape: str, split: str, elements: int, recorder: Recorder, rounds: int, rng: random.Random
) -> list[dict[str, Any]]:
    """Time each launch beside a copy of as many bytes."""
    rows = []
    for spec, call, moved in recorder.launches:
        source = torch.randint(0, 255, (moved // 2,), dtype=torch.uint8, device="cuda")
        target = torch.empty_like(source)
        calls = {label: call, "torch": lambda target=target, source=source: target.copy_(source)}
        times = interleave(calls, rounds=rounds, seconds=4.0, rng=rng)
        ratio = times[label].speed_over(times["torch"])
        for impl, measured in times.items():
            row = {
                "shape": shape,
                "split": split,
                "kernel": "quantize",
                "impl": f"ours-{label}" if impl == label else impl,
                "variant": spec.name,
                "ms": round(measured.median, 5),
                "tflops": round(elements / measured.median / 1e9, 4),
                "tb_per_s": round(moved / measured.median / 1e9, 3),
                "quartiles_ms": [round(value, 5) for value in measured.quartiles],
                "rounds": len(measured.ms),
                "launches": measured.launches,
            }
            rows.append(row | ({"over_copy": round(ratio, 4)} if impl == label else {}))
        ours, copy = rows[-2:]
        print(
            f"{shape:<18}{split:<10}{spec.name.removeprefix('sm90a_bf16_'):<52}{ours['ms']:8.3f} ms"
            f"{ours['tb_per_s']:7.2f} TB/s, copy {copy['tb_per_s']:5.2f}: {ours['over_copy']:.3f}",
            flush=True,
        )
        del source, target
    return rows


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description="Bandwidth of the kernels that quantise, against a copy by torch.")
    parser.add_argument("--variants", type=lambda text: text.split(","), default=list(VARIANTS))
    parser.add_argument("--columns", type=lambda text: [int(c) for c in text.split(",")], default=[2048, 7168])
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--directions", type=lambda text: text.split(","), default=["both"])
    parser.add_argument("--packed", action="store_true", help="also bytes and scales")
    parser.add_argument("--commit", help="where there is no .git (default: $GIT_COMMIT, else git describe)")
    parser.add_argument(
        "--out", type=Path, help="results file (default: benchmarks/results/<date>-<gpu>-quantize.json)"
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, write the results file, print the table."""
    arguments = parse_arguments(argv)
    if not torch.cuda.is_available():
        print("quantize.py needs a CUDA GPU", file=sys.stderr)
        return 1
    started = time.monotonic()
    rng = random.Random(0)
    result = results.environment(arguments.commit)
    rows: list[dict[str, Any]] = []
    for columns in arguments.columns:
        x = torch.randn(arguments.tokens, columns, device="cuda", dtype=torch.bfloat16)
        splits = {
            kind: torch.tensor(make_splits(kind, GROUPS, arguments.tokens), device="cuda")
            for kind in ("balanced", "zipf")
        }
        for name in arguments.variants:
            for direction in arguments.directions:
                for emulate in (True, False) if arguments.packed else (True,):
                    label = f"{name}-{direction}{'' if emulate else '-packed'}"
                    if name in BATCHED:
                        cases = {"none": (x.reshape(GROUPS, -1, columns), None)}
                    else:
                        kinds = splits if name in ("mxfp8", "nvfp4") else ("balanced",)
                        cases = {kind: (x, splits[kind]) for kind in kinds}
                    for split, (tensor, sizes) in cases.items():
                        recorder = record(name, tensor, sizes, direction, emulate)
                        shape = f"{arguments.tokens}x{columns}"
                        rows += measure(label, shape, split, x.numel(), recorder, arguments.rounds, rng)
    result["rows"] = rows
    path = arguments.out or results.default_path(result, "quantize")
    results.write(result, path)
    print(f"\n{path}: {len(rows)} rows in {time.monotonic() - started:.0f} s")
    return 1 if results.problems(result) else 0


if __name__ == "__main__":
    sys.exit(main())
