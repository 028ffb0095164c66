"""Recipes: fields, validation and the text that plans are found by (docs/acceptance.md, A, M1, M6)."""

import copy
import dataclasses
import functools
import itertools
import pickle
from enum import Enum

import pytest
import torch

import cute_grouped_mlp as cgm
from cute_grouped_mlp.recipe import class_kind, recipe_kind
from cute_grouped_mlp.recipe_text import TEXT
from cute_grouped_mlp.snapshot import NO_RECIPE, fusion_flag, recipe_key

F = cgm.Format
COMMON = {"backward_override": None, "enable_cutedsl_fused_grouped_mlp": None}
FIELDS = {
    cgm.HighPrecision: {},
    cgm.DelayedScaling: {
        "margin": 0,
        "fp8_format": F.HYBRID,
        "amax_history_len": 1024,
        "amax_compute_algo": "max",
        "scaling_factor_compute_algo": None,
        "reduce_amax": True,
        "fp8_dpa": False,
        "fp8_mha": False,
    },
    cgm.Float8CurrentScaling: {
        "use_power_2_scales": False,
        "fp8_format": F.HYBRID,
        "fp8_gemm_fprop": cgm.MMParams(False),
        "fp8_gemm_dgrad": cgm.MMParams(True),
        "fp8_gemm_wgrad": cgm.MMParams(True),
    },
    cgm.Float8BlockScaling: {
        "use_f32_scales": False,
        "fp8_format": F.E4M3,
        "x_block_scaling_dim": 1,
        "w_block_scaling_dim": 2,
        "grad_block_scaling_dim": 1,
        "fp8_gemm_fprop": cgm.MMParams(True),
        "fp8_gemm_dgrad": cgm.MMParams(True),
        "fp8_gemm_wgrad": cgm.MMParams(True),
    },
    cgm.MXFP8BlockScaling: {"margin": 0, "fp8_format": F.E4M3, "enable_2d_quantization": False},
    cgm.NVFP4BlockScaling: {
        "disable_rht": False,
        "disable_stochastic_rounding": False,
        "disable_2d_quantization": False,
        "row_scaled_activation": False,
        "fp4_format": F.E2M1,
        "fp8_format": F.E4M3,
    },
    cgm.CustomRecipe: {"qfactory": max, "quantization_alignment": 128},
}


def make(cls, **values):
    return cls(**({"qfactory": max} if cls is cgm.CustomRecipe else {}) | values)


def other_value(cls, name, value):
    """Another value that the field allows, or None if there is none."""
    if name == "backward_override":
        return None if cls is cgm.DelayedScaling else "dequantized"
    if isinstance(value, bool) or name == "enable_cutedsl_fused_grouped_mlp":
        return not value
    if isinstance(value, int):
        return 1 if name == "w_block_scaling_dim" else {1: None}.get(value, value + 1)
    if isinstance(value, F):
        return {F.HYBRID: F.E4M3}.get(value, None if cls is cgm.NVFP4BlockScaling else F.HYBRID)
    if isinstance(value, cgm.MMParams):
        return None if cls is cgm.Float8BlockScaling else cgm.MMParams(not value.use_split_accumulator)
    return {"amax_compute_algo": "most_recent", "scaling_factor_compute_algo": min, "qfactory": min}[name]


@pytest.mark.parametrize("cls", FIELDS, ids=lambda c: c.__name__)
def test_a1_fields_and_defaults(cls):
    recipe = make(cls)
    expected = {**FIELDS[cls], **COMMON}
    assert {f.name for f in dataclasses.fields(cls)} == set(expected)
    assert {name: getattr(recipe, name) for name in expected} == expected
    with pytest.raises(TypeError, match="no_such_field"):
        make(cls, no_such_field=1)


def test_a1_formats():
    assert {f.name: tuple(f.value) for f in F} == {
        "E2M1": (6, 6),
        "E4M3": (448, 448),
        "E5M2": (57344, 57344),
        "HYBRID": (448, 57344),
    }


