"""Training under quantising recipes on a Hopper GPU, emulated, against float64 that replays each quantisation point."""

import copy
import warnings

import pytest
import torch
from references import replayed, replays_of

import cute_grouped_mlp as cgm
from cute_grouped_mlp import kernels
from cute_grouped_mlp import quantization as cgq
from cute_grouped_mlp.reference_kernels import ReferenceKernels

pytestmark = pytest.mark.gpu

BF16, FP32 = torch.bfloat16, torch.float32
FP8, FP4 = 0.03, 0.05
HYBRID = {"fp8_format": cgm.Format.HYBRID}
UNFUSED = {"enable_cutedsl_fused_grouped_mlp": False}
#: Recipes with their bounds of rms(error) / rms(reference).
RECIPES = {
    "current": (cgm.Float8CurrentScaling, {}, FP8),
    "delayed": (cgm.DelayedScaling, {}, FP8),
    "block": (cgm.Float8BlockScaling, {}, FP8),
    "block_f32": (cgm.Float8BlockScaling, {"use_f32_scales": True}, FP8),
    "mxfp8": (cgm.MXFP8BlockScaling, {}, FP8),
    "mxfp8_hybrid": (cgm.MXFP8BlockScaling, HYBRID, FP8),
    "nvfp4": (cgm.NVFP4BlockScaling, {}, FP4),
    "nvfp4_no_rht": (cgm.NVFP4BlockScaling, {"disable_rht": True}, FP4),
    "nvfp4_nearest": (cgm.NVFP4BlockScaling, {"disable_stochastic_rounding": True}, FP4),
}
E1_SPLITS = (512, 0, 768, 256)
QGEGLU = {"activation": "clamped_qgeglu", "limit": 5.0, "alpha": 1.5, "glu_linear_offset": 0.5}
SITU = {"activation": "situglu", "beta1": 2.0, "beta2": 8.0, "glu_interleave_size": 32}
#: Recipe, options of the module, hidden and ffn size.
MATRIX = [
    ("current", {"bias": True}, (128, 256)),
    ("current", {"activation": "srelu"}, (256, 128)),
    ("delayed", {"bias": True, "single_grouped_weight": False}, (256, 128)),
    ("delayed", {"activation": "clamped_qgeglu", "glu_interleave_size": 32}, (128, 256)),
    ("block", {"activation": "srelu", "bias": True}, (128, 256)),
    ("block", {}, (256, 128)),
    ("block_f32", SITU, (256, 128)),
    ("mxfp8", {**SITU, "bias": True}, (128, 256)),
    ("mxfp8", QGEGLU, (256, 128)),
    ("mxfp8_hybrid", {"single_grouped_weight": False}, (128, 256)),
    ("nvfp4", {"bias": True}, (256, 128)),
    ("nvfp4", {**QGEGLU, "glu_interleave_size": 32}, (128, 256)),
    ("nvfp4_no_rht", {"activation": "srelu"}, (128, 256)),
    ("mxfp8", {}, (7168, 512)),
    ("nvfp4", {}, (7168, 512)),
]
SPLITS = (0, 700, 129, 1, 0, 1500, 64)
SMALL = (128, 256)


def recipe_of(name, **more):
    cls, fields, _ = RECIPES[name]
    return cls(**{**fields, **more})


def module_of(groups, hidden, ffn, *, device="cuda", **options):
    torch.manual_seed(0)
    return cgm.GroupedMLP(groups, hidden, ffn, device=device, dtype=BF16, **options)


def operands(splits, hidden, *, tokens=None, seed=1):
    """x, sizes, probs and dy; rows past the sum are NaN."""
    generator = torch.Generator("cuda").manual_seed(seed)
    total = sum(splits)
    tokens = total + 5 if tokens is None else tokens
    x, dy = (torch.randn(tokens, hidden, device="cuda", generator=generator).to(BF16) for _ in range(2))
    probs = torch.rand(tokens, device="cuda", generator=generator)
    for t in (x, dy, probs):
        t[total:] = torch.nan
    return x, torch.tensor(splits, dtype=torch.int32, device="cuda"), probs, dy


