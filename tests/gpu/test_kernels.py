"""Every kernel on its own against float64: features, tile configs, splits, bad splits.

Bounds are those of acceptance section E: error relative to the RMS of the reference, which rounds where the kernel
stores.
"""

import dataclasses

import pytest
import torch

from cute_grouped_mlp import kernels, reference
from cute_grouped_mlp.codegen import select, tiles
from cute_grouped_mlp.codegen.activations import ACTIVATIONS, Activation
from cute_grouped_mlp.codegen.spec import Arch, DType, GluLayout, KernelSpec, Pass, Schedule, TileConfig

pytestmark = pytest.mark.gpu

TORCH = {DType.BF16: torch.bfloat16, DType.FP16: torch.float16, DType.FP32: torch.float32}
RMS_BOUND = {DType.BF16: 5e-3, DType.FP16: 7e-4, DType.FP32: 7e-4}
PINGPONG = TileConfig(128, 128, 1, 1, Schedule.PINGPONG)

#: (T, splits, H, F): odd sizes, empties in every place, a tail, everything empty, many groups, dimensions with tails.
PROBLEMS = {
    "odd": (1000, (0, 1, 127, 128, 0, 129, 300, 0), 136, 96),
    "tail": (64, (5, 0, 0), 64, 96),
    "all_empty": (40, (0, 0, 0), 64, 64),
    "n1": (3268, (162, 0, 2577, 446, 0, 83), 512, 352),
    "many": (1100, (300,) + (0,) * 40 + (7,) * 37 + (513,), 264, 160),
    "exact": (2500, (700, 800, 1000), 2056, 544),
}


def spec(kernel, **fields):
    """A spec with a small tile and, for kernels with an activation, SwiGLU and fp32 probs."""
    if Pass(kernel).has_activation:
        fields = {"activation": "swiglu", "probs": DType.FP32, "store_z": kernel == "fprop_act"} | fields
    fields.setdefault("tile", PINGPONG if Pass(kernel).is_gemm else None)
    return KernelSpec(Arch.SM90A, Pass(kernel), **fields)


FEATURES = [
    *(spec(k, activation=a) for k in ("fprop_act", "dgrad_act") for a in ACTIVATIONS),
    *(spec(k, glu_layout=GluLayout.INTERLEAVED32) for k in ("fprop_act", "dgrad_act")),
    *(spec(k, probs=p) for k in ("fprop_act", "dgrad_act") for p in (None, DType.BF16, DType.FP16)),
    spec("fprop_act", store_z=False),
    spec("fprop_act", bias=True),
    spec("fprop_act", bias=True, glu_layout=GluLayout.INTERLEAVED32, activation="clamped_qgeglu"),
    spec("fprop_act", bias=True, activation="srelu", probs=None),
    *(spec(k, alpha=True) for k in ("fprop_act", "fprop", "dgrad_act", "dgrad", "wgrad")),
    spec("fprop_act", alpha=True, bias=True),
    spec("fprop", alpha=True, bias=True, probs=DType.FP32),
    spec("wgrad", alpha=True, out=DType.FP32, accumulate=True),
    spec("dgrad_act", store_act=False),
    spec("dgrad_act", sum_probs=False),
    spec("fprop", bias=True),
    spec("fprop", bias=True, probs=DType.FP32),
    *(spec(k, numerics="fp16") for k in ("fprop_act", "fprop", "dgrad_act", "dgrad", "wgrad")),
    *(spec("wgrad", out=o, accumulate=a) for o in (None, DType.FP32) for a in (False, True)),
    spec("wgrad", numerics="fp16", out=DType.FP32, accumulate=True),
    *(spec("bias_grad", out=o, accumulate=a) for o in (None, DType.FP32) for a in (False, True)),
    spec("bias_grad", probs=DType.FP32),
    spec("bias_grad", probs=DType.BF16, sum_probs=False),
]
TILES = [
    dataclasses.replace(s, tile=tile)
    for s in map(spec, ("fprop_act", "fprop", "dgrad_act", "dgrad", "wgrad"))
    for tile in tiles.candidates(s)
]
REDUCE = [spec("reduce", probs=p) for p in (DType.FP32, DType.BF16)]
#: Everything this file launches: tests/gpu/build.py compiles it beforehand, on the CPU.
SPECS = tuple(dict.fromkeys([*FEATURES, *TILES, *REDUCE]))


