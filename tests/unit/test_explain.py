"""What explain says: plans, kernels and where they come from, every reason against a fusion (acceptance.md, D5)."""

import pytest
import torch

import cute_grouped_mlp as cgm

G, H, F, T = 2, 16, 32, 12


def args(dtype=torch.bfloat16, grad=True):
    return (
        torch.randn(T, H, dtype=dtype, requires_grad=grad),
        torch.tensor([5, 6]),
        torch.rand(T, requires_grad=grad),
    )


def roles(explanation):
    return [(k.step.role, k.step.backward) for p in explanation.pipelines for k in p.kernels]


def test_a_wrong_number_of_extra_inputs_is_named_as_in_the_call():
    x, sizes, _ = args()
    module = cgm.GroupedLinear(G, H, F, dtype=torch.bfloat16)
    for extra in ((), (sizes, sizes)):
        explanation = cgm.explain(module, x, *extra)
        text = f"got {len(extra)} extra inputs, expected 1"
        assert explanation.problems == (f"the call would raise ShapeError: {text}",)
        assert "plan       GroupedLinear(0)" in str(explanation)
        with pytest.raises(cgm.ShapeError, match=text):
            module(x, *extra)


def wrong_arguments():
    x, sizes, probs = args(grad=False)
    ones = torch.ones(G + 1, dtype=torch.int64)
    yield (x, ones, probs), "split_sizes has shape (3,), allowed: (2,)"
    yield (x, sizes.float(), probs), "split_sizes is torch.float32, allowed: torch.int32, torch.int64"
    yield (x, None, probs), "split_sizes is NoneType, allowed: an int32 or int64 tensor of shape (2,)"
    yield (x[:, :8], sizes, probs), "input has shape (12, 8), allowed: (tokens, 16) or more leading dimensions"
    yield (x.float(), sizes, probs), "input is torch.float32, the weight is torch.bfloat16"
    yield (x, sizes, torch.ones(T - 1)), "probs has shape (11,), allowed: (12,)"
    yield (x, sizes, torch.ones(T, dtype=torch.int64)), "probs is torch.int64, allowed: a floating-point type"


@pytest.mark.parametrize(("arguments", "problem"), list(wrong_arguments()), ids=[p for _, p in wrong_arguments()])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("recipe", [None, cgm.Float8BlockScaling()], ids=["bf16", "block"])
def test_arguments_that_the_call_refuses_are_named_beside_the_plan(ref, arguments, problem, fused, recipe):
    module = cgm.GroupedMLP(G, H, F, dtype=torch.bfloat16)
    with cgm.settings.override(fuse=fused), cgm.autocast(recipe=recipe):
        explanation = cgm.explain(module, *arguments)
        assert any(found.endswith(problem) for found in explanation.problems)
        assert f"problem    the call would raise ShapeError: {explanation.problems[0].split(': ', 1)[1]}" in str(
            explanation
        )
        assert explanation.fused == fused
        assert len(explanation.pipelines[0].kernels) >= 2
        with pytest.raises(cgm.ShapeError) as error:
            module(*arguments)
        assert problem in str(error.value)


@pytest.mark.parametrize("fused", [True, False])
def test_arguments_that_are_no_tensors_are_named_beside_the_plan(ref, fused):
    x, sizes, probs = args()
    module = cgm.GroupedMLP(G, H, F, dtype=torch.bfloat16)
    with cgm.settings.override(fuse=fused):
        explanation = cgm.explain(module, x, [5, 6], 1.0)
        assert len(explanation.problems) == 3  # split_sizes of both layers, and probs
        assert "ScaledActivation(1): probs is float" in explanation.problems[1]
        assert explanation.fused == fused
        with pytest.raises(TypeError, match="the input is list; allowed: a tensor"):
            cgm.explain(module, [1.0], sizes, probs)


