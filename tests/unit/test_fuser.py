"""Plans and their cache (docs/acceptance.md, B, M1)."""

import dataclasses
import functools
import threading

import pytest
import torch
from pipelines import FUSED, UNFUSED, Scale, fused, inputs, make, run
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import cute_grouped_mlp as cgm

SETTINGS = [
    (cgm.HighPrecision, "enable_cutedsl_fused_grouped_mlp", False),
    (cgm.HighPrecision, "anything", 3),
    (cgm.DelayedScaling, "margin", 2),
    (cgm.Float8CurrentScaling, "use_power_2_scales", True),
    (cgm.Float8BlockScaling, "use_f32_scales", True),
    (cgm.MXFP8BlockScaling, "enable_2d_quantization", True),
    (cgm.NVFP4BlockScaling, "disable_rht", True),
]


@pytest.mark.parametrize(("cls", "name", "value"), SETTINGS, ids=lambda v: str(v)[:40])
def test_b1_m1_a_setting_is_another_plan_and_back_is_the_same_lists(ref, cls, name, value):
    module, args, recipe = make(), inputs(), cls()
    run(module, args, recipe)
    first = module.fuser.last_plan
    missing = object()
    before = getattr(recipe, name, missing)
    setattr(recipe, name, value)
    run(module, args, recipe)
    second = module.fuser.last_plan
    assert second is not first
    assert second.key[0] == str(recipe) != first.key[0]
    assert module.fuser.plan_cache_info()[:2] == (0, 2)
    delattr(recipe, name) if before is missing else setattr(recipe, name, before)
    run(module, args, recipe)
    assert module.fuser.last_plan.forward_ops is first.forward_ops
    assert module.fuser.last_plan.backward_ops is first.backward_ops
    assert module.fuser.plan_cache_info() == (1, 2, 64, 2)


def test_b1_the_key_is_text_and_boundary(ref):
    module = make()
    recipe = cgm.HighPrecision()
    run(module, inputs(), recipe)
    assert module.fuser.last_plan.key == (str(recipe), 0)
    with torch.no_grad():
        run(module, inputs(), recipe)
    assert module.fuser.last_plan.key == (str(recipe), 3)


FREEZE = {
    "x without gradient": ((), False, True, 0),
    "only probs": ((0, 2), False, True, 1),
    "FC1 frozen": ((0,), False, False, 2),
    "FC1 frozen, probs": ((0,), False, True, 1),
    "FC2 frozen": ((2,), False, False, 0),
    "all frozen": ((0, 2), False, False, 3),
    "all frozen, x": ((0, 2), True, False, 0),
}


@pytest.mark.parametrize(("frozen", "x_grad", "probs_grad", "boundary"), FREEZE.values(), ids=FREEZE)
@pytest.mark.parametrize("fuse", [True, False])
def test_b2_no_grad_and_grad_alternate_between_two_plans(ref, fuse, frozen, x_grad, probs_grad, boundary):
    module, args = make(), inputs(x_grad, probs_grad)
    for index in frozen:
        module[index].weight.requires_grad_(False)
    recipe = cgm.HighPrecision(enable_cutedsl_fused_grouped_mlp=fuse)
    lists = {}
    for _ in range(100):
        for enabled in (False, True):
            with torch.set_grad_enabled(enabled):
                y = run(module, args, recipe)
            plan = module.fuser.last_plan
            ops = lists.setdefault(plan.boundary, (plan.forward_ops, plan.backward_ops))
            assert plan.forward_ops is ops[0]
            assert plan.backward_ops is ops[1]
            assert y.requires_grad == (enabled and boundary < 3)
        if y.requires_grad:
            y.sum().backward()
    assert set(lists) == {3, boundary}
    info = module.fuser.plan_cache_info()
    assert info.misses == len(lists)
    assert info.hits == 200 - len(lists)
    assert module.fuser.recipe_state_resets == 1