BAD = [
    (cgm.HighPrecision, "backward_override", "fast", "high_precision"),
    (cgm.HighPrecision, "enable_cutedsl_fused_grouped_mlp", "yes", "None, True, False"),
    (cgm.DelayedScaling, "backward_override", "dequantized", "None"),
    (cgm.DelayedScaling, "margin", 0.5, "an integer"),
    (cgm.DelayedScaling, "margin", True, "an integer"),
    (cgm.DelayedScaling, "fp8_format", F.E5M2, "E4M3, HYBRID"),
    (cgm.DelayedScaling, "amax_history_len", 0, "at least 1"),
    (cgm.DelayedScaling, "amax_compute_algo", "median", "'max', 'most_recent' or a callable"),
    (cgm.DelayedScaling, "scaling_factor_compute_algo", "x", "a callable or None"),
    (cgm.DelayedScaling, "reduce_amax", 1, "False, True"),
    (cgm.Float8CurrentScaling, "fp8_gemm_dgrad", False, "MMParams"),
    (cgm.Float8CurrentScaling, "use_power_2_scales", None, "False, True"),
    (cgm.Float8BlockScaling, "fp8_gemm_wgrad", cgm.MMParams(False), "use_split_accumulator=True"),
    (cgm.Float8BlockScaling, "x_block_scaling_dim", 3, "1, 2"),
    (cgm.Float8BlockScaling, "x_block_scaling_dim", 2, "at most one of"),
    (cgm.MXFP8BlockScaling, "fp8_format", "E4M3", "E4M3, HYBRID"),
    (cgm.NVFP4BlockScaling, "fp4_format", F.E4M3, "E2M1"),
    (cgm.CustomRecipe, "qfactory", None, "a callable"),
    (cgm.CustomRecipe, "quantization_alignment", 0, "at least 1"),
]


@pytest.mark.parametrize(("cls", "name", "value", "allowed"), BAD, ids=lambda v: str(v)[:30])
def test_a1_bad_values_raise_when_constructed_and_when_assigned(cls, name, value, allowed):
    with pytest.raises(cgm.ConfigError, match=name) as error:
        make(cls, **{name: value})
    assert allowed in str(error.value)
    recipe = make(cls)
    before, text = getattr(recipe, name), str(recipe)
    with pytest.raises(cgm.ConfigError, match=name) as error:
        setattr(recipe, name, value)
    assert allowed in str(error.value)
    assert getattr(recipe, name) == before
    assert str(recipe) == text


def test_a1_every_violation_at_once():
    with pytest.raises(cgm.ConfigError, match=r"margin.*amax_history_len.*reduce_amax"):
        cgm.DelayedScaling(margin="a", amax_history_len=-1, reduce_amax="no")


def test_a1_block_dims_can_be_swapped_in_a_valid_order():
    recipe = cgm.Float8BlockScaling()
    recipe.w_block_scaling_dim = 1
    recipe.x_block_scaling_dim = 2
    assert (recipe.x_block_scaling_dim, recipe.w_block_scaling_dim) == (2, 1)


@pytest.mark.parametrize("cls", FIELDS, ids=lambda c: c.__name__)
def test_a2_m1_each_field_changes_the_text(cls):
    seen = {str(make(cls))}
    flipped = 0
    for field in dataclasses.fields(cls):
        value = other_value(cls, field.name, getattr(make(cls), field.name))
        if value is None:
            continue
        flipped += 1
        constructed = make(cls, **{field.name: value})
        assigned = make(cls)
        setattr(assigned, field.name, value)
        assert str(constructed) == str(assigned)
        assert str(constructed) not in seen, field.name
        seen.add(str(constructed))
        setattr(assigned, field.name, getattr(make(cls), field.name))
        assert str(assigned) == str(make(cls))
    assert flipped >= 1
    assert all(f"{f.name}=" in str(make(cls)) for f in dataclasses.fields(cls))


