"""Sizes of small layers, and how their results are compared with float64, for several files of tests."""

import torch

from cute_grouped_mlp import reference

G, H, F, T = 4, 16, 32, 40
SIZES = [9, 0, 20, 6]


def sizes_of(kind="int64"):
    if kind == "strided":
        return torch.stack([torch.tensor(SIZES), torch.full((G,), -7)], 1)[:, 0]
    return torch.tensor(SIZES, dtype=getattr(torch, kind))


def rows():
    ends, _ = reference.offsets(SIZES, T)
    return reference.group_of_rows(ends, T, torch.device("cpu"))[: ends[-1]]


def close(actual, expected, dtype):
    expected = expected.to(torch.float64)
    actual = actual.to(torch.float64)
    bound = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 7e-4, torch.bfloat16: 5e-3}[dtype]
    scale = expected.pow(2).mean().sqrt().clamp(min=1e-30)
    assert torch.isfinite(actual).all()
    assert ((actual - expected).pow(2).mean().sqrt() / scale).item() <= bound
