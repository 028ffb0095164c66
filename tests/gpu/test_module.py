"""The fused grouped MLP and a lone GroupedLinear on a Hopper GPU, against float64 (docs/acceptance.md, E)."""

import itertools

import pytest
import torch
from gpu_steps import (
    BF16,
    CONFIGS,
    FP16,
    FP32,
    RMS_BOUND,
    SPLITS,
    UNFUSED,
    assert_close,
    assert_equal,
    assert_step,
    is_fused,
    module_of,
    operands,
    poisoned,
    step,
)
from references import expected_step

import cute_grouped_mlp as cgm
from cute_grouped_mlp import kernels, reference
from cute_grouped_mlp.reference_kernels import ReferenceKernels

pytestmark = pytest.mark.gpu

# E: numbers -----------------------------------------------------------------------------------------------------------

SHAPES = {"small": (128, 96), "tails": (264, 352), "wide": (2048, 768)}
MATRIX = [
    ("plain", "wide", FP32),
    ("plain", "tails", BF16),
    ("plain", "small", None),
    ("fp16", "tails", FP32),
    ("fp16", "wide", FP16),
    ("bias", "wide", FP32),
    ("bias", "tails", None),
    ("interleaved", "small", FP32),
    ("interleaved", "wide", BF16),
    ("qgeglu", "tails", FP32),
    ("situglu", "tails", FP32),
    ("srelu", "small", FP32),
    ("srelu", "wide", None),
]


@pytest.mark.parametrize(("config", "shape", "probs"), MATRIX, ids=lambda v: str(v).removeprefix("torch."))
def test_e1_e9_fused_step_against_float64(config, shape, probs):
    hidden, ffn = SHAPES[shape]
    options = CONFIGS[config]
    dtype = options.get("dtype", BF16)
    module = module_of(len(SPLITS), hidden, ffn, **options)
    args = operands(SPLITS, hidden, tokens=sum(SPLITS) + 77, dtype=dtype, probs=probs)
    got = step(module, *args)
    assert is_fused(module), cgm.explain(module, *args[:3])
    assert_step(got, expected_step(module, *args), dtype)
    for name in {"y", "x", "probs"} & set(got):
        assert not got[name][sum(SPLITS) :].any(), f"{name}: the tail is not 0"
    kernels.provider().check_status(args[0].device)


@pytest.mark.parametrize("config", ["plain", "bias", "fp16"])
def test_d6_unfused_step_against_float64(config):
    hidden, ffn = SHAPES["tails"]
    options = CONFIGS[config]
    dtype = options.get("dtype", BF16)
    module = module_of(len(SPLITS), hidden, ffn, **options)
    args = operands(SPLITS, hidden, tokens=sum(SPLITS) + 77, dtype=dtype)
    got = step(module, *args, recipe=cgm.HighPrecision(**UNFUSED))
    assert not is_fused(module)
    assert_step(got, expected_step(module, *args, round_grad=True), dtype)


def test_d6_one_weight_and_packed_views_are_bitwise_equal():
    hidden, ffn = SHAPES["tails"]
    one = module_of(len(SPLITS), hidden, ffn)
    many = module_of(len(SPLITS), hidden, ffn, single_grouped_weight=False)
    with torch.no_grad():
        many.fc1.packed_weight().copy_(one.fc1.weight)
        many.fc2.packed_weight().copy_(one.fc2.weight)
    args = operands(SPLITS, hidden)
    want, got = step(one, *args), step(many, *args)
    assert is_fused(many)
    assert_equal(got, want, ("y", "x", "probs"))
    for layer in ("fc1", "fc2"):
        stacked = torch.stack([got[f"{layer}.weight{g}"] for g in range(len(SPLITS))])
        assert torch.equal(stacked, want[f"{layer}.weight"])


@pytest.mark.parametrize("groups", [1, 3])
def test_e9_one_group_and_strided_int64_splits(groups):
    splits = (500,) if groups == 1 else (200, 0, 300)
    module = module_of(groups, 128, 96)
    x, _, probs, dy = operands(splits, 128)
    sizes = torch.stack([torch.tensor(splits), torch.full((groups,), -9)], 1).cuda()[:, 0]
    assert_step(step(module, x, sizes, probs, dy), expected_step(module, x, torch.tensor(splits), probs, dy))


