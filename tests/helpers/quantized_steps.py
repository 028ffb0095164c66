"""Steps of small grouped MLPs under quantising recipes, and their float64 replay, for several files of tests."""

import torch

import cute_grouped_mlp as cgm

BF16 = torch.bfloat16
G, H, F = 3, 64, 96
SPLITS = (40, 0, 75)
FP8, FP4 = 0.03, 0.05
HYBRID = {"fp8_format": cgm.Format.HYBRID}
UNFUSED = {"enable_cutedsl_fused_grouped_mlp": False}
#: Recipes with their bounds of rms(error) / rms(reference).
RECIPES = {
    "current": (cgm.Float8CurrentScaling, {}, FP8),
    "current_pow2": (cgm.Float8CurrentScaling, {"use_power_2_scales": True}, FP8),
    "delayed": (cgm.DelayedScaling, {}, FP8),
    "block": (cgm.Float8BlockScaling, {}, FP8),
    "block_f32": (cgm.Float8BlockScaling, {"use_f32_scales": True}, FP8),
    "mxfp8": (cgm.MXFP8BlockScaling, {}, FP8),
    "mxfp8_hybrid": (cgm.MXFP8BlockScaling, HYBRID, FP8),
    "mxfp8_2d": (cgm.MXFP8BlockScaling, {"enable_2d_quantization": True}, FP8),
    "nvfp4": (cgm.NVFP4BlockScaling, {}, FP4),
    "nvfp4_plain": (cgm.NVFP4BlockScaling, {"disable_rht": True, "disable_stochastic_rounding": True}, FP4),
    "nvfp4_1d": (cgm.NVFP4BlockScaling, {"disable_2d_quantization": True}, FP4),
}


def recipe_of(name, **more):
    cls, fields, _ = RECIPES[name]
    return cls(**{**fields, **more})


def module_of(dtype=BF16, hidden=H, ffn=F, groups=G, **options):
    torch.manual_seed(0)
    return cgm.GroupedMLP(groups, hidden, ffn, dtype=dtype, **options)


def operands(splits=SPLITS, hidden=H, tail=9, dtype=BF16, seed=1):
    """x, sizes, probs and dy; rows past the sum are NaN."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(splits)
    x, dy = (torch.randn(total + tail, hidden, generator=generator).to(dtype) for _ in range(2))
    probs = torch.rand(total + tail, generator=generator)
    for t in (x, dy, probs):
        t[total:] = torch.nan
    return x, torch.tensor(splits), probs, dy


def step(module, x, sizes, probs, dy, recipe=None, frozen=(), **kwargs):
    tensors = {"x": x, "probs": probs, **dict(module.named_parameters())}
    for name, t in tensors.items():
        t.grad = None
        t.requires_grad_(name not in frozen)
    with cgm.autocast(recipe=recipe):
        y = module(x, sizes, probs, **kwargs)
        y.backward(dy)
    return {"y": y.detach()} | {name: t.grad for name, t in tensors.items() if t.grad is not None}


def is_fused(module):
    return isinstance(module.fuser.last_plan.forward_ops[0][0], cgm.FusedGroupedMLP)


def assert_close(got, expected, bound):
    assert set(got) == set(expected)
    for name, want in expected.items():
        have = got[name].double()
        assert torch.isfinite(have).all(), name
        assert ((have - want).pow(2).mean() / want.pow(2).mean()).sqrt() <= bound, name
        assert abs(have.norm() / want.norm() - 1) <= 0.01, name


def trained(module, recipe, steps=1):
    """State as after some steps, so that delayed scaling has scales."""
    for seed in range(steps):
        step(module, *operands(seed=10 + seed), recipe=recipe)
    return module
