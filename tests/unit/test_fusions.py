"""Fusions, why they are not used, and life of plans and graphs (acceptance.md, section D)."""

import contextlib
import copy
import gc
import logging
import warnings
import weakref

import pytest
import torch
from pipelines import FUSED, F, G, H, Scale, T, inputs, make, run

import cute_grouped_mlp as cgm
from cute_grouped_mlp import fusion


@pytest.fixture
def registry():
    """Put registered fusions back."""
    before = fusion.registry.copy()
    yield fusion.registry
    fusion.registry.replace(before)


class ForwardPair(cgm.FusedOperation):
    """Two scales in one multiplication, saving what their own backwards expect."""

    def fuser_forward(self, basic_op_ctxs, input_, **unused):
        first, second = (op.factor for op in self.basic_ops)
        if basic_op_ctxs[1].requires_grad:
            basic_op_ctxs[0].save_for_backward(input_, first)
            basic_op_ctxs[1].save_for_backward(input_ * first, second)
        return input_ * (first * second), [(), ()]


class BackwardPair(cgm.FusedOperation):
    def fuser_backward(self, basic_op_ctxs, grad_output, **unused):
        (x, first), (x2, second) = (ctx.saved_tensors for ctx in basic_op_ctxs)
        grad = grad_output * second
        return grad * first, [((grad * x).sum(),), ((grad_output * x2).sum(),)], [(), ()]


class JointPair(cgm.FusedOperation):
    def fuser_forward(self, basic_op_ctxs, input_, **unused):
        basic_op_ctxs[0].save_for_backward(input_, *(op.factor for op in self.basic_ops))
        return input_ * (self.basic_ops[0].factor * self.basic_ops[1].factor), [(), ()]

    def fuser_backward(self, basic_op_ctxs, grad_output, **unused):
        x, first, second = basic_op_ctxs[0].saved_tensors
        total = (grad_output * x).sum()
        return grad_output * first * second, [(total * second,), (total * first,)], [(), ()]


def pairs(cls, calls=None):
    def fuse(ops, *, recipe):
        if calls is not None:
            calls.append((cls.__name__, [type(op).__name__ for op in ops]))
        return fusion.sweep(
            ops, 2, lambda run: cgm.Match(cls(run)) if all(isinstance(op, Scale) for op in run) else None
        ).ops

    return fuse


def scale_step(module):
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    y = module(x)
    y.sum().backward()
    return y.tolist(), x.grad.tolist(), [p.grad.item() for p in module.parameters()]


EXPECTED = ([30.0, 60.0], [30.0, 30.0], [45.0, 30.0, 18.0])


def test_d3_a_custom_operation():
    module = cgm.Sequential(Scale(2), Scale(3), Scale(5))
    assert scale_step(module) == EXPECTED


@pytest.mark.parametrize(
    ("register", "cls", "where"),
    [
        (cgm.register_forward_fusion, ForwardPair, ("ForwardPair", "Scale")),
        (cgm.register_backward_fusion, BackwardPair, ("Scale", "BackwardPair")),
        (cgm.register_forward_backward_fusion, JointPair, ("JointPair", "JointPair")),
    ],
    ids=["forward", "backward", "joint"],
)
def test_d1_d3_user_registered_fusions(registry, register, cls, where):
    module = cgm.Sequential(Scale(2), Scale(3), Scale(5))
    assert scale_step(module) == EXPECTED
    register(pairs(cls))  # takes effect on the next call
    module.zero_grad()
    assert scale_step(module) == EXPECTED
    plan = module.fuser.last_plan
    assert (type(plan.forward_ops[0][0]).__name__, type(plan.backward_ops[0][0]).__name__) == where
    assert [i for _, i in (plan.forward_ops if cls is not BackwardPair else plan.backward_ops)] == [(0, 1), (2,)]
    if cls is JointPair:
        assert plan.forward_ops[0][0] is plan.backward_ops[0][0]


