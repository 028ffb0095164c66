"""What plans are made from: recipes read once, foreign ones too, and values that no text can tell apart."""

import copy
import dataclasses
import functools
import threading
import types

import numpy as np
import pytest
import torch
from quantized_steps import is_fused, module_of, operands, step

import cute_grouped_mlp as cgm
from cute_grouped_mlp import fusion, kernels
from cute_grouped_mlp import quantization as cgq
from cute_grouped_mlp.recipe import FLAG
from cute_grouped_mlp.reference_kernels import ReferenceKernels
from cute_grouped_mlp.snapshot import recipe_key, snapshot

DEFAULTS = {"margin": 0, "fp8_format": cgm.Format.E4M3, "enable_2d_quantization": False}


@pytest.fixture
def ref():
    with kernels.using(ReferenceKernels()) as provider:
        yield provider


# The flag, wherever it is given ---------------------------------------------------------------------------------------


def flag_on_the_class():
    recipe = type("MXFP8BlockScaling", (), {**DEFAULTS, FLAG: None})()

    def put(value):
        setattr(type(recipe), FLAG, value)

    return recipe, put


def flag_by_a_property():
    now = [None]
    recipe = type("MXFP8BlockScaling", (), {**DEFAULTS, FLAG: property(lambda self: now[0])})()

    def put(value):
        now[0] = value

    return recipe, put


def flag_by_a_proxy():
    inner = cgm.MXFP8BlockScaling()
    str(inner)  # it keeps its text, which is not the proxy's

    class MXFP8BlockScaling:
        def __getattr__(self, name):
            return getattr(inner, name)

    def put(value):
        setattr(inner, FLAG, value)

    return MXFP8BlockScaling(), put


def flag_by_a_proxy_that_says_it_is_ours():
    inner = cgm.MXFP8BlockScaling()
    str(inner)
    flag = [None]

    class MXFP8BlockScaling:
        __class__ = property(lambda self: type(inner))

        def __getattr__(self, name):
            return flag[0] if name == FLAG else getattr(inner, name)

    def put(value):
        flag[0] = value

    return MXFP8BlockScaling(), put


def flag_by_a_property_of_a_subclass():
    now = [None]

    class Mine(cgm.MXFP8BlockScaling):
        enable_cutedsl_fused_grouped_mlp = property(lambda self: now[0], lambda self, value: None)

    def put(value):
        now[0] = value

    return Mine(), put


def flag_in_a_slot():
    class HighPrecision:
        __slots__ = (FLAG,)

    recipe = HighPrecision()

    def put(value):
        setattr(recipe, FLAG, value)

    return recipe, put


def flag_of_a_deleted_field():
    recipe = cgm.MXFP8BlockScaling()
    Base = type("Base", (cgm.MXFP8BlockScaling,), {FLAG: None})
    recipe = Base()
    delattr(recipe, FLAG)

    def put(value):
        setattr(Base, FLAG, value)

    return recipe, put


SOURCES = [
    flag_on_the_class,
    flag_by_a_property,
    flag_by_a_proxy,
    flag_by_a_proxy_that_says_it_is_ours,
    flag_by_a_property_of_a_subclass,
    flag_in_a_slot,
    flag_of_a_deleted_field,
]


@pytest.mark.parametrize("source", SOURCES, ids=lambda f: f.__name__)
def test_b1_the_flag_is_read_where_it_is_and_is_in_the_key(ref, source):
    recipe, put = source()
    module, args = module_of(), operands()
    texts = set()
    for value, wanted in ((True, True), (False, False), (None, True), (False, False), (True, True)):
        put(value)
        step(module, *args, recipe=recipe)
        assert is_fused(module) is wanted, value
        texts.add(recipe_key(recipe)[0])
        assert cgm.explain(module, *args[:3], recipe=recipe).fused is wanted
    assert len(texts) == 3
    assert module.fuser.plan_cache_info().misses == 3


