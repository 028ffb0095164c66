"""The support predicates and their cache (acceptance.md, section C)."""

import itertools

import pytest
import torch

import cute_grouped_mlp as cgm
from cute_grouped_mlp import support

MODULE, FUSER = support.module_grouped_tensor_supported, support.fuser_grouped_tensor_supported
PREDICATES = [MODULE, FUSER]
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def cleared():
    for predicate in PREDICATES:
        predicate.cache_clear()
    yield
    for predicate in PREDICATES:
        predicate.cache_clear()


@pytest.fixture
def devices(monkeypatch):
    """Two CUDA devices of different generations, and the current one; calls are counted."""
    state = {"capabilities": {0: (9, 0), 1: (10, 0)}, "current": 0, "asked": 0}

    def capability(device=None):
        state["asked"] += 1
        return state["capabilities"][torch.device(device).index]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: state["current"])
    monkeypatch.setattr(torch.cuda, "get_device_capability", capability)
    return state


RECIPES = [
    None,
    cgm.HighPrecision(),
    cgm.DelayedScaling(),
    cgm.Float8CurrentScaling(),
    cgm.Float8BlockScaling(),
    cgm.MXFP8BlockScaling(),
    cgm.NVFP4BlockScaling(),
    cgm.CustomRecipe(qfactory=max),
]
NATIVE_ON_SM90 = {(name, dtype) for name in ("NoneType", "HighPrecision") for dtype in (BF16, torch.float16)}


@pytest.mark.parametrize("predicate", PREDICATES, ids=lambda p: p.__name__)
def test_c1_table(devices, predicate):
    for recipe, dtype, index in itertools.product(RECIPES, (BF16, torch.float16, torch.float32), (0, 1)):
        answer = predicate(recipe, dtype, device=torch.device("cuda", index))
        expected = index == 0 and (type(recipe).__name__, dtype) in NATIVE_ON_SM90
        assert bool(answer) is expected, (recipe, dtype, index, str(answer))
        assert answer == predicate.uncached(recipe, dtype, device=torch.device("cuda", index))
        assert bool(answer.reasons) is not expected
    for capability in ((7, 5), (8, 0), (8, 9), (12, 0)):
        devices["capabilities"][0] = capability
        answer = predicate.uncached(None, BF16, device=torch.device("cuda", 0))
        assert not answer
        assert f"{capability[0]}.{capability[1]}" in str(answer)
    assert "CUDA" in str(predicate(None, BF16, device="cpu"))


def test_c1_settings_that_are_read_are_misses_and_others_are_hits(devices):
    device = torch.device("cuda", 0)

    def misses(predicate, recipe, **options):
        before = predicate.cache_info().misses
        predicate(recipe, BF16, device=device, **options)
        return predicate.cache_info().misses - before

    for predicate in PREDICATES:
        recipe = cgm.NVFP4BlockScaling()
        assert misses(predicate, recipe) == 1
        assert misses(predicate, recipe) == 0
        recipe.disable_stochastic_rounding = True
        recipe.enable_cutedsl_fused_grouped_mlp = False
        recipe.note = 3
        assert misses(predicate, recipe) == 0
        recipe.disable_rht = True
        assert misses(predicate, recipe) == 1
        recipe.row_scaled_activation = True
        assert misses(predicate, recipe) == 1
        assert misses(predicate, recipe, split_alignment=128) == 1
        recipe.backward_override = "dequantized"
        assert misses(predicate, recipe) == (1 if predicate is MODULE else 0)
        assert misses(predicate, cgm.MXFP8BlockScaling()) == 1
        assert misses(predicate, cgm.MXFP8BlockScaling(margin=3)) == 0
        with cgm.settings.override(fuse=False):
            assert misses(predicate, recipe) == 0
        with cgm.settings.override(sm100="unverified"):
            assert misses(predicate, recipe) == 1


def test_c1_reasons(devices):
    device = torch.device("cuda", 0)
    recipe = cgm.NVFP4BlockScaling(disable_rht=True, row_scaled_activation=True, backward_override="high_precision")
    module, fuser = (str(predicate(recipe, torch.float32, device=device)) for predicate in PREDICATES)
    for text in ("disable_rht=True", "row_scaled_activation=True", "torch.float32"):
        assert text in module
        assert text in fuser
    assert "backward_override='high_precision'" in module
    assert "backward_override" not in fuser


def test_c1_results_never_cross_devices(devices):
    for predicate in PREDICATES:
        assert predicate(None, BF16, device=torch.device("cuda", 0))
        assert not predicate(None, BF16, device=torch.device("cuda", 1))
        assert predicate(None, BF16, device=torch.device("cuda", 0))
        assert predicate.cache_info()[:2] == (1, 2)


def test_c2_without_a_device_the_current_one_is_asked_on_each_call(devices):
    for predicate in PREDICATES:
        devices["current"] = 0
        assert predicate(None, BF16)
        devices["current"] = 1
        assert not predicate(None, BF16)
        devices["current"] = 0
        assert predicate(None, BF16)
        assert predicate(None, BF16, device="cuda")
        assert predicate(None, BF16, device="cuda:0")
        assert predicate(None, BF16, device=0)
        assert predicate.cache_info().misses == 2


def test_c4_a_hit_asks_the_device_nothing(devices):
    device = torch.device("cuda", 0)
    recipe = cgm.MXFP8BlockScaling()
    for predicate in PREDICATES:
        predicate(recipe, BF16, device=device)
        devices["asked"] = 0
        for _ in range(10):
            predicate(recipe, BF16, device=device)
        assert devices["asked"] == 0
        predicate.uncached(recipe, BF16, device=device)
        assert devices["asked"] == 1


def test_a5_foreign_recipes(devices):
    class NVFP4BlockScaling:
        disable_rht = False
        row_scaled_activation = False
        backward_override = None

    recipe = NVFP4BlockScaling()
    device = torch.device("cuda", 0)
    for predicate in PREDICATES:
        assert not predicate(recipe, BF16, device=device)
        recipe.disable_rht = True
        assert "disable_rht=True" in str(predicate(recipe, BF16, device=device))
        recipe.disable_rht = False


def test_a5_a_foreign_recipe_may_lack_what_came_later_and_nothing_else(devices):
    class NVFP4BlockScaling:
        disable_rht = disable_stochastic_rounding = disable_2d_quantization = False

    class MXFP8BlockScaling:
        margin, fp8_format = 0, cgm.Format.E4M3

    device = torch.device("cuda", 0)
    for predicate, cls in itertools.product(PREDICATES, (NVFP4BlockScaling, MXFP8BlockScaling)):
        for ask in (predicate, predicate.uncached):
            assert "grouped path" not in str(ask(cls(), BF16, device=device))
    del NVFP4BlockScaling.disable_rht, NVFP4BlockScaling.disable_2d_quantization
    for predicate in PREDICATES:
        for ask in (predicate, predicate.uncached):
            with pytest.raises(cgm.UnsupportedError, match=r"NVFP4BlockScaling.*disable_rht, disable_2d_quantization"):
                ask(NVFP4BlockScaling(), BF16, device=device)


def test_wrong_alignment():
    with pytest.raises(cgm.ConfigError, match="split_alignment is 0"):
        FUSER(None, BF16, split_alignment=0)


def test_predicates_are_documented():
    for predicate in PREDICATES:
        assert "natively" in predicate.__doc__
        assert predicate.__name__.endswith("_grouped_tensor_supported")