@pytest.mark.parametrize("tokens", [0, 256])
def test_k1_e9_no_tokens_and_only_empty_groups(tokens):
    module = module_of(4, 128, 96, bias=True)
    x, _, probs, dy = operands((0,), 128, tokens=tokens)
    fired = []
    hooks = [p.register_post_accumulate_grad_hook(fired.append) for p in module.parameters()]
    got = step(module, x, torch.zeros(4, dtype=torch.int64, device="cuda"), probs, dy)
    for hook in hooks:
        hook.remove()
    assert len(fired) == 4
    assert set(got) == {"y", "x", "probs", *dict(module.named_parameters())}
    assert all(not t.any() for t in got.values())
    assert got["x"].shape == (tokens, 128)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("splits", [(64, 64, 0), (0, 128, 0, 64)])
def test_k2_empty_groups_in_every_pass(splits):
    module = module_of(len(splits), 128, 96)
    args = operands(splits, 128)
    assert_step(step(module, *args), expected_step(module, *args))
    torch.cuda.synchronize()


def test_e2_scaled_bias_with_its_own_scale():
    hidden, ffn, groups = 264, 160, len(SPLITS)
    torch.manual_seed(0)
    module = cgm.Sequential(
        cgm.GroupedLinear(groups, hidden, 2 * ffn, device="cuda", dtype=BF16),
        cgm.ScaledSwiGLU(),
        cgm.GroupedLinear(groups, ffn, hidden, scale_bias=True, device="cuda", dtype=BF16),
    )
    x, sizes, probs, dy = operands(SPLITS, hidden)
    scale = torch.rand_like(probs).requires_grad_()
    probs.requires_grad_()
    with poisoned():
        y = module(x, sizes, probs, sizes, scale)
        y.backward(dy)
    assert is_fused(module)
    s = reference.grouped_mlp(
        x, module[0].weight, module[2].weight, SPLITS, probs, dy, b1=module[0].bias, b2=module[2].bias, scale=scale
    )
    for name, got, want in (
        ("y", y.detach(), s.y),
        ("dscale", scale.grad, s.dscale),
        ("dprobs", probs.grad, s.dprobs),
        ("db1", module[0].bias.grad, s.db1),
        ("db2", module[2].bias.grad, s.db2),
    ):
        assert_close(name, got, want)


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("delay", [False, True])
@pytest.mark.parametrize("main_dtype", [FP32, BF16])
def test_e3_n2_main_grad(main_dtype, delay, overwrite):
    splits = (0, 128, 300)
    module = module_of(3, 128, 96, accumulate_into_main_grad=True, delay_wgrad_compute=delay)
    args = operands(splits, 128)
    for w in module.parameters():
        w.main_grad = torch.full(w.shape, float("nan") if overwrite else 0.5, device="cuda", dtype=main_dtype)
        w.overwrite_main_grad, w.grad_added_to_main_grad = overwrite, False
    step(module, *args)
    assert is_fused(module)
    module.backward_dw()
    expected = expected_step(module, *args)
    for name, w in module.named_parameters():
        assert w.grad_added_to_main_grad
        assert_close(name, w.main_grad, expected[name] + (0.0 if overwrite else 0.5))
        assert bool((w.main_grad[0] == (0.0 if overwrite else 0.5)).all()), "the empty group"


FROZEN = ["x", "probs", "fc1.weight", "fc2.weight", "x probs fc1.weight", "x fc1.weight fc2.weight"]


@pytest.mark.parametrize("frozen", FROZEN)
def test_e4_frozen_parts(frozen):
    module = module_of(len(SPLITS), 264, 352)
    args = operands(SPLITS, 264)
    full = step(module, *args)
    got = step(module, *args, frozen=frozen.split())
    assert set(got) == set(full) - set(frozen.split())
    if (
        "fc2.weight" in frozen.split() and "probs" in got
    ):  # dgrad_act without a adds the parts of dprobs in another order
        scale = full["probs"].pow(2).mean().sqrt().item()
        torch.testing.assert_close(got.pop("probs"), full["probs"], rtol=0, atol=1e-5 * scale)
    assert_equal(got, full, got)