@pytest.mark.parametrize("source", [flag_on_the_class, flag_by_a_property, flag_by_a_proxy], ids=lambda f: f.__name__)
def test_b1_other_settings_of_a_foreign_recipe_are_read_the_same_way(ref, source):
    recipe, _ = source()
    args, results = operands(), []
    module = module_of()
    for margin in (0, 8, 0):
        if source is flag_by_a_proxy:
            vars(recipe)["margin"] = margin
        else:
            type(recipe).margin = margin
        results.append(step(module, *args, recipe=recipe))
        expected = step(module_of(), *args, recipe=cgm.MXFP8BlockScaling(margin=margin))
        assert all(torch.equal(results[-1][name].nan_to_num(), expected[name].nan_to_num()) for name in expected)
    assert not torch.equal(results[0]["y"].nan_to_num(), results[1]["y"].nan_to_num())


@pytest.mark.parametrize("foreign", [False, True])
def test_b1_a_flip_in_another_thread_while_a_plan_is_made_stores_no_plan_under_the_wrong_key(ref, foreign):
    """The plan of a text never fuses unless the text says so, whatever the recipe says by the time it is made."""
    module, args = module_of(), operands()
    recipe = types.SimpleNamespace() if foreign else cgm.HighPrecision(enable_cutedsl_fused_grouped_mlp=True)
    if foreign:
        recipe = type("HighPrecision", (), {})()
        recipe.enable_cutedsl_fused_grouped_mlp = True

    def flipping(ops, *, recipe):
        live.enable_cutedsl_fused_grouped_mlp = not live.enable_cutedsl_fused_grouped_mlp
        assert recipe is not live
        return ops

    live, before = recipe, fusion.registry.copy()
    cgm.register_forward_backward_fusion(flipping, prepend=True)
    try:
        for _ in range(4):
            text = recipe_key(recipe)[0]
            step(module, *args, recipe=recipe)
            assert is_fused(module) is ("mlp=True" in text)
            assert module.fuser.last_plan.key[0] == text
    finally:
        fusion.registry.replace(before)


def test_b1_a_flip_between_the_look_at_the_text_and_the_reading_of_the_recipe(ref, monkeypatch):
    module, args = module_of(), operands()
    recipe = cgm.HighPrecision(enable_cutedsl_fused_grouped_mlp=True)

    def flip_and_read(recipe):
        recipe.enable_cutedsl_fused_grouped_mlp = not recipe.enable_cutedsl_fused_grouped_mlp
        return snapshot(recipe)

    monkeypatch.setattr("cute_grouped_mlp.fuser.snapshot", flip_and_read)
    for _ in range(4):
        with torch.no_grad(), cgm.autocast(recipe=recipe):
            module(*args[:3])
        assert is_fused(module) is ("mlp=True" in module.fuser.last_plan.key[0])


def test_b1_threads_that_flip_and_call_get_plans_of_their_texts(ref):
    module, args = module_of(), operands()
    recipe = cgm.HighPrecision()
    stop, wrong = threading.Event(), []

    def flip():
        while not stop.is_set():
            recipe.enable_cutedsl_fused_grouped_mlp = not recipe.enable_cutedsl_fused_grouped_mlp

    thread = threading.Thread(target=flip)
    thread.start()
    try:
        for _ in range(100):
            module.fuser.plan_cache_clear()
            with torch.no_grad(), cgm.autocast(recipe=recipe):
                module(*args[:3])
            plan = module.fuser.last_plan
            if is_fused(module) != ("mlp=False" not in plan.key[0]):
                wrong.append(plan.key[0])
    finally:
        stop.set()
        thread.join()
    assert not wrong


def test_b1_a_plans_copy_of_a_recipe_does_not_change():
    recipe = cgm.HighPrecision()
    recipe.layers = [1, {"a": [2]}]
    frozen = snapshot(recipe).recipe
    assert frozen == recipe
    text = str(frozen)
    recipe.layers[1]["a"].append(3)
    assert str(frozen) == text != str(recipe)
    for change in (lambda: setattr(frozen, "margin", 1), lambda: delattr(frozen, "layers")):
        with pytest.raises(cgm.ConfigError, match="belongs to a plan"):
            change()
    thawed = copy.copy(frozen)
    thawed.margin = 1
    assert "margin=1" in str(thawed)
    assert snapshot(frozen).recipe is frozen


