import dataclasses
import itertools

import pytest

from cute_grouped_mlp.codegen.spec import (
    NUMERICS,
    Arch,
    DType,
    Element,
    GluLayout,
    KernelSpec,
    Pass,
    Quantization,
    Scaling,
    Schedule,
    TileConfig,
)

BASE = KernelSpec(Arch.SM90A, Pass.FPROP_ACT, tile=TileConfig(128, 192), activation="swiglu", probs=DType.FP32)
#: Another value of each field.
OTHER = {
    "arch": Arch.SM100A,
    "kernel": Pass.DGRAD_ACT,
    "numerics": "fp16",
    "tile": TileConfig(128, 256),
    "activation": "situglu",
    "glu_layout": GluLayout.INTERLEAVED32,
    "probs": DType.BF16,
    "alpha": True,
    "bias": True,
    "store_z": True,
    "store_act": False,
    "sum_probs": False,
    "out": DType.FP32,
    "accumulate": True,
    "quantization": Quantization(Scaling.MXFP8, Element.E4M3),
}
TILE_OTHER = {"tile_m": 256, "tile_n": 128, "cluster_m": 2, "cluster_n": 2, "schedule": Schedule.PINGPONG}


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(KernelSpec)])
def test_each_field_is_part_of_the_identity(field):
    changed = dataclasses.replace(BASE, **{field: OTHER[field]})
    assert changed != BASE
    assert changed.digest != BASE.digest
    assert changed.name != BASE.name


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(TileConfig)])
def test_each_field_of_a_tile_config_is_part_of_the_identity(field):
    changed = dataclasses.replace(BASE, tile=dataclasses.replace(BASE.tile, **{field: TILE_OTHER[field]}))
    assert changed.digest != BASE.digest
    assert changed.name != BASE.name


@pytest.mark.parametrize("fields", list(itertools.combinations(OTHER, 2)))
def test_json_round_trip(fields):
    spec = dataclasses.replace(BASE, **{field: OTHER[field] for field in fields})
    assert KernelSpec.from_dict(spec.to_dict()) == spec


def test_json_is_canonical_and_names_are_modules():
    assert BASE.to_json() == BASE.to_json().replace(" ", "")
    assert BASE.name.isidentifier()
    assert str(BASE) == BASE.name


def test_from_dict_refuses_what_it_does_not_know():
    with pytest.raises(TypeError):
        KernelSpec.from_dict({**BASE.to_dict(), "colour": "red"})
    with pytest.raises(ValueError, match="sm_12"):
        KernelSpec.from_dict({**BASE.to_dict(), "arch": "sm_12"})


@pytest.mark.parametrize("numerics", NUMERICS.values(), ids=str)
def test_a_stage_is_one_swizzle_atom_deep(numerics):
    assert numerics.tile_k * numerics.operand.bits == 128 * 8
    assert numerics.alignment * numerics.operand.bits == 16 * 8
