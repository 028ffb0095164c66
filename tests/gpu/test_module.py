"""The fused grouped MLP and a lone GroupedLinear on a Hopper GPU, against float64 (acceptance.md, E; cases.md)."""

import contextlib
import itertools
import sys
import threading
import warnings

import pytest
import torch
from references import expected_step

import cute_grouped_mlp as cgm
from cute_grouped_mlp import kernels, reference
from cute_grouped_mlp.reference_kernels import ReferenceKernels

pytestmark = pytest.mark.gpu

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


# Host: no synchronisation, no work per group, graphs, streams ---------------------------------------------------------


@pytest.mark.parametrize("recipe", [None, cgm.HighPrecision(**UNFUSED)], ids=["fused", "unfused"])
def test_h2_nothing_synchronises(recipe):
    module = module_of(len(SPLITS), 264, 352, bias=True)
    args = operands(SPLITS, 264)
    step(module, *args, recipe=recipe)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
            torch.cuda.set_sync_debug_mode("error")
        step(module, *args, recipe=recipe)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_h1_h3_no_host_reads_and_no_python_work_that_grows_with_groups(monkeypatch):
    def forbidden(*_, **__):
        raise AssertionError("a host read in the hot path")

    def calls_of(groups):
        module = module_of(groups, 128, 128)
        args = operands((16,) * groups, 128)
        step(module, *args)
        counts = []
        for _ in range(2):
            seen = 0

            def count(frame, event, argument):
                nonlocal seen
                seen += event in ("call", "c_call")

            with monkeypatch.context() as patch:
                for name in ("tolist", "item", "numpy", "cpu"):
                    patch.setattr(torch.Tensor, name, forbidden)
                patch.setattr(torch, "from_dlpack", forbidden)
                with torch.autograd.set_multithreading_enabled(False):  # or backward's thread is not counted
                    sys.setprofile(count)
                    try:
                        y = module(*args[:3])
                        y.backward(args[3])
                    finally:
                        sys.setprofile(None)
            counts.append(seen)
        return min(counts)

    assert calls_of(8) == calls_of(64) == calls_of(256)


def test_e5_graph_replays_with_other_splits():
    hidden, ffn, tokens, groups = 264, 352, 1500, 5
    module = module_of(groups, hidden, ffn)
    x, sizes, probs, dy = operands((300,) * groups, hidden)
    for t in (x, probs):
        t.requires_grad_()
    wanted = (x, probs, *module.parameters())

    def run():
        y = module(x, sizes, probs)
        return (y.detach(), *torch.autograd.grad(y, wanted, dy))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = run()
    for splits in ((300,) * 5, (0, 1, 700, 0, 799), (100, 0, 0, 50, 3), (0,) * 5):
        fresh = operands(splits, hidden, tokens=tokens, seed=sum(splits))
        with torch.no_grad():
            for target, source in zip((x, sizes, probs, dy), fresh, strict=True):
                target.copy_(source)
        graph.replay()
        eager = run()
        torch.cuda.synchronize()
        for got, want in zip(outputs, eager, strict=True):
            assert torch.equal(got, want), splits


def test_e5_two_layers_of_equal_shape_in_one_graph():
    groups, hidden, ffn = 4, 264, 352
    first, second = module_of(groups, hidden, ffn), module_of(groups, hidden, ffn)
    with torch.no_grad():
        second.fc1.weight.mul_(-1.0)
    x, sizes, probs, _ = operands((300, 0, 200, 77), hidden)

    def run():
        with torch.no_grad():
            return second(first(x, sizes, probs), sizes, probs)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = run()
    for splits in ((300, 0, 200, 77), (77, 200, 300, 0)):
        fresh = operands(splits, hidden, seed=9)
        for target, source in zip((x, sizes, probs), fresh, strict=False):
            target.copy_(source)
        graph.replay()
        assert torch.equal(output, run())
        assert output.any()