def test_b3_an_operations_own_recipe_has_a_say_in_its_fusion(ref):
    off = cgm.MXFP8BlockScaling(enable_cutedsl_fused_grouped_mlp=False)
    for own, wanted in (((off, off), False), ((off, None), False), ((None, off), False), ((None, None), True)):
        module, args = module_of(), operands()
        module.fc1.recipe, module.fc2.recipe = own
        step(module, *args, recipe=cgm.MXFP8BlockScaling())
        assert is_fused(module) is wanted, own
        if not wanted:
            report = str(cgm.explain(module, *args[:3], recipe=cgm.MXFP8BlockScaling()))
            for name, mine in zip(("FC1", "FC2"), own, strict=True):
                assert (f"{name}'s recipe.{FLAG} is False" in report) is (mine is not None)
    module.fc1.recipe = module.fc2.recipe = mine = cgm.MXFP8BlockScaling()
    for flag, wanted in ((None, True), (False, False), (True, True)):  # in place: no setter of the operation sees it
        mine.enable_cutedsl_fused_grouped_mlp = flag
        step(module, *args)
        assert is_fused(module) is wanted
    module.activation.recipe = cgm.HighPrecision(enable_cutedsl_fused_grouped_mlp=False)
    step(module, *args)
    assert not is_fused(module)


def test_b3_own_recipes_of_an_operation_that_demand_fusion_warn(ref):
    module, args = module_of(dtype=torch.float32), operands(dtype=torch.float32)
    module.fc1.recipe = module.fc2.recipe = cgm.MXFP8BlockScaling(enable_cutedsl_fused_grouped_mlp=True)
    with pytest.warns(cgm.FusionFallbackWarning, match="the type is torch.float32"):
        step(module, *args)


def test_b3_an_own_recipe_changed_in_place_is_seen(ref):
    module, args = module_of(), operands()
    mine = cgm.MXFP8BlockScaling()
    for layer in (module.fc1, module.fc2):
        layer.recipe = mine
    for margin in (0, 8):
        mine.margin = margin
        got = step(module, *args)
        expected = step(module_of(), *args, recipe=cgm.MXFP8BlockScaling(margin=margin))
        assert all(torch.equal(got[name].nan_to_num(), expected[name].nan_to_num()) for name in expected)


# Values that no text tells apart --------------------------------------------------------------------------------------


def class_of(factor):
    class Made:
        def __init__(self):
            self.n = 1

        def __call__(self, role):
            return factor

    return Made


class WithRepr:
    def __init__(self, n):
        self.n = n

    def __repr__(self):
        return "WithRepr"

    def __call__(self, role):
        return None


def plain(role):
    return None


def with_attribute(role):
    return with_attribute.n


with_attribute.n = 1


class OwnPickling:
    def __init__(self, n):
        self.n = n

    def __reduce__(self):
        return OwnPickling, (0,)


def with_value(value):
    recipe = cgm.HighPrecision()
    recipe.note = value
    return recipe


@pytest.mark.parametrize(
    "value",
    [
        np.arange(2000),
        np.float64(1.5),
        torch.ones(2),
        object(),
        lambda x: x,
        lambda *x: x,
        with_attribute,
        functools.wraps(plain)(lambda role: 1),
        [lambda: 1],
        {"a": (object(),)},
        OwnPickling(1),
        types.SimpleNamespace(f=lambda: 1),
        iter([]),
        [].append,
    ],
    ids=lambda v: type(v).__name__,
)
def test_a2_what_cannot_be_described_exactly_is_refused(value):
    text, refusals = snapshot(with_value(value))[1:]
    assert refusals
    assert "0x" not in text
    assert not recipe_key(with_value(value))[1]


