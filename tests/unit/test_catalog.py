"""The catalog holds what the runtime chooses, and nothing that cannot be built."""

import dataclasses
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cute_grouped_mlp as cgm
from cute_grouped_mlp import kernels
from cute_grouped_mlp.codegen import tiles
from cute_grouped_mlp.codegen.activations import ACTIVATIONS
from cute_grouped_mlp.codegen.catalog import DEFAULT_PROBS, default_catalog, full_catalog, use
from cute_grouped_mlp.codegen.errors import GroupedMLPError
from cute_grouped_mlp.codegen.render import render
from cute_grouped_mlp.codegen.select import linear_specs, step_specs
from cute_grouped_mlp.codegen.spec import NUMERICS, Arch, DType, GluLayout, Pass, Scaling, TileConfig
from cute_grouped_mlp.codegen.variants import named
from cute_grouped_mlp.reference_kernels import ReferenceKernels

SHAPE = {"tokens": 4096, "groups": 8, "hidden": 2048, "ffn": 768}
features = st.one_of(st.integers(1, 512), st.integers(1, 4096), st.sampled_from([256, 360, 896, 2304])).map(
    lambda n: 8 * n
)
tokens = st.one_of(st.integers(1, 1 << 20), st.integers(0, 20).map(lambda n: 1 << n))
groups = st.one_of(st.integers(1, 1025), st.sampled_from([1, 8, 64, 128, 256]))


def step(probs=DType.FP32, *, backward=True, activation="swiglu", numerics="bf16", **shape):
    return step_specs(
        Arch.SM90A, numerics, activation, GluLayout.CONTIGUOUS, probs, backward=backward, **{**SHAPE, **shape}
    )


@settings(deadline=None)  # the first example makes the catalog
@given(tokens, groups, features, features, st.sampled_from(DEFAULT_PROBS), st.booleans())
def test_the_default_catalog_holds_whatever_the_runtime_chooses(tokens, groups, hidden, ffn, probs, backward):
    catalog = set(default_catalog(Arch.SM90A))
    chosen = step(probs, backward=backward, tokens=tokens, groups=groups, hidden=hidden, ffn=ffn)
    assert set(chosen.all) <= catalog
    linear = linear_specs(Arch.SM90A, "bf16", tokens=tokens, groups=groups, in_features=hidden, out_features=ffn)
    assert {linear.fprop, linear.dgrad, linear.wgrad} <= catalog


@settings(deadline=None)  # the first example makes the catalog
@given(
    tokens, groups, features, features,
    st.sampled_from(sorted(NUMERICS)), st.sampled_from(sorted(ACTIVATIONS)), st.sampled_from([*DType, None]),
)  # fmt: skip
def test_every_choice_can_be_found_by_name(tokens, groups, hidden, ffn, numerics, activation, probs):
    shape = {"tokens": tokens, "groups": groups, "hidden": hidden, "ffn": ffn}
    for spec in step(probs, activation=activation, numerics=numerics, **shape).all:
        assert named(spec.name, Arch.SM90A) == spec


MODULES = [
    {},
    {"bias": True, "glu_interleave_size": 32},
    {"bias": True, "scale_bias": True},
    {"accumulate_into_main_grad": True},
    {"activation": "srelu", "bias": True},
]


def planned(module, recipe=None, *, probs=torch.float32, grads=("x", "probs")):
    """Kernels of a call, forward and backward."""
    dtype = module.fc1.weight.dtype
    meta = {"device": "meta"}
    x = torch.empty(64, module.fc1.in_features, dtype=dtype, requires_grad="x" in grads, **meta)
    p = None if probs is None else torch.empty(64, dtype=probs, requires_grad="probs" in grads, **meta)
    report = cgm.explain(module, x, torch.empty(2, dtype=torch.int32, **meta), p, recipe=recipe)
    found = [kernel.step.spec for pipeline in report.pipelines for kernel in pipeline.kernels]
    return [spec for spec in found if spec is not None]


@pytest.mark.parametrize("options", MODULES, ids=lambda options: "_".join(map(str, options)) or "plain")
@pytest.mark.parametrize("recipe", [None, "MXFP8BlockScaling", "NVFP4BlockScaling"])
def test_every_kernel_that_explain_names_can_be_found_by_name(options, recipe):
    """MissingArtifactError and the README name ``build --variant NAME`` for any of them."""
    missing = set()
    with kernels.using(ReferenceKernels()):
        for dtype, grads, frozen, fused, probs in itertools.product(
            (torch.bfloat16,) if recipe else (torch.bfloat16, torch.float16),
            (("x", "probs"), ("x",), ()),
            ((), ("fc1.weight",), ("fc2.weight", "fc1.weight")),
            (True, False),
            (torch.float32, torch.float16, None),
        ):
            module = cgm.GroupedMLP(2, 64, 128, dtype=dtype, device="meta", **options)
            for name, parameter in module.named_parameters():
                parameter.requires_grad_(name not in frozen)
                if options.get("accumulate_into_main_grad") and "weight" in name:
                    parameter.main_grad = torch.empty_like(parameter, dtype=torch.float32)
            made = getattr(cgm, recipe or "HighPrecision")(enable_cutedsl_fused_grouped_mlp=fused)
            specs = planned(module, made, probs=probs, grads=grads)
            assert specs
            missing |= {spec.name for spec in specs if named(spec.name) != spec}
    assert missing == set()


