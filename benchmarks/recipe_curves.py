"""Loss curves of the example's layer under every recipe, with several seeds each.

A seed sets weights and batches: a recipe is compared with BF16 at equal seed, and seen against what a seed changes.

python3 benchmarks/recipe_curves.py                        # writes benchmarks/results/<date>-<gpu>-curves.json
python3 benchmarks/recipe_curves.py --plot RESULTS.json    # draws docs/recipe-curves.svg; needs matplotlib
python3 benchmarks/recipe_curves.py --compare RESULTS.json --baseline nvfp4      # gaps of a results file, against NVFP4
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import torch

from cute_grouped_mlp.examples import train_moe

sys.path.insert(0, str(Path(__file__).resolve().parent))
import results

BASELINE = "bf16"
#: Steps whose mean loss says how a run ended.
LAST = 20


def curve(name: str, seed: int, steps: int, config: train_moe.Config, device: torch.device) -> list[float]:
    """Train the example's model with this project's experts; returns the loss of each step."""
    batches = train_moe.make_batches(train_moe.stdlib_text(), steps, config, seed).to(device)
    model, _ = train_moe.make_models(config, device, seed)
    losses = train_moe.train((model,), batches, config.learning_rate, train_moe.RECIPES[name]())
    return losses[:, 0].tolist()


def gaps(rows: list[dict], baseline: str = BASELINE) -> dict[str, list[float]]:
    """By recipe: at each seed, its loss above the baseline's, in the mean of all steps but a first quarter."""
    mean = {(row["recipe"], row["seed"]): statistics.fmean(row["losses"][len(row["losses"]) // 4 :]) for row in rows}
    found: dict[str, list[float]] = {}
    for (name, seed), value in mean.items():
        if name != baseline and (baseline, seed) in mean:
            found.setdefault(name, []).append(value - mean[baseline, seed])
    return found


def show_gaps(rows: list[dict], baseline: str = BASELINE) -> None:
    """Print :func:`gaps`, their mean and its standard error."""
    for name, found in gaps(rows, baseline).items():
        print(f"{name:<14} above {baseline} at equal seed: {', '.join(f'{gap:+.4f}' for gap in found)}")
        if len(found) > 1:
            error = statistics.stdev(found) / len(found) ** 0.5
            print(f"{'':<14} mean {statistics.fmean(found):+.5f}, standard error {error:.5f}, {len(found)} seeds")


def plot(result: dict, path: Path) -> None:
    """Draw the curves of the first seed, and of all seeds the distance from BF16 at equal seed."""
    import matplotlib.pyplot as plt

    curves = {(row["recipe"], row["seed"]): torch.tensor(row["losses"]) for row in result["rows"]}
    seeds = sorted({seed for _, seed in curves})
    steps = range(1, len(next(iter(curves.values()))) + 1)
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4))
    plain = torch.stack([curves[BASELINE, seed] for seed in seeds])
    band = (plain.min(0).values.tolist(), plain.max(0).values.tolist())
    left.fill_between(steps, *band, color="0.85", label=f"BF16, {len(seeds)} seeds")
    for name in dict.fromkeys(name for name, _ in curves):
        left.plot(steps, curves[name, seeds[0]].tolist(), linewidth=1, label=name)
        if name == BASELINE:
            continue
        differences = torch.stack([curves[name, seed] - curves[BASELINE, seed] for seed in seeds])
        smooth = torch.nn.functional.avg_pool1d(differences, 21, 1, 10, count_include_pad=False)
        (line,) = right.plot(steps, smooth.mean(0).tolist(), linewidth=1, label=name)
        low, high = smooth.min(0).values.tolist(), smooth.max(0).values.tolist()
        right.fill_between(steps, low, high, color=line.get_color(), alpha=0.15)
    right.set_ylim(-0.03, 0.06)  # delayed scaling, which has no scales yet, starts far above
    right.axhline(0, color="0.5", linewidth=0.8)
    titles = ("loss, nats per byte (seed 0)", "loss minus BF16's at equal seed: mean of 21 steps, range of seeds")
    for axes, title in zip((left, right), titles, strict=True):
        axes.set_title(title, fontsize=9)
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    figure.suptitle(f"{result['gpu']}, commit {result['commit'][:7]}, {result['date'][:10]}", fontsize=9)
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    """Train, or plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--recipes", default=",".join(train_moe.RECIPES), help="names, separated by commas")
    parser.add_argument("--small", action="store_true", help="the example's small layer also on a GPU")
    parser.add_argument("--commit")
    parser.add_argument("--out", type=Path, help="results file, or the plot")
    parser.add_argument("--plot", type=Path, metavar="RESULTS", help="plot a results file instead of training")
    parser.add_argument("--compare", type=Path, metavar="RESULTS", help="show the gaps of a results file")
    parser.add_argument("--baseline", default=BASELINE, help="what --compare compares with (default: %(default)s)")
    options = parser.parse_args()
    if options.compare is not None:
        show_gaps(json.loads(options.compare.read_text())["rows"], options.baseline)
        return
    if options.plot is not None:
        result = json.loads(options.plot.read_text())
        show_gaps(result["rows"])
        plot(result, options.out or results.ROOT / "docs" / "recipe-curves.svg")
        return
    names = options.recipes.split(",")
    if unknown := sorted(set(names) - set(train_moe.RECIPES)):
        parser.error(f"unknown recipes {', '.join(unknown)}; there are: {', '.join(train_moe.RECIPES)}")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = train_moe.SMALL if options.small or device.type == "cpu" else train_moe.QWEN3_30B_A3B
    result = results.environment(options.commit) | {"rows": []}
    path = options.out or results.default_path(result, "curves")
    for seed in range(options.seeds):
        for name in names:
            started = time.perf_counter()
            losses = curve(name, seed, options.steps, config, device)
            row = {"recipe": name, "seed": seed, "experts": config.experts, "hidden": config.hidden, "ffn": config.ffn}
            row |= {"last": statistics.fmean(losses[-LAST:]), "seconds": round(time.perf_counter() - started, 1)}
            result["rows"].append(row | {"losses": [round(loss, 5) for loss in losses]})
            results.write(result, path)  # after each run: an interrupted one keeps what it has
            print(f"{name:<14} seed {seed}: last {LAST} steps {row['last']:.4f}, {row['seconds']} s", flush=True)
    show_gaps(result["rows"])
    print(path)


if __name__ == "__main__":
    main()
