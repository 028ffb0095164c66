"""Steps of a grouped MLP on a GPU, with poisoned outputs, and the bounds that they are held to."""

import contextlib

import torch

import cute_grouped_mlp as cgm

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
RMS_BOUND = {BF16: 5e-3, FP16: 7e-4}
UNFUSED = {"enable_cutedsl_fused_grouped_mlp": False}
#: Options of the modules that are tested; SPECS compiles the kernels of all of them.
CONFIGS = {
    "plain": {},
    "fp16": {"dtype": FP16},
    "bias": {"bias": True},
    "interleaved": {"glu_interleave_size": 32, "activation": "clamped_qgeglu", "bias": True},
    "qgeglu": {"activation": "clamped_qgeglu", "limit": 5.0, "alpha": 1.5, "glu_linear_offset": 0.5},
    "situglu": {"activation": "situglu", "beta1": 2.0, "beta2": 8.0, "glu_interleave_size": 32},
    "srelu": {"activation": "srelu"},
}
SPLITS = (0, 700, 129, 1, 0, 1500, 64)


def module_of(groups, hidden, ffn, *, device="cuda", dtype=BF16, **options):
    torch.manual_seed(0)
    return cgm.GroupedMLP(groups, hidden, ffn, device=device, dtype=dtype, **options)


def operands(splits, hidden, *, tokens=None, dtype=BF16, probs=FP32, sizes_dtype=torch.int32, seed=1):
    """x, sizes, probs and dy; rows past the sum are NaN."""
    generator = torch.Generator("cuda").manual_seed(seed)
    total = sum(splits)
    tokens = total if tokens is None else tokens

    def normal(*shape):
        return torch.randn(*shape, device="cuda", generator=generator)

    x, dy = normal(tokens, hidden).to(dtype), normal(tokens, hidden).to(dtype)
    p = None if probs is None else torch.rand(tokens, device="cuda", generator=generator).to(probs)
    for t in (x, dy, p):
        if t is not None:
            t[total:] = float("nan")
    return x, torch.tensor(splits, dtype=sizes_dtype, device="cuda"), p, dy


@contextlib.contextmanager
def poisoned(on=True):
    """New tensors are filled with NaN: what a kernel does not write shows."""
    torch.use_deterministic_algorithms(on)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def step(module, x, sizes, probs, dy, *, frozen=(), recipe=None, poison=True):
    """Run forward and backward with poisoned outputs; returns y and every gradient by name."""
    tensors = {"x": x, "probs": probs, **dict(module.named_parameters())}
    for name, t in tensors.items():
        if t is not None:
            t.grad = None
            t.requires_grad_(name not in frozen)
    with poisoned(poison), cgm.autocast(recipe=recipe):
        y = module(x, sizes, probs)
        if y.requires_grad:
            y.backward(dy)
    return {"y": y.detach()} | {name: t.grad for name, t in tensors.items() if t is not None and t.grad is not None}


def assert_close(name, actual, expected, dtype=BF16):
    """Bounds of section E: rms, largest error, norm."""
    actual, expected = actual.double(), expected.double()
    assert actual.shape == expected.shape, name
    assert bool(torch.isfinite(actual).all()), f"{name}: not finite"
    if not expected.numel() or not expected.any():
        assert not actual.any(), name
        return
    bound = RMS_BOUND[dtype]
    scale = expected.pow(2).mean().sqrt()
    error = actual - expected
    assert (error.pow(2).mean().sqrt() / scale).item() <= bound, f"{name}: rms"
    ulp = expected.abs() * torch.finfo(dtype).eps
    assert bool((error.abs() <= 12 * bound * scale + ulp).all()), f"{name}: largest error"
    assert abs((actual.norm() / expected.norm()).item() - 1) <= 0.01, f"{name}: norm"


def assert_step(got, expected, dtype=BF16):
    assert set(got) == set(expected)
    for name, t in got.items():
        assert_close(name, t, expected[name], dtype)


def assert_equal(got, expected, names=None):
    for name in expected if names is None else names:
        assert torch.equal(got[name], expected[name]), name


def is_fused(module):
    return isinstance(module.fuser.last_plan.forward_ops[0][0], cgm.FusedGroupedMLP)
