"""Training under quantising recipes on the CPU, against a float64 replay of every quantisation point."""

import contextlib
import copy
import dataclasses

import pytest
import torch

import cute_grouped_mlp as cgm
from cute_grouped_mlp import kernels, reference_quantized
from cute_grouped_mlp import quantization as cgq
from cute_grouped_mlp.errors import GroupedMLPError, UnsupportedError
from cute_grouped_mlp.reference_kernels import ReferenceKernels
from cute_grouped_mlp.reference_quantized import LinearReplay

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


def replayed(module, x, sizes, probs, dy, replays, round_grad):
    weights = {name: p.detach() for name, p in module.named_parameters()}
    act = module.activation
    s = reference_quantized.grouped_mlp(
        x.detach(),
        weights["fc1.weight"],
        weights["fc2.weight"],
        sizes,
        probs.detach(),
        dy,
        fc1=replays[0],
        fc2=replays[1],
        activation=act.activation,
        interleave=act.glu_interleave_size,
        params=act.params,
        b1=weights.get("fc1.bias"),
        b2=weights.get("fc2.bias"),
        round_grad=round_grad,
    )
    found = {"y": s.y, "x": s.dx, "probs": s.dprobs, "fc1.weight": s.dw1, "fc2.weight": s.dw2}
    found |= {"fc1.bias": s.db1, "fc2.bias": s.db2}
    return {name: t for name, t in found.items() if t is not None}


def replays_of(module):
    return [
        LinearReplay() if fc.recipe_state is None else LinearReplay.of_state(fc.recipe_state)
        for fc in (module.fc1, module.fc2)
    ]


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


# E1: numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", RECIPES)
def test_e1_recipes_against_float64(path, name, bias):
    recipe, bound = recipe_of(name), RECIPES[name][2]
    module = trained(module_of(bias=bias), recipe)
    args = operands()
    replays = replays_of(module)
    assert all(replay.quantizers["input"] is not None for replay in replays)
    got = step(module, *args, recipe=recipe)
    assert is_fused(module) == (path == "kernels")
    assert_close(got, replayed(module, *args, replays, round_grad=not is_fused(module)), bound)


@pytest.mark.parametrize("override", ["high_precision", "dequantized"])
@pytest.mark.parametrize("name", ["current", "block", "mxfp8", "nvfp4"])
def test_e1_backward_override(path, name, override):
    recipe, bound = recipe_of(name, backward_override=override), RECIPES[name][2]
    module = trained(module_of(bias=True), recipe)
    args = operands()
    replays = replays_of(module)
    got = step(module, *args, recipe=recipe)
    assert_close(got, replayed(module, *args, replays, round_grad=not is_fused(module)), bound)
    if override == "high_precision":  # on what forward stored, backward is that of no recipe
        plain = replayed(module, *args, [LinearReplay(), LinearReplay()], round_grad=True)
        assert_close({"b": got["fc2.bias"]}, {"b": plain["fc2.bias"]}, 5e-3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("name", ["current", "delayed", "mxfp8", "nvfp4_plain"])
def test_e1_other_types_run_in_plain_torch(path, name, dtype):
    recipe, bound = recipe_of(name), RECIPES[name][2]
    module = module_of(dtype)
    args = operands(dtype=dtype)
    step(module, *args, recipe=recipe)
    replays = replays_of(module)
    got = step(module, *args, recipe=recipe)
    assert not is_fused(module)
    assert_close(got, replayed(module, *args, replays, round_grad=True), bound)
    assert "bfloat16, the type is" in str(cgm.explain(module, *args[:3], recipe=recipe))


def test_e1_row_scaled_activations_run_unfused(path):
    recipe = recipe_of("nvfp4", row_scaled_activation=True)
    module, args = module_of(), operands()
    step(module, *args, recipe=recipe)
    replays = replays_of(module)
    got = step(module, *args, recipe=recipe)
    assert not is_fused(module)
    assert_close(got, replayed(module, *args, replays, round_grad=True), FP4)
    recipe.backward_override = "dequantized"
    step(module, *args, recipe=recipe)
    replays = replays_of(module)
    got = step(module, *args, recipe=recipe)
    assert_close(got, replayed(module, *args, replays, round_grad=True), FP4)


def test_e1_a_list_of_weights_gives_the_same_bits(path):
    recipe = recipe_of("delayed")
    one, many = module_of(bias=True), module_of(bias=True, single_grouped_weight=False)
    with torch.no_grad():
        for fc, other in ((one.fc1, many.fc1), (one.fc2, many.fc2)):
            other.packed_weight().copy_(fc.weight)
            other.bias.copy_(fc.bias)
    for _ in range(2):
        a, b = step(one, *operands(), recipe=recipe), step(many, *operands(), recipe=recipe)
    assert torch.equal(a["y"], b["y"])
    assert torch.equal(a["x"], b["x"])
    for fc in ("fc1", "fc2"):
        assert torch.equal(a[f"{fc}.weight"], torch.stack([b[f"{fc}.weight{g}"] for g in range(G)]))


@pytest.mark.parametrize("frozen", [("x",), ("fc1.weight",), ("fc2.weight",), ("x", "fc1.weight"), ("probs", "x")])
def test_e4_frozen_parts(path, frozen):
    recipe = recipe_of("mxfp8")
    module = module_of()
    want = step(module, *operands(), recipe=recipe)
    got = step(module, *operands(), recipe=recipe, frozen=frozen)
    assert set(got) == set(want) - set(frozen)
    assert all(torch.equal(got[name], want[name]) for name in got)


def test_n5_gradients_are_e5m2_under_hybrid(path):
    """Gradients that E4M3 would cut or lose: the norm shows it, a cosine would not."""
    module = module_of()
    x, sizes, probs, dy = operands()
    dy = dy * torch.logspace(-4, 4, H).to(BF16)
    recipe = recipe_of("mxfp8_hybrid")
    got = step(module, x, sizes, probs, dy, recipe=recipe)
    assert module.fc1.recipe_state.quantizers.by_mode["backward"][0].fp8_dtype is torch.float8_e5m2
    want = replayed(module, x, sizes, probs, dy, replays_of(module), round_grad=not is_fused(module))
    assert_close(got, want, FP8)
    e4m3 = dataclasses.replace(
        LinearReplay.of_state(module.fc2.recipe_state),
        quantizers=dict(LinearReplay.of_state(module.fc2.recipe_state).quantizers, grad_output=cgq.MXFP8Quantizer()),
    )
    other = replayed(module, x, sizes, probs, dy, [LinearReplay.of_state(module.fc1.recipe_state), e4m3], True)
    assert not torch.equal(want["fc2.weight"], other["fc2.weight"])


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "block", "delayed"])
def test_n14_a_short_total_in_one_and_two_groups(path, name, groups):
    recipe = recipe_of(name)
    module = module_of(groups=groups)
    args = operands((128,) if groups == 1 else (100, 28), tail=128)
    step(module, *args, recipe=recipe)
    replays = replays_of(module)
    got = step(module, *args, recipe=recipe)
    assert_close(got, replayed(module, *args, replays, round_grad=not is_fused(module)), RECIPES[name][2])