def test_a2_unknown_attributes_are_shown_sorted_and_private_ones_are_not():
    recipe = cgm.HighPrecision()
    recipe.zeta, recipe.alpha, recipe._hidden = 1, "x", 3
    assert str(recipe).endswith("alpha='x', zeta=1)")
    assert "_hidden" not in str(recipe)
    recipe.alpha = 1
    assert str(recipe).endswith("alpha=1, zeta=1)")


def test_a2_equal_recipes_have_equal_texts_and_types_differ():
    assert str(cgm.MXFP8BlockScaling()) == str(cgm.MXFP8BlockScaling())
    assert cgm.MXFP8BlockScaling() == cgm.MXFP8BlockScaling()
    assert cgm.MXFP8BlockScaling() != cgm.MXFP8BlockScaling(margin=1)
    assert len({str(make(cls)) for cls in FIELDS}) == len(FIELDS)
    extra = cgm.HighPrecision()
    extra.note = 1
    assert extra != cgm.HighPrecision()


def test_a2_subclass_shows_its_own_fields():
    @dataclasses.dataclass
    class Mine(cgm.HighPrecision):
        strength: float = 0.5

    recipe = Mine()
    assert "strength=0.5" in str(recipe)
    recipe.strength = 0.25
    assert "strength=0.25" in str(recipe)
    assert str(recipe) != str(cgm.HighPrecision())
    assert recipe_kind(recipe) == "high_precision"


def scaled(factor):
    return lambda role: factor * 2


def module_level(role, mode="a"):
    return role


class Factory:
    def __init__(self, n):
        self.n = n

    def __call__(self, role):
        return self.n

    def method(self, role):
        return self.n


class Color(Enum):
    RED = 1


DISTINCT = [
    module_level,
    max,
    scaled(1),
    scaled(2),
    lambda role: 1,
    lambda role: 2,
    functools.partial(module_level, mode="b"),
    functools.partial(module_level, mode="c"),
    Factory(1),
    Factory(2),
    Factory(1).method,
    Factory,
    (lambda role, n=1: n),
    (lambda role, n=2: n),
]


def test_a2_m6_callables_by_name_and_captured_values():
    recipes = [cgm.CustomRecipe(qfactory=f) for f in DISTINCT]
    texts, usable = zip(*map(recipe_key, recipes), strict=True)
    exact = [text for text, good in zip(texts, usable, strict=True) if good]
    assert len(set(exact)) == len(exact) == len(DISTINCT) - 6, "lambdas and closures are refused, nothing else"
    assert all("0x" not in text for text in texts)
    assert f"{__name__}.module_level" in texts[0]
    for a, b in itertools.combinations(recipes, 2):
        assert a != b
    again = [cgm.CustomRecipe(qfactory=f) for f in DISTINCT]
    assert recipes == again
    assert str(cgm.CustomRecipe(qfactory=Factory(3))) == str(cgm.CustomRecipe(qfactory=Factory(3)))


def test_a2_what_cannot_be_told_apart_is_no_key():
    def usable(value):
        return recipe_key(cgm.CustomRecipe(qfactory=functools.partial(module_level, value)))[1]

    assert usable(1)
    assert usable([1, {"a": (2, Color.RED)}])
    assert not usable(torch.zeros(2))
    assert not usable(object())
    loop = []
    loop.append(loop)
    assert not usable(loop)


def test_a3_the_same_object_until_an_attribute_is_set_or_deleted():
    recipe = cgm.NVFP4BlockScaling()
    text = str(recipe)
    assert str(recipe) is text
    assert repr(recipe) is text
    recipe.disable_rht = True
    changed = str(recipe)
    assert changed is not text
    assert "disable_rht=True" in changed
    assert str(recipe) is changed
    recipe.extra = 1
    with_extra = str(recipe)
    del recipe.extra
    assert str(recipe) == changed != with_extra
    del recipe.disable_rht
    assert str(recipe) == text