@pytest.mark.parametrize(("sizes", "least", "total"), [((5, 8), 5, 13), ((-1, 3), -1, 2)])
def test_split_sizes_that_do_not_fit_are_named(ref, sizes, least, total):
    x, _, probs = args()
    module = cgm.GroupedMLP(G, H, F, dtype=torch.bfloat16)
    explanation = cgm.explain(module, x, torch.tensor(sizes), probs)
    assert explanation.fused
    assert len(explanation.problems) == 1
    assert f"the least is {least}, their sum {total} of {T} rows" in explanation.problems[0]
    with cgm.settings.override(debug_checks=True), pytest.raises(cgm.ShapeError, match="split_sizes"):
        module(x, torch.tensor(sizes), probs)


@pytest.mark.parametrize("x", [torch.tensor(1.0).bfloat16(), torch.ones(H).bfloat16(), torch.ones(T, 8).bfloat16()])
def test_a_wrong_input_is_named_alone(ref, x):
    """How many rows it was meant to have is not known: nothing is said of what would have to fit them."""
    module = cgm.GroupedMLP(G, H, F, dtype=torch.bfloat16)
    explanation = cgm.explain(module, x, torch.tensor([20, 20]), torch.rand(T))
    text = f"input has shape {tuple(x.shape)}, allowed: (tokens, 16) or more leading dimensions"
    assert explanation.problems == (f"the call would raise ShapeError: GroupedLinear(0): {text}",)
    with pytest.raises(cgm.ShapeError) as error:
        module(x, torch.tensor([20, 20]), torch.rand(T))
    assert text in str(error.value)


def wrong_keywords():
    yield {"is_first_microbatch": 1}, TypeError, "is_first_microbatch is 1; allowed: True, False, None"
    yield {"op_kwargs": {2: {"is_first_microbatch": 0}}}, TypeError, "is_first_microbatch is 0; allowed"
    yield {"op_kwargs": {0: {"out": None}}}, TypeError, "grad_input and is_first_microbatch, got out"
    yield {"op_kwargs": {7: {}}}, IndexError, "list index out of range"
    yield {"op_kwargs": {cgm.ScaledSwiGLU(): {}}}, cgm.FusionError, "not a basic operation of this Sequential"


@pytest.mark.parametrize(("keywords", "error", "text"), list(wrong_keywords()), ids=[t for *_, t in wrong_keywords()])
@pytest.mark.parametrize("fused", [True, False])
def test_keywords_that_the_call_refuses_are_named_beside_the_plan(ref, keywords, error, text, fused):
    module = cgm.GroupedMLP(G, H, F, dtype=torch.bfloat16)
    with cgm.settings.override(fuse=fused):
        explanation = cgm.explain(module, *args(), **keywords)
        (problem,) = explanation.problems
        assert problem.startswith(f"the call would raise {error.__name__}: ")
        assert text in problem
        assert explanation.fused == fused
        with pytest.raises(error) as raised:
            module(*args(), **keywords)
        assert str(raised.value) == problem.split(": ", 1)[1]


def wrong_buffers():
    right = torch.empty(T, H, dtype=torch.bfloat16)
    yield (
        {2: {"output": right[1:]}},
        f"the call would raise ShapeError: GroupedLinear(2): output has shape ({T - 1}, {H})",
    )
    yield {2: {"output": right.float()}}, "the call would raise ShapeError: GroupedLinear(2): output is torch.float32"
    yield {2: {"output": 3}}, "the call would raise ShapeError: GroupedLinear(2): output is int"
    yield {0: {"grad_input": right.t()}}, "its backward would raise ShapeError: GroupedLinear(0): grad_input has shape"


