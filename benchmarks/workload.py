"""What is measured: shapes, split sizes, FLOPs, and the random tensors of a training step."""

from __future__ import annotations

from dataclasses import dataclass

import torch

#: Floating-point operations of each row, in units of T·H·F.
FLOPS = {"fprop_act": 4, "fprop": 2, "dgrad_act": 2, "dgrad": 4, "wgrad1": 4, "wgrad2": 2, "step": 18}
KERNELS = tuple(FLOPS)
SPLITS = ("balanced", "zipf")


@dataclass(frozen=True, slots=True)
class Shape:
    """A layer and the tokens that it gets.

    Attributes
    ----------
    name
        Key in :data:`SHAPES`.
    groups, tokens, hidden, ffn
        G, T (summed over the groups), H and F.
    """

    name: str
    groups: int
    tokens: int
    hidden: int
    ffn: int

    def flops(self, kernel: str) -> int:
        """Floating-point operations of a kernel, or of a step."""
        return FLOPS[kernel] * self.tokens * self.hidden * self.ffn


#: Layers of published models.  "ep32": one rank of 32-way expert parallelism; "16k": 16,384 tokens times top-k.
SHAPES = {
    shape.name: shape
    for shape in (
        Shape("dsv3-ep32", 8, 32768, 7168, 2048),
        Shape("qwen3-16k", 128, 131072, 2048, 768),
        Shape("gptoss-16k", 128, 65536, 2880, 2880),
        Shape("olmoe-16k", 64, 131072, 2048, 1024),
        Shape("mix-16k", 8, 32768, 4096, 14336),
    )
}
DEFAULT_SHAPES = ("dsv3-ep32", "qwen3-16k")


def make_splits(kind: str, groups: int, tokens: int, seed: int = 1) -> list[int]:
    """Split sizes that sum to ``tokens``.

    Parameters
    ----------
    kind
        ``"balanced"``: equal sizes, the first ones larger by 1 where they do not divide.
        ``"zipf"``: proportional to 1 / rank, in shuffled order.
    groups, tokens
        G and T.
    seed
        Of the shuffle.
    """
    if kind == "balanced":
        return [tokens // groups + (group < tokens % groups) for group in range(groups)]
    if kind != "zipf":
        raise ValueError(f"splits are {kind!r}; allowed: {', '.join(SPLITS)}")
    total = sum(1 / rank for rank in range(1, groups + 1))
    sizes = [int(tokens / rank / total) for rank in range(1, groups + 1)]
    sizes[0] += tokens - sum(sizes)
    order = torch.randperm(groups, generator=torch.Generator().manual_seed(seed)).tolist()
    return [sizes[group] for group in order]


@dataclass(slots=True)
class Workload:
    """The inputs of every kernel of one training step, drawn at random.

    Attributes
    ----------
    x, dy : Tensor (T, H)
    w1 : Tensor (G, 2F, H)
    w2 : Tensor (G, H, F)
    probs : Tensor (T,), fp32
    sizes, offs : Tensor (G,), int32
        Split sizes and their running sum.
    z, dz : Tensor (T, 2F)
    a : Tensor (T, F)
    """

    shape: Shape
    split: str
    x: torch.Tensor
    dy: torch.Tensor
    w1: torch.Tensor
    w2: torch.Tensor
    probs: torch.Tensor
    sizes: torch.Tensor
    offs: torch.Tensor
    z: torch.Tensor
    dz: torch.Tensor
    a: torch.Tensor


def make_workload(shape: Shape, split: str, device: torch.device, seed: int = 0) -> Workload:
    """Draw the tensors: N(0, 1), weights scaled by 1 / sqrt(fan-in), probs uniform in [0, 1)."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, device=device, dtype=torch.bfloat16)

    tokens, hidden, ffn = shape.tokens, shape.hidden, shape.ffn
    sizes = torch.tensor(make_splits(split, shape.groups, tokens), dtype=torch.int32, device=device)
    return Workload(
        shape,
        split,
        x=normal(tokens, hidden),
        dy=normal(tokens, hidden),
        w1=normal(shape.groups, 2 * ffn, hidden).mul_(hidden**-0.5),
        w2=normal(shape.groups, hidden, ffn).mul_(ffn**-0.5),
        probs=torch.rand(tokens, generator=generator, device=device),
        sizes=sizes,
        offs=sizes.cumsum(0, dtype=torch.int32),
        z=normal(tokens, 2 * ffn),
        dz=normal(tokens, 2 * ffn),
        a=normal(tokens, ffn),
    )
