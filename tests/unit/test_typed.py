"""Specs and quantisers refuse what is equal to a value and is of another type: it would share its cache entry."""

import dataclasses

import pytest

import cute_grouped_mlp as cgm
from cute_grouped_mlp import quantization as cgq
from cute_grouped_mlp.codegen.errors import FieldTypeError
from cute_grouped_mlp.codegen.select import quantize_spec
from cute_grouped_mlp.codegen.spec import Arch, KernelSpec, Pass, Quantization, TileConfig

VALUES = [
    TileConfig(128, 128),
    Quantization(),
    KernelSpec(Arch.SM90A, Pass.FPROP, tile=TileConfig(128, 128)),
    cgq.MXFP8Quantizer(),
    cgq.NVFP4Quantizer(),
    cgq.Float8BlockQuantizer(),
    cgq.Float8CurrentScalingQuantizer(),
    cgq.DelayedScalingQuantizer(),
]
LIKE = {bool: [0, 1, 0.0, None], int: [True, 1.0, "1"], type(None): [0, False], str: [b"bf16", 1]}


@pytest.mark.parametrize("value", VALUES, ids=lambda v: type(v).__name__)
def test_every_field_refuses_what_is_like_its_value(value):
    error = cgm.ConfigError if isinstance(value, cgq.Quantizer) else FieldTypeError
    checked = 0
    for field in dataclasses.fields(value):
        for other in LIKE.get(type(getattr(value, field.name)), [3, "x"]):
            with pytest.raises(error, match=f"{field.name} is {other!r}; allowed"):
                dataclasses.replace(value, **{field.name: other})
            checked += 1
    assert checked >= 2 * len(dataclasses.fields(value))


def test_all_wrong_fields_are_named_at_once():
    with pytest.raises(FieldTypeError, match=r"batched is 1; allowed: bool; margin is True; allowed: int"):
        Quantization(batched=1, margin=True)
    with pytest.raises(cgm.ConfigError, match=r"fp8_dtype is 'e4m3'.*margin is 1.0"):
        cgq.MXFP8Quantizer(fp8_dtype="e4m3", margin=1.0)


def test_equal_numbers_of_other_types_share_no_spec():
    quantize_spec(Arch.SM90A, Quantization(margin=1))
    for other in (True, 1.0):
        with pytest.raises(FieldTypeError):
            quantize_spec(Arch.SM90A, Quantization(margin=other))
