"""Launches kernels on inputs that show races and stray accesses, for compute-sanitizer: a training step's, quantisers'.

    compute-sanitizer --tool memcheck python tests/gpu/sanitize.py    (racecheck likewise; `make sanitize` runs both)

With PYTORCH_NO_CUDA_MEMORY_CACHING=1 each tensor is an allocation of its own, so that an access past its end is seen
(K3).
"""

import argparse
import itertools
import random

import torch

from cute_grouped_mlp import kernels
from cute_grouped_mlp import quantization as cgq
from cute_grouped_mlp.codegen.select import step_specs
from cute_grouped_mlp.codegen.spec import Arch, DType, GluLayout, KernelSpec, Pass
from cute_grouped_mlp.quantizers import launch as quantize

_RANDOM = random.Random(0)
#: Split sizes and rows of the buffer: many short groups; one long among tiny ones; empties and a tail.
CASES = {
    "n7": ([128, 120, 136, 128, 100, 156, 127, 129], 1024),
    "n8": ([8192] + [_RANDOM.randint(1, 16) for _ in range(31)], None),
    "k3": ([0, 65, 0, 190, 0], 257),
}
QUANTIZERS = {
    "mxfp8": cgq.MXFP8Quantizer(),
    "nvfp4": cgq.NVFP4Quantizer(),
    "nvfp4, transform": cgq.NVFP4Quantizer(with_rht=True),
    "nvfp4, transform, by chance": cgq.NVFP4Quantizer(with_rht=True, stochastic_rounding=True),
    "block fp8": cgq.Float8BlockQuantizer(block_scaling_dim=1),
    "current scaling": cgq.Float8CurrentScalingQuantizer(),
    "nvfp4, weights": cgq.NVFP4Quantizer(with_2d_quantization=True),
    "block fp8, weights": cgq.Float8BlockQuantizer(),
}
#: Split sizes, rows and columns of what is quantised, by which quantisers, and whether only as bytes both ways: ragged
#: groups; so much that teams work on runs of pieces, which NVFP4's bytes do; three matrices.
QUANTIZE_CASES = {
    "ragged": ([1, 63, 0, 64, 65, 127, 129, 200], 700, 160, list(QUANTIZERS)[:6], False),
    "runs": ([100, 0, 70_001, 130_000], 200_200, 512, ["nvfp4"], True),
    "matrices": (None, 3 * 136, 160, ["mxfp8", "block fp8", "nvfp4, weights", "block fp8, weights"], False),
}


def quantise(sizes, tokens, columns, names, only_both):
    """Columnwise, with rows and alone, as bytes and as bf16 numbers."""
    device = torch.device("cuda", 0)
    x = torch.randn(tokens, columns, device=device, dtype=torch.bfloat16)
    splits, batched = None if sizes is None else torch.tensor(sizes, device=device), sizes is None
    x = x.reshape(3, -1, columns) if batched else x
    for name in names:
        quantizer = QUANTIZERS[name]
        for rowwise, emulate in [(True, False)] if only_both else itertools.product((True, False), (True, False)):
            where = {"batched": batched, "rowwise": rowwise, "columnwise": True}
            specs = quantize.specs_of(quantizer, x, splits, emulate=emulate, **where)
            (quantize.emulated if emulate else quantize.quantized)(quantizer, specs, x, splits, batched=batched)
            torch.cuda.synchronize()


def step(sizes, tokens, hidden, ffn):
    """Forward and backward, kernel by kernel."""
    device, dtype = torch.device("cuda", 0), torch.bfloat16
    groups = len(sizes)
    chosen = step_specs(
        Arch.SM90A, "bf16", "swiglu", GluLayout.CONTIGUOUS, DType.FP32,
        tokens=tokens, groups=groups, hidden=hidden, ffn=ffn, backward=True,
    )  # fmt: skip
    provider = kernels.provider()
    provider.prepare(chosen.all, device)
    sms, status = provider.sm_count(device), provider.status(device)
    splits = torch.tensor(sizes, dtype=torch.int32, device=device)

    def randn(*shape):
        return torch.randn(*shape, device=device, dtype=dtype)

    def launch(spec, *arguments):
        provider.get(spec)(*arguments, status, kernels.grid(spec, sms))
        torch.cuda.synchronize()

    x, w1, w2, dy = (
        randn(tokens, hidden),
        randn(groups, 2 * ffn, hidden),
        randn(groups, hidden, ffn),
        randn(tokens, hidden),
    )
    probs = torch.rand(tokens, device=device)
    z, a, y = randn(tokens, 2 * ffn), randn(tokens, ffn), randn(tokens, hidden)
    launch(chosen.fprop_act, x, w1, probs, splits, z, a)
    launch(chosen.fprop, a, w2, splits, y)
    dz, dx = torch.empty_like(z), torch.empty_like(x)
    partial = torch.empty(-(-ffn // chosen.dgrad_act.tile.tile_n), tokens, device=device)
    launch(chosen.dgrad_act, dy, w2, z, probs, splits, dz, a, partial)
    launch(chosen.dgrad, dz, w1, splits, dx)
    launch(chosen.wgrad1, dz, x, splits, torch.empty_like(w1))
    launch(chosen.wgrad2, dy, a, splits, torch.empty_like(w2))
    dprobs = torch.empty(tokens, device=device)
    provider.get(chosen.reduce)(partial, dprobs, sms)
    bias_grad = KernelSpec(Arch.SM90A, Pass.BIAS_GRAD)
    provider.prepare([bias_grad], device)
    provider.get(bias_grad)(dy, splits, randn(groups, hidden))
    torch.cuda.synchronize()
    assert not any(t.isnan().any() for t in (z, a, y, dz, dx, dprobs))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", default=[*CASES, *QUANTIZE_CASES])
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--ffn", type=int, default=256)
    options = parser.parse_args()
    for name in options.cases:
        if name in QUANTIZE_CASES:
            sizes, tokens, columns, names, only_both = QUANTIZE_CASES[name]
            quantise(sizes, tokens, columns, names, only_both)
            print(f"{name}: {tokens} rows, {columns} columns, {len(names)} quantisers: ran")
            continue
        sizes, tokens = CASES[name]
        step(sizes, tokens or sum(sizes), options.hidden, options.ffn)
        print(
            f"{name}: {len(sizes)} groups, {tokens or sum(sizes)} rows, hidden {options.hidden}, ffn {options.ffn}: ran"
        )


if __name__ == "__main__":
    main()