def step(module, x, sizes, probs, dy, recipe=None):
    """Run forward and backward with poisoned outputs; returns y and every gradient by name."""
    tensors = {"x": x, "probs": probs, **dict(module.named_parameters())}
    for t in tensors.values():
        t.grad = None
        t.requires_grad_(True)
    torch.use_deterministic_algorithms(True)  # new tensors are filled with NaN: what a kernel does not write shows
    try:
        with cgm.autocast(recipe=recipe):
            y = module(x, sizes, probs)
        y.backward(dy)
    finally:
        torch.use_deterministic_algorithms(False)
    return {"y": y.detach()} | {name: t.grad for name, t in tensors.items()}


def assert_close(got, expected, bound):
    assert set(got) == set(expected)
    for name, want in expected.items():
        have = got[name].double()
        assert have.shape == want.shape, name
        assert bool(torch.isfinite(have).all()), f"{name}: not finite"
        if not want.any():
            assert not have.any(), name
            continue
        error = ((have - want).pow(2).mean() / want.pow(2).mean()).sqrt().item()
        assert error <= bound, f"{name}: rms {error}"
        assert abs((have.norm() / want.norm()).item() - 1) <= 0.01, f"{name}: norm"


def assert_equal(got, want):
    for name in want:
        assert torch.equal(got[name], want[name]), name


def is_fused(module):
    return isinstance(module.fuser.last_plan.forward_ops[0][0], cgm.FusedGroupedMLP)


# E: numbers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "options", "shape"), MATRIX, ids=lambda v: str(v).replace(" ", ""))
def test_e1_fused_step_under_a_recipe_against_float64(name, options, shape):
    recipe, bound = recipe_of(name), RECIPES[name][2]
    module = module_of(len(E1_SPLITS), *shape, **options)
    args = operands(E1_SPLITS, shape[0])
    step(module, *args, recipe=recipe)  # gives delayed scaling its scales
    replays = replays_of(module)
    got = step(module, *args, recipe=recipe)
    assert is_fused(module)
    assert_close(got, replayed(module, *args, replays), bound)


@pytest.mark.parametrize("name", ["current", "mxfp8", "nvfp4"])
def test_d6_e1_unfused_step_under_a_recipe_against_float64(name):
    recipe, bound = recipe_of(name, **UNFUSED), RECIPES[name][2]
    module = module_of(len(SPLITS), *SMALL, bias=True)
    args = operands(SPLITS, SMALL[0])
    step(module, *args, recipe=recipe)
    replays = replays_of(module)
    got = step(module, *args, recipe=recipe)
    assert not is_fused(module)
    assert_close(got, replayed(module, *args, replays, round_grad=True), bound)


@pytest.mark.parametrize("override", ["high_precision", "dequantized"])
@pytest.mark.parametrize("name", ["current", "mxfp8"])
def test_e1_backward_override(name, override):
    recipe, bound = recipe_of(name, backward_override=override), RECIPES[name][2]
    module = module_of(len(SPLITS), *SMALL)
    args = operands(SPLITS, SMALL[0])
    step(module, *args, recipe=recipe)
    replays = replays_of(module)
    got = step(module, *args, recipe=recipe)
    assert is_fused(module)
    assert_close(got, replayed(module, *args, replays), bound)


@pytest.mark.parametrize("row_scaled", [False, True])
def test_e9_what_the_kernels_decline_runs_in_plain_torch(row_scaled):
    """FP16 models, and NVFP4 with a scale for each row of activations."""
    torch.manual_seed(0)
    dtype = BF16 if row_scaled else torch.float16
    recipe = recipe_of("nvfp4_nearest", row_scaled_activation=True) if row_scaled else recipe_of("mxfp8")
    module = cgm.GroupedMLP(len(SPLITS), *SMALL, device="cuda", dtype=dtype)
    x, sizes, probs, dy = operands(SPLITS, SMALL[0])
    args = x.to(dtype), sizes, probs, dy.to(dtype)
    step(module, *args, recipe=recipe)
    replays = replays_of(module)
    got = step(module, *args, recipe=recipe)
    assert not is_fused(module)
    assert_close(got, replayed(module, *args, replays, round_grad=True), FP4 if row_scaled else FP8)