def test_e7_caller_buffers():
    module = module_of(len(SPLITS), 264, 352)
    x, sizes, probs, dy = operands(SPLITS, 264)
    want = step(module, x, sizes, probs, dy)
    out, grad = torch.full_like(x.detach(), float("nan")), torch.full_like(x.detach(), float("nan"))
    y = module(x, sizes, probs, op_kwargs={module.fc2: {"output": out}, module.fc1: {"grad_input": grad}})
    (dx,) = torch.autograd.grad(y, x, dy)
    assert y.data_ptr() == out.data_ptr()
    assert dx.data_ptr() == grad.data_ptr()
    assert torch.equal(out, want["y"])
    assert torch.equal(grad, want["x"])


def test_e8_evaluation_between_training_steps():
    module = module_of(len(SPLITS), 264, 352)
    x, sizes, probs, dy = operands(SPLITS, 264)
    want = step(module, x, sizes, probs, dy)
    y = module(x, sizes, probs)
    with torch.no_grad():
        assert torch.equal(module(x, sizes, probs), want["y"])
        module(torch.zeros_like(x), sizes, probs)
    x.grad = module.fc1.weight.grad = None
    y.backward(dy)
    assert torch.equal(x.grad, want["x"])
    assert torch.equal(module.fc1.weight.grad, want["fc1.weight"])


@pytest.mark.parametrize("config", ["plain", "bias"])
def test_e11_twenty_runs_are_bitwise_equal(config):
    module = module_of(len(SPLITS), 2048, 768, **CONFIGS[config])
    args = operands(SPLITS, 2048)
    first = step(module, *args)
    for _ in range(19):
        assert_equal(step(module, *args), first)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_b5_n13_checkpointed_step_is_bitwise_the_plain_one(use_reentrant):
    module = module_of(len(SPLITS), 264, 352)
    args = operands(SPLITS, 264)
    want = step(module, *args)

    class Checkpointed:
        named_parameters = module.named_parameters

        def __call__(self, *inputs):
            return cgm.checkpoint(module, *inputs, use_reentrant=use_reentrant)

    assert_equal(step(Checkpointed(), *args), want)


# N: cases from the field ----------------------------------------------------------------------------------------------


def poison_freed_memory(*shapes):
    """Fill blocks of these shapes with NaN and give them back to the allocator."""
    blocks = [torch.full(shape, float("nan"), device="cuda", dtype=BF16) for shape in shapes]
    del blocks


N1 = {
    "n1": (162, 0, 2577, 446, 0, 83),
    "empty first": (0, 162, 446),
    "empty last": (162, 446, 0),
    "all but one": (0, 0, 300, 0),
    "250 of 256": tuple(100 if g % 43 == 3 else 0 for g in range(256)),
}


@pytest.mark.parametrize("splits", N1.values(), ids=N1)
def test_n1_empty_groups_get_exact_zeros_and_change_nothing(splits):
    hidden, ffn = (2048, 768) if len(splits) == 6 else (256, 160)
    module = module_of(len(splits), hidden, ffn)
    args = operands(splits, hidden)
    poison_freed_memory(module.fc1.weight.shape, module.fc2.weight.shape)
    got = step(module, *args)
    kept = [g for g, size in enumerate(splits) if size]
    few = module_of(len(kept), hidden, ffn)
    with torch.no_grad():
        few.fc1.weight.copy_(module.fc1.weight[kept])
        few.fc2.weight.copy_(module.fc2.weight[kept])
    x, _, probs, dy = args
    sizes = torch.tensor([splits[g] for g in kept], dtype=torch.int32, device="cuda")
    want = step(few, x, sizes, probs, dy)
    assert_equal(got, want, ("y", "x", "probs"))
    for name in ("fc1.weight", "fc2.weight"):
        assert torch.equal(got[name][kept], want[name])
        empty = [g for g, size in enumerate(splits) if not size]
        assert not got[name][empty].any()


