"""A plan that is one operation: what it does without contexts and routing is what it does with them."""

import contextlib
import itertools

import pytest
import torch

import cute_grouped_mlp as cgm
from cute_grouped_mlp import kernels
from cute_grouped_mlp.context import StalePlan
from cute_grouped_mlp.pipeline import make_contexts
from cute_grouped_mlp.step import NEED_B1, NEED_B2, NEED_PROBS, NEED_SCALE, NEED_W1, NEED_W2, NEED_X

G, H, F, T = 4, 16, 32, 40


pytestmark = pytest.mark.usefixtures("ref")


@pytest.fixture
def launched(ref, monkeypatch):
    """Every tensor that a kernel was given, except status words."""
    tensors = []
    get = ref.get

    def watched(spec):
        launch = get(spec)

        def run(*arguments):
            tensors.extend(t for t in arguments if isinstance(t, torch.Tensor) and t.numel() > 1)
            launch(*arguments)

        return run

    monkeypatch.setattr(ref, "get", watched)
    return tensors


def module_of(**options):
    return cgm.GroupedMLP(G, H, F, dtype=torch.bfloat16, **options)


def inputs_of(probs=True):
    torch.manual_seed(0)
    x = torch.randn(T, H, dtype=torch.bfloat16)
    return x, torch.tensor([9, 0, 20, 11], dtype=torch.int32), torch.rand(T) if probs else None


@pytest.mark.parametrize("weights", ["packed", "list"])
@pytest.mark.parametrize("bias", [None, "plain", "scaled"])
def test_gradients_wanted_are_those_that_contexts_say(bias, weights):
    module = module_of(bias=bias is not None, scale_bias=bias == "scaled", single_grouped_weight=weights == "packed")
    x, sizes, probs = inputs_of()
    module(x, sizes, probs)
    op = module.fuser.last_plan.direct
    fc1, fc2 = module[0], module[2]
    parts = [x, probs, fc1.weights()[-1], fc2.weights()[0], *([] if bias is None else [fc1.bias, fc2.bias])]
    for flags in itertools.product((False, True), repeat=len(parts)):
        for part, flag in zip(parts, flags, strict=True):
            part.requires_grad_(flag)
        for weight in (*fc1.weights()[:-1], *fc2.weights()[1:]):
            weight.requires_grad_(False)
        extra = module.pipeline_inputs(x, sizes, probs)
        scale = extra[3] if bias == "scaled" else None
        boundary = module.fuser.boundary(x.requires_grad, extra)
        expected = op.needs(make_contexts(3, boundary, x.requires_grad), probs, scale)
        tensors = (x, *module.fuser.parameters(), *extra)
        assert op._needs_of(tuple(t is not None and t.requires_grad for t in tensors)) == expected, flags
        bits = (NEED_X, NEED_PROBS, NEED_W1, NEED_W2, NEED_B1, NEED_B2)[: len(parts)]
        wanted = sum(bit for bit, flag in zip(bits, flags, strict=True) if flag)
        assert expected == wanted + (NEED_SCALE if scale is not None and probs.requires_grad else 0), flags
    assert op._needs_of(()) == 0


@pytest.mark.parametrize("probs", [True, False])
def test_direct_calls_equal_calls_with_keyword_arguments(probs):
    """An empty dict for the layers' keyword arguments takes the long way."""
    module = module_of(bias=True)
    x, sizes, p = inputs_of(probs)
    x.requires_grad_()
    inputs = [x, *([p.requires_grad_()] if probs else []), *module.parameters()]
    buffer = torch.empty_like(x)
    results = []
    for kwargs in (None, {2: {"output": buffer}}):
        y = module(x, sizes, p, op_kwargs=kwargs)
        results.append((y.detach().clone(), *torch.autograd.grad(y, inputs, torch.ones_like(y))))
    for direct, long in zip(*results, strict=True):
        assert torch.equal(direct, long)


class Labelled(torch.Tensor):
    """A tensor of another type."""