@dataclasses.dataclass
class Problem:
    """Random operands of one problem; rows past sum(S) are NaN."""

    tokens: int
    splits: tuple
    hidden: int
    ffn: int
    dtype: torch.dtype

    def __post_init__(self):
        self.generator = torch.Generator("cuda").manual_seed(7)
        self.total = sum(self.splits)
        self.groups = len(self.splits)
        self.ends = torch.tensor((0, *self.splits)).cumsum(0).tolist()
        sizes = torch.tensor(self.splits, dtype=torch.int64, device="cuda")
        self.sizes = sizes.unsqueeze(-1).view(torch.int32)[:, 0]  # int64 as the low words, stride 2

    def rows(self, columns, dtype=None):
        value = torch.randn(self.tokens, columns, device="cuda", generator=self.generator).to(dtype or self.dtype)
        value[self.total :] = float("nan")
        return value

    def weight(self, n, k):
        return (torch.randn(self.groups, n, k, device="cuda", generator=self.generator) * k**-0.5).to(self.dtype)

    def factors(self, dtype):
        value = torch.rand(self.tokens, device="cuda", generator=self.generator).add(0.1).to(dtype)
        value[self.total :] = float("nan")
        return value

    def alpha(self):
        """A factor for each group; NaN for empty ones, which nothing may read."""
        value = torch.rand(self.groups, device="cuda", generator=self.generator) + 0.5
        value[torch.tensor(self.splits, device="cuda") == 0] = float("nan")
        return value

    def each(self, function):
        """function(group, rows) of each group, one below the other, in float64."""
        return torch.cat([function(g, slice(self.ends[g], self.ends[g + 1])) for g in range(self.groups)])


def poisoned(*shape, dtype):
    return torch.full(shape, float("nan"), device="cuda", dtype=dtype)


def status():
    return kernels.provider().status(torch.device("cuda", 0))


