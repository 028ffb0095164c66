"""NVFP4Quantizer against Transformer Engine's plain-torch reference, bit for bit, on random tensors.

    git clone https://github.com/NVIDIA/TransformerEngine
    python tests/independent/nvfp4_transformer_engine.py TransformerEngine [--tensors 10000] [--seed 0]

Transformer Engine need not be installed: the one file is loaded from the checkout, with stubs for what it imports.
Prints the elements that differ; exits 1 if any does, but for -0, which the reference writes as +0 and we (as the
hardware's conversion) as -0.
"""

import argparse
import enum
import importlib.util
import pathlib
import sys
import types
from collections import Counter

import torch

from cute_grouped_mlp.quantization import NVFP4Quantizer

#: Options of the reference and ours.
VARIANTS = {
    "1x16": ({}, {}),
    "hadamard": ({"with_rht": True}, {"with_rht": True}),
    "16x16": ({"quant_tile_shape": (16, 16)}, {"with_2d_quantization": True}),
    "row-scaled": ({"row_scaled_nvfp4": True}, {"row_scaled_nvfp4": True}),
}


class Formats(enum.Enum):
    """Stands for the enumeration that the reference imports."""

    E2M1 = "e2m1"


class Base:
    """Stands for the quantiser's base class that the reference imports."""

    def __init__(self, *, rowwise=True, columnwise=True):
        self.rowwise_usage, self.columnwise_usage = rowwise, columnwise


def load(checkout):
    """Return the reference's module."""

    def stub(name, **names):
        module = types.ModuleType(name)
        module.__dict__.update(names)
        sys.modules[name] = module
        return module

    package = "transformer_engine.pytorch.custom_recipes"
    for name in ("transformer_engine", "transformer_engine.pytorch"):
        stub(name)
    passes = enum.Enum("GEMMType", "FPROP DGRAD WGRAD")
    gemm = stub(f"{package}.gemm", GEMMType=passes, MMParams=object)
    utils = stub(f"{package}.reference_utils", Fp4Formats=Formats, roundup_div=lambda a, b: -(-a // b))
    stub(package, gemm=gemm, reference_utils=utils)
    stub("transformer_engine.pytorch.quantized_tensor", QuantizedTensorStorage=object, Quantizer=Base)
    file = pathlib.Path(checkout, "transformer_engine/pytorch/custom_recipes/reference_nvfp4.py")
    spec = importlib.util.spec_from_file_location("reference_nvfp4", file)
    module = importlib.util.module_from_spec(spec)
    sys.modules["reference_nvfp4"] = module
    spec.loader.exec_module(module)
    return module


def sample(index, generator):
    """Normal numbers; every fifth tensor each: rows far apart, another magnitude, zeros in between, many ties."""
    rows, columns = (16 * int(torch.randint(1, n, (1,), generator=generator)) for n in (5, 9))
    x = torch.randn(rows, columns, generator=generator)
    if index % 5 == 1:
        x *= 10.0 ** torch.randint(-20, 20, (rows, 1), generator=generator)
    elif index % 5 == 2:
        x *= 10.0 ** float(torch.randint(-30, 30, (1,), generator=generator))
    elif index % 5 == 3:
        x[torch.rand(rows, columns, generator=generator) < 0.5] = 0
    elif index % 5 == 4:
        x = (x * 4).round() / 2
    return x


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout")
    parser.add_argument("--tensors", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    reference = load(options.checkout)
    generator = torch.Generator().manual_seed(options.seed)
    differ, total, zeros = Counter(), Counter(), 0
    for index in range(options.tensors):
        x = sample(index, generator).to((torch.bfloat16, torch.float32)[index % 2])
        for name, (theirs, ours) in VARIANTS.items():
            expected = reference.NVFP4QuantizerRef(dtype=Formats.E2M1, **theirs)._quantize(x)[:4]
            q = NVFP4Quantizer(**ours).quantize(x)
            found = (q.rowwise_data, q.rowwise_scale_inv, q.columnwise_data, q.columnwise_scale_inv)
            for part, want, got in zip(("data", "scales", "data^T", "scales^T"), expected, found, strict=True):
                want, got = want.view(torch.uint8), got.view(torch.uint8)
                if part.startswith("data"):
                    want, got = (torch.stack((t & 15, t >> 4), -1) for t in (want, got))
                    negative_zero = (want == 0) & (got == 8)
                    zeros += int(negative_zero.sum())
                    got = torch.where(negative_zero, want, got)
                total[name, part] += want.numel()
                differ[name, part] += int((want != got).sum())
    for (name, part), count in total.items():
        print(f"{name:12}{part:10}{differ[name, part]:8} of {count} differ")
    print(f"-0, written as +0 by the reference: {zeros}")
    return int(any(differ.values()))


if __name__ == "__main__":
    sys.exit(main())