# Recipe state ---------------------------------------------------------------------------------------------------------


def test_a4_disable_rht_takes_effect_at_the_next_state_reset():
    recipe = cgm.NVFP4BlockScaling()
    module = module_of()
    step(module, *operands(), recipe=recipe)
    quantizer = module.fc1.recipe_state.quantizers.by_mode["forward"][0]
    assert quantizer.with_rht
    recipe.disable_rht = True
    step(module, *operands(), recipe=recipe)  # another plan, the same quantisers (B4)
    assert module.fc1.recipe_state.quantizers.by_mode["forward"][0] is quantizer
    module.reset_recipe_state()
    step(module, *operands(), recipe=recipe)
    assert not module.fc1.recipe_state.quantizers.by_mode["forward"][0].with_rht


def test_b4_switching_plans_keeps_quantisers_and_history(path):
    recipe = recipe_of("delayed")
    module = trained(module_of(), recipe, steps=2)
    state = module.fc1.recipe_state
    history = state.amax_history["forward"].clone()
    with torch.no_grad(), cgm.autocast(recipe=recipe):
        module(*operands(seed=5)[:3])
    assert module.fc1.recipe_state is state
    assert torch.equal(state.amax_history["forward"], history)  # evaluation counts for nothing
    recipe.enable_cutedsl_fused_grouped_mlp = False
    step(module, *operands(seed=6), recipe=recipe)
    recipe.enable_cutedsl_fused_grouped_mlp = None
    step(module, *operands(seed=7), recipe=recipe)
    assert module.fc1.recipe_state is state
    assert state.updates == 4
    module(*operands(seed=8)[:3])  # no recipe: nothing is quantised, and history waits
    assert module.fc1.recipe_state is None
    assert "fc1.recipe_state.scale_forward" in module.state_dict()
    step(module, *operands(seed=9), recipe=recipe)
    assert module.fc1.recipe_state is not state
    assert torch.equal(module.fc1.recipe_state.amax_history["forward"][2:6], state.amax_history["forward"][1:5])