def launch(s, *arguments):
    """Launch a kernel with the arguments that it takes; None for those that its spec leaves out."""
    given = [a for a in arguments if a is not None]
    if s.kernel.is_gemm:
        cluster = s.tile.cluster_m * s.tile.cluster_n
        params = [] if s.activation is None else [value for _, value in ACTIVATIONS[s.activation].params]
        given += [status(), *params, 132 // cluster * cluster]
    kernels.provider().get(s)(*given)
    torch.cuda.synchronize()


def assert_close(name, actual, expected, dtype):
    """Bounds of section E on the whole and on every stripe of 16 columns (N6)."""
    expected = expected.to(TORCH[dtype]).double()
    if not expected.numel():
        return
    actual = actual.double()
    bound = RMS_BOUND[dtype]
    error, scale = actual - expected, expected.pow(2).mean().sqrt()
    assert not actual.isnan().any(), f"{name}: {int(actual.isnan().sum())} elements were not written"
    if not scale:
        assert not actual.any(), f"{name}: not 0"
        return
    rms = (error.pow(2).mean().sqrt() / scale).item()
    assert rms <= bound, f"{name}: rms error {rms:.2e}"
    ulp = expected.abs() * torch.finfo(TORCH[dtype]).eps
    assert bool((error.abs() <= 12 * bound * scale + ulp).all()), (
        f"{name}: largest error {error.abs().max() / scale:.2e}"
    )
    assert abs((actual.norm() / expected.norm()).item() - 1) <= 0.01, f"{name}: norm"
    if actual.dim() > 1 and actual.shape[-1] >= 32:
        stripes = [e.pow(2).mean().sqrt() / scale for e in error.flatten(0, -2).split(16, -1)]
        assert max(stripes) <= 3 * bound, f"{name}: stripe {int(torch.stack(stripes).argmax())}"


def assert_rows(name, problem, actual, expected, dtype):
    """Rows of groups close, rows past them exactly 0."""
    assert_close(name, actual[: problem.total], expected, dtype)
    assert bool((actual[problem.total :] == 0).all()), f"{name}: the tail is not 0"


def run(s, problem):
    """Launch a spec's kernel on a problem and compare every output with float64."""
    p, dtype, store = problem, problem.dtype, s.types.storage
    glu = s.activation is None or ACTIVATIONS[s.activation].glu
    width = p.ffn * (2 if glu else 1)
    interleave = 32 if s.glu_layout is GluLayout.INTERLEAVED32 else None
    params = [] if s.activation is None else [value for _, value in ACTIVATIONS[s.activation].params]
    probs = None if s.probs is None else p.factors(TORCH[s.probs])
    alpha = p.alpha() if s.alpha else None
    times = torch.ones(p.groups, device="cuda").double() if alpha is None else alpha.double()
    if s.kernel is Pass.FPROP_ACT:
        x, w = p.rows(p.hidden), p.weight(width, p.hidden)
        bias = torch.randn(p.groups, width, device="cuda", generator=p.generator).to(dtype) if s.bias else None
        z = poisoned(p.tokens, width, dtype=dtype) if s.store_z else None
        act = poisoned(p.tokens, p.ffn, dtype=dtype)
        launch(s, x, w, alpha, bias, probs, p.sizes, z, act)
        expected = p.each(
            lambda g, r: times[g] * (x[r].double() @ w[g].double().T) + (bias[g].double() if s.bias else 0.0)
        )
        if s.store_z:
            assert_rows("z", p, z, expected, store)
        z_used = z[: p.total].double() if s.store_z else expected.to(dtype).double()
        factors = None if probs is None else probs[: p.total].double()
        assert_rows("a", p, act, reference.activation_forward(s.activation, z_used, factors, interleave, params), store)
    elif s.kernel is Pass.FPROP:
        x, w = p.rows(p.ffn), p.weight(p.hidden, p.ffn)
        bias = torch.randn(p.groups, p.hidden, device="cuda", generator=p.generator).to(dtype) if s.bias else None
        y = poisoned(p.tokens, p.hidden, dtype=dtype)
        launch(s, x, w, alpha, bias, probs, p.sizes, y)
        scale = (lambda r: probs[r].double()[:, None]) if probs is not None else (lambda r: 1.0)
        added = (lambda g, r: bias[g].double() * scale(r)) if s.bias else (lambda g, r: 0.0)
        assert_rows("y", p, y, p.each(lambda g, r: times[g] * (x[r].double() @ w[g].double().T) + added(g, r)), store)
    elif s.kernel is Pass.DGRAD:
        dy, w = p.rows(width), p.weight(width, p.hidden)
        dx = poisoned(p.tokens, p.hidden, dtype=dtype)
        launch(s, dy, w, alpha, p.sizes, dx)
        assert_rows("dx", p, dx, p.each(lambda g, r: times[g] * dy[r].double() @ w[g].double()), store)
    elif s.kernel is Pass.DGRAD_ACT:
        dy, w, z = p.rows(p.hidden), p.weight(p.hidden, p.ffn), p.rows(width)
        dz = poisoned(p.tokens, width, dtype=dtype)
        act = poisoned(p.tokens, p.ffn, dtype=dtype) if s.store_act else None
        sums = s.sum_probs and probs is not None
        partial = poisoned(-(-p.ffn // s.tile.tile_n), p.tokens, dtype=torch.float32) if sums else None
        launch(s, dy, w, alpha, z, probs, p.sizes, dz, act, partial)
        h = p.each(lambda g, r: times[g] * dy[r].double() @ w[g].double())
        factors = None if probs is None else probs[: p.total].double()
        z_used = z[: p.total].double()
        expected, dp = reference.activation_backward(s.activation, h, z_used, factors, interleave, params)
        assert_rows("dz", p, dz, expected, store)
        if s.store_act:
            a = reference.activation_forward(s.activation, z_used, factors, interleave, params)
            assert_rows("a", p, act, a, store)
        if sums:
            out = poisoned(p.tokens, dtype=TORCH[DType.FP32])
            kernels.provider().get(REDUCE[0])(partial, out, 132)
            assert_rows("dp", p, out, dp, DType.FP32)
    elif s.kernel is Pass.WGRAD:
        dy, x = p.rows(p.hidden), p.rows(p.ffn)
        kind = s.out or store
        dw = poisoned(p.groups, p.hidden, p.ffn, dtype=TORCH[kind])
        if s.accumulate:
            dw.normal_(generator=p.generator)
        before = dw.clone()
        launch(s, dy, x, alpha, p.sizes, dw)
        groups = [slice(a, b) for a, b in zip(p.ends, p.ends[1:], strict=False)]
        expected = torch.stack(
            [dy[r].double().T @ x[r].double() * (times[g] if p.splits[g] else 1) for g, r in enumerate(groups)]
        )
        assert_close("dw", dw, expected + (before.double() if s.accumulate else 0.0), kind)
        for g, size in enumerate(p.splits):
            if size == 0:
                assert torch.equal(dw[g], before[g] if s.accumulate else torch.zeros_like(dw[g])), f"empty group {g}"
    else:
        dy = p.rows(p.hidden)
        kind = s.out or store
        bias = torch.randn(p.groups, p.hidden, device="cuda", generator=p.generator).to(dtype)
        db = poisoned(p.groups, p.hidden, dtype=TORCH[kind])
        if s.accumulate:
            db.normal_(generator=p.generator)
        before = db.clone()
        sums = s.sum_probs and probs is not None
        partial = poisoned(-(-p.hidden // 256), p.tokens, dtype=torch.float32) if sums else None
        launch(s, dy, probs, bias if sums else None, p.sizes, db, partial)
        weighted = dy.double() * (1.0 if probs is None else probs.double()[:, None])
        expected = torch.stack([weighted[a:b].sum(0) for a, b in zip(p.ends, p.ends[1:], strict=False)])
        assert_close("db", db, expected + (before.double() if s.accumulate else 0.0), kind)
        if sums:
            out = poisoned(p.tokens, dtype=torch.float32)
            kernels.provider().get(REDUCE[0])(partial, out, 132)
            expected = p.each(lambda g, r: (dy[r].double() * bias[g].double()).sum(-1))
            assert_rows("ds", p, out, expected, DType.FP32)
    assert int(status().item()) == 0, "valid splits were reported as bad"


@pytest.mark.parametrize("s", FEATURES, ids=str)
@pytest.mark.parametrize("problem", PROBLEMS)
def test_feature(s, problem):
    run(s, Problem(*PROBLEMS[problem], TORCH[s.types.storage]))


def test_one_table_entry_adds_an_activation(monkeypatch):
    """A throwaway GEGLU with tanh: nothing but the table changes, and value and gradient are right."""
    geglu = Activation(
        name="geglu_tanh",
        glu=True,
        forward=(
            "inner = 0.7978845608 * (gate + 0.044715 * gate * gate * gate)",
            "th = tanh(inner)",
            "act = 0.5 * gate * (1.0 + th) * up",
        ),
        backward=(
            "slope = 0.7978845608 * (1.0 + 0.134145 * gate * gate)",
            "dgate = grad * up * (0.5 * (1.0 + th) + 0.5 * gate * (1.0 - th * th) * slope)",
            "dup = grad * 0.5 * gate * (1.0 + th)",
        ),
    )
    monkeypatch.setitem(ACTIVATIONS, geglu.name, geglu)
    gate, up = torch.randn(2, 100, dtype=torch.float64, device="cuda").requires_grad_()
    expected = torch.nn.functional.gelu(gate, approximate="tanh") * up
    found = reference.activation_forward(geglu.name, torch.cat((gate, up)), None)
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8)
    for kernel in ("fprop_act", "dgrad_act"):
        run(spec(kernel, activation=geglu.name), Problem(*PROBLEMS["n1"], torch.bfloat16))


@pytest.mark.parametrize("s", TILES, ids=str)
def test_n6_tile(s):
    """N6: every tile config of the family is right on its own, in every stripe of columns."""
    for problem in ("n1", "many", "all_empty"):
        run(s, Problem(*PROBLEMS[problem], TORCH[s.types.storage]))


@pytest.mark.parametrize("s", REDUCE, ids=str)
def test_reduce(s):
    partial = torch.randn(11, 5000, device="cuda")
    out = poisoned(5000, dtype=TORCH[s.probs])
    kernels.provider().get(s)(partial, out, 132)
    assert_close("sum", out, partial.double().sum(0), s.probs)


@pytest.mark.parametrize("s", [spec(k) for k in ("fprop_act", "fprop", "dgrad_act", "dgrad", "wgrad")], ids=str)
@pytest.mark.parametrize("splits", [(400, 300, 800, 200), (400, -300, 100, 200), (2**31 - 1,) * 4])
def test_bad_splits_touch_nothing_else(s, splits):
    """Sizes that exceed T or are negative: nothing outside the outputs changes, and the status word says so."""
    tokens, hidden, ffn = 1000, 256, 128
    sizes = torch.tensor(splits, dtype=torch.int32, device="cuda")
    guarded = []

    def inside(columns, value):
        """The middle third of a larger buffer."""
        guarded.append(torch.full((3 * tokens, columns), value, device="cuda", dtype=torch.bfloat16))
        return guarded[-1][tokens : 2 * tokens]

    def weight(n, k):
        return torch.randn(4, n, k, device="cuda", dtype=torch.bfloat16)

    def tensor(columns):
        return torch.randn(tokens, columns, device="cuda", dtype=torch.bfloat16)

    probs = torch.rand(tokens, device="cuda")
    if s.kernel is Pass.FPROP_ACT:
        launch(s, tensor(hidden), weight(2 * ffn, hidden), probs, sizes, inside(2 * ffn, 7.0), inside(ffn, 7.0))
    elif s.kernel is Pass.FPROP:
        launch(s, tensor(ffn), weight(hidden, ffn), sizes, inside(hidden, 7.0))
    elif s.kernel is Pass.DGRAD:
        launch(s, tensor(2 * ffn), weight(2 * ffn, hidden), sizes, inside(hidden, 7.0))
    elif s.kernel is Pass.DGRAD_ACT:
        partial = torch.empty(1, tokens, device="cuda")
        dz, act = inside(2 * ffn, 7.0), inside(ffn, 7.0)
        launch(s, tensor(hidden), weight(hidden, ffn), tensor(2 * ffn), probs, sizes, dz, act, partial)
    else:
        dw = torch.full((12, hidden, ffn), 7.0, device="cuda", dtype=torch.bfloat16)
        launch(s, tensor(hidden), tensor(ffn), sizes, dw[4:8])
        assert bool((torch.cat((dw[:4], dw[8:])) == 7).all())
        assert not dw.isnan().any()
    for whole in guarded:
        assert bool((torch.cat((whole[:tokens], whole[2 * tokens :])) == 7).all())
    word = status()
    assert int(word.item()) != 0
    word.zero_()


def test_activation_of_both_passes_is_bitwise_equal():
    """The a recomputed in dgrad_act equals the forward's, whatever the tile configs."""
    chosen = select.step_specs(
        Arch.SM90A,
        "bf16",
        "swiglu",
        GluLayout.CONTIGUOUS,
        DType.FP32,
        tokens=3268,
        groups=6,
        hidden=512,
        ffn=352,
        backward=True,
    )
    p = Problem(*PROBLEMS["n1"], torch.bfloat16)
    x, w1, w2, dy = p.rows(p.hidden), p.weight(2 * p.ffn, p.hidden), p.weight(p.hidden, p.ffn), p.rows(p.hidden)
    probs = p.factors(torch.float32)
    z, a, again, dz = (poisoned(p.tokens, n, dtype=torch.bfloat16) for n in (2 * p.ffn, p.ffn, p.ffn, 2 * p.ffn))
    launch(chosen.fprop_act, x, w1, probs, p.sizes, z, a)
    partial = poisoned(-(-p.ffn // chosen.dgrad_act.tile.tile_n), p.tokens, dtype=torch.float32)
    launch(chosen.dgrad_act, dy, w2, z, probs, p.sizes, dz, again, partial)
    assert torch.equal(a, again)


@pytest.mark.parametrize("s", [spec(k) for k in ("fprop_act", "dgrad_act", "wgrad")], ids=str)
def test_n7_many_short_groups_repeat_bitwise(s):
    """N7: 8 groups of about 128 tokens, 768x2048: a race shows as differing bits within 50 runs."""
    p = Problem(1024, (128, 120, 136, 128, 100, 156, 127, 129), 2048, 768, torch.bfloat16)
    probs = p.factors(torch.float32)
    runs = []
    dy, z, w2 = p.rows(p.hidden), p.rows(2 * p.ffn), p.weight(p.hidden, p.ffn)
    x, w1 = p.rows(p.hidden), p.weight(2 * p.ffn, p.hidden)
    for _ in range(50):
        if s.kernel is Pass.FPROP_ACT:
            outputs = [poisoned(p.tokens, n, dtype=p.dtype) for n in (2 * p.ffn, p.ffn)]
            launch(s, x, w1, probs, p.sizes, *outputs)
        elif s.kernel is Pass.DGRAD_ACT:
            outputs = [poisoned(p.tokens, n, dtype=p.dtype) for n in (2 * p.ffn, p.ffn)]
            outputs.append(poisoned(p.ffn // 128, p.tokens, dtype=torch.float32))
            launch(s, dy, w2, z, probs, p.sizes, *outputs)
        else:
            outputs = [poisoned(p.groups, p.hidden, 2 * p.ffn, dtype=p.dtype)]
            launch(s, dy, z, p.sizes, *outputs)
        runs.append(outputs)
    for outputs in runs[1:]:
        assert all(torch.equal(one, other) for one, other in zip(outputs, runs[0], strict=True))
