"""What quantising recipes keep from step to step: scales, histories, random numbers; resets and checkpoints."""

import contextlib
import copy
import functools

import pytest
import torch
from quantized_steps import BF16, RECIPES, SPLITS, F, G, H, module_of, operands, recipe_of, step, trained

import cute_grouped_mlp as cgm
from cute_grouped_mlp import kernels
from cute_grouped_mlp import quantization as cgq
from cute_grouped_mlp.errors import GroupedMLPError
from cute_grouped_mlp.reference_kernels import ReferenceKernels


def mxfp8_factory(role, margin=0):
    return cgq.MXFP8Quantizer(margin=margin)


def test_a4_disable_rht_takes_effect_at_the_next_call_without_a_reset(path):
    recipe = cgm.NVFP4BlockScaling()
    module = module_of()
    step(module, *operands(), recipe=recipe)
    state = module.fc1.recipe_state
    assert state.quantizers.by_mode["forward"][0].with_rht
    recipe.disable_rht = True
    step(module, *operands(), recipe=recipe)  # another plan and its quantisers, the same state (B4)
    assert module.fc1.recipe_state is state
    assert not state.quantizers.by_mode["forward"][0].with_rht
    assert (state.updates, module.fuser.recipe_state_resets) == (2, 1)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (cgm.MXFP8BlockScaling(), cgm.MXFP8BlockScaling(margin=8)),
        (cgm.Float8CurrentScaling(), cgm.Float8CurrentScaling(use_power_2_scales=True)),
        (cgm.Float8BlockScaling(), cgm.Float8BlockScaling(use_f32_scales=True)),
        (
            cgm.NVFP4BlockScaling(disable_stochastic_rounding=True),
            cgm.NVFP4BlockScaling(disable_stochastic_rounding=True, disable_2d_quantization=True),
        ),
        (
            cgm.CustomRecipe(qfactory=mxfp8_factory),
            cgm.CustomRecipe(qfactory=functools.partial(mxfp8_factory, margin=8)),
        ),
    ],
    ids=["mxfp8 margin", "power of 2", "fp32 scales", "nvfp4 1d weights", "factories"],
)
def test_b4_recipes_of_one_class_in_turn_have_the_numbers_of_each(path, one, other):
    """State is shared, settings are not: each call computes as in a module that saw no other recipe."""
    args = operands()
    alone = [step(module_of(), *args, recipe=recipe) for recipe in (one, other)]
    assert any(not torch.equal(alone[0][name].nan_to_num(), alone[1][name].nan_to_num()) for name in alone[0])
    module = module_of()
    for recipe, expected in zip((one, other) * 2, alone * 2, strict=True):
        got = step(module, *args, recipe=recipe)
        assert all(torch.equal(got[name].nan_to_num(), expected[name].nan_to_num()) for name in expected)
    assert module.fuser.recipe_state_resets == 1
    assert module.fuser.plan_cache_info()[:2] == (2, 2)


def test_b4_a_backward_updates_delayed_scales_as_its_own_recipe_says(path):
    module, (x, sizes, probs, dy) = module_of(), operands()
    x.requires_grad_()
    with cgm.autocast(recipe=cgm.DelayedScaling()):
        y = module(x, sizes, probs)
    amax = x[:40].detach().float().abs().amax()
    with torch.no_grad(), cgm.autocast(recipe=cgm.DelayedScaling(margin=3)):
        module(x, sizes, probs)
    y.backward(dy)
    assert module.fc1.recipe_state.scale["forward"][0] == 448.0 / amax


def test_b4_a_kept_weight_of_other_settings_is_not_used(path):
    args, module = operands(), module_of()
    step(module, *args, recipe=cgm.MXFP8BlockScaling(), is_first_microbatch=True)
    got = step(module, *args, recipe=cgm.MXFP8BlockScaling(margin=8), is_first_microbatch=False)
    expected = step(module_of(), *args, recipe=cgm.MXFP8BlockScaling(margin=8))
    assert all(torch.equal(got[name].nan_to_num(), expected[name].nan_to_num()) for name in expected)


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
    assert module.state_dict()["fc1._extra_state"].numel()
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
    assert saved["fc1._extra_state"].numel()
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
