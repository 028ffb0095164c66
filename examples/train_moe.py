"""Train a Mixture-of-Experts layer with this project's grouped MLP, next to the same layer in plain torch.

A byte-level language model (embedding of the last bytes, one MoE layer, a linear head) learns Python's own standard
library for 50 steps, twice: with ``cgm.GroupedMLP`` and with plain torch.  Both start from the same weights and see the
same batches, so their loss curves have to agree; the example exits with 1 if they do not.

On a GPU the layer has the dimensions of Qwen3-30B-A3B (128 experts, hidden 2048, ffn 768, top-8).  Elsewhere it is
small and runs in plain torch; the kernels of the full-size layer are generated and compiled for Hopper all the same.

    python examples/train_moe.py [--steps 50] [--seed 0] [--device cuda|cpu] [--small]
                                 [--recipe mxfp8] [--losses losses.json]

``--recipe`` trains this project's model under a quantising recipe, emulated; plain torch stays in BF16 beside it.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import sysconfig
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import cute_grouped_mlp as cgm
from cute_grouped_mlp.codegen import recipe_names
from cute_grouped_mlp.examples import moe_report as report
from cute_grouped_mlp.examples.moe_report import console


@dataclass(frozen=True, slots=True)
class Config:
    """Dimensions of the model and of a batch."""

    experts: int
    hidden: int
    ffn: int
    top_k: int
    sequences: int
    length: int
    learning_rate: float
    context: int = 8

    @property
    def rows(self) -> int:
        """Rows that the experts see in a step: T."""
        return self.sequences * self.length * self.top_k


QWEN3_30B_A3B = Config(128, 2048, 768, 8, sequences=8, length=1024, learning_rate=4e-4)
SMALL = Config(8, 128, 64, 2, sequences=8, length=128, learning_rate=4e-3)

#: Recipes by the names that ``--recipe`` takes, made anew for each run.
RECIPES: Mapping[str, Callable[[], Any]] = {
    "bf16": cgm.HighPrecision,
    **{short: getattr(cgm, name) for name, short in recipe_names.SHORT.items() if name != "HighPrecision"},
    "nvfp4_no_rht": lambda: cgm.NVFP4BlockScaling(disable_rht=True),
}


def recipe_name(text: str) -> str:
    """Return the key of RECIPES that a user means: the short name or the class of a recipe, in any case."""
    name, numerics = recipe_names.RECIPES.get(text.lower(), ("", ""))
    key = text.lower() if name == "" else "bf16" if name == "HighPrecision" else recipe_names.SHORT[name]
    if key not in RECIPES or numerics == "fp16":
        raise argparse.ArgumentTypeError(f"{text!r} is no recipe of this example; allowed: {', '.join(RECIPES)}")
    return key


# ------------------------------------------------------------------------------------------------------------ data


def stdlib_text(limit: int = 4 << 20) -> Tensor:
    """Return the first ``limit`` bytes of the sources of Python's standard library, uint8."""
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = b"".join(path.read_bytes() for path in sources)[:limit]
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def make_batches(text: Tensor, steps: int, config: Config, seed: int) -> Tensor:
    """Draw random windows of the text: (steps, sequences, length + 1) int64; the last byte is only a target."""
    generator = torch.Generator().manual_seed(seed)
    window = config.length + 1
    start = torch.randint(len(text) - window, (steps, config.sequences, 1), generator=generator)
    return text[start + torch.arange(window)].long()


# ------------------------------------------------------------------------------------------- routing, on the device


class Reorder(torch.autograd.Function):
    """``x[order]`` for a permutation; the gradient goes back through the inverse one, without atomics."""

    @staticmethod
    def forward(ctx, x: Tensor, order: Tensor) -> Tensor:  # noqa: ANN001, D102
        ctx.save_for_backward(order)
        return x[order]

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:  # noqa: ANN001, D102
        (order,) = ctx.saved_tensors
        return torch.empty_like(grad).index_copy_(0, order, grad), None