def test_n13_delayed_scaling_uses_the_scales_from_before_the_step():
    module, recipe = module_of(), recipe_of("delayed")
    x, sizes, probs, dy = operands()
    step(module, x, sizes, probs, dy, recipe=recipe)
    state = module.fc1.recipe_state
    for mode, columns in (("forward", 2 * G), ("backward", G)):
        assert state.amax_history[mode].shape == (1024, columns)
        assert state.scale[mode].shape == (columns,)
    amax = torch.stack(
        [part.detach().float().abs().amax() if len(part) else torch.tensor(0.0) for part in x.split((*SPLITS, 9))]
    )
    assert torch.equal(state.amax_history["forward"][1, :G], amax[:G])
    assert torch.equal(state.amax_history["forward"][1, G:], module.fc1.weight.detach().float().abs().amax((1, 2)))
    assert not state.amax_history["forward"][0].any()
    want = torch.where(amax[:G] > 0, torch.full_like(amax[:G], 448.0) / amax[:G], 1.0)
    assert torch.equal(state.scale["forward"][:G], want)
    before = state.scale["forward"].clone()
    seen = []
    original = cgq.DelayedScalingQuantizer.quantize
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            cgq.DelayedScalingQuantizer,
            "quantize",
            lambda self, *a, scale=None, **k: seen.append(scale.clone()) or original(self, *a, scale=scale, **k),
        )
        step(module, 3 * x.detach(), sizes, probs, dy, recipe=recipe)
    assert torch.equal(seen[0], before[:G])
    assert torch.allclose(state.scale["forward"][0], before[0] / 3, rtol=5e-3)  # 3 x is rounded to bf16


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("name", RECIPES)
def test_n13_checkpointed_is_bitwise_plain(path, name, use_reentrant):
    recipe = recipe_of(name)
    plain = trained(module_of(), recipe)
    again = copy.deepcopy(plain)

    class Checkpointed:
        named_parameters = again.named_parameters

        def __call__(self, *inputs):
            return cgm.checkpoint(again, *inputs, use_reentrant=use_reentrant)

    for seed in (3, 4):
        want = step(plain, *operands(seed=seed), recipe=recipe)
        got = step(Checkpointed(), *operands(seed=seed), recipe=recipe)
        assert all(torch.equal(got[key], want[key]) for key in want)
    a, b = plain.fc1.recipe_state, again.fc1.recipe_state
    assert (a.updates, b.updates) == (3, 2)  # that of the copy was made anew, and took over
    assert all(torch.equal(t, b.state_dict()[key]) for key, t in a.state_dict().items())


@pytest.mark.parametrize("how", ["reentrant", "not reentrant", "context_fn", "nested", "nested, reentrant"])
def test_n13_checkpoints_of_several_micro_batches_recompute_with_their_own_scales(how):
    """Two forwards before the first backward, which changes the scales: the second is recomputed with the old ones."""
    recipe = recipe_of("delayed")
    plain = trained(module_of(), recipe)
    again = copy.deepcopy(plain)

    def checkpointed(*inputs):
        if how == "context_fn":
            return torch.utils.checkpoint.checkpoint(
                again, *inputs, use_reentrant=False, context_fn=cgm.checkpoint_context_fn
            )
        reentrant = how.endswith("reentrant") and not how.startswith("not")
        if not how.startswith("nested"):
            return cgm.checkpoint(again, *inputs, use_reentrant=reentrant)

        def inner(*inputs):
            return cgm.checkpoint(again, *inputs, use_reentrant=reentrant)

        return cgm.checkpoint(inner, *inputs, use_reentrant=reentrant)

    results = []
    for module, call in ((plain, plain), (again, checkpointed)):
        module.zero_grad()
        batches = [operands(seed=3), tuple(t if t is None or i == 1 else 5 * t for i, t in enumerate(operands(seed=4)))]
        batches = [(x.detach().requires_grad_(), sizes, probs, dy) for x, sizes, probs, dy in batches]
        with cgm.autocast(recipe=recipe):
            outputs = [call(x, sizes, probs) for x, sizes, probs, _ in batches]
        for y, (*_, dy) in zip(outputs, batches, strict=True):
            y.backward(dy)
        results.append([*outputs, *[x.grad for x, *_ in batches], *[p.grad for p in module.parameters()]])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_state_dict_restores_scales_and_random_numbers():
    for name in ("delayed", "nvfp4"):
        recipe = recipe_of(name)
        trained_one = trained(module_of(), recipe, steps=2)
        fresh = module_of()
        fresh.load_state_dict(trained_one.state_dict())
        a, b = step(trained_one, *operands(), recipe=recipe), step(fresh, *operands(), recipe=recipe)
        assert all(torch.equal(b[key], a[key]) for key in a)


def test_stochastic_rounding_draws_anew_at_each_step_and_follows_the_seed():
    recipe = recipe_of("nvfp4")
    args = operands()
    torch.manual_seed(7)
    module = module_of()
    first, second = step(module, *args, recipe=recipe), step(module, *args, recipe=recipe)
    assert torch.equal(first["y"], second["y"])
    assert not torch.equal(first["fc1.weight"], second["fc1.weight"])
    torch.manual_seed(7)
    again = module_of()
    assert torch.equal(step(again, *args, recipe=recipe)["fc1.weight"], first["fc1.weight"])


def test_an_operation_in_two_pipelines_is_quantised_as_each_says():
    recipe = recipe_of("mxfp8")
    fc = cgm.GroupedLinear(G, H, F, dtype=BF16)
    both = cgm.Sequential(fc, cgm.GroupedLinear(G, F, H, dtype=BF16))
    x, sizes, _, _ = operands()
    with torch.no_grad():
        with cgm.autocast(recipe=recipe):
            quantised = both(x, sizes, sizes)
        fc(x, sizes)  # alone, without a recipe: this drops the state
        with cgm.autocast(recipe=recipe):
            assert torch.equal(both(x, sizes, sizes), quantised)


@pytest.mark.parametrize("whose", ["layer", "pipeline"])
def test_a_reset_of_one_owner_never_leaves_another_unquantised(path, whose):
    module, (x, sizes, probs, _) = module_of(), operands()
    recipe = cgm.Float8CurrentScaling()

    def both():
        with torch.no_grad(), cgm.autocast(recipe=recipe):
            return module.fc1(x, sizes), module(x, sizes, probs)

    before = both()
    (module.fc1 if whose == "layer" else module).reset_recipe_state()
    after = both()
    for a, b in zip(before, after, strict=True):
        assert torch.equal(a.nan_to_num(), b.nan_to_num())
    unquantised = module.fc1(x, sizes)
    assert not torch.equal(before[0].nan_to_num(), unquantised.detach().nan_to_num())