def test_a3_m1_mutable_values_are_seen_when_they_change_in_place():
    recipe = cgm.HighPrecision()
    recipe.layers = [1, 2]
    text = str(recipe)
    assert str(recipe) is text
    recipe.layers.append(3)
    assert "[1, 2, 3]" in str(recipe)
    factory = Factory(1)
    custom = cgm.CustomRecipe(qfactory=factory)
    text = str(custom)
    factory.n = 2
    assert str(custom) != text


@pytest.mark.parametrize(
    "clone",
    [copy.copy, copy.deepcopy, lambda r: pickle.loads(pickle.dumps(r)), dataclasses.replace],
    ids=["copy", "deepcopy", "pickle", "replace"],
)
def test_a3_copies_never_carry_a_stale_text(clone):
    recipe = cgm.DelayedScaling(margin=1)
    text = str(recipe)
    twin = clone(recipe)
    assert TEXT not in vars(twin)
    assert str(twin) == text
    twin.margin = 2
    assert "margin=2" in str(twin)
    assert str(recipe) is text
    with pytest.raises(cgm.ConfigError):
        twin.margin = "x"
    vars(recipe)["margin"] = 7  # behind the recipe's back: at least a copy must not be wrong
    assert "margin=7" in str(clone(recipe))


def test_a4_disable_rht_is_in_the_text_and_read_when_asked():
    recipe = cgm.NVFP4BlockScaling()
    assert "disable_rht=False" in str(recipe)
    recipe.disable_rht = True
    assert "disable_rht=True" in str(recipe)
    # No derived copy of the setting may exist: whoever builds quantisers at the next reset reads the field itself.
    assert [name for name in vars(recipe) if "rht" in name] == ["disable_rht"]


def test_a5_foreign_recipes_have_a_text_and_a_kind():
    class MXFP8BlockScaling:
        def __init__(self):
            self.margin = 0
            self._cached_repr = "private"

    class Derived(MXFP8BlockScaling):
        pass

    recipe = Derived()
    text, usable = recipe_key(recipe)
    assert usable
    assert "margin=0" in text
    assert "private" not in text
    assert recipe_kind(recipe) == "mxfp8"
    assert class_kind(int) == "unknown"
    assert recipe_key(recipe)[0] != str(cgm.MXFP8BlockScaling())
    recipe.enable_cutedsl_fused_grouped_mlp = False
    assert "enable_cutedsl_fused_grouped_mlp=False" in recipe_key(recipe)[0]
    assert fusion_flag(recipe) is False
    assert fusion_flag(object()) is None
    recipe.enable_cutedsl_fused_grouped_mlp = "sometimes"
    with pytest.raises(cgm.ConfigError, match="None, True, False"):
        fusion_flag(recipe)


def test_a5_foreign_recipe_with_slots():
    class Slotted:
        __slots__ = ("margin",)

    recipe = Slotted()
    recipe.margin = 3
    assert "margin=3" in recipe_key(recipe)[0]


def test_b6_no_recipe_has_the_text_of_high_precision():
    assert recipe_key(None) == (NO_RECIPE, True) == (str(cgm.HighPrecision()), True)


def test_kinds_have_transformer_engines_questions():
    assert cgm.MXFP8BlockScaling().mxfp8()
    assert cgm.NVFP4BlockScaling.nvfp4()
    assert cgm.DelayedScaling().delayed()
    assert cgm.DelayedScaling().float8_per_tensor_scaling()
    assert cgm.Float8CurrentScaling().float8_current_scaling()
    assert cgm.Float8BlockScaling().float8_block_scaling()
    assert make(cgm.CustomRecipe).custom()
    assert not cgm.HighPrecision().mxfp8()