@pytest.mark.parametrize(("op_kwargs", "text"), list(wrong_buffers()), ids=[text for _, text in wrong_buffers()])
@pytest.mark.parametrize("recipe", [None, cgm.Float8CurrentScaling()], ids=str)
@pytest.mark.parametrize("fused", [True, False])
def test_buffers_that_the_call_refuses_are_named(ref, op_kwargs, text, fused, recipe):
    module = cgm.GroupedMLP(G, H, F, dtype=torch.bfloat16)
    x, sizes, probs = args()
    x.requires_grad_()
    with cgm.settings.override(fuse=fused), cgm.autocast(recipe=recipe):
        explanation = cgm.explain(module, x, sizes, probs, op_kwargs=op_kwargs)
        assert explanation.problems[0].startswith(text)
        assert explanation.fused == fused
        with pytest.raises(cgm.ShapeError) as raised:
            module(x, sizes, probs, op_kwargs=op_kwargs).sum().backward()
        assert explanation.problems[0].split("): ", 1)[1] in str(raised.value)


@pytest.mark.parametrize("recipe", [None, cgm.Float8CurrentScaling()], ids=str)
def test_buffers_between_fused_operations_are_named(ref, recipe):
    module = cgm.GroupedMLP(G, H, F, dtype=torch.bfloat16)
    buffer = torch.empty(T, 2 * F, dtype=torch.bfloat16)
    for index, name, given in ((0, "output", buffer), (2, "grad_input", buffer[:, :F].contiguous())):
        keywords = {"op_kwargs": {index: {name: given}}}
        with cgm.autocast(recipe=recipe):
            (problem,) = cgm.explain(module, *args(), **keywords).problems
            assert f"{name} of GroupedLinear({index}) would never be written" in problem
            with pytest.raises(cgm.ShapeError, match="never be written"):
                module(*args(), **keywords)
            with cgm.settings.override(fuse=False):
                assert cgm.explain(module, *args(), **keywords).problems == ()
                module(*args(), **keywords)


@pytest.mark.parametrize("fused", [True, False])
def test_a_buffer_for_a_gradient_that_nobody_computes_is_no_problem(ref, fused):
    wrong = {"op_kwargs": {0: {"grad_input": torch.zeros(3)}}}
    module = cgm.GroupedMLP(G, H, F, dtype=torch.bfloat16)
    x, sizes, probs = args(grad=False)
    with cgm.settings.override(fuse=fused):
        assert cgm.explain(module, x, sizes, probs, **wrong).problems == ()
        module(x, sizes, probs, **wrong).sum().backward()
        x.requires_grad_()
        assert "its backward would raise" in cgm.explain(module, x, sizes, probs, **wrong).problems[0]
        with torch.no_grad():
            assert cgm.explain(module, x, sizes, probs, **wrong).problems == ()
            module(x, sizes, probs, **wrong)


def test_keywords_of_other_modules(ref):
    op = cgm.GroupedLinear(G, H, F, dtype=torch.bfloat16)
    x, sizes, _ = args()
    text = "the call would raise TypeError: is_first_microbatch is 1; allowed: True, False, None"
    keywords = {"is_first_microbatch": 1}
    assert cgm.explain(op, x, sizes, **keywords).problems == (text,)
    assert cgm.explain(op.fuser, x, sizes, basic_op_kwargs=[keywords]).problems == (text,)
    assert cgm.explain(cgm.Sequential(op), x, sizes, op_kwargs={op: keywords}).problems == (text,)
    mlp = cgm.GroupedMLP(G, H, F, dtype=torch.bfloat16)
    for right in ({"is_first_microbatch": True}, {"is_first_microbatch": False, "op_kwargs": {0: keywords}}):
        assert cgm.explain(mlp, *args(), **right).problems == ()
        mlp(*args(), **right)