@pytest.mark.parametrize("name", ["none", "delayed", "nvfp4"])
def test_training_goes_on_after_a_first_call_in_inference_mode(path, name):
    recipe = None if name == "none" else recipe_of(name)
    arguments = operands()
    with kernels.using(ReferenceKernels()) if path == "kernels" else contextlib.nullcontext():  # a new status word
        module = module_of()
        with torch.inference_mode(), cgm.autocast(recipe=recipe):
            module(*arguments[:3])
        step(module, *arguments, recipe)
        too_many = (arguments[0], arguments[1] + 1000, *arguments[2:])
        step(module, *too_many, recipe)  # writes to the status word
        with contextlib.suppress(GroupedMLPError):
            kernels.provider().check_status(arguments[0].device)


def test_loaded_state_is_saved_again_before_the_first_forward():
    module, arguments, recipe = module_of(), operands(), recipe_of("delayed")
    step(module, *arguments, recipe)
    saved = module.state_dict()
    assert any("recipe_state" in name for name in saved)
    loaded = module_of()
    loaded.load_state_dict(saved)
    again = loaded.state_dict()
    assert again.keys() == saved.keys()
    assert all(torch.equal(again[name], saved[name]) for name in saved)


@pytest.mark.parametrize("name", ["delayed", "nvfp4"])
def test_state_that_was_made_on_the_meta_device_is_made_anew(name):
    recipe, arguments = recipe_of(name), operands()
    module = module_of(device="meta")
    for layer in (module.fc1, module.fc2):
        layer.reset_recipe_state(recipe=recipe)
    module.to_empty(device="cpu")
    module.load_state_dict(module_of().state_dict())
    torch.manual_seed(3)
    got = step(module, *arguments, recipe)
    expected = module_of()
    torch.manual_seed(3)
    expected = step(expected, *arguments, recipe)
    assert all(torch.equal(expected[key].nan_to_num(), got[key].nan_to_num()) for key in expected)


def test_loaded_state_waits_for_its_own_recipe():
    module, arguments, recipe = module_of(), operands(), recipe_of("delayed")
    step(module, *arguments, recipe)
    other = module_of()
    step(other, *arguments, recipe_of("nvfp4"))
    other.load_state_dict(module.state_dict())
    step(other, *arguments, recipe_of("mxfp8"))
    expected, got = (step(m, *arguments, recipe) for m in (module, other))
    assert all(torch.equal(expected[name].nan_to_num(), got[name].nan_to_num()) for name in expected)


def test_an_unquantised_call_before_backward_loses_no_step_of_delayed_scaling(path):
    recipe, (x, sizes, probs, dy) = recipe_of("delayed"), operands()
    scales = []
    for between in (False, True):
        module = module_of()
        with cgm.autocast(recipe=recipe):
            y = module(x, sizes, probs)
        if between:
            with torch.no_grad():
                module(x, sizes, probs)
        y.backward(dy)
        with torch.no_grad(), cgm.autocast(recipe=recipe):
            module(x, sizes, probs)
        scales.append(module.fc1.recipe_state.scale["forward"])
    assert torch.equal(*scales)
    assert (scales[0] != 1).any()


def test_delayed_scales_follow_transformer_engine_where_an_amax_is_no_help():
    from cute_grouped_mlp.recipe_state import make_recipe_state

    op = cgm.GroupedLinear(4, 32, 32)
    state = make_recipe_state(cgm.DelayedScaling(amax_history_len=2, margin=1), op, None)
    state.scale["backward"].fill_(5.0)
    state.amax_history["backward"][1] = torch.tensor([0.0, 9.0, 0.0, 1.0])
    state.amax_history["backward"][0] = torch.tensor([0.0, torch.inf, 1e-40, 3.0])
    state.update()
    third = (torch.tensor(57344.0 / 2) / 3).item()
    assert state.scale["backward"].tolist() == [5.0, 5.0, torch.finfo(torch.float32).max, third]
    rows = state.amax_history["backward"]
    assert rows[0].tolist() == [0.0] * 4
    assert rows[1].tolist() == pytest.approx([0.0, torch.inf, 1e-40, 3.0])
    state.update()  # nothing ran: histories stay where they are
    assert rows[1].tolist() == pytest.approx([0.0, torch.inf, 1e-40, 3.0])


def test_delayed_amaxes_are_reduced_over_processes(tmp_path):
    import torch.multiprocessing as mp

    mp.spawn(_reduce_amaxes, args=(str(tmp_path / "store"),), nprocs=2)