@pytest.mark.parametrize(("use_reentrant", "plans"), [(True, 2), (False, 1)])
def test_b2_recompute_builds_a_plan_for_each_boundary(ref, use_reentrant, plans):
    module, args = make(), inputs()
    for _ in range(10):
        torch_checkpoint(module, *args, use_reentrant=use_reentrant).sum().backward()
    assert module.fuser.plan_cache_info().misses == plans
    assert module.fuser.recipe_state_resets == 1


def test_b3_toggling_the_flag_replans_and_toggling_back_hits(ref):
    module, args, recipe = make(), inputs(), cgm.HighPrecision()
    fuser = module.fuser
    run(module, args, recipe)
    assert fused(fuser) == FUSED
    states = [op.recipe_state for op in fuser.basic_ops]
    recipe.enable_cutedsl_fused_grouped_mlp = False
    run(module, args, recipe)
    assert fused(fuser) == UNFUSED
    recipe.enable_cutedsl_fused_grouped_mlp = True
    run(module, args, recipe)
    assert fused(fuser) == FUSED
    recipe.enable_cutedsl_fused_grouped_mlp = None
    run(module, args, recipe)
    assert fused(fuser) == FUSED
    assert fuser.plan_cache_info()[:2] == (1, 3)
    assert [op.recipe_state for op in fuser.basic_ops] == states
    assert fuser.recipe_state_resets == 1


class HighPrecision:
    """Somebody else's recipe of that name."""

    backward_override = None


def test_b3_a5_the_flag_attached_to_a_foreign_recipe(ref):
    module, args, recipe = make(), inputs(), HighPrecision()
    run(module, args, recipe)
    assert fused(module.fuser) == FUSED
    recipe.enable_cutedsl_fused_grouped_mlp = False
    run(module, args, recipe)
    assert fused(module.fuser) == UNFUSED
    del recipe.enable_cutedsl_fused_grouped_mlp
    run(module, args, recipe)
    assert fused(module.fuser) == FUSED
    assert module.fuser.plan_cache_info()[:2] == (1, 2)


class Quantised(cgm.BasicOperation):
    """Identity with one quantiser in each direction, which counts what its recipe state goes through."""

    def __init__(self):
        super().__init__()
        self.resets = 0

    def num_quantizers(self, mode):
        return 1

    def reset_recipe_state(self, *, recipe=None):
        super().reset_recipe_state(recipe=recipe)
        self.resets += 1

    def op_forward(self, ctx, input_, *, prev_op_grad_output_quantizer, next_op_input_quantizer):
        state = self.recipe_state
        if state is not None and hasattr(state, "amax_history"):
            state.amax_history["forward"][0] = input_.detach().abs().amax()
        return input_ * 1

    def op_backward(self, ctx, grad_output):
        return grad_output, ()


def test_b4_state_resets_by_its_own_conditions():
    op = Quantised()
    module = cgm.Sequential(op)
    x = torch.randn(2, 4, requires_grad=True)

    def resets(recipe):
        run(module, (x,), recipe)
        return op.resets

    delayed, current = cgm.DelayedScaling(), cgm.Float8CurrentScaling()
    assert resets(delayed) == 1  # first use
    assert resets(delayed) == 1
    delayed.margin = 3
    assert resets(delayed) == 1  # another plan, the same state
    delayed.amax_history_len = 16
    assert resets(delayed) == 2
    with torch.no_grad():
        assert resets(delayed) == 2  # the boundary alone
    assert resets(current) == 3  # another type
    current.use_power_2_scales = True
    assert resets(current) == 3
    current.backward_override = "dequantized"
    assert resets(current) == 4
    assert resets(cgm.Float8CurrentScaling(backward_override="dequantized")) == 4
    assert module.fuser.recipe_state_resets == 4
    module.reset_recipe_state()
    assert op.recipe_state is None
    assert resets(current) > 4