def test_default_catalog_is_small_sorted_valid_and_named_uniquely():
    catalog = default_catalog(Arch.SM90A)
    assert 10 <= len(catalog) < 150
    assert len({spec.name for spec in catalog}) == len(catalog) == len(set(catalog))
    assert {spec.kernel for spec in catalog} >= {*Pass} - {Pass.BIAS_GRAD}
    assert [problem for spec in catalog for problem in tiles.check(spec)] == []
    order = [list(Pass).index(spec.kernel) for spec in catalog]
    assert order == sorted(order)
    assert default_catalog(Arch.SM100A) == ()


def test_full_catalog_has_unique_names_and_renders():
    catalog = full_catalog(Arch.SM90A)
    assert set(catalog) > set(default_catalog(Arch.SM90A))
    assert len({spec.name for spec in catalog}) == len(catalog)
    for spec in catalog[::20]:
        assert render(spec).spec == spec


def test_what_a_step_needs():
    training, inference, unscaled = step(), step(backward=False), step(None)
    assert training.fprop_act.store_z
    assert not inference.fprop_act.store_z
    assert inference.all == (inference.fprop_act, inference.fprop)
    assert training.reduce.probs is DType.FP32
    assert unscaled.reduce is None
    assert unscaled.dgrad_act.probs is None
    for chosen in (training, unscaled):
        kernels = [chosen.fprop_act, chosen.fprop, chosen.dgrad_act, chosen.dgrad, chosen.wgrad1, chosen.wgrad2]
        assert [spec.kernel.value for spec in kernels] == ["fprop_act", "fprop", "dgrad_act", "dgrad", "wgrad", "wgrad"]
        assert set(chosen.all) == {*kernels, chosen.reduce} - {None}


def test_equal_choices_are_one_object():
    assert all(a is b for a, b in zip(step().all, step(tokens=4097).all, strict=True))


def test_use_tells_variants_of_a_pass_apart():
    kinds = {use(step(probs, backward=b).fprop_act) for probs in DEFAULT_PROBS for b in (True, False)}
    assert len(kinds) == 6
    gemms = [spec for spec in full_catalog(Arch.SM90A) if spec.kernel is Pass.DGRAD_ACT and spec.tile.tile_n == 128]
    alike = [s for s in gemms if (s.numerics, s.activation, s.probs, s.sum_probs) == ("bf16", "silu", None, True)]
    assert len({use(spec) for spec in alike}) == len(alike) == 4


def test_every_valid_tile_config_has_a_name_that_is_found():
    families = {dataclasses.replace(s, tile=None): s for s in full_catalog(Arch.SM90A) if s.kernel.is_gemm}
    for spec in families.values():
        for tile in (*tiles.candidates(spec)[::7], TileConfig(256, 96)):
            variant = dataclasses.replace(spec, tile=tile)
            if not tiles.check(variant):
                assert named(variant.name) == variant
    assert str(named("sm90a_bf16_fprop_act_swiglu_128x256_2x1_co").tile) == "128x256_2x1_co"


@pytest.mark.parametrize("margin", [-3, 2, 11])
def test_a_margin_of_scales_is_found_by_name(margin):
    for spec in full_catalog(Arch.SM90A):
        if spec.quantization is not None and spec.quantization.scaling is Scaling.MXFP8:
            other = dataclasses.replace(spec, quantization=dataclasses.replace(spec.quantization, margin=margin))
            assert named(other.name) == other


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("nothing", ["there is no variant 'nothing'", "cute-grouped-mlp list"]),
        ("sm90a_bf16_fprop_act_swiglu_128x192_1x1_p", ["near it: sm90a_bf16_fprop_act_swiglu_128x192_1x1_pp"]),
        ("sm90a_bf16_fprop_0128x192_1x1_pp", ["near it: sm90a_bf16_fprop_128x192_1x1_pp"]),
        ("sm90a_bf16_fprop", ["fprop needs a tile config"]),
        ("sm90a_bf16_reduce_pfp32_128x192_1x1_pp", ["reduce takes no tile config"]),
        ("sm90a_bf16_fprop_100x200_3x1_co", ["tile_m is 100", "tile_n is 200", "cluster is 3x1"]),
        ("sm90a_bf16_dgrad_192x96_1x1_pp", ["tile_n is 96"]),
        ("sm90a_bf16_quantize_nvfp4_e2m1_m2_row", ["margin belongs to mxfp8"]),
    ],
)
def test_a_name_that_is_not_valid_is_told_why(name, parts):
    with pytest.raises(GroupedMLPError) as error:
        named(name)
    for part in parts:
        assert part in str(error.value)


def test_a_name_of_another_architecture():
    with pytest.raises(GroupedMLPError, match="a kernel of sm_90a, not of sm_100a"):
        named("sm90a_bf16_reduce_pfp32", Arch.SM100A)