def _reduce_amaxes(rank, store):
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    recipe = cgm.DelayedScaling()
    op = cgm.GroupedLinear(2, 32, 32, dtype=BF16)
    for reduce_amax, expected in ((True, 7.0), (False, 3.0 + 4 * rank)):
        recipe.reduce_amax = reduce_amax
        op.forget_recipe_state()
        op.fuser.reset_recipe_state()
        x = torch.full((4, 32), 3.0 + 4 * rank, dtype=BF16, requires_grad=True)
        with cgm.autocast(recipe=recipe):
            op(x, torch.tensor([4, 0])).sum().backward()
        assert op.recipe_state.amax_history["forward"][1, 0] == expected
    recipe.reduce_amax = True
    own = [dist.new_group([r]) for r in range(2)][rank]
    for group, expected in ((own, 3.0 + 4 * rank), (dist.new_group([0, 1]), 7.0), (None, 7.0)):
        for checkpointed in (False, True):
            op.fuser.reset_recipe_state()
            x = torch.full((4, 32), 3.0 + 4 * rank, dtype=BF16, requires_grad=True)
            with cgm.autocast(recipe=recipe, amax_reduction_group=group):
                y = cgm.checkpoint(op, x, torch.tensor([4, 0])) if checkpointed else op(x, torch.tensor([4, 0]))
            with cgm.autocast(recipe=recipe, amax_reduction_group=dist.group.WORLD):
                y.sum().backward()
            assert op.recipe_state.amax_history["forward"][1, 0] == expected, (group, checkpointed)
    with pytest.raises(TypeError, match="amax_reduction_group is 'data', allowed: None or a process group"):
        cgm.autocast(recipe=recipe, amax_reduction_group="data")
    dist.destroy_process_group()


# E6, N12, micro-batches, range ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mxfp8", "mxfp8_hybrid", "block"])
def test_e6_quantised_inputs_and_gradients_equal_their_dequantised_values(path, name):
    recipe = recipe_of(name)
    module = module_of(bias=True)
    x, sizes, probs, dy = operands()
    step(module, x, sizes, probs, dy, recipe=recipe)
    (quantize_x, _), (quantize_dy,) = module.fc1.recipe_state.quantizers.by_mode.values()
    qx, qdy = quantize_x.quantize(x.detach(), sizes), quantize_dy.quantize(dy, sizes)
    got = step(module, cgq.prequantized(qx), sizes, probs, cgq.prequantized(qdy), recipe=recipe)
    want = step(module, qx.dequantize(), sizes, probs, qdy.dequantize(), recipe=recipe)
    assert all(torch.equal(got[key], want[key]) for key in want)


@pytest.mark.parametrize("name", ["current", "nvfp4_plain"])
def test_e6_quantised_inputs_are_read_as_they_are(path, name):
    """Scales of whole tensors do not survive dequantising to bf16: the operands themselves are compared."""
    recipe = recipe_of(name)
    module = cgm.GroupedLinear(G, H, F, bias=False, dtype=BF16)
    x, sizes, _, _ = operands()
    with cgm.autocast(recipe=recipe):
        module(x, sizes)
        quantizer = cgq.MXFP8Quantizer(block := torch.float8_e5m2)  # of another recipe than the one in force
        q = quantizer.quantize(x, sizes)
        y = module(cgq.prequantized(q), sizes)
    assert quantizer.fp8_dtype is block
    replay = dataclasses.replace(LinearReplay.of_state(module.recipe_state))
    values = q.operand("rowwise", torch.float64)
    want = reference_quantized.reference.fprop(
        values, replay.weight(module.weight.detach(), "rowwise"), [0, 40, 40, 115]
    )
    assert_close({"y": y.detach()}, {"y": want}, 5e-3)


def test_e6_prequantised_tensors_are_plain_ones_elsewhere():
    x, sizes, probs, _ = operands()
    q = cgq.MXFP8Quantizer().quantize(x, sizes)
    t = cgq.prequantized(q)
    assert torch.equal(t, q.dequantize())
    assert type(t * 1) is torch.Tensor
    module = module_of()
    assert torch.equal(module(t, sizes, probs), module(q.dequantize(), sizes, probs))  # no recipe: unquantised
    wrong = cgq.prequantized(cgq.Float8CurrentScalingQuantizer().quantize(x, torch.tensor([40, 75])))
    with cgm.autocast(recipe=recipe_of("current")), pytest.raises(cgm.ShapeError, match="2 groups, allowed: 1 or 3"):
        module(wrong, sizes, probs)


@pytest.mark.parametrize(("given", "name"), [("current", "mxfp8"), ("nvfp4", "block"), ("mxfp8", "current")])
def test_e6_prequantised_tensors_of_another_format_than_the_recipe_s(path, given, name):
    quantizers = {"current": cgq.Float8CurrentScalingQuantizer(), "nvfp4": cgq.NVFP4Quantizer()}
    x, sizes, probs, dy = operands(tail=0)
    t = cgq.prequantized(quantizers.get(given, cgq.MXFP8Quantizer()).quantize(x, sizes))
    results = []
    for flag in (None, False):
        module = module_of()
        with cgm.autocast(recipe=recipe_of(name, enable_cutedsl_fused_grouped_mlp=flag)):
            y = module(t, sizes, probs)
        y.backward(dy)
        results.append((y.detach(), module.fc1.weight.grad))
    for a, b in zip(*results, strict=True):
        assert (a - b).float().norm() <= FP8 * b.float().norm()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_e6_checkpoints_recompute_from_what_was_quantised(path, use_reentrant):
    x, sizes, probs, dy = operands(tail=0)
    results = []
    for checkpointed in (False, True):
        module = module_of()
        t = cgq.prequantized(cgq.NVFP4Quantizer().quantize(x, sizes)).requires_grad_()
        with cgm.autocast(recipe=recipe_of("current")):
            if checkpointed:
                y = cgm.checkpoint(module, t, sizes, probs, use_reentrant=use_reentrant)
            else:
                y = module(t, sizes, probs)
        y.backward(dy)
        results.append((y.detach(), t.grad, module.fc1.weight.grad, module.fc2.weight.grad))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_e6_a_gradient_of_another_format_is_refused_where_kernels_take_no_factor():
    x, sizes, probs, dy = operands(tail=0)
    g = cgq.prequantized(cgq.Float8CurrentScalingQuantizer().quantize(dy, sizes))
    with kernels.using(ReferenceKernels()), cgm.autocast(recipe=recipe_of("mxfp8")):
        y = module_of()(x, sizes, probs)
    with pytest.raises(UnsupportedError, match="a factor for each group, the recipe's has none"):
        y.backward(g)