def test_arguments_that_do_not_fit_the_call(ref):
    mlp = cgm.GroupedMLP(G, H, F, dtype=torch.bfloat16)
    x, sizes, probs = args()
    for module, given, named, text in (
        (mlp, (), {}, "GroupedMLP: missing a required argument: 'x'"),
        (mlp, (x,), {}, "GroupedMLP: missing a required argument: 'split_sizes'"),
        (mlp, (x, sizes, probs), {"first": True}, "GroupedMLP: got an unexpected keyword argument 'first'"),
        (cgm.Sequential(mlp[0]), (), {}, "Sequential: missing a required argument: 'input'"),
        (mlp[0], (), {}, "GroupedLinear: missing a required argument: 'input'"),
        (mlp.fuser, (), {}, "OperationFuser: missing a required argument: 'input'"),
        (torch.nn.Linear(1, 1), (), {}, "got Linear"),
    ):
        with pytest.raises(TypeError, match=text):
            cgm.explain(module, *given, **named)
        with pytest.raises((TypeError, cgm.ShapeError)):
            module(*given, **named)


def test_right_arguments_have_no_problems(ref):
    assert cgm.explain(cgm.GroupedMLP(G, H, F, dtype=torch.bfloat16), *args()).problems == ()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        x, sizes, probs = args(dtype=torch.float32)
        assert cgm.explain(cgm.GroupedMLP(G, H, F, dtype=torch.float32), x, sizes, probs).problems == ()
        assert cgm.explain(cgm.GroupedLinear(G, H, F), x.view(3, 4, H), sizes).problems == ()


def test_fused_plan_lists_what_would_be_launched(ref):
    module = cgm.GroupedMLP(G, H, F, dtype=torch.bfloat16)
    explanation = cgm.explain(module, *args())
    assert not ref.launches
    assert explanation.fused
    assert explanation.reasons == ()
    x, sizes, probs = args()
    module(x, sizes, probs).sum().backward()
    specs = [k.step.spec for p in explanation.pipelines for k in p.kernels]
    assert specs == ref.launches
    text = str(explanation)
    for name in ("GroupedMLP on cpu", "FusedGroupedMLP(0, 1, 2)", "boundary   0 of 3", *(s.name for s in specs)):
        assert name in text
    assert "native" in text


def test_only_what_is_needed(ref):
    module = cgm.GroupedMLP(G, H, F, dtype=torch.bfloat16)
    with torch.no_grad():
        explanation = cgm.explain(module, *args())
    assert roles(explanation) == [("fprop_act", False), ("fprop", False)]
    assert "backward   none" in str(explanation)
    assert "no tokens, no launch" in str(
        cgm.explain(module, torch.zeros(0, H).bfloat16(), torch.zeros(G, dtype=torch.int64), torch.zeros(0))
    )


def test_the_recipe_in_force_or_the_one_given(ref):
    module = cgm.GroupedMLP(G, H, F, dtype=torch.bfloat16)
    off = cgm.HighPrecision(enable_cutedsl_fused_grouped_mlp=False)
    assert not cgm.explain(module, *args(), recipe=off).fused
    with cgm.autocast(recipe=off):
        explanation = cgm.explain(module, *args())
        assert not explanation.fused
        assert cgm.explain(module, *args(), recipe=None).fused
    assert explanation.reasons == ("recipe.enable_cutedsl_fused_grouped_mlp is False",)
    assert [role for role, _ in roles(explanation)].count("fprop") == 2
    assert "enable_cutedsl_fused_grouped_mlp is False" in str(explanation)
    with cgm.settings.override(fuse=False):
        assert "settings.fuse is off" in str(cgm.explain(module, *args()))