def test_a2_equal_texts_mean_equal_things():
    pairs = [
        (WithRepr(1), WithRepr(2)),
        (class_of(1)(), class_of(2)()),
        (class_of(1), class_of(2)),
        (1, True),
        (1, 1.0),
        ("1", 1),
        ((1,), [1]),
        (np.float32, np.float64),
    ]
    for a, b in pairs:
        first, second = snapshot(with_value(a)), snapshot(with_value(b))
        assert first.text != second.text, (a, b)
        assert not first.refusals
        assert with_value(a) != with_value(b)
        assert with_value(a) == with_value(a)
    big, bigger = np.arange(2000), np.arange(2000)
    bigger[1000] = -1
    assert repr(big) == repr(bigger)
    assert with_value(big) != with_value(bigger)
    assert with_value(big) == with_value(big)


def test_a2_a_name_that_leads_to_another_function_now_has_another_text(monkeypatch):
    module = types.ModuleType("notebook")
    monkeypatch.setitem(__import__("sys").modules, "notebook", module)
    texts = []
    for source in ("def f(role): return 1", "def f(role): return 2", "def f(role): return 3"):
        exec(source, module.__dict__)
        texts.append(recipe_key(cgm.CustomRecipe(qfactory=module.f)))
    assert len(set(texts)) == 3
    assert all(usable for _, usable in texts)
    assert not recipe_key(cgm.CustomRecipe(qfactory=types.FunctionType(module.f.__code__, module.__dict__)))[1]


def test_a2_class_attributes_of_a_subclass_are_in_the_text(ref):
    class Mine(cgm.MXFP8BlockScaling):
        strength = 1

    recipe = Mine()
    text = str(recipe)
    assert "strength=1" in text
    Mine.strength = 2
    assert "strength=2" in str(recipe)
    first, second = (type("Mine", (cgm.MXFP8BlockScaling,), {"strength": 1}) for _ in range(2))
    assert str(first()) != str(second())


# Foreign recipes ------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class QParams:
    """As Transformer Engine has it."""

    power_2_scale: bool = False
    amax_epsilon: float = 0.0
    random_hadamard_transform: bool = False
    stochastic_rounding: bool = False
    fp4_2d_quantization: bool = False


def foreign(ours, **more):
    fields = {f.name: getattr(ours, f.name) for f in dataclasses.fields(ours)}
    recipe = type(type(ours).__name__, (), {"__module__": "elsewhere"})()
    vars(recipe).update({**fields, **more})
    return recipe


CURRENT, BLOCK, NVFP4 = cgm.Float8CurrentScaling(), cgm.Float8BlockScaling(), cgm.NVFP4BlockScaling()
REFUSED = [
    (CURRENT, {"fp8_quant_fwd_inp": QParams(power_2_scale=True)}, "fp8_quant_fwd_inp.power_2_scale is True"),
    (CURRENT, {"fp8_quant_bwd_grad": QParams(amax_epsilon=1e-3)}, "fp8_quant_bwd_grad.amax_epsilon is 0.001"),
    (BLOCK, {"fp8_quant_fwd_weight": QParams(power_2_scale=False)}, "fp8_quant_fwd_weight.power_2_scale is False"),
    (NVFP4, {"fp4_quant_bwd_grad": QParams(True, stochastic_rounding=False)}, "fp4_quant_bwd_grad"),
    (NVFP4, {"fp4_quant_fwd_weight": QParams(fp4_2d_quantization=False)}, "fp4_2d_quantization is False"),
    (NVFP4, {"nvfp4_4over6": "all"}, "nvfp4_4over6 is 'all'"),
    (cgm.DelayedScaling(), {"override_linear_precision": (False, True, False)}, "override_linear_precision"),
    (cgm.MXFP8BlockScaling(), {"margin": 0.5}, "margin is 0.5; allowed: an integer"),
]