def test_e6_a_prequantised_tensor_that_was_written_to_is_a_plain_one():
    x, sizes, _, _ = operands(tail=0)
    layer = cgm.GroupedLinear(G, H, F, bias=False, dtype=BF16)
    t = cgq.prequantized(cgq.MXFP8Quantizer().quantize(x, sizes))
    with torch.no_grad(), cgm.autocast(recipe=recipe_of("mxfp8")):
        before = layer(t, sizes)
        t.mul_(2)
        assert torch.equal(layer(t, sizes), 2 * before)


@pytest.mark.parametrize("which", ["fc1", "fc2"])
def test_n12_d5_a_layer_keeps_its_own_recipe(path, which):
    quantised, plain = recipe_of("mxfp8"), cgm.HighPrecision()
    module, args = module_of(), operands()
    step(module, *args, recipe=quantised)  # planned for one recipe
    getattr(module, which).recipe = plain
    got = step(module, *args, recipe=quantised)
    states = {name: getattr(module, name).recipe_state for name in ("fc1", "fc2")}
    assert states.pop(which) is None
    assert next(iter(states.values())) is not None
    assert not is_fused(module)
    assert_close(got, replayed(module, *args, replays_of(module), round_grad=True), 0.03)
    explanation = cgm.explain(module, *args[:3], recipe=quantised)
    assert "FC1 runs under" in str(explanation)
    number = {"fc1": 0, "fc2": 2}[which]
    assert f"GroupedLinear({number}) not quantised" in explanation.numerics
    assert f"GroupedLinear({2 - number}) MXFP8BlockScaling emulated" in explanation.numerics


def test_n12_a_layer_quantises_without_a_recipe_in_force():
    recipe = recipe_of("delayed")
    fc = cgm.GroupedLinear(G, H, F, dtype=BF16, recipe=recipe)
    x, sizes, _, _ = operands()
    x.requires_grad_()
    fc(x, sizes).sum().backward()
    fc(x, sizes).sum().backward()
    assert fc.recipe_state.updates == 2
    assert fc.recipe_state.amax_history["forward"][2].any()


def test_weights_are_kept_only_when_the_caller_says_so(path):
    recipe = recipe_of("mxfp8")
    fc = cgm.GroupedLinear(G, H, F, bias=False, dtype=BF16)
    x, sizes, _, _ = operands()
    with torch.no_grad(), cgm.autocast(recipe=recipe):
        first = fc(x, sizes, is_first_microbatch=True)
        fc.weight.data.copy_(-fc.weight)
        assert torch.equal(fc(x, sizes, is_first_microbatch=False), first)
        assert torch.equal(fc(x, sizes), -first)
        assert torch.equal(fc(x, sizes, is_first_microbatch=False), first)
        assert torch.equal(fc(x, sizes, is_first_microbatch=True), -first)
    with cgm.autocast(recipe=recipe):  # backward needs the other direction, which was not kept
        x.requires_grad_()
        fc(x, sizes, is_first_microbatch=False).sum().backward()
    assert torch.isfinite(fc.weight.grad).all()
    with pytest.raises(TypeError, match="is_first_microbatch"):
        fc(x, sizes, first=True)


def test_a_grouped_mlp_keeps_the_weights_of_both_layers(path):
    recipe = recipe_of("current")
    module = module_of()
    x, sizes, probs, dy = operands()
    first = step(module, x, sizes, probs, dy, recipe=recipe, is_first_microbatch=True)
    with torch.no_grad():
        module.fc1.weight.mul_(2)
        module.fc2.weight.mul_(2)
    again = step(module, x, sizes, probs, dy, recipe=recipe, is_first_microbatch=False)
    assert all(torch.equal(again[name], first[name]) for name in first)
    output = torch.empty_like(first["y"])
    with torch.no_grad(), cgm.autocast(recipe=recipe):
        y = module(x, sizes, probs, is_first_microbatch=False, op_kwargs={2: {"output": output}})
    assert y.data_ptr() == output.data_ptr()
    assert torch.equal(y, first["y"])
    assert not torch.equal(step(module, x, sizes, probs, dy, recipe=recipe)["y"], first["y"])