def test_b4_amax_history_survives_plan_switches_and_advances_once_per_step():
    op = Quantised()
    module = cgm.Sequential(op)
    recipe = cgm.DelayedScaling(amax_history_len=4)
    x = torch.full((2, 4), 3.0, requires_grad=True)
    run(module, (x,), recipe).sum().backward()  # train
    state = op.recipe_state
    history = state.amax_history["forward"].clone()
    assert history[:, 0].tolist() == [0, 3, 0, 0]
    assert state.scale["forward"].item() == pytest.approx(448 / 3)
    with torch.no_grad():  # evaluate
        run(module, (x,), recipe)
    assert op.recipe_state is state
    assert state.updates == 1
    run(module, (x * 2,), recipe).sum().backward()
    assert op.recipe_state is state
    assert state.amax_history["forward"][:, 0].tolist() == [0, 6, 3, 0]
    assert state.updates == 2
    recipe.amax_history_len = 2  # a reset that keeps what fits
    run(module, (x,), recipe).sum().backward()
    assert op.recipe_state is not state
    assert op.recipe_state.amax_history["forward"].shape == (2, 1)
    assert op.recipe_state.scale["forward"].item() == pytest.approx(448 / 6)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_b4_n13_history_advances_once_per_checkpointed_step(use_reentrant):
    op = Quantised()
    module = cgm.Sequential(op)
    x = torch.full((2, 4), 3.0, requires_grad=True)
    with cgm.autocast(recipe=cgm.DelayedScaling()):
        y = cgm.checkpoint(module, x, use_reentrant=use_reentrant)
    y.sum().backward()
    assert op.recipe_state.updates == 1


def test_b4_recipe_state_round_trip():
    from cute_grouped_mlp.recipe_state import make_recipe_state

    op = Quantised()
    recipe = cgm.DelayedScaling(amax_history_len=4)
    state = make_recipe_state(recipe, op, None)
    state.amax_history["forward"][:, 0] = torch.tensor([1.0, 2, 3, 4])
    state.scale["backward"][:] = 7
    other = make_recipe_state(dataclasses.replace(recipe, amax_history_len=2), op, None)
    other.load_state_dict(state.state_dict())
    assert other.amax_history["forward"][:, 0].tolist() == [1, 2]
    assert other.scale["backward"].tolist() == [7]
    assert make_recipe_state(cgm.HighPrecision(), op, None) is None
    assert make_recipe_state(recipe, cgm.ScaledSwiGLU(), None) is None


def test_b4_recipe_state_travels_in_the_state_dict():
    recipe = cgm.DelayedScaling(amax_history_len=4)
    x = torch.full((2, 4), 3.0, requires_grad=True)
    trained, fresh = cgm.Sequential(Quantised(), Scale(2)), cgm.Sequential(Quantised(), Scale(3))
    run(trained, (x,), recipe).sum().backward()
    state = trained.state_dict()
    assert set(state) == {"0._extra_state", "1._extra_state", "1.factor"}
    fresh.load_state_dict(state)  # before the first forward
    run(fresh, (x,), recipe)
    assert fresh[0].recipe_state.amax_history["forward"][:, 0].tolist() == [3, 3, 0, 0]
    assert fresh[0].recipe_state.scale["forward"].item() == pytest.approx(448 / 3)
    run(fresh, (x * 2,), recipe).sum().backward()
    fresh.load_state_dict(state)  # and after it
    assert torch.equal(fresh[0].recipe_state.amax_history["forward"], trained[0].recipe_state.amax_history["forward"])
    cgm.Sequential(Quantised(), Scale(1)).load_state_dict({"1.factor": torch.tensor(1.0)})
    with pytest.raises(RuntimeError, match="Unexpected key"):
        fresh.load_state_dict({**state, "0.nonsense": torch.zeros(1)})