def test_d1_joint_fusions_run_first_and_feed_the_others(registry):
    calls = []
    registry.replace(fusion.Registry([], [], []))
    cgm.register_forward_fusion(pairs(ForwardPair, calls))
    cgm.register_backward_fusion(pairs(BackwardPair, calls))
    cgm.register_forward_backward_fusion(pairs(JointPair, calls))
    module = cgm.Sequential(Scale(2), Scale(3), Scale(5))
    assert scale_step(module) == EXPECTED
    assert calls == [
        ("JointPair", ["Scale"] * 3),
        ("ForwardPair", ["JointPair", "Scale"]),
        ("BackwardPair", ["JointPair", "Scale"]),
    ]


def test_d1_prepend(registry):
    calls = []
    registry.replace(fusion.Registry([], [], []))

    def note(name):
        def fuse(ops, *, recipe):
            calls.append(name)
            return ops

        return fuse

    cgm.register_forward_fusion(note("first"))
    cgm.register_forward_fusion(note("before"), prepend=True)
    scale_step(cgm.Sequential(Scale(1)))
    assert calls == ["before", "first"]


@pytest.mark.parametrize(
    "bad",
    [
        lambda ops, *, recipe: ops[:-1],
        lambda ops, *, recipe: ops[::-1],
        lambda ops, *, recipe: [*ops, ops[0]],
        lambda ops, *, recipe: [JointPair(ops[:2]), *ops[1:]],
        lambda ops, *, recipe: None,
        lambda ops, *, recipe: [1, 2, 3],
    ],
    ids=["dropped", "reversed", "repeated", "overlapping", "nothing", "not operations"],
)
def test_d1_a_list_that_does_not_expand_to_the_basic_ops_raises(registry, bad):
    cgm.register_forward_fusion(bad)
    with pytest.raises(cgm.FusionError):
        cgm.Sequential(Scale(1), Scale(2), Scale(3))(torch.ones(2))


def test_d3_a_fused_operation_alone_and_in_a_pipeline():
    pair = JointPair([Scale(2), Scale(3)])
    assert pair(torch.ones(1)).tolist() == [6]
    module = cgm.Sequential(pair, Scale(5))
    assert len(list(module.parameters())) == 3
    assert scale_step(module) == EXPECTED


def test_d5_reasons_one_warning_and_one_log_line(ref, caplog):
    module = cgm.GroupedMLP(G, 12, 20, dtype=torch.bfloat16)
    args = (torch.randn(T, 12).bfloat16(), *inputs()[1:3])
    recipe = cgm.HighPrecision(enable_cutedsl_fused_grouped_mlp=True)
    with pytest.warns(cgm.FusionFallbackWarning, match=r"hidden size is 12.*ffn size is 20") as caught:
        with cgm.autocast(recipe=recipe):
            module(*args)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(module, args, recipe)  # a hit says nothing
        module.fuser.plan_cache_clear()
        run(module, args, recipe)  # nor does planning again
    with caplog.at_level(logging.INFO, "cute_grouped_mlp"):
        run(module, args, None)
        module.fuser.plan_cache_clear()
        run(module, args, None)
    assert [r.levelname for r in caplog.records] == ["INFO"]
    assert "hidden size is 12" in caplog.text


def test_d5_false_and_a_switched_off_policy_are_silent(ref, caplog):
    module, args = make(), inputs()
    with caplog.at_level(logging.INFO, "cute_grouped_mlp"), warnings.catch_warnings():
        warnings.simplefilter("error")
        run(module, args, cgm.HighPrecision(enable_cutedsl_fused_grouped_mlp=False))
        with cgm.settings.override(fuse=False):
            run(module, args)
    assert not caplog.records
    assert not any(r.wanted for r in module.fuser.last_plan.rejections)


CONDITIONS = {
    "FC1's scaled bias": (
        lambda: cgm.Sequential(
            cgm.GroupedLinear(G, H, 2 * F, scale_bias=True, dtype=torch.bfloat16),
            cgm.ScaledSwiGLU(),
            cgm.GroupedLinear(G, F, H, dtype=torch.bfloat16),
        ),
        "FC1 scales its bias",
    ),
    "fp32": (lambda: make(dtype=torch.float32), "torch.float32"),
    "groups": (
        lambda: cgm.Sequential(
            cgm.GroupedLinear(G, H, 2 * F, bias=False, dtype=torch.bfloat16),
            cgm.ScaledSwiGLU(),
            cgm.GroupedLinear(G + 1, F, H, bias=False, dtype=torch.bfloat16),
        ),
        "FC1 has 3 groups, FC2 has 4",
    ),
    "odd sizes": (lambda: cgm.GroupedMLP(G, 12, 20, dtype=torch.bfloat16), "hidden size is 12"),
    "interleave": (
        lambda: cgm.GroupedMLP(G, H, 32, glu_interleave_size=16, dtype=torch.bfloat16),
        "glu_interleave_size is 16",
    ),
    "mixed": (
        lambda: cgm.Sequential(
            cgm.GroupedLinear(G, H, 2 * F, bias=False, dtype=torch.bfloat16),
            cgm.ScaledSwiGLU(),
            cgm.GroupedLinear(G, F, H, bias=False, dtype=torch.float16),
        ),
        "FC2 is torch.float16",
    ),
}