@pytest.mark.parametrize("name", ["current", "delayed", "mxfp8", "nvfp4_nearest"])
def test_e5_graph_replays_with_other_splits_under_a_recipe(name):
    (hidden, ffn), tokens, groups = SMALL, 1500, 5
    module, recipe = module_of(groups, hidden, ffn), recipe_of(name)
    x, sizes, probs, dy = operands((300,) * groups, hidden, tokens=tokens)
    for t in (x, probs):
        t.requires_grad_()
    wanted = (x, probs, *module.parameters())

    def run():
        with cgm.autocast(recipe=recipe):
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
            module.fc1.weight.mul_(1.25)  # weights are quantised anew at each replay
        states = [op.recipe_state for op in (module.fc1, module.fc2)]
        before = [{key: t.clone() for key, t in state.state_dict().items()} for state in states]
        graph.replay()
        after = [{key: t.clone() for key, t in state.state_dict().items()} for state in states]
        for state, tensors in zip(states, before, strict=True):
            state.load_state_dict(tensors)
        eager = run()
        torch.cuda.synchronize()
        for got, want in zip(outputs, eager, strict=True):
            assert torch.equal(got, want), splits
        for state, tensors in zip(states, after, strict=True):
            assert all(torch.equal(t, tensors[key]) for key, t in state.state_dict().items()), splits


@pytest.mark.parametrize("name", ["mxfp8", "block"])
def test_e6_quantised_inputs_and_gradients_equal_their_dequantised_values(name):
    recipe = recipe_of(name)
    module = module_of(len(SPLITS), *SMALL)
    x, sizes, probs, dy = operands(SPLITS, SMALL[0])
    step(module, x, sizes, probs, dy, recipe=recipe)
    (quantize_x, _), (quantize_dy,) = module.fc1.recipe_state.quantizers.by_mode.values()
    qx, qdy = quantize_x.quantize(x.detach(), sizes), quantize_dy.quantize(dy, sizes)
    got = step(module, cgq.prequantized(qx), sizes, probs, cgq.prequantized(qdy), recipe=recipe)
    want = step(module, qx.dequantize(), sizes, probs, qdy.dequantize(), recipe=recipe)
    assert is_fused(module)
    assert_equal(got, want)