@pytest.mark.parametrize(("ours", "more", "named"), REFUSED, ids=lambda v: v if isinstance(v, str) else "")
def test_a5_settings_of_a_foreign_recipe_that_would_be_ignored_are_refused_by_name(path, ours, more, named):
    module, args = module_of(), operands()
    with pytest.raises(cgm.UnsupportedError, match=r"quantising under elsewhere\.") as error:
        step(module, *args, recipe=foreign(ours, **more))
    assert named in str(error.value)
    assert named in str(cgm.explain(module, *args[:3], recipe=foreign(ours, **more)))


def test_a5_a_declared_setting_that_nobody_here_knows_is_refused_unless_it_is_the_default(path):
    module, args = module_of(), operands()
    fields = [(f.name, f.type, f) for f in dataclasses.fields(cgm.MXFP8BlockScaling())]
    fields.append(("block_size", int, dataclasses.field(default=32, kw_only=True)))
    Newer = dataclasses.make_dataclass("MXFP8BlockScaling", fields)
    step(module, *args, recipe=Newer())
    with pytest.raises(cgm.UnsupportedError, match="block_size is 64"):
        step(module, *args, recipe=Newer(block_size=64))


def test_a5_what_agrees_with_the_other_fields_is_honoured(path):
    rht = QParams(random_hadamard_transform=True)
    same = [
        (CURRENT, dict.fromkeys(("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad"), QParams())),
        (BLOCK, {"fp8_quant_fwd_inp": QParams(power_2_scale=True), "fp8_dpa": False}),
        (
            cgm.NVFP4BlockScaling(disable_stochastic_rounding=True),
            {
                "fp4_quant_fwd_inp": rht,
                "fp4_quant_bwd_grad": rht,
                "fp4_quant_fwd_weight": QParams(fp4_2d_quantization=True),
                "nvfp4_4over6": "none",
                "nvfp4_4over6_err_mode": "MAE",
            },
        ),
    ]
    for ours, more in same:
        got = step(module_of(), *operands(), recipe=foreign(ours, **more))
        expected = step(module_of(), *operands(), recipe=ours)
        assert all(torch.equal(got[name].nan_to_num(), expected[name].nan_to_num()) for name in expected)


def test_a5_a_factory_is_asked_with_a_role():
    asked = []

    def factory(role):
        asked.append((role.module_type, role.tensor_type, role.name, role == role.tensor_type))
        return cgq.MXFP8Quantizer()

    for recipe in (cgm.CustomRecipe(qfactory=factory), foreign(cgm.CustomRecipe(qfactory=factory))):
        asked.clear()
        step(module_of(), *operands(), recipe=recipe)
        tensors = ("input", "weight", "grad_output")
        wanted = {("grouped_linear", tensor, name, True) for tensor in tensors for name in ("fc1", "fc2")}
        assert set(asked) == wanted


@pytest.mark.parametrize("path_of", ["torch", "reference"])
def test_c1_predicate_and_plan_never_differ(path_of):
    """For each recipe, type and provider of kernels: fused on native kernels if and only if the predicate says so."""
    recipes = [None, cgm.HighPrecision(), CURRENT, cgm.DelayedScaling(), BLOCK, NVFP4, cgm.MXFP8BlockScaling(),
               cgm.NVFP4BlockScaling(disable_rht=True), foreign(cgm.HighPrecision())]  # fmt: skip
    asked = cgm.support.fuser_grouped_tensor_supported
    provider = ReferenceKernels() if path_of == "reference" else kernels.provider()
    with kernels.using(provider):
        seen = set()
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            for recipe in recipes:
                module, args = module_of(dtype=dtype), operands(dtype=dtype)
                report = cgm.explain(module, *args[:3], recipe=recipe)
                steps = [k for p in report.pipelines for k in p.kernels if k.step.spec is not None]
                native = report.fused and all(k.native for k in steps)
                answer = asked(recipe, dtype, device=args[0].device)
                assert native == bool(answer), (recipe, dtype, str(answer), str(report))
                if not report.fused and recipe in (None, cgm.HighPrecision()):
                    assert set(answer.reasons) <= set(report.reasons)
                seen.add(native)
    assert seen == ({True, False} if path_of == "reference" else {False})