def test_the_range_of_emulation_is_checked_where_it_is_asked_for(path):
    fc = cgm.GroupedLinear(1, 32, 32, bias=False, dtype=BF16)
    x = torch.full((4, 32), 2.0**-126, dtype=BF16)
    x[0, 0] = 2.0**-120  # the block's scale is 2^-128: E4M3 holds the rest as subnormal numbers
    sizes, recipe = torch.tensor([4]), recipe_of("mxfp8")
    tiny = torch.where(torch.arange(32) == 0, 2.0**-120, 2.0**-130).to(BF16).expand(4, 32).contiguous()
    with cgm.autocast(recipe=recipe), cgm.settings.override(debug_checks=True):
        fc(x, sizes)
        with pytest.raises(GroupedMLPError, match="outside of bfloat16's normal numbers"):
            fc(tiny, sizes)
        fc(x, sizes)  # read once, forgotten
        with cgm.settings.override(check_range=False):
            fc(tiny, sizes)
        with pytest.raises(cgm.ShapeError, match=r"split_sizes on cpu.*emulated operands on cpu"):
            fc(tiny, torch.tensor([9]))


def test_layers_that_do_not_fit_the_blocks_raise_and_say_why():
    x, sizes = torch.randn(4, 24), torch.tensor([4])
    with cgm.autocast(recipe=recipe_of("mxfp8")):
        with pytest.raises(UnsupportedError, match=r"in_features is 24.*out_features is 40"):
            cgm.GroupedLinear(1, 24, 40)(x, sizes)
    with cgm.autocast(recipe=recipe_of("block")):
        cgm.GroupedLinear(1, 24, 40)(x, sizes)


def test_custom_recipes_mix_quantisers_and_refuse_what_cannot_cancel(path):
    def some(role):
        return cgq.MXFP8Quantizer() if role == "input" else None

    recipe = cgm.CustomRecipe(qfactory=some)
    module, args = module_of(), operands()
    got = step(module, *args, recipe=recipe)
    replays = replays_of(module)
    assert not is_fused(module)
    slots = LinearReplay(quantizers={"input": cgq.MXFP8Quantizer(), "grad_output": _Unchanged()})
    assert replays[0].quantizers["weight"] is None
    assert_close(got, replayed(module, *args, [slots, slots], round_grad=True), 5e-3)

    def one_sided(role):
        return cgq.NVFP4Quantizer(with_rht=role == "input")

    with pytest.raises(UnsupportedError, match="transforms must cancel"):
        step(module_of(), *args, recipe=cgm.CustomRecipe(qfactory=one_sided))
    with pytest.raises(UnsupportedError, match="returned 3"):
        step(module_of(), *args, recipe=cgm.CustomRecipe(qfactory=lambda role: 3))


class _Unchanged:
    """In a replay: rows at their slots, unquantised."""

    group_alignment = 128

    def quantize(self, x, sizes, scale=None, rng=None):
        self.groups = cgq.MXFP8Quantizer().quantize(x, sizes).matrices
        self.x = x
        return self

    def operand(self, direction, dtype):
        clean = self.groups.clean(self.x.unsqueeze(0))
        return (clean if direction == "rowwise" else self.groups.pad(clean))[0].to(dtype)


def test_explain_says_emulated_and_how_exact():
    module, args = module_of(), operands()
    text = str(cgm.explain(module, *args[:3], recipe=recipe_of("mxfp8")))
    assert "MXFP8BlockScaling emulated: MXFP8 operands as bfloat16, exactly" in text
    assert "quantize_x" in text
    assert "rounded to bfloat16" in str(cgm.explain(module, *args[:3], recipe=recipe_of("block_f32")))
    assert "backward dequantized" in str(
        cgm.explain(module, *args[:3], recipe=recipe_of("mxfp8", backward_override="dequantized"))
    )


def test_d5_quantisers_that_a_reset_changed_run_one_by_one(path):
    """The plan was made for quantisers that kernels take; a reset makes others before its recipe's text changes."""
    recipe = recipe_of("nvfp4_plain")
    module, args = module_of(bias=True), operands()
    step(module, *args, recipe=recipe)
    recipe.row_scaled_activation = True
    step(module, *args, recipe=recipe)  # planned for, and run on, the quantisers of the first step
    planned = module.fuser.last_plan
    module.reset_recipe_state()
    step(module, *args, recipe=recipe)
    assert module.fuser.last_plan is planned
    assert is_fused(module) == (path == "kernels")
    replays = replays_of(module)
    assert replays[0].quantizers["input"].row_scaled_nvfp4
    got = step(module, *args, recipe=recipe)
    assert_close(got, replayed(module, *args, replays, round_grad=True), FP4)
    step(module, *args, recipe=recipe, frozen=("x", "fc1.weight", "fc1.bias", "probs"))


@pytest.mark.parametrize("delay", [False, True])
def test_e3_main_grad_takes_quantised_gradients(path, delay):
    recipe = recipe_of("delayed")
    want_module = module_of()
    module = module_of(accumulate_into_main_grad=True, delay_wgrad_compute=delay)
    for weight in (module.fc1.weight, module.fc2.weight):
        weight.main_grad = torch.full_like(weight, 0.5, dtype=torch.float32)
    for _ in range(2):
        want = step(want_module, *operands(), recipe=recipe)
        for weight in (module.fc1.weight, module.fc2.weight):
            weight.main_grad.fill_(0.5)
        step(module, *operands(), recipe=recipe)
        module.backward_dw()
    for name in ("fc1", "fc2"):
        weight = getattr(module, name).weight
        assert torch.allclose(weight.main_grad - 0.5, want[f"{name}.weight"].float(), rtol=1e-2, atol=1e-5)