def test_b4_amax_algorithms():
    from cute_grouped_mlp.recipe_state import make_recipe_state

    def scale(**fields):
        recipe = cgm.DelayedScaling(amax_history_len=3, fp8_format=cgm.Format.HYBRID, **fields)
        state = make_recipe_state(recipe, Quantised(), None)
        for mode in ("forward", "backward"):
            state.amax_history[mode][:, 0] = torch.tensor([2.0, 8.0, 4.0])
        state.update()
        return state.scale["forward"].item(), state.scale["backward"].item()

    assert scale() == (448 / 8, 57344 / 8)
    assert scale(amax_compute_algo="most_recent") == (448 / 2, 57344 / 2)
    assert scale(amax_compute_algo=lambda history: history[2]) == (448 / 4, 57344 / 4)
    assert scale(margin=1) == (448 / 16, 57344 / 16)
    assert scale(scaling_factor_compute_algo=lambda amax, scale, limit, recipe: amax * 0 + limit) == (448, 57344)


def test_b5_backward_uses_the_plan_of_its_forward(ref):
    module, args, recipe = make(), inputs(), cgm.HighPrecision()
    y = run(module, args, recipe)
    recipe.enable_cutedsl_fused_grouped_mlp = False
    other = run(module, inputs(), recipe)
    with torch.no_grad():
        run(module, inputs(), recipe)
    ref.launches.clear()
    y.sum().backward()
    assert ref.names() == ["dgrad_act", "wgrad", "dgrad", "wgrad", "reduce"]
    ref.launches.clear()
    recipe.enable_cutedsl_fused_grouped_mlp = True
    other.sum().backward()
    assert ref.names() == ["dgrad", "wgrad", "dgrad", "wgrad"]


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_b5_checkpoint_of_a_fused_plan_is_bitwise_the_same(ref, use_reentrant):
    module, args = make(), inputs()
    recipe = cgm.HighPrecision()

    def step(call):
        with cgm.autocast(recipe=recipe):
            y = call(*args)
        with cgm.autocast(recipe=cgm.HighPrecision(enable_cutedsl_fused_grouped_mlp=False)):
            y.float().square().sum().backward()
        found = [y.detach()] + [t.grad.clone() for t in (args[0], args[2], *module.parameters())]
        for t in (args[0], args[2], *module.parameters()):
            t.grad = None
        return found

    plain = step(module)
    ref.launches.clear()
    again = step(lambda *a: cgm.checkpoint(module, *a, use_reentrant=use_reentrant))
    assert all(map(torch.equal, plain, again))
    assert ref.names()[:4] == ["fprop_act", "fprop"] * 2
    assert "dgrad_act" in ref.names()


def test_b6_no_recipe_disabled_autocast_and_high_precision_share_one_plan(ref):
    module, args = make(), inputs()
    module(*args)
    plan = module.fuser.last_plan
    run(module, args, None)
    run(module, args, cgm.HighPrecision())
    with cgm.autocast(enabled=False, recipe=cgm.MXFP8BlockScaling()):
        module(*args)
    assert module.fuser.last_plan is plan
    assert module.fuser.plan_cache_info() == (3, 1, 64, 1)
    assert module.fuser.recipe_state_resets == 1


def test_b6_the_default_policy_takes_effect_on_the_next_call(ref):
    module, args = make(), inputs()
    module(*args)
    assert fused(module.fuser) == FUSED
    with cgm.settings.override(fuse=False):
        module(*args)
        assert fused(module.fuser) == UNFUSED
        run(module, args, cgm.HighPrecision(enable_cutedsl_fused_grouped_mlp=True))
        assert fused(module.fuser) == FUSED
    module(*args)
    assert fused(module.fuser) == FUSED


def test_b7_the_cache_is_bounded_and_counts(ref):
    module, args = make(), inputs()
    recipe = cgm.HighPrecision()
    for number in range(70):
        recipe.number = number
        run(module, args, recipe)
    assert module.fuser.plan_cache_info() == (0, 70, 64, 64)
    run(module, args, recipe)
    assert module.fuser.plan_cache_info() == (1, 70, 64, 64)
    recipe.number = 0  # evicted long ago
    run(module, args, recipe)
    assert module.fuser.plan_cache_info() == (1, 71, 64, 64)
    module.fuser.plan_cache_clear()
    assert module.fuser.plan_cache_info() == (0, 0, 64, 0)
    with cgm.settings.override(plan_cache_size=2):
        for number in range(5):
            recipe.number = number
            run(module, args, recipe)
        assert module.fuser.plan_cache_info().currsize == 2


