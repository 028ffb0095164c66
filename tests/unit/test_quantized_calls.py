"""What a caller may give and ask under quantising recipes: quantised tensors, a recipe per layer, kept weights."""

import dataclasses

import pytest
import torch
from quantized_steps import (
    BF16,
    FP4,
    FP8,
    RECIPES,
    UNFUSED,
    F,
    G,
    H,
    assert_close,
    is_fused,
    module_of,
    operands,
    recipe_of,
    step,
    trained,
)
from references import replayed, replays_of

import cute_grouped_mlp as cgm
from cute_grouped_mlp import kernels, reference_quantized
from cute_grouped_mlp import quantization as cgq
from cute_grouped_mlp.errors import GroupedMLPError, UnsupportedError
from cute_grouped_mlp.reference_kernels import ReferenceKernels
from cute_grouped_mlp.reference_quantized import LinearReplay


@pytest.mark.parametrize("name", RECIPES)
def test_only_a_bias_is_trained(path, name):
    """No product of the backward is wanted, so that dy is quantised in neither direction."""
    recipe = recipe_of(name)
    module = module_of(bias=True)
    x, sizes, probs, dy = operands()
    full = step(module, x, sizes, probs, dy, recipe=recipe)
    others = ["x", "probs", "fc1.weight", "fc1.bias", "fc2.weight"]
    got = step(trained(module, recipe), x, sizes, probs, dy, recipe=recipe, frozen=others)
    assert set(got) == {"y", "fc2.bias"}
    torch.testing.assert_close(got["fc2.bias"], full["fc2.bias"])
    layer = cgm.GroupedLinear(G, H, F, bias=True, dtype=BF16)
    layer.weight.requires_grad_(False)
    with cgm.autocast(recipe=recipe):
        layer(x.detach(), sizes).nan_to_num().sum().backward()
    assert layer.bias.grad is not None


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


def test_b4_a_setting_that_kernels_do_not_take_unfuses_the_next_call(path):
    """Quantisers have the settings of the call's recipe: no reset is needed, and no state is lost."""
    recipe = recipe_of("nvfp4")
    module, args = module_of(bias=True), operands()
    step(module, *args, recipe=recipe)
    assert is_fused(module) == (path == "kernels")
    state = module.fc1.recipe_state
    recipe.row_scaled_activation = True
    step(module, *args, recipe=recipe)
    assert not is_fused(module)
    assert module.fc1.recipe_state is state
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


QUANTISING = [c for c in cgm.Recipe.__subclasses__() if c.kind not in ("high_precision", "custom", "unknown")]


@pytest.mark.parametrize("cls", QUANTISING)
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
    with pytest.raises(cgm.UnsupportedError, match="fp8_format is 'E4M3'; allowed: one of E4M3, HYBRID"):
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


def test_doctor_says_emulated_where_kernels_run():
    from cute_grouped_mlp import doctor

    plain = {(row["recipe"], row["dtype"]): row["status"] for row in doctor.report()["recipes"]}
    assert plain["MXFP8BlockScaling", "bfloat16"] == "unfused"

    class Everywhere(kernels.KernelCache):
        def unsupported(self, device):
            return ()

    with kernels.using(Everywhere()):
        rows = {(row["recipe"], row["dtype"]): row for row in doctor.report()["recipes"]}
    assert rows["MXFP8BlockScaling", "bfloat16"]["status"] == "emulated"
    assert rows["NVFP4BlockScaling", "float16"]["status"] == "unfused"
    assert "kernels for quantised operands exist for bfloat16" in rows["NVFP4BlockScaling", "float16"]["why"]
    assert rows["HighPrecision", "float16"]["status"] == "native"