def test_n3_nan_past_the_sum_reaches_nothing():
    splits, tokens, hidden, ffn = (100, 200, 0, 50), 1024, 512, 256
    module = module_of(4, hidden, ffn, bias=True)
    x, sizes, probs, dy = operands(splits, hidden, tokens=tokens)
    for _ in range(2):
        poison_freed_memory((tokens, 2 * ffn), (tokens, ffn), (tokens, hidden))
        got = step(module, x, sizes, probs, dy)
        want = step(module, x[:350].detach().clone(), sizes, probs[:350].detach().clone(), dy[:350].clone())
        for name in ("y", "x", "probs"):
            assert torch.equal(got[name][:350], want[name]), name
            assert not got[name][350:].any(), f"{name}: the tail is not 0"
        assert_equal(got, want, [name for name, _ in module.named_parameters()])


def test_n4_groups_that_are_no_multiple_of_anything():
    splits = (40, 72, 136) * 4
    module = module_of(len(splits), 512, 384)
    args = operands(splits, 512)
    got, want = step(module, *args), expected_step(module, *args)
    for name in ("fc1.weight", "fc2.weight"):
        for group in range(len(splits)):
            error = (got[name][group].double() - want[name][group]).abs().max()
            assert (error / want[name][group].abs().max()).item() <= 0.02, (name, group)
    assert_step(got, want)


def test_n7_many_short_groups_repeat_bitwise():
    splits = (128, 120, 136, 128, 100, 156, 127, 129)
    module = module_of(8, 2048, 768)
    args = operands(splits, 2048)
    first = step(module, *args)
    for _ in range(49):
        assert_equal(step(module, *args), first)


@pytest.mark.timeout(600)
def test_n10_weights_beyond_two_to_the_31_elements():
    """G=64, K=4096, N=14336: the last group starts at element 3.7e9; two to the 31 lies in group 36."""
    groups, k, n = 64, 4096, 14336
    rows = {0: 70, 36: 65, 37: 130, 63: 129}
    splits = [rows.get(g, 0) for g in range(groups)]
    op = cgm.GroupedLinear(groups, k, n, bias=False, device="cuda", dtype=BF16)
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(sum(splits), k, device="cuda", generator=generator).to(BF16).requires_grad_()
    dy = torch.randn(sum(splits), n, device="cuda", generator=generator).to(BF16)
    with poisoned():
        y = op(x, torch.tensor(splits, device="cuda"))
        dx, dw = torch.autograd.grad(y, (x, op.weight), dy)
    ends = [0, *itertools.accumulate(splits)]
    for g in rows:
        r = slice(ends[g], ends[g + 1])
        w = op.weight[g].detach().double()
        assert_close(f"y of group {g}", y[r].detach(), (x[r].detach().double() @ w.T).to(BF16))
        assert_close(f"dx of group {g}", dx[r], (dy[r].double() @ w).to(BF16))
        assert_close(f"dw of group {g}", dw[g], (dy[r].double().T @ x[r].detach().double()).to(BF16))
    for g in (1, 35, 38, 62):
        assert not dw[g].any()


@pytest.mark.timeout(600)
def test_n10_activations_beyond_two_to_the_31_elements():
    """T=140000 and 2F=16384: rows above 131072 of z lie beyond two to the 31 elements."""
    tokens, hidden, ffn = 140000, 128, 8192
    splits = (131000, 144, 8800)  # the second group lies across the limit; 56 rows of tail
    module = module_of(3, hidden, ffn)
    x, sizes, probs, dy = operands(splits, hidden, tokens=tokens)
    got = step(module, x, sizes, probs, dy)
    assert is_fused(module)
    for g, window in ((0, slice(130872, 131000)), (1, slice(131000, 131144)), (2, slice(139816, 139944))):
        part = [t[window].detach() for t in (x, probs, dy)]
        w1, w2 = (w[g : g + 1].detach() for w in (module.fc1.weight, module.fc2.weight))
        want = reference.grouped_mlp(part[0], w1, w2, [window.stop - window.start], part[1], part[2])
        assert_close("y", got["y"][window], want.y)
        assert_close("dx", got["x"][window], want.dx)
        assert_close("dprobs", got["probs"][window], want.dprobs)
        if g == 1:
            assert_close("dw1", got["fc1.weight"][1], want.dw1[0])
            assert_close("dw2", got["fc2.weight"][1], want.dw2[0])
    for name in ("y", "x", "probs"):
        assert not got[name][sum(splits) :].any()


# A lone GroupedLinear, and where kernels cannot run -------------------------------------------------------------------


