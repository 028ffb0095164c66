"""What explain says: plans, kernels and where they come from, every reason against a fusion (acceptance.md, D5)."""

import pytest
import torch

import cute_grouped_mlp as cgm
from cute_grouped_mlp import kernels
from cute_grouped_mlp.reference_kernels import ReferenceKernels

G, H, F, T = 2, 16, 32, 12


@pytest.fixture
def ref():
    with kernels.using(ReferenceKernels()) as provider:
        yield provider


def args(dtype=torch.bfloat16, grad=True):
    return (
        torch.randn(T, H, dtype=dtype, requires_grad=grad),
        torch.tensor([5, 6]),
        torch.rand(T, requires_grad=grad),
    )


def roles(explanation):
    return [(k.step.role, k.step.backward) for p in explanation.pipelines for k in p.kernels]


def test_a_wrong_number_of_extra_inputs_is_an_error_as_in_the_call():
    x, sizes, _ = args()
    module = cgm.GroupedLinear(G, H, F, dtype=torch.bfloat16)
    for extra in ((), (sizes, sizes)):
        with pytest.raises(cgm.ShapeError, match=f"got {len(extra)} extra inputs, expected 1"):
            cgm.explain(module, x, *extra)


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