@pytest.mark.parametrize("name", ["current", "delayed", "block", "mxfp8", "nvfp4_nearest"])
def test_e11_repeats_bitwise_and_synchronises_nowhere(name):
    """H2 and E11 under a recipe; scales of delayed scaling settle after one step on the same data."""
    recipe = recipe_of(name, **({"amax_compute_algo": "most_recent"} if name == "delayed" else {}))
    module = module_of(len(SPLITS), *SMALL)
    args = operands(SPLITS, SMALL[0])
    for _ in range(2):
        step(module, *args, recipe=recipe)
    want = step(module, *args, recipe=recipe)
    torch.cuda.synchronize()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
            torch.cuda.set_sync_debug_mode("error")
        runs = [step(module, *args, recipe=recipe) for _ in range(10)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for got in runs:
        assert_equal(got, want)


# N: cases from the field ----------------------------------------------------------------------------------------------


def test_n5_gradients_are_e5m2_under_hybrid():
    """Gradients whose blocks E4M3 could not hold: the norms show it, a cosine would not."""
    module, recipe = module_of(len(SPLITS), *SMALL), recipe_of("mxfp8_hybrid")
    x, sizes, probs, dy = operands(SPLITS, SMALL[0])
    dy = dy * torch.logspace(-4, 4, SMALL[0], device="cuda").to(BF16)
    step(module, x, sizes, probs, dy, recipe=recipe)
    assert module.fc2.recipe_state.quantizers.by_mode["backward"][0].fp8_dtype is torch.float8_e5m2
    got = step(module, x, sizes, probs, dy, recipe=recipe)
    want = replayed(module, x, sizes, probs, dy, replays_of(module))
    assert_close(got, want, FP8)


@pytest.mark.parametrize("which", ["fc1", "fc2"])
def test_n12_a_layer_keeps_its_own_recipe(which):
    module = module_of(len(SPLITS), *SMALL)
    getattr(module, which).recipe = cgm.HighPrecision()
    args, recipe = operands(SPLITS, SMALL[0]), recipe_of("mxfp8")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = step(module, *args, recipe=recipe)
    assert getattr(module, which).recipe_state is None
    assert not is_fused(module)
    assert_close(got, replayed(module, *args, replays_of(module), round_grad=True), FP8)


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("name", ["current", "delayed", "block", "mxfp8", "nvfp4"])
def test_n13_checkpointed_is_bitwise_plain(name, use_reentrant):
    recipe = recipe_of(name)
    plain = module_of(len(SPLITS), *SMALL)
    step(plain, *operands(SPLITS, SMALL[0]), recipe=recipe)
    again = copy.deepcopy(plain)

    class Checkpointed:
        named_parameters = again.named_parameters

        def __call__(self, *inputs):
            return cgm.checkpoint(again, *inputs, use_reentrant=use_reentrant)

    for seed in (3, 4):
        args = operands(SPLITS, SMALL[0], seed=seed)
        assert_equal(step(Checkpointed(), *args, recipe=recipe), step(plain, *args, recipe=recipe))
    a, b = plain.fc1.recipe_state, again.fc1.recipe_state
    assert (a.updates, b.updates) == (3, 2)  # that of the copy was made anew, and took over
    assert_equal(b.state_dict(), a.state_dict())


@pytest.mark.parametrize("splits", [(256,), (100, 156)])
@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_n14_a_short_total_in_one_and_two_groups(name, splits):
    module, recipe = module_of(len(splits), *SMALL), recipe_of(name)
    args = operands(splits, SMALL[0], tokens=512)
    step(module, *args, recipe=recipe)
    replays = replays_of(module)
    got = step(module, *args, recipe=recipe)
    assert_close(got, replayed(module, *args, replays), RECIPES[name][2])


def test_operands_out_of_range_are_reported_where_they_are_asked_for():
    fc = cgm.GroupedLinear(1, 128, 128, bias=False, device="cuda", dtype=BF16)
    x = torch.full((64, 128), 2.0**-130, device="cuda", dtype=BF16)
    sizes = torch.tensor([64], device="cuda", dtype=torch.int32)
    with cgm.autocast(recipe=recipe_of("mxfp8")), cgm.settings.override(debug_checks=True):
        with pytest.raises(cgm.GroupedMLPError, match="outside of bfloat16's normal numbers"):
            fc(x, sizes)
        fc(x * 0, sizes)


# Kernels to build beforehand ------------------------------------------------------------------------------------------


def specs():
    """Kernels that this file launches, found without a GPU by planning on meta tensors."""
    found = {}

    def meta(*shape, dtype=FP32, grad=True):
        return torch.empty(*shape, dtype=dtype, device="meta", requires_grad=grad)

    def plan(name, options, groups, rows, shape, layer=None, **more):
        module = module_of(groups, *shape, device="meta", **options)
        if layer is not None:
            getattr(module, layer).recipe = cgm.HighPrecision()
        x, sizes = meta(rows, shape[0], dtype=BF16), meta(groups, dtype=torch.int32, grad=False)
        for pipeline in cgm.explain(module, x, sizes, meta(rows), recipe=recipe_of(name, **more)).pipelines:
            found.update(dict.fromkeys(k.step.spec for k in pipeline.kernels if k.step.spec is not None))

    rows = sum(SPLITS) + 5
    with kernels.using(ReferenceKernels()):
        for name, options, shape in MATRIX:
            plan(name, options, len(E1_SPLITS), sum(E1_SPLITS) + 5, shape)
        for name in RECIPES:
            plan(name, {}, len(SPLITS), rows, SMALL)
            with torch.no_grad():  # the first forward of a reentrant checkpoint
                plan(name, {}, len(SPLITS), rows, SMALL)
        for name in ("current", "mxfp8", "nvfp4"):
            plan(name, {"bias": True}, len(SPLITS), rows, SMALL, **UNFUSED)
            plan(name, {}, 5, 1500, SMALL)
            for groups in (1, 2):
                plan(name, {}, groups, 512, SMALL)
        for override in ("high_precision", "dequantized"):
            for name in ("current", "mxfp8"):
                plan(name, {}, len(SPLITS), rows, SMALL, backward_override=override)
        for layer in ("fc1", "fc2"):
            plan("mxfp8", {}, len(SPLITS), rows, SMALL, layer=layer)
        fc = cgm.GroupedLinear(1, 128, 128, bias=False, device="meta", dtype=BF16)
        sizes = meta(1, dtype=torch.int32, grad=False)
        for recipe in (recipe_of("mxfp8"),):
            report = cgm.explain(fc, meta(64, 128, dtype=BF16, grad=False), sizes, recipe=recipe)
            found.update(dict.fromkeys(k.step.spec for k in report.pipelines[0].kernels if k.step.spec is not None))
    return tuple(found)


SPECS = specs()