@pytest.mark.parametrize("kind", [torch.Tensor, Labelled])
def test_tensors_left_over_from_a_transform(launched, kind):
    """torch's own ``apply`` unwraps tensors whose torch.func transform has ended; so does ours."""
    module = module_of()
    x, sizes, probs = inputs_of()
    sizes = sizes.as_subclass(kind)
    left = []

    def keep(x, probs):
        left.extend((x * 1, probs * 1))
        return x.float().sum() + probs.sum()

    torch.func.grad(keep, argnums=(0, 1))(x, probs)
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor
    assert all(map(wrapped, left)), "the test's tensors are no longer what it is about"
    y = module(left[0], sizes, left[1])
    assert not wrapped(y)
    assert launched
    assert not any(map(wrapped, launched))
    assert torch.equal(y, module(x, sizes, probs))
    y.backward(torch.ones_like(y))
    assert torch.isfinite(module[0].weight.grad).all()
    launched.clear()
    with torch.no_grad():
        assert torch.equal(y, module(left[0], sizes, left[1]))
    assert launched
    assert not any(map(wrapped, launched))


def test_inside_a_transform_torch_says_what_is_missing():
    module = module_of()
    x, sizes, probs = inputs_of()
    with pytest.raises(RuntimeError, match="setup_context"):
        torch.func.grad(lambda x: module(x, sizes, probs).float().sum())(x)


def test_a_stale_plan_is_made_again_and_the_call_runs_once():
    """Somebody assigned to ``data`` of the weights: the operation notices before it launches anything."""
    module = module_of()
    x, sizes, probs = inputs_of()
    module(x, sizes, probs)
    planned = module.fuser.plan_cache_info().misses
    for weight in module.parameters():
        weight.data = weight.data.half()
    y = module(x.half(), sizes, probs)
    assert y.dtype is torch.float16
    assert module.fuser.plan_cache_info().misses == planned + 1


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", ["strided", "shifted"])
def test_weights_that_became_unreadable_under_a_plan(launched, kind, bias):
    """Other data of the same type and shape: no kernel gets what it cannot read; strided weights are planned anew."""
    module = module_of(bias=bias)
    args = inputs_of()
    before = module(*args)
    planned = module.fuser.plan_cache_info().misses
    for weight in (module[0].weight, module[2].weight):
        if kind == "strided":
            weight.data = weight.data.mT.contiguous().mT
        else:
            weight.data = torch.cat((torch.zeros(1), weight.data.flatten())).to(weight.dtype)[1:].view(weight.shape)
        assert weight.data_ptr() % 16 or not weight.is_contiguous()
        launched.clear()
        y = module(*args)
        torch.autograd.grad(y, (module[0].weight, module[2].weight), torch.ones_like(y))
        assert torch.equal(y, before)
        assert launched
        assert not any(t.data_ptr() % 16 or not t.is_contiguous() for t in launched)
    assert module.fuser.plan_cache_info().misses == planned + (2 if kind == "strided" else 0)


def test_b8_contiguity_of_weights_is_part_of_what_plans_depend_on():
    """By assignment to data or to the parameter, back and forth: the plan is that of the weights as they are."""
    module, args = module_of(), inputs_of()
    expected = module(*args)

    def fused():
        y = module(*args)
        assert torch.equal(y, expected)
        return len(module.fuser.last_plan.forward_ops) == 1

    assert fused()
    weight = module[0].weight
    packed, strided = weight.detach().clone(), weight.detach().mT.contiguous().mT
    for data, wanted in ((strided, False), (packed, True), (strided, False), (packed, True)):
        weight.data = data
        assert fused() is wanted
    for data, wanted in ((strided, False), (packed, True)):
        module[0].weight = torch.nn.Parameter(data)
        assert fused() is wanted


def test_a_plan_that_never_fits_is_an_error(monkeypatch):
    module = module_of()
    runs = []

    def refuse(*arguments):
        runs.append(arguments)
        raise StalePlan("never fits")

    monkeypatch.setattr(cgm.FusedGroupedMLP, "direct_forward", refuse)
    with pytest.raises(StalePlan, match="never fits"):
        module(*inputs_of())
    assert len(runs) == 2