@pytest.mark.parametrize(("build", "reason"), CONDITIONS.values(), ids=CONDITIONS)
def test_d5_every_unmet_condition_is_named(ref, build, reason):
    fuser = build().fuser
    params = [p for op in fuser.basic_ops for p in op.fuser_parameters()]
    plan = fuser.select(None, 0, torch.zeros(1, H, dtype=params[0].dtype), params)
    assert [type(op).__name__ for op, _ in plan.forward_ops] != FUSED
    (rejection,) = plan.rejections
    assert reason in str(rejection)


def test_d5_without_a_gpu_the_reason_is_the_device():
    module = make()
    module(*inputs())
    assert "CUDA" in str(module.fuser.last_plan.rejections[0])


def test_plans_are_freed_with_their_module(ref):
    module = make()
    module(*inputs()).sum().backward()
    alive = weakref.ref(module[0].weight)
    del module
    gc.collect()
    assert alive() is None


def test_graph_is_freed_without_the_garbage_collector(ref):
    module, args = make(), inputs()
    gc.collect()
    gc.disable()
    try:
        y = module(*args)
        node = weakref.ref(y.grad_fn)
        del y
        assert node() is None
    finally:
        gc.enable()


def test_copies_make_their_own_fuser(ref):
    module = make()
    module(*inputs())
    twin = copy.deepcopy(module)
    y = twin(*inputs())
    assert torch.equal(y, module(*inputs()))
    assert twin.fuser is not module.fuser
    assert twin.fuser.basic_ops[0] is twin[0]
    y.sum().backward()
    assert module[0].weight.grad is None


def test_backward_twice_and_double_backward(ref):
    module, args = make(), inputs()
    y = module(*args).float().sum()
    y.backward(retain_graph=True)
    first = args[0].grad.clone()
    y.backward()
    assert torch.equal(args[0].grad, first * 2)
    args[0].grad = None
    (gx,) = torch.autograd.grad(module(*args).float().square().sum(), args[0], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gx.sum().backward()


@pytest.mark.parametrize("flag", [None, False])
def test_a_gradient_penalty_is_refused_not_taken_for_a_constant(ref, flag):
    module, args = make(), inputs()
    y = run(module, args, cgm.HighPrecision(enable_cutedsl_fused_grouped_mlp=flag))
    (gx,) = torch.autograd.grad(y.sum(), args[0], create_graph=True)  # dy requires no gradient
    with pytest.raises(RuntimeError, match="once_differentiable"):
        (y.sum() + gx.square().sum()).backward()


def test_an_input_without_dimensions_is_named(ref):
    _, *others = inputs()
    with pytest.raises(cgm.ShapeError, match=r"input has shape \(\), allowed: \(tokens, "):
        make()(torch.tensor(1.0, dtype=torch.bfloat16), *others)


def test_saved_weights_changed_in_place_are_noticed(ref):
    module, args = make(), inputs()
    y = module(*args)
    with torch.no_grad():
        module[2].weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_debug_checks_raise_where_splits_are_invalid(ref):
    module, args = make(), inputs()
    bad = torch.tensor([T, 5, 0])
    module(args[0], bad, args[2], bad)  # cut at T, noted on the device
    with pytest.raises(cgm.ShapeError, match="split_sizes"), cgm.settings.override(debug_checks=True):
        module(args[0], bad, args[2], bad)
    with contextlib.nullcontext(), cgm.settings.override(debug_checks=True):
        module(*args).sum().backward()
