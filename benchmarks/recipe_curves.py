"""Loss curves of the example's layer under every recipe, from equal weights and batches.

BF16 runs with several seeds: what a recipe changes must be seen against what a seed changes.

python3 benchmarks/recipe_curves.py                        # writes benchmarks/results/<date>-<gpu>-curves.json
python3 benchmarks/recipe_curves.py --plot RESULTS.json    # draws docs/recipe-curves.svg; needs matplotlib
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

SEEDS = (0, 1, 2)
#: Steps whose mean loss says how a run ended.
LAST = 20


def runs(names: list[str]) -> list[tuple[str, int]]:
    """Recipes with their seeds: BF16 with each, the others with the first."""
    return [(name, seed) for name in names for seed in (SEEDS if name == "bf16" else SEEDS[:1])]


def curve(name: str, seed: int, steps: int, config: train_moe.Config, device: torch.device) -> list[float]:
    """Train the example's model with this project's experts; returns the loss of each step."""
    batches = train_moe.make_batches(train_moe.stdlib_text(), steps, config, seed).to(device)
    model, _ = train_moe.make_models(config, device, seed)
    losses = train_moe.train((model,), batches, config.learning_rate, train_moe.RECIPES[name]())
    return losses[:, 0].tolist()


def plot(result: dict, path: Path) -> None:
    """Draw the curves, and the distance of each from the mean of BF16's seeds."""
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4))
    rows = result["rows"]
    plain = torch.tensor([row["losses"] for row in rows if row["recipe"] == "bf16"])
    steps = range(1, plain.shape[1] + 1)
    band = plain.min(0).values, plain.max(0).values
    left.fill_between(steps, *map(torch.Tensor.tolist, band), color="0.8", label="BF16, three seeds")
    first = torch.tensor(next(row["losses"] for row in rows if (row["recipe"], row["seed"]) == ("bf16", 0)))
    for row in rows:
        if row["seed"] != 0:
            continue
        left.plot(steps, row["losses"], linewidth=1, label=row["recipe"])
        if row["recipe"] != "bf16":
            difference = torch.tensor(row["losses"]) - first
            smooth = torch.nn.functional.avg_pool1d(difference[None], 9, 1, 4, count_include_pad=False)[0]
            right.plot(steps, smooth.tolist(), linewidth=1, label=row["recipe"])
    for axes, title in ((left, "loss, nats per byte"), (right, "loss minus BF16's on the same data, mean of 9 steps")):
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.suptitle(f"{result['gpu']}, commit {result['commit'][:7]}, {result['date'][:10]}", fontsize=9)
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    """Train, or plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--recipes", default=",".join(train_moe.RECIPES), help="names, separated by commas")
    parser.add_argument("--small", action="store_true", help="the example's small layer also on a GPU")
    parser.add_argument("--commit")
    parser.add_argument("--out", type=Path, help="results file, or the plot")
    parser.add_argument("--plot", type=Path, metavar="RESULTS", help="plot a results file instead of training")
    options = parser.parse_args()
    if options.plot is not None:
        plot(json.loads(options.plot.read_text()), options.out or results.ROOT / "docs" / "recipe-curves.svg")
        return
    names = options.recipes.split(",")
    if unknown := sorted(set(names) - set(train_moe.RECIPES)):
        parser.error(f"unknown recipes {', '.join(unknown)}; there are: {', '.join(train_moe.RECIPES)}")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = train_moe.SMALL if options.small or device.type == "cpu" else train_moe.QWEN3_30B_A3B
    result = results.environment(options.commit) | {"rows": []}
    path = options.out or results.default_path(result, "curves")
    for name, seed in runs(names):
        started = time.perf_counter()
        losses = curve(name, seed, options.steps, config, device)
        row = {"recipe": name, "seed": seed, "experts": config.experts, "hidden": config.hidden, "ffn": config.ffn}
        row |= {"last": statistics.fmean(losses[-LAST:]), "seconds": round(time.perf_counter() - started, 1)}
        result["rows"].append(row | {"losses": [round(loss, 5) for loss in losses]})
        results.write(result, path)  # after each run: an interrupted one keeps what it has
        print(f"{name:<14} seed {seed}: last {LAST} steps {row['last']:.4f}, {row['seconds']} s", flush=True)
    print(path)


if __name__ == "__main__":
    main()