@pytest.mark.parametrize("bias", [False, True])
def test_lone_linear_runs_kernels(bias):
    groups, k, n = len(SPLITS), 264, 136
    op = cgm.GroupedLinear(groups, k, n, bias=bias, device="cuda", dtype=BF16)
    x, sizes, _, _ = operands(SPLITS, k, tokens=sum(SPLITS) + 30)
    dy = torch.randn(x.shape[0], n, device="cuda").to(BF16)
    explanation = str(cgm.explain(op, x.requires_grad_(), sizes))
    assert "sm90a_bf16_fprop" in explanation
    with poisoned():
        y = op(x, sizes)
        grads = torch.autograd.grad(y, (x, *op.parameters()), dy)
    ends, total = [0, *itertools.accumulate(SPLITS)], sum(SPLITS)
    xd, dyd, w = x.detach().double(), dy.double(), op.weight.detach().double()
    expected = reference.fprop(xd, w, ends)
    if bias:
        groups_of_rows = reference.group_of_rows(ends, x.shape[0], x.device)[:total]
        expected[:total] += op.bias.detach().double()[groups_of_rows]
    assert_close("y", y.detach(), expected.to(BF16))
    assert_close("dx", grads[0], reference.dgrad(dyd, w, ends).to(BF16))
    assert_close("dw", grads[1], reference.wgrad(dyd, xd, ends).to(BF16))
    if bias:
        sums = torch.stack([dyd[a:b].sum(0) for a, b in itertools.pairwise(ends)])
        assert_close("db", grads[2], sums.to(BF16))


@pytest.mark.parametrize(("hidden", "ffn", "dtype"), [(32, 37, BF16), (37, 12, FP16), (64, 32, FP32)])
def test_dimensions_and_types_that_no_kernel_takes(hidden, ffn, dtype):
    module = module_of(3, hidden, ffn, dtype=dtype)
    args = operands((5, 0, 9), hidden, dtype=dtype, tokens=20)
    got = step(module, *args, poison=False)  # cuBLAS refuses to run in deterministic mode
    assert not is_fused(module)
    assert module.fuser.last_plan.rejections
    expected = expected_step(module, *args, round_grad=True)
    for name, t in got.items():
        scale = expected[name].pow(2).mean().sqrt()
        error = (t.double() - expected[name]).pow(2).mean().sqrt()
        assert error <= 2 * RMS_BOUND.get(dtype, 1e-5) * scale, name


# Kernels to build beforehand ------------------------------------------------------------------------------------------


def specs():
    """Kernels that this file launches, found without a GPU by planning on meta tensors."""
    found = {}

    def meta(*shape, dtype=FP32, grad=True):
        return torch.empty(*shape, dtype=dtype, device="meta", requires_grad=grad)

    def plan(module, k, dtype, *probs):
        sizes = meta(3, dtype=torch.int32, grad=False)
        for pipeline in cgm.explain(module, meta(9, k, dtype=dtype), sizes, *probs).pipelines:
            found.update(dict.fromkeys(k.step.spec for k in pipeline.kernels if k.step.spec is not None))

    cases = [(config, SHAPES[shape], probs) for config, shape, probs in MATRIX]
    cases += [("plain", shape, FP32) for shape in ((512, 384), (256, 160), (128, 128), (128, 8192), *SHAPES.values())]
    cases += [("bias", shape, FP32) for shape in ((512, 256), (128, 96), SHAPES["tails"])]
    linear = [(False, 4096, 14336), *((bias, 264, 136) for bias in (False, True))]
    linear += [(bias, *shape) for bias in (False, True) for shape in ((264, 704), (352, 264))]
    with kernels.using(ReferenceKernels()):
        for config, (hidden, ffn), probs in cases:
            module = module_of(3, hidden, ffn, device="meta", **CONFIGS[config])
            dtype = CONFIGS[config].get("dtype", BF16)
            plan(module, hidden, dtype, *([] if probs is None else [meta(9, dtype=probs)]))
        with torch.no_grad():
            plan(module_of(3, *SHAPES["tails"], device="meta"), 264, BF16, meta(9))
        for bias, k, n in linear:
            plan(cgm.GroupedLinear(3, k, n, bias=bias, device="meta", dtype=BF16), k, BF16)
    return tuple(found)


SPECS = specs()