def test_d5_every_unmet_condition_at_once(ref):
    module = cgm.Sequential(
        cgm.GroupedLinear(G, 12, 2 * F, dtype=torch.float32),
        cgm.ScaledSwiGLU(16),
        cgm.GroupedLinear(G + 1, F, H, dtype=torch.float32),
    )
    sizes = torch.tensor([5, 6])
    explanation = cgm.explain(module, torch.randn(T, 12), sizes, torch.rand(T), sizes, recipe=cgm.MXFP8BlockScaling())
    text = "\n".join(explanation.reasons)
    for reason in (
        "FC1: in_features is 12, allowed: a multiple of 32",
        "FC2: out_features is 16",
        "torch.float32",
        "2 groups, FC2 has 3",
        "FC2 has 16 output features, FC1 has 12",
        "hidden size is 12",
        "glu_interleave_size is 16",
    ):
        assert reason in text
    assert text in str(explanation).replace("  - ", "")
    assert "the call would raise: GroupedLinear under MXFP8BlockScaling" in str(explanation)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("recipe", [None, cgm.Float8BlockScaling()], ids=["plain", "block"])
def test_a_type_without_kernels_is_told_once_with_the_types_that_have_them(ref, dtype, recipe):
    explanation = cgm.explain(cgm.GroupedMLP(G, H, F, dtype=dtype), *args(dtype), recipe=recipe)
    plain = f"kernels exist for bfloat16 and float16, the type is {dtype}"
    quantised = f"kernels for quantised operands exist for bfloat16, the type is {dtype}"
    if recipe is not None:
        assert explanation.reasons == (f"{quantised}; without quantising, for bfloat16 and float16",)
    else:
        assert explanation.reasons == (() if dtype is torch.float16 else (plain,))


def test_without_a_gpu_it_says_that_the_reference_path_runs_and_why():
    module = cgm.GroupedMLP(G, H, F, dtype=torch.bfloat16)
    text = str(cgm.explain(module, *args()))
    assert "cpu (the reference path: plain torch)" in text
    assert "kernels need a CUDA device, the tensors are on cpu" in text
    assert "torch matmul per group" in text


def test_a_pattern_that_is_not_one_says_what_is_expected(ref):
    class Odd(cgm.BasicOperation):
        def op_forward(self, ctx, input_, **unused):
            return input_[..., :F]

    module = cgm.Sequential(
        cgm.GroupedLinear(G, H, 2 * F, dtype=torch.bfloat16), Odd(), cgm.GroupedLinear(G, F, H, dtype=torch.bfloat16)
    )
    x, sizes, _ = args()
    explanation = cgm.explain(module, x, sizes, sizes)
    assert "it takes GroupedLinear, activation, GroupedLinear" in str(explanation)
    assert "got GroupedLinear, Odd, GroupedLinear" in str(explanation)
    assert "Odd" in str(explanation)


def test_other_modules(ref):
    op = cgm.GroupedLinear(G, H, F, bias=True, scale_bias=True, dtype=torch.bfloat16)
    x, sizes, scale = args()
    explanation = cgm.explain(op, x, sizes, scale)
    op(x, sizes, scale).sum().backward()
    assert [k.step.spec for p in explanation.pipelines for k in p.kernels] == ref.launches
    assert cgm.explain(op.fuser, x, sizes, scale).pipelines[0].plan is explanation.pipelines[0].plan
    mixed = cgm.Sequential(op, torch.nn.Identity(), cgm.GroupedLinear(G, F, H, dtype=torch.bfloat16))
    assert len(cgm.explain(mixed, x, sizes, scale, sizes).pipelines) == 2
    with pytest.raises(TypeError, match="got Linear"):
        cgm.explain(torch.nn.Linear(1, 1), x)


def test_the_status_word_is_read_and_raises(ref):
    module = cgm.GroupedMLP(G, H, F, dtype=torch.bfloat16)
    x, _, probs = args()
    module(x, torch.tensor([T, 1]), probs)
    with pytest.raises(cgm.ShapeError, match="split_sizes on cpu"):
        cgm.explain(module, *args())
    cgm.explain(module, *args())


def test_keyword_arguments(ref):
    module = cgm.GroupedMLP(G, H, F, dtype=torch.bfloat16)
    x, sizes, probs = args()
    assert str(cgm.explain(module, x, split_sizes=sizes, probs=probs)) == str(cgm.explain(module, x, sizes, probs))