def test_c1_a_plan_asks_the_predicate_once_for_a_key(ref):
    asked = cgm.support.fuser_grouped_tensor_supported
    asked.cache_clear()
    module, args = module_of(), operands()
    for margin in (0, 1, 2):
        step(module, *args, recipe=cgm.MXFP8BlockScaling(margin=margin))
    info = asked.cache_info()
    assert (info.misses, info.hits) == (1, 2)  # for each of three plans; FC1 says no


# Faults that a reviewer found -----------------------------------------------------------------------------------------


def test_b1_dictionaries_that_differ_in_their_order_have_different_texts():
    """Code that takes the first match sees the order."""
    a, b = cgm.MXFP8BlockScaling(), cgm.MXFP8BlockScaling()
    a.layers, b.layers = {"fc1": 1, "fc": 2}, {"fc": 2, "fc1": 1}
    assert str(a) != str(b)


@dataclasses.dataclass
class WithFactory:
    margin: int = 0
    fp8_format: cgm.Format = cgm.Format.E4M3
    clip: list = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class WithRequired:
    clip: float
    margin: int = 0
    fp8_format: cgm.Format = cgm.Format.E4M3


@dataclasses.dataclass
class WithDefault:
    margin: int = 0
    fp8_format: cgm.Format = cgm.Format.E4M3
    clip: float = 0.0


class Proxy:
    def __init__(self, inner):
        self._inner = inner

    def __getattr__(self, name):
        return getattr(self._inner, name)


def named(cls):
    return type("MXFP8BlockScaling", (cls,), {})


@pytest.mark.parametrize(
    "recipe",
    [
        named(WithFactory)(clip=[1.0]),
        named(WithRequired)(0.0),
        named(WithDefault)(clip=1.0),
        named(Proxy)(named(WithDefault)(clip=1.0)),
    ],
    ids=["default factory", "no default", "default", "proxy"],
)
def test_a5_an_unknown_setting_of_a_foreign_recipe_is_refused_however_it_is_declared(recipe):
    with pytest.raises(cgm.UnsupportedError, match=r"clip is .* not implemented"):
        step(module_of(), *operands(), recipe=recipe)


@pytest.mark.parametrize("recipe", [named(WithFactory)(), named(WithDefault)(), named(Proxy)(named(WithDefault)())])
def test_a5_an_unknown_setting_at_its_default_is_not_refused(recipe):
    got, expected = (step(module_of(), *operands(), recipe=r) for r in (recipe, cgm.MXFP8BlockScaling()))
    assert all(torch.equal(got[name].nan_to_num(), expected[name].nan_to_num()) for name in expected)


class Validated:
    """A data descriptor that is no property, as those of validation libraries."""

    def __set_name__(self, owner, name):
        self.name = name

    def __get__(self, instance, owner):
        return self if instance is None else vars(instance).get(self.name, 0)

    def __set__(self, instance, value):
        vars(instance)[self.name] = value


@pytest.mark.parametrize("kind", ["descriptor", "slot"])
def test_b1_a_setting_in_a_descriptor_or_slot_of_a_subclass_is_read_and_stays_as_it_was(kind):
    members = {"margin": Validated()} if kind == "descriptor" else {"__slots__": ("layers",)}
    name = "margin" if kind == "descriptor" else "layers"
    recipe = type("Mine", (cgm.MXFP8BlockScaling,), members)()
    member = vars(type(recipe))[name]
    member.__set__(recipe, 1)
    first = snapshot(recipe)
    assert str(recipe) == first.text
    member.__set__(recipe, 2)  # behind __setattr__
    second = snapshot(recipe)
    assert (getattr(first.recipe, name), getattr(second.recipe, name)) == (1, 2)
    assert first.text != second.text == str(recipe)