def test_b7_custom_recipes_made_anew_neither_collide_nor_grow_the_cache(ref, caplog):
    module, args = make(), inputs()

    def recipe(factor):
        return cgm.CustomRecipe(qfactory=functools.partial(no_quantizer, factor))

    for _ in range(5):
        run(module, args, recipe(1))
    assert module.fuser.plan_cache_info()[:2] == (4, 1)
    run(module, args, recipe(2))
    assert module.fuser.plan_cache_info().currsize == 2
    # A tensor, or what a function captured, cannot be told from another: planned anew, never kept, and said once.
    with caplog.at_level("WARNING", logger="cute_grouped_mlp"):
        for _ in range(3):
            run(module, args, recipe(torch.ones(1)))
        for _ in range(3):
            run(module, args, cgm.CustomRecipe(qfactory=lambda role: None))
    assert module.fuser.plan_cache_info() == (4, 8, 64, 2)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2
    assert "Tensor: its class does not say what it holds" in said[0]
    assert "<lambda>: it is a lambda, a local function" in said[1]


def no_quantizer(factor, role):
    return None


@pytest.mark.parametrize("fuse", [True, False])
def test_b8_parameters_are_read_at_each_call(ref, fuse):
    recipe = cgm.HighPrecision(enable_cutedsl_fused_grouped_mlp=fuse)
    module, args = make(device="meta"), inputs()
    module.to_empty(device="cpu")
    for op in (module[0], module[2]):
        op.reset_parameters()
    first = run(module, args, recipe)
    weights = {name: torch.randn_like(p) * 0.1 for name, p in module.state_dict().items() if "weight" in name}
    module.load_state_dict({**weights, "1._extra_state": torch.tensor(0)}, assign=True, strict=True)
    second = run(module, args, recipe)
    assert not torch.equal(first, second)
    module[0].weight = torch.nn.Parameter(weights["0.weight"] * 2)
    third = run(module, args, recipe)
    assert not torch.equal(second, third)
    third.sum().backward()
    assert module[0].weight.grad is not None
    assert module.fuser.plan_cache_info().misses == 1
    module.to(torch.float16)
    half = run(module, inputs(dtype=torch.float16), recipe)
    assert half.dtype is torch.float16
    assert module.fuser.plan_cache_info().misses == 2
    assert module.fuser.plan_cache_info().currsize == 1  # a new stamp clears the cache


def test_b8_a_new_parameter_of_the_same_shape_keeps_the_plans(ref):
    module, args = make(), inputs()
    module(*args)
    for _ in range(3):  # as a sharded parameter that is gathered for each step
        module[0].weight = torch.nn.Parameter(module[0].weight.detach().clone())
        module(*args)
    assert module.fuser.plan_cache_info()[:2] == (3, 1)
    module[0].weight.data = module[0].weight.data.half()
    module[2].weight.data = module[2].weight.data.half()
    module(*inputs(dtype=torch.float16))
    assert module.fuser.plan_cache_info().misses == 2


def test_b8_a_dtype_that_kernels_do_not_have_replans(ref):
    module = make()
    module(*inputs())
    assert fused(module.fuser) == FUSED
    module.float()
    module(*inputs(dtype=torch.float32))
    assert fused(module.fuser) == UNFUSED


def test_threads_share_plans(ref):
    module, recipe = make(), cgm.HighPrecision()
    plans, errors = [], []
    barrier = threading.Barrier(4)

    def work():
        try:
            barrier.wait()
            for _ in range(20):
                run(module, inputs(), recipe).sum().backward()
                plans.append(module.fuser.last_plan)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert len({id(plan) for plan in plans}) == 1
    assert module.fuser.plan_cache_info().currsize == 1