def test_m2_what_changes_in_one_process_is_seen_and_nothing_grows():
    """M2: groups, types and options change; then 200 values of T compile nothing and grow no table."""
    for groups, dtype, options in (
        (4, FP32, {}),
        (8, FP32, {}),
        (8, BF16, {}),
        (8, FP32, {"bias": True}),
        (8, FP32, {"activation": "clamped_qgeglu"}),
        (8, FP32, {"activation": "clamped_qgeglu", "limit": 1.0, "alpha": 1.1}),
        (8, FP32, {"glu_interleave_size": 32}),
    ):
        module = module_of(groups, 128, 96, **options)
        args = operands(tuple(range(40, 40 + groups)), 128, probs=dtype)
        assert_step(step(module, *args), expected_step(module, *args))
    module = module_of(8, 128, 96)
    step(module, *operands((128,) * 8, 128))
    for tokens in (1, 1024, 4096):  # one for each bucket of rows per group that follows
        step(module, *operands((tokens,) + (0,) * 7, 128))
    cache = kernels.provider()
    sizes = len(cache._kernels), len(module.fuser.last_plan.forward_ops[0][0]._tables)
    for tokens in range(1, 4001, 20):
        step(module, *operands((tokens,) + (0,) * 7, 128), poison=False)
    assert len(cache._kernels) == sizes[0]
    assert len(module.fuser.last_plan.forward_ops[0][0]._tables) <= sizes[1] + 12  # buckets: powers of two
    assert module.fuser.plan_cache_info().currsize == 1


def test_k6_more_than_a_thousand_groups():
    module = module_of(1025, 128, 96)
    splits = [0] * 1025
    splits[0], splits[31], splits[32], splits[511], splits[1023], splits[1024] = 70, 1, 130, 9, 64, 300
    args = operands(splits, 128, tokens=sum(splits) + 5)
    got, expected = step(module, *args), expected_step(module, *args)
    busy = torch.tensor(splits, device="cuda") > 0
    for name in ("fc1.weight", "fc2.weight"):  # the RMS of a gradient that is nearly all zeros says nothing
        assert not got[name][~busy].any()
        got[name], expected[name] = got[name][busy], expected[name][busy]
    assert_step(got, expected)


def test_m3_a_cold_kernel_under_capture_is_a_clear_error():
    module = module_of(3, 128, 96)
    args = operands((10, 20, 30), 128)
    cold = kernels.KernelCache()
    with kernels.using(cold):
        graph = torch.cuda.CUDAGraph()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the graph is empty
            with pytest.raises(cgm.UnsupportedError, match="once before capturing"), torch.cuda.graph(graph):
                module(*args[:3])
    step(module, *args)


def test_side_stream_and_other_threads():
    module = module_of(len(SPLITS), 264, 352)
    args = operands(SPLITS, 264)
    want = step(module, *args)
    torch.cuda.synchronize()
    results = []

    def work():
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            x, probs = (t.detach().clone().requires_grad_() for t in (args[0], args[2]))
            y = module(x, args[1], probs)
            grads = torch.autograd.grad(y, (x, probs, *module.parameters()), args[3])
            stream.synchronize()
            results.append((y.detach(), *grads))

    work()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    names = ("y", "x", "probs", "fc1.weight", "fc2.weight")
    for result in results:
        assert_equal(dict(zip(names, result, strict=True)), want, names)
    assert len(results) == 2


def test_invalid_splits_are_reported_where_they_are_asked_for():
    module = module_of(3, 128, 96)
    x, _, probs, dy = operands((50, 50, 50), 128)
    bad = torch.tensor([100, -5, 100], dtype=torch.int32, device="cuda")
    got = step(module, x, bad, probs, dy)
    assert all(bool(torch.isfinite(t).all()) for t in got.values())
    with pytest.raises(cgm.ShapeError, match="split_sizes on cuda:0"):
        cgm.explain(module, x, bad, probs)
    with cgm.settings.override(debug_checks=True), pytest.raises(cgm.ShapeError, match="split_sizes"):
        module(x, bad, probs)
    kernels.provider().check_status(x.device)
    good = torch.tensor([50, 50, 50], dtype=torch.int32, device="cuda")
    with cgm.settings.override(debug_checks=True):
        module(x, good, probs).backward(dy)


def test_switching_the_recipe_changes_what_runs_and_builds_nothing_when_switched_back():
    module = module_of(len(SPLITS), 264, 352)
    args = operands(SPLITS, 264)
    recipe = cgm.HighPrecision()
    step(module, *args, recipe=recipe)
    assert "FusedGroupedMLP" in str(cgm.explain(module, *args[:3], recipe=recipe))
    recipe.enable_cutedsl_fused_grouped_mlp = False
    step(module, *args, recipe=recipe)
    assert not is_fused(module)
    assert "FusedGroupedMLP" not in str(cgm.explain(module, *args[:3], recipe=recipe))
    recipe.enable_cutedsl_fused_grouped_mlp = None
    before = module.fuser.plan_cache_info().misses
    step(module, *args, recipe=recipe)
    assert is_fused(module)
    assert module.fuser.plan_cache_info().misses == before


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