@pytest.mark.parametrize("weights", ["packed", "list"])
def test_a_weight_that_is_no_parameter_any_more(weights):
    module = module_of(single_grouped_weight=weights == "packed")
    name = "weight" if weights == "packed" else "weight2"
    torch.nn.utils.parametrize.register_parametrization(module[0], name, torch.nn.Identity())
    x, sizes, probs = inputs_of()
    with pytest.raises(cgm.ConfigError, match=f"no parameter '{name}'.*parametrize"):
        module(x, sizes, probs)


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("kernels_run", [True, False])
def test_arguments_that_are_no_tensors(ref, monkeypatch, kernels_run, grad):
    if not kernels_run:
        monkeypatch.setattr(type(ref), "unsupported", lambda self, device: ("none here",))
    module = module_of()
    x, sizes, probs = inputs_of()
    x.requires_grad_(grad)
    with torch.set_grad_enabled(grad):
        with pytest.raises(TypeError, match="the input is list; allowed: a tensor"):
            module([1.0], sizes, probs)
        with pytest.raises(
            cgm.ShapeError, match=r"split_sizes is list, allowed: an int32 or int64 tensor of shape \(4,\)"
        ):
            module(x, sizes.tolist(), probs)
        with pytest.raises(cgm.ShapeError, match="probs is float, allowed: a floating-point tensor"):
            module(x, sizes, 0.5)
        with pytest.raises(TypeError, match="is_first_microbatch is 'yes'; allowed: True, False, None"):
            module(x, sizes, probs, is_first_microbatch="yes")


@pytest.mark.parametrize("kernels_run", [True, False])
def test_keywords_and_buffers_that_operations_refuse(ref, monkeypatch, kernels_run):
    if not kernels_run:
        monkeypatch.setattr(type(ref), "unsupported", lambda self, device: ("none here",))
    module = module_of()
    x, sizes, probs = inputs_of()
    with pytest.raises(TypeError, match="ScaledActivation takes no keywords, got gain, limit"):
        module(x, sizes, probs, op_kwargs={1: {"limit": 1, "gain": 2}})
    (problem,) = cgm.explain(module, x, sizes, probs, op_kwargs={1: {"limit": 1, "gain": 2}}).problems
    assert problem == "the call would raise TypeError: ScaledActivation takes no keywords, got gain, limit"
    with pytest.raises(cgm.ShapeError, match=r"output is int, allowed: a tensor of shape \(40, 16\)"):
        module(x, sizes, probs, op_kwargs={2: {"output": 3}})


@pytest.mark.parametrize("recipe", [None, cgm.MXFP8BlockScaling()], ids=["none", "mxfp8"])
def test_each_pass_makes_its_device_current_by_itself(monkeypatch, recipe):
    """A context that threads share would give one of them another's device back (torch.cuda.device keeps it inside)."""
    made = []

    class Guard(contextlib.AbstractContextManager):
        def __init__(self, device):
            self.entered = 0
            made.append(self)

        def __enter__(self):
            self.entered += 1

        def __exit__(self, *error):
            pass

    monkeypatch.setattr(kernels, "device_guard", Guard)
    monkeypatch.setattr(kernels, "needs_guard", lambda device: True)
    module = cgm.GroupedMLP(G, 32, F, dtype=torch.bfloat16)
    for _ in range(2):
        with cgm.autocast(recipe=recipe):
            module(torch.randn(T, 32, dtype=torch.bfloat16), inputs_of()[1]).sum().backward()
    assert len(made) >= 4
    assert {guard.entered for guard in made} == {1}


def test_forward_of_a_class_between_is_called():
    called = []

    class Logged(cgm.Sequential):
        def forward(self, *inputs, **options):
            called.append(len(inputs))
            return super().forward(*inputs, **options)

    class Module(cgm.GroupedMLP, Logged): ...

    plain, between, args = module_of(), Module(G, H, F, dtype=torch.bfloat16), inputs_of()
    between.load_state_dict(plain.state_dict())
    assert torch.equal(between(*args), plain(*args))
    assert called == [4]


@pytest.mark.parametrize("fused", [True, False])
def test_a_float64_scale_gets_a_float64_gradient(launched, fused):
    module = module_of(bias=True, scale_bias=True)
    x, sizes, probs = inputs_of()
    found = []
    for dtype in (torch.float32, torch.float64):
        rows = probs.detach().to(dtype).requires_grad_()
        with cgm.settings.override(fuse=fused):
            y = module(x, sizes, rows)
            (grad,) = torch.autograd.grad(y, rows, torch.ones_like(y))
            assert cgm.explain(module, x, sizes, rows).problems == ()
        assert grad.dtype is dtype
        found.append((y, grad.double()))
    assert launched
    assert not any(t.dtype is torch.float64 for t in launched)
    for single, double in zip(*found, strict=True):
        torch.testing.assert_close(double, single, rtol=1e-2, atol=1e-2)