@pytest.mark.parametrize("cls", [c for c in cgm.Recipe.__subclasses__() if c.kind not in ("high_precision", "custom")])
def test_a5_a_foreign_recipe_that_lacks_fields_is_told_all_of_them(path, cls):
    foreign = type(cls.__name__, (), {"__module__": "elsewhere"})()
    module, args = module_of(), operands()
    with pytest.raises(cgm.UnsupportedError, match=rf"elsewhere\.{cls.__name__}.*the recipe lacks") as error:
        step(module, *args, recipe=foreign)
    assert error.value.reasons[0] in str(cgm.explain(module, *args[:3], recipe=foreign))
    given = {name: value for name, value in vars(cls()).items() if name in error.value.reasons[0]}
    assert len(given) >= 2
    vars(foreign).update(given)
    assert all(torch.isfinite(t).all() for t in step(module, *args, recipe=foreign).values())


def test_a5_a_format_without_a_name_is_told(path):
    foreign = type("MXFP8BlockScaling", (), {"margin": 0, "fp8_format": "E4M3"})()
    with pytest.raises(cgm.UnsupportedError, match="fp8_format 'E4M3' is not supported: allowed: members of Format"):
        step(module_of(), *operands(), recipe=foreign)


@pytest.mark.parametrize("value", ["yes", 1, torch.tensor(True)], ids=str)
@pytest.mark.parametrize("options", [{}, UNFUSED], ids=["fused", "unfused"])
def test_is_first_microbatch_takes_a_bool_or_none(path, value, options):
    module = module_of()
    x, sizes, probs, _ = operands()
    with cgm.autocast(recipe=recipe_of("mxfp8", **options)):
        for tokens in (len(x), 0):
            with pytest.raises(TypeError, match=r"is_first_microbatch is .*; allowed: True, False, None"):
                module(x[:tokens], sizes, probs[:tokens], is_first_microbatch=value)


@pytest.mark.parametrize("tokens", [0, 5])
def test_k1_no_tokens_under_a_recipe(path, tokens):
    recipe = recipe_of("delayed")
    module = trained(module_of(bias=True), recipe)
    before = module.fc1.recipe_state.scale["forward"][:G].clone()
    got = step(module, *operands((0,) * G, tail=tokens), recipe=recipe)
    assert all(not t.any() for t in got.values())
    assert {name: t.shape for name, t in got.items() if name not in ("x", "y", "probs")} == {
        name: p.shape for name, p in module.named_parameters()
    }
    assert torch.equal(module.fc1.recipe_state.scale["forward"][:G], before)


def test_fused_and_unfused_agree_and_explain_lists_each_step():
    recipe = recipe_of("nvfp4")
    with kernels.using(ReferenceKernels()) as provider:
        module = module_of(bias=True)
        args = operands()
        report = cgm.explain(module, *(t.requires_grad_(t.is_floating_point()) for t in args[:3]), recipe=recipe)
        fused = step(module, *args, recipe=recipe)
        steps = [kernel.step for kernel in report.pipelines[0].kernels]
        assert [s.role for s in steps] == (
            "quantize_x quantize_w1 fprop_act quantize_a quantize_w2 fprop "
            "quantize_dy dgrad_act wgrad2 bias_grad2 reduce_probs quantize_dz dgrad wgrad1 bias_grad1"
        ).split()
        gemms = [s for s in steps if s.spec is not None and not s.role.startswith("quantize")]
        assert {s.spec for s in gemms} == set(provider.launches)
        assert all(s.emulated == s.spec.alpha for s in gemms)
        module.reset_recipe_state()
        torch.manual_seed(0)
        first = step(module, *args, recipe=recipe)
        module.reset_recipe_state()
        torch.manual_seed(0)
        unfused = step(module, *args, recipe=recipe_of("nvfp4", **UNFUSED))
        assert not is_fused(module)
        assert torch.equal(first["y"], fused["y"])
        assert_close(first, {name: t.double() for name, t in unfused.items()}, FP4)


def test_doctor_says_emulated_where_kernels_run(monkeypatch):
    from cute_grouped_mlp import doctor

    plain = {(row["recipe"], row["dtype"]): row["status"] for row in doctor.report()["recipes"]}
    assert plain["MXFP8BlockScaling", "bfloat16"] == "unfused"
    monkeypatch.setattr(kernels.KernelCache, "unsupported", lambda self, device: ())
    rows = {(row["recipe"], row["dtype"]): row for row in doctor.report()["recipes"]}
    assert rows["MXFP8BlockScaling", "bfloat16"]["status"] == "emulated"
    assert rows["NVFP4BlockScaling", "float16"]["status"] == "unfused"
    assert "reads and stores bfloat16" in rows["NVFP4BlockScaling", "float16"]["why"]
    assert rows["HighPrecision", "float16"]["status"] == "unfused"  # native kernels are another question