def route(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Return probabilities and ids of each token's experts, (tokens, K) each: softmax in fp32, top-k, normalised."""
    probs, experts = logits.float().softmax(-1).topk(top_k, dim=-1)
    return probs / probs.sum(-1, keepdim=True), experts


def sort_by_expert(experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Return the order that sorts (tokens, K) expert ids, (tokens·K,), and how many rows each expert gets, (G,) int64.

    The sizes stay on the device: nothing in a step waits for them.
    """
    ids = experts.flatten()
    split_sizes = ids.new_zeros(num_experts).scatter_add_(0, ids, torch.ones_like(ids))
    return ids.argsort(stable=True), split_sizes


def permute(x: Tensor, order: Tensor, top_k: int) -> Tensor:
    """Give each of (tokens, H) rows to its ``top_k`` experts: (tokens·K, H), sorted by expert."""
    return Reorder.apply(x.unsqueeze(1).expand(-1, top_k, -1).reshape(-1, x.shape[1]), order)


def unpermute(rows: Tensor, order: Tensor, top_k: int) -> Tensor:
    """Sum each token's ``top_k`` rows: the way back from :func:`permute`."""
    inverse = torch.empty_like(order).index_copy_(0, order, torch.arange(len(order), device=order.device))
    return Reorder.apply(rows, inverse).view(-1, top_k, rows.shape[1]).sum(1)


# ----------------------------------------------------------------------------------------------------------- model


class MoE(nn.Module):
    """Router, permutation, experts and the way back.  The probs scale the experts' activation."""

    def __init__(self, config: Config, experts: nn.Module) -> None:
        super().__init__()
        self.top_k = config.top_k
        self.router = nn.Linear(config.hidden, config.experts, bias=False)
        self.experts = experts

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        probs, experts = route(F.linear(x.float(), self.router.weight.float()), self.top_k)
        order, split_sizes = sort_by_expert(experts, len(self.router.weight))
        rows = self.experts(permute(x, order, self.top_k), split_sizes, Reorder.apply(probs.flatten(), order))
        return unpermute(rows, order, self.top_k)


class ByteLM(nn.Module):
    """Next-byte model: each position sees the sum of the embeddings of its last bytes, one table for each distance."""

    def __init__(self, config: Config, experts: nn.Module) -> None:
        super().__init__()
        self.context = config.context
        self.embedding = nn.Embedding(256 * config.context, config.hidden)
        nn.init.normal_(self.embedding.weight, std=config.context**-0.5)
        self.norm = nn.RMSNorm(config.hidden)
        self.moe = MoE(config, experts)
        self.head_norm = nn.RMSNorm(config.hidden)
        self.head = nn.Linear(config.hidden, 256, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (sequences · length, 256) of bytes (sequences, length)."""
        tables = 256 * torch.arange(self.context, device=tokens.device)
        last_bytes = F.pad(tokens, (self.context - 1, 0)).unfold(1, self.context, 1)
        x = self.embedding(last_bytes + tables).sum(2).flatten(0, 1)
        x = x + self.moe(self.norm(x))
        return self.head(self.head_norm(x))

    def loss(self, batch: Tensor) -> Tensor:
        """Mean cross entropy of a batch (sequences, length + 1) in nats per byte."""
        return F.cross_entropy(self(batch[:, :-1]).float(), batch[:, 1:].flatten())


def swiglu(z: Tensor, probs: Tensor) -> Tensor:
    """``silu(gate) * up * prob`` in fp32, rounded once."""
    gate, up = z.chunk(2, dim=-1)
    return (F.silu(gate.float()) * up.float() * probs[:, None]).to(z.dtype)


@functools.cache
def compiled_swiglu() -> Callable[[Tensor, Tensor], Tensor]:
    """Compile :func:`swiglu`, at its first use: torch's compiler takes seconds to import."""
    return torch.compile(swiglu, dynamic=False)


class TorchExperts(nn.Module):
    """The experts in plain torch: grouped GEMMs and a compiled activation on a GPU, a loop over the groups on a CPU."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        groups, hidden, ffn = config.experts, config.hidden, config.ffn
        self.w1 = nn.Parameter(torch.randn(groups, 2 * ffn, hidden) * hidden**-0.5)
        self.w2 = nn.Parameter(torch.randn(groups, hidden, ffn) * ffn**-0.5)

    def forward(self, x: Tensor, split_sizes: Tensor, probs: Tensor) -> Tensor:  # noqa: D102
        if x.is_cuda:
            offs = split_sizes.cumsum(0, dtype=torch.int32)
            a = compiled_swiglu()(torch._grouped_mm(x, self.w1.transpose(1, 2), offs=offs), probs)
            return torch._grouped_mm(a, self.w2.transpose(1, 2), offs=offs)
        sizes = split_sizes.tolist()
        groups = zip(x.split(sizes), probs.split(sizes), self.w1, self.w2, strict=True)
        return torch.cat([swiglu(rows @ w1.T, p) @ w2.T for rows, p, w1, w2 in groups])


def make_models(config: Config, device: torch.device, seed: int) -> tuple[ByteLM, ByteLM]:
    """Build the model with this project's experts and the one with torch's, with equal weights."""
    torch.manual_seed(seed)
    with device:
        theirs = ByteLM(config, TorchExperts(config)).bfloat16()
        ours = ByteLM(config, cgm.GroupedMLP(config.experts, config.hidden, config.ffn, activation="swiglu")).bfloat16()
    with torch.no_grad():
        for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            mine.copy_(other)
    return ours, theirs


def train(models: tuple[ByteLM, ...], batches: Tensor, learning_rate: float, recipe: Any = None) -> Tensor:
    """Train all models on the same batches; returns their losses, (steps, models) on the CPU.

    Only this project's experts know of the recipe.
    """
    optimizers = [torch.optim.AdamW(model.parameters(), lr=learning_rate) for model in models]
    losses = []
    started = time.perf_counter()
    for step, batch in enumerate(batches, 1):
        row = []
        for model, optimizer in zip(models, optimizers, strict=True):
            with cgm.autocast(recipe=recipe):
                loss = model.loss(batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            row.append(loss.detach())
        losses.append(torch.stack(row))
        # Lines of their own, in a terminal too: a bar would be torn by those of kernels that are compiled.
        if step in (1, len(batches)) or step % max(1, len(batches) // 5) == 0:
            console.print(f"step {step} of {len(batches)}, {time.perf_counter() - started:.0f} s")
    return torch.stack(losses).float().cpu()


def expert_inputs(model: ByteLM, batch: Tensor) -> report.Inputs:
    """Return what the experts get for a batch: rows (T, H), split sizes (G,) and probs (T,)."""
    captured: list[Tensor] = []
    hook = model.moe.experts.register_forward_pre_hook(lambda _, args: captured.extend(args))
    with torch.no_grad():
        model.loss(batch)
    hook.remove()
    x, split_sizes, probs = captured
    return x.requires_grad_(), split_sizes, probs.requires_grad_()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the example; returns the exit status."""
    parser = argparse.ArgumentParser(description="Train an MoE layer with cute_grouped_mlp, next to plain torch.")
    parser.add_argument("--steps", type=int, default=50, help="training steps (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and batches (default: %(default)s)")
    parser.add_argument("--device", type=torch.device, help="cuda or cpu (default: cuda where there is one)")
    parser.add_argument("--small", action="store_true", help="the small layer also on a GPU")
    parser.add_argument(
        "--recipe",
        type=recipe_name,
        default="bf16",
        metavar="RECIPE",
        help=f"recipe of this project's experts: {', '.join(RECIPES)} (default: %(default)s)",
    )
    parser.add_argument("--losses", type=Path, metavar="FILE", help="write the losses of both models here, as JSON")
    arguments = parser.parse_args(argv)

    device = arguments.device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = device.type == "cuda"
    config = QWEN3_30B_A3B if on_gpu and not arguments.small else SMALL
    report.show_machine(device)
    console.print(
        f"one MoE layer in bfloat16: {config.experts} experts, hidden {config.hidden}, ffn {config.ffn}, "
        f"top-{config.top_k}, {config.rows} rows a step"
    )

    batches = make_batches(stdlib_text(), arguments.steps, config, arguments.seed).to(device)
    ours, theirs = make_models(config, device, arguments.seed)
    recipe = RECIPES[arguments.recipe]()
    losses = train((ours, theirs), batches, config.learning_rate, recipe)
    agree = report.show_losses(losses, judged=arguments.recipe == "bf16")
    if arguments.losses is not None:
        curves = dict(zip(("ours", "torch"), losses.T.tolist(), strict=True))
        run = {"recipe": str(recipe), "steps": arguments.steps, "seed": arguments.seed}
        arguments.losses.write_text(json.dumps({**run, **curves}, indent=1) + "\n")

    inputs = expert_inputs(theirs, batches[-1])
    mlp, torch_mlp = ours.moe.experts, theirs.moe.experts
    unit = config.rows * config.hidden * config.ffn
    console.print(str(cgm.explain(mlp, *inputs, recipe=recipe)))
    if arguments.recipe != "bf16":  # losses differ by what the recipe loses, and nothing below is about recipes
        return 0
    if on_gpu:
        report.show_kernels(mlp, inputs, unit)
    report.show_speed(mlp, torch_mlp, inputs, unit)
    report.show_switch(mlp, inputs)
    if not on_gpu:
        full = QWEN3_30B_A3B
        report.show_cross_compiled(full.rows, full.experts, full.hidden, full.ffn)
    return 0 if agree else 1


if __name__ == "__main__":
    cgm.settings.log_level = "INFO"  # a line for each kernel that is compiled now, and for each fusion that is not used
    sys.exit(main())
