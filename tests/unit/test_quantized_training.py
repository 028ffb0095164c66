"""Numbers of training under quantising recipes on the CPU, against a float64 replay of every quantisation point."""

import dataclasses

import pytest
import torch
from quantized_steps import (
    BF16,
    FP4,
    FP8,
    RECIPES,
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
from cute_grouped_mlp import quantization as cgq
from cute_grouped_mlp.reference_quantized import LinearReplay


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
