"""GroupedLinear, activations and the fused grouped MLP on the CPU, with torch functions in the kernels' place."""

import sys

import pytest
import torch

import cute_grouped_mlp as cgm
from cute_grouped_mlp import kernels, reference
from cute_grouped_mlp.codegen.activations import ACTIVATIONS
from cute_grouped_mlp.reference_kernels import ReferenceKernels

G, H, F, T = 4, 16, 32, 40
SIZES = [9, 0, 20, 6]


@pytest.fixture
def ref():
    """Run this project's kernels as torch functions; new tensors are filled with NaN."""
    torch.use_deterministic_algorithms(True)
    with kernels.using(ReferenceKernels()) as provider:
        yield provider
    torch.use_deterministic_algorithms(False)


@pytest.fixture(params=["loop", "kernels"])
def path(request):
    """A lone GroupedLinear in plain torch, and through kernels."""
    if request.param == "loop":
        yield torch.float64
        return
    torch.use_deterministic_algorithms(True)
    with kernels.using(ReferenceKernels()):
        yield torch.bfloat16
    torch.use_deterministic_algorithms(False)


def sizes_of(kind="int64"):
    if kind == "strided":
        return torch.stack([torch.tensor(SIZES), torch.full((G,), -7)], 1)[:, 0]
    return torch.tensor(SIZES, dtype=getattr(torch, kind))


def rows():
    ends, _ = reference.offsets(SIZES, T)
    return reference.group_of_rows(ends, T, torch.device("cpu"))[: ends[-1]]


def close(actual, expected, dtype):
    expected = expected.to(torch.float64)
    actual = actual.to(torch.float64)
    bound = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 7e-4, torch.bfloat16: 5e-3}[dtype]
    scale = expected.pow(2).mean().sqrt().clamp(min=1e-30)
    assert torch.isfinite(actual).all()
    assert ((actual - expected).pow(2).mean().sqrt() / scale).item() <= bound


# GroupedLinear -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["int32", "int64", "strided"])
@pytest.mark.parametrize("bias", [None, "plain", "scaled"])
def test_e2_linear_forward_and_every_gradient(path, bias, kind):
    torch.manual_seed(0)
    op = cgm.GroupedLinear(G, H, F, bias=bias is not None, scale_bias=bias == "scaled", dtype=path)
    x = torch.randn(T, H, dtype=path, requires_grad=True)
    scale = torch.rand(T, dtype=torch.float64 if path is torch.float64 else torch.float32, requires_grad=True)
    extra = (sizes_of(kind), scale) if bias == "scaled" else (sizes_of(kind),)
    y = op(x, *extra)
    dy = torch.randn_like(y)
    wanted = [x, *op.parameters(), *([scale] if bias == "scaled" else [])]
    grads = torch.autograd.grad(y, wanted, dy)

    doubles = [t.detach().double().requires_grad_() for t in wanted]
    total = sum(SIZES)
    expected = torch.einsum("tk,tnk->tn", doubles[0][:total], doubles[1][rows()])
    if bias:
        added = doubles[2][rows()]
        expected = expected + (added * doubles[3][:total, None] if bias == "scaled" else added)
    expected = torch.cat((expected, expected.new_zeros(T - total, F)))
    close(y, expected, path)
    assert not y[total:].any()
    for got, want in zip(grads, torch.autograd.grad(expected, doubles, dy.double()), strict=True):
        close(got, want, path)
    assert not grads[0][total:].any()
    assert not grads[1][1].any()  # the empty group


def test_linear_leading_dimensions_and_strided_inputs(path):
    op = cgm.GroupedLinear(G, H, F, dtype=path)
    x = torch.randn(5, 8, H, dtype=path)
    flat = op(x.view(T, H), sizes_of())
    assert torch.equal(op(x, sizes_of()), flat.view(5, 8, F))
    wide = torch.randn(T, 3 * H, dtype=path)[:, H : 2 * H]
    shifted = torch.randn(T * H + 3, dtype=path)[3:].view(T, H)
    exact = {"rtol": 0, "atol": 0} if path is torch.bfloat16 else {}  # a BLAS may sum otherwise by alignment
    for x_of in (wide, shifted):
        torch.testing.assert_close(op(x_of, sizes_of()), op(x_of.clone(), sizes_of()), **exact)
    y = op(x.requires_grad_(), sizes_of())
    y.sum().backward()  # an expanded gradient
    assert x.grad.shape == x.shape


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"single_grouped_weight": False}])
def test_one_weight_and_packed_views_are_bit_equal(path, options):
    torch.manual_seed(0)
    op = cgm.GroupedLinear(G, H, F, dtype=path, **options)
    one = cgm.GroupedLinear(G, H, F, dtype=path, bias=op.bias is not None)
    with torch.no_grad():
        one.weight.copy_(op.packed_weight())
        if op.bias is not None:
            one.bias.copy_(op.bias)
    x = torch.randn(T, H, dtype=path, requires_grad=True)
    dy = torch.randn(T, F, dtype=path)
    first, second = op(x, sizes_of()), one(x, sizes_of())
    assert torch.equal(first, second)
    first.backward(dy)
    second.backward(dy)
    weights = [w.grad for w in op.weights()]
    assert torch.equal(weights[0] if len(weights) == 1 else torch.stack(weights), one.weight.grad)


def test_packed_weights_survive_to_and_not_assignment():
    op = cgm.GroupedLinear(G, H, F, single_grouped_weight=False, dtype=torch.float32)
    assert op.is_packed()
    assert set(dict(op.named_parameters())) == {"bias", *(f"weight{g}" for g in range(G))}
    op.to(torch.bfloat16)
    assert op.is_packed()
    assert op.packed_weight().data_ptr() == op.weight0.data_ptr()
    op.weight1 = torch.nn.Parameter(op.weight1.detach().clone())
    assert not op.is_packed()
    assert torch.equal(op.packed_weight()[1], op.weight1)


def test_frozen_weights_and_inputs_compute_only_what_is_needed(ref):
    def launched(x_grad, w_grad, b_grad):
        op = cgm.GroupedLinear(G, H, F, dtype=torch.bfloat16)
        op.weight.requires_grad_(w_grad)
        op.bias.requires_grad_(b_grad)
        ref.launches.clear()
        y = op(torch.randn(T, H, dtype=torch.bfloat16, requires_grad=x_grad), sizes_of())
        if y.requires_grad:
            y.sum().backward()
        return ref.names()

    assert launched(False, False, False) == ["fprop"]
    assert launched(True, False, False) == ["fprop", "dgrad"]
    assert launched(False, True, False) == ["fprop", "wgrad"]
    assert launched(False, False, True) == ["fprop", "bias_grad"]
    assert launched(True, True, True) == ["fprop", "dgrad", "wgrad", "bias_grad"]


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("single", [True, False])
@pytest.mark.parametrize("delay", [False, True])
@pytest.mark.parametrize("main_dtype", [torch.float32, torch.bfloat16])
def test_e3_n2_main_grad(path, main_dtype, delay, single, overwrite):
    main_dtype = torch.float64 if path is torch.float64 else main_dtype
    torch.manual_seed(0)
    options = {"single_grouped_weight": single, "delay_wgrad_compute": delay}
    op = cgm.GroupedLinear(G, H, F, dtype=path, accumulate_into_main_grad=True, **options)
    plain = cgm.GroupedLinear(G, H, F, dtype=path)
    with torch.no_grad():
        plain.weight.copy_(op.packed_weight())
    for w in op.weights():
        w.main_grad = torch.full(w.shape, float("nan") if overwrite else 0.5, dtype=main_dtype)
        w.overwrite_main_grad = overwrite
        w.grad_added_to_main_grad = False
        assert getattr(w, "skip_backward_post_hook", False) is delay
    x, dy = torch.randn(T, H, dtype=path), torch.randn(T, F, dtype=path)
    plain(x, sizes_of()).backward(dy)
    op(x, sizes_of()).backward(dy)
    assert op.need_backward_dw() is delay
    if delay:
        assert all(torch.isnan(w.main_grad).all() if overwrite else (w.main_grad == 0.5).all() for w in op.weights())
        op.backward_dw()
        op.backward_dw()  # nothing left
    got = torch.stack([w.main_grad for w in op.weights()]).view(G, F, H)
    close(got - (0 if overwrite else 0.5), plain.weight.grad, path)
    assert (got[1] == (0.0 if overwrite else 0.5)).all()  # the empty group
    assert all(w.grad_added_to_main_grad for w in op.weights())
    assert all(w.grad is not None for w in op.weights())
    dummies = {w.grad.data_ptr() for w in op.weights()}
    again = cgm.GroupedLinear(G, H, F, dtype=path, accumulate_into_main_grad=True, single_grouped_weight=single)
    for w in again.weights():
        w.main_grad, w.grad_added_to_main_grad, w.zero_out_wgrad = torch.zeros(w.shape, dtype=main_dtype), False, True
    again(x, sizes_of()).backward(dy)
    assert all(not w.grad.any() for w in again.weights())
    assert not dummies & {w.grad.data_ptr() for w in again.weights()}


def test_e3_main_grad_is_required_and_checked():
    op = cgm.GroupedLinear(G, H, F, accumulate_into_main_grad=True)
    y = op(torch.randn(T, H), sizes_of())
    with pytest.raises(cgm.ConfigError, match=r"needs a tensor main_grad of shape .*got None"):
        y.sum().backward()
    op.weight.main_grad = torch.zeros(3)
    with pytest.raises(cgm.ConfigError, match=r"got one of shape \(3,\)"):
        op(torch.randn(T, H), sizes_of()).sum().backward()


def test_e3_delayed_wgrad_gives_the_same_bits(path):
    torch.manual_seed(0)
    op = cgm.GroupedLinear(G, H, F, dtype=path)
    late = cgm.GroupedLinear(G, H, F, dtype=path, delay_wgrad_compute=True)
    late.load_state_dict(op.state_dict())
    x, dy = torch.randn(T, H, dtype=path), torch.randn(T, F, dtype=path)
    for _ in range(2):
        op(x, sizes_of()).backward(dy)
        late(x, sizes_of()).backward(dy)
    assert late.weight.grad is None
    late.backward_dw()
    late.backward_dw()
    assert torch.equal(late.weight.grad, op.weight.grad)
    assert torch.equal(late.bias.grad, op.bias.grad)


BAD = {
    "features": ((torch.zeros(T, H + 1), torch.tensor(SIZES)), r"input has shape \(40, 17\), allowed: \(tokens, 16\)"),
    "rank": ((torch.zeros(H), torch.tensor(SIZES)), r"input has shape \(16,\)"),
    "dtype": ((torch.zeros(T, H, dtype=torch.float16), torch.tensor(SIZES)), "input is torch.float16, the weight is"),
    "length": ((torch.zeros(T, H), torch.tensor([1])), r"split_sizes has shape \(1,\), allowed: \(4,\)"),
    "list": ((torch.zeros(T, H), SIZES), "split_sizes is list"),
    "float sizes": ((torch.zeros(T, H), torch.ones(G)), "split_sizes is torch.float32, allowed: torch.int32"),
    "device": ((torch.zeros(T, H, device="meta"), torch.tensor(SIZES)), "input is on meta, the weight is on cpu"),
    "all": (
        (torch.zeros(T, 3, dtype=torch.float16), torch.ones(2)),
        r"input has shape .*input is torch.float16.*split_sizes has shape .*split_sizes is torch.float32",
    ),
}


@pytest.mark.parametrize(("args", "message"), BAD.values(), ids=BAD)
def test_k5_wrong_arguments_are_named_all_at_once(args, message):
    with pytest.raises(cgm.ShapeError, match=message):
        cgm.GroupedLinear(G, H, F)(*args)


def test_wrong_constructor_arguments():
    with pytest.raises(cgm.ConfigError, match=r"num_groups is 0.*in_features is -1.*dtype is torch.int8"):
        cgm.GroupedLinear(0, -1, 3, dtype=torch.int8)
    with pytest.raises(TypeError, match="scale"):
        cgm.GroupedLinear(G, H, F)(torch.zeros(T, H), sizes_of(), scale=1)


@pytest.mark.parametrize("tokens", [0, T])
def test_k1_no_tokens_and_only_empty_groups(path, tokens):
    op = cgm.GroupedLinear(G, H, F, dtype=path)
    x = torch.randn(tokens, H, dtype=path, requires_grad=True)
    fired = []
    op.weight.register_post_accumulate_grad_hook(fired.append)
    y = op(x, torch.zeros(G, dtype=torch.int32))
    assert y.shape == (tokens, F)
    assert not y.any()
    y.sum().backward()
    assert x.grad.shape == x.shape
    assert not x.grad.any()
    assert not op.weight.grad.any()
    assert not op.bias.grad.any()
    assert len(fired) == 1


def test_linear_initialises_as_torch_does():
    op = cgm.GroupedLinear(64, 100, 50)
    assert op.weight.abs().max() <= 0.1
    assert op.weight.std().item() == pytest.approx(0.1 / 3**0.5, rel=0.01)
    meta = cgm.GroupedLinear(G, H, F, device="meta")
    assert meta.weight.is_meta


# Activations ---------------------------------------------------------------------------------------------------------

CLASSES = [
    (cgm.ScaledSwiGLU, {}, "swiglu", ()),
    (cgm.ScaledClampedQGeGLU, {}, "clamped_qgeglu", (7.0, 1.702, 1.0)),
    (
        cgm.ScaledClampedQGeGLU,
        {"limit": 5.0, "alpha": 1.5, "glu_linear_offset": 0.5},
        "clamped_qgeglu",
        (5.0, 1.5, 0.5),
    ),
    (cgm.ScaledSiTUGLU, {"beta1": 2.0, "beta2": 8.0}, "situglu", (2.0, 8.0)),
    (cgm.ScaledSReLU, {}, "srelu", ()),
]


@pytest.mark.parametrize("probs_dtype", [None, torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("cls", "options", "name", "params"), CLASSES)
def test_activation_operations(cls, options, name, params, probs_dtype):
    torch.manual_seed(0)
    op = cls(**options)
    assert (op.activation, op.params) == (name, params)
    z = torch.randn(2, 5, 64, dtype=torch.bfloat16, requires_grad=True)
    probs = None if probs_dtype is None else torch.rand(2, 5, dtype=probs_dtype, requires_grad=True)
    a = op(z, probs)
    expected = reference.activation_forward(name, z.detach().double(), probs, None, params)
    close(a, expected.detach(), torch.bfloat16)
    grad = torch.randn_like(a)
    a.backward(grad)
    dz, dprobs = reference.activation_backward(name, grad.double(), z.detach().double(), probs, None, params)
    close(z.grad, dz.detach(), torch.bfloat16)
    if probs is not None:
        assert probs.grad.dtype is probs_dtype
        close(probs.grad, dprobs.detach(), torch.bfloat16)


def test_activation_interleave_and_flat_probs():
    z, probs = torch.randn(2, 5, 128), torch.rand(10)
    a = cgm.ScaledSwiGLU(32)(z, probs)
    contiguous = reference.join_glu(*reference.split_glu(z, 32), None)
    torch.testing.assert_close(a, cgm.ScaledSwiGLU()(contiguous, probs.view(2, 5)))


def test_activation_wrong_arguments():
    with pytest.raises(cgm.ConfigError, match=r"activation is 'gelu'; allowed: .*swiglu"):
        cgm.ScaledActivation("gelu")
    with pytest.raises(cgm.ConfigError, match=r"beta1 is -1.*greater than 0"):
        cgm.ScaledSiTUGLU(beta1=-1)
    with pytest.raises(cgm.ConfigError, match="beta2 is inf"):
        cgm.ScaledSiTUGLU(beta2=float("inf"))
    with pytest.raises(cgm.ConfigError, match="unknown parameter 'slope'"):
        cgm.ScaledActivation("swiglu", slope=1.0)
    with pytest.raises(cgm.ConfigError, match="without a gate"):
        cgm.ScaledActivation("srelu", glu_interleave_size=32)
    with pytest.raises(cgm.ConfigError, match="glu_interleave_size is 0"):
        cgm.ScaledSwiGLU(0)
    with pytest.raises(cgm.ShapeError, match=r"probs has shape \(3,\), allowed: \(5,\).*64 divides"):
        cgm.ScaledSwiGLU(32)(torch.zeros(5, 32), torch.zeros(3))
    with pytest.raises(cgm.ShapeError, match=r"probs is torch\.int64"):
        cgm.ScaledSwiGLU()(torch.zeros(5, 32), torch.zeros(5, dtype=torch.int64))


def test_n11_layout_travels_with_the_weights():
    ours, theirs = (cgm.GroupedMLP(G, H, F, glu_interleave_size=size) for size in (None, 32))
    state = ours.state_dict()
    assert cgm.GroupedMLP(G, H, F).load_state_dict(state).missing_keys == []
    with pytest.raises(RuntimeError, match="saved contiguous, this module has them interleaved by 32"):
        theirs.load_state_dict(state)
    with pytest.raises(RuntimeError, match="saved interleaved by 32, this module has them contiguous"):
        ours.load_state_dict(theirs.state_dict())
    weights_only = {name: t for name, t in state.items() if "weight" in name}
    ours.load_state_dict(weights_only)
    with pytest.raises(cgm.ConfigError, match="not a multiple of glu_interleave_size 32"):
        cgm.GroupedMLP(G, H, 24, glu_interleave_size=32)


# The fused grouped MLP -----------------------------------------------------------------------------------------------

NAMES = ("x", "probs", "fc1.weight", "fc2.weight", "fc1.bias", "fc2.bias")


def step(module, x, sizes, probs, dy, frozen=()):
    """y and every gradient by name."""
    tensors = {"x": x, "probs": probs, **dict(module.named_parameters())}
    for name, t in tensors.items():
        if t is not None:
            t.requires_grad_(name not in frozen)
            t.grad = None
    y = module(x, sizes, probs)
    if y.requires_grad:
        y.backward(dy)
    return {"y": y.detach(), **{name: t.grad for name, t in tensors.items() if t is not None and t.requires_grad}}


def expected_step(module, x, sizes, probs, dy, **options):
    weights = {name: p.detach() for name, p in module.named_parameters()}
    act = module.activation
    s = reference.grouped_mlp(
        x.detach(),
        weights["fc1.weight"],
        weights["fc2.weight"],
        sizes,
        None if probs is None else probs.detach(),
        dy,
        activation=act.activation,
        interleave=act.glu_interleave_size,
        params=act.params,
        b1=weights.get("fc1.bias"),
        b2=weights.get("fc2.bias"),
        **options,
    )
    return {
        "y": s.y,
        "x": s.dx,
        "probs": s.dprobs,
        "fc1.weight": s.dw1,
        "fc2.weight": s.dw2,
        "fc1.bias": s.db1,
        "fc2.bias": s.db2,
    }


def operands(dtype=torch.bfloat16, probs_dtype=torch.float32):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(T, H, generator=generator).to(dtype)
    probs = None if probs_dtype is None else torch.rand(T, generator=generator).to(probs_dtype)
    return x, sizes_of(), probs, torch.randn(T, H, generator=generator).to(dtype)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("probs_dtype", [None, torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("interleave", [None, 32])
def test_e1_fused_equals_the_reference(ref, interleave, dtype, probs_dtype, bias):
    torch.manual_seed(0)
    module = cgm.GroupedMLP(G, H, F, glu_interleave_size=interleave, bias=bias, dtype=dtype)
    args = operands(dtype, probs_dtype)
    got = step(module, *args)
    assert type(module.fuser.last_plan.forward_ops[0][0]) is cgm.FusedGroupedMLP
    expected = expected_step(module, *args)
    assert set(got) == {name for name, t in expected.items() if t is not None}
    for name, t in got.items():
        close(t, expected[name], dtype)
    if probs_dtype:
        assert got["probs"].dtype is probs_dtype
    unfused = cgm.HighPrecision(enable_cutedsl_fused_grouped_mlp=False)
    with cgm.autocast(recipe=unfused):
        plain = step(module, *args)
    expected = expected_step(module, *args, round_grad=True)
    for name, t in plain.items():
        close(t, expected[name], dtype)


@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
def test_e1_every_activation_of_the_table_fuses(ref, activation):
    torch.manual_seed(0)
    module = cgm.GroupedMLP(G, H, F, activation=activation, dtype=torch.bfloat16)
    args = operands()
    got = step(module, *args)
    assert type(module.fuser.last_plan.forward_ops[0][0]) is cgm.FusedGroupedMLP
    for name, t in got.items():
        close(t, expected_step(module, *args)[name], torch.bfloat16)


FROZEN = {
    (): ["dgrad_act", "wgrad", "dgrad", "wgrad", "reduce"],
    ("x",): ["dgrad_act", "wgrad", "wgrad", "reduce"],
    ("probs",): ["dgrad_act", "wgrad", "dgrad", "wgrad"],
    ("fc1.weight",): ["dgrad_act", "wgrad", "dgrad", "reduce"],
    ("fc2.weight",): ["dgrad_act", "dgrad", "wgrad", "reduce"],
    ("x", "probs", "fc1.weight"): ["wgrad"],
    ("x", "fc1.weight", "fc2.weight"): ["dgrad_act", "reduce"],
    ("probs", "fc1.weight", "fc2.weight"): ["dgrad_act", "dgrad"],
    ("x", "probs", "fc1.weight", "fc2.weight"): [],
}


@pytest.mark.parametrize("frozen", FROZEN, ids=lambda f: " ".join(f) or "none")
def test_e4_only_what_is_needed_is_launched(ref, frozen):
    torch.manual_seed(0)
    module = cgm.GroupedMLP(G, H, F, dtype=torch.bfloat16)
    args = operands()
    full = step(module, *args)
    ref.launches.clear()
    got = step(module, *args, frozen=frozen)
    assert ref.names() == ["fprop_act", "fprop", *FROZEN[frozen]]
    assert ref.launches[0].store_z == ("dgrad_act" in FROZEN[frozen])
    assert set(got) == set(full) - set(frozen)
    assert all(torch.equal(got[name], full[name]) for name in got)
    acts = [spec for spec in ref.launches if spec.kernel.value == "dgrad_act"]
    assert all(spec.store_act == ("fc2.weight" not in frozen) for spec in acts)
    assert all(spec.sum_probs == ("probs" not in frozen) for spec in acts)


def test_e4_frozen_with_biases(ref):
    torch.manual_seed(0)
    module = cgm.GroupedMLP(G, H, F, bias=True, dtype=torch.bfloat16)
    args = operands()
    full = step(module, *args)
    for frozen in (("fc1.bias",), ("fc2.bias",), ("x", "probs", "fc1.weight", "fc2.weight", "fc2.bias")):
        got = step(module, *args, frozen=frozen)
        assert all(torch.equal(got[name], full[name]) for name in got)


@pytest.mark.parametrize("fused", [True, False])
def test_a_float64_scale_gets_a_float64_gradient(ref, fused):
    module = cgm.GroupedMLP(G, H, F, bias=True, scale_bias=True, dtype=torch.bfloat16)
    x, sizes, probs, dy = operands(probs_dtype=torch.float32)
    found = []
    for dtype in (torch.float32, torch.float64):
        rows = probs.detach().to(dtype).requires_grad_()
        with cgm.settings.override(fuse=fused):
            y = module(x, sizes, rows)
            (grad,) = torch.autograd.grad(y, rows, dy)
            assert cgm.explain(module, x, sizes, rows).problems == ()
        assert grad.dtype is dtype
        found.append((y, grad.double()))
    for single, double in zip(*found, strict=True):
        torch.testing.assert_close(double, single, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("same", [True, False])
def test_e2_scaled_bias_of_fc2(ref, same):
    torch.manual_seed(0)
    module = cgm.Sequential(
        cgm.GroupedLinear(G, H, 2 * F, dtype=torch.bfloat16),
        cgm.ScaledSwiGLU(),
        cgm.GroupedLinear(G, F, H, scale_bias=True, dtype=torch.bfloat16),
    )
    x, sizes, probs, dy = operands()
    probs.requires_grad_()
    scale = probs if same else torch.rand(T, dtype=torch.bfloat16, requires_grad=True)
    y = module(x, sizes, probs, sizes, scale)
    assert type(module.fuser.last_plan.forward_ops[0][0]) is cgm.FusedGroupedMLP
    y.backward(dy)
    s = reference.grouped_mlp(
        x, module[0].weight, module[2].weight, sizes, probs, dy, b1=module[0].bias, b2=module[2].bias, scale=scale
    )
    close(y.detach(), s.y, torch.bfloat16)
    close(module[2].bias.grad, s.db2, torch.bfloat16)
    if same:
        close(probs.grad, s.dprobs + s.dscale, torch.bfloat16)
    else:
        close(probs.grad, s.dprobs, torch.bfloat16)
        close(scale.grad, s.dscale, torch.bfloat16)
    mlp = cgm.GroupedMLP(G, H, F, bias=True, scale_bias=True, dtype=torch.bfloat16)
    mlp.load_state_dict(dict(zip(mlp.state_dict(), module.state_dict().values(), strict=True)))
    if same:
        assert torch.equal(mlp(x, sizes, probs), y)
    assert mlp(x, sizes).shape == y.shape


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("delay", [False, True])
@pytest.mark.parametrize("main_dtype", [torch.float32, torch.bfloat16])
def test_e3_n2_fused_main_grad(ref, main_dtype, delay, overwrite):
    torch.manual_seed(0)
    options = {"accumulate_into_main_grad": True, "delay_wgrad_compute": delay}
    module = cgm.GroupedMLP(G, H, F, dtype=torch.bfloat16, **options)
    args = operands()
    for w in module.parameters():
        w.main_grad = torch.full(w.shape, float("nan") if overwrite else 7.0, dtype=main_dtype)
        w.overwrite_main_grad, w.grad_added_to_main_grad = overwrite, False
    got = step(module, *args)
    assert type(module.fuser.last_plan.forward_ops[0][0]) is cgm.FusedGroupedMLP
    module.backward_dw()
    expected = expected_step(module, *args, storage=torch.bfloat16)
    for name, w in module.named_parameters():
        assert w.grad_added_to_main_grad
        assert got[name] is not None
        close(w.main_grad, expected[name] + (0.0 if overwrite else 7.0), torch.bfloat16)
        assert (w.main_grad[1] == (0 if overwrite else 7)).all()
    specs = [spec for spec in ref.launches if spec.kernel.value == "wgrad"]
    assert len(specs) == 2
    assert all(spec.accumulate is not overwrite for spec in specs)
    assert all((spec.out is not None) == (main_dtype is torch.float32) for spec in specs)


def test_e3_main_grad_that_changes_between_forward_and_backward(ref):
    module = cgm.GroupedMLP(G, H, F, dtype=torch.bfloat16, accumulate_into_main_grad=True)
    x, sizes, probs, dy = operands()
    for w in module.parameters():
        w.main_grad, w.overwrite_main_grad = torch.full(w.shape, float("nan")), True
    y = module(x, sizes, probs)
    for w in module.parameters():
        w.main_grad, w.overwrite_main_grad = torch.full(w.shape, 0.5, dtype=torch.bfloat16), False
    y.backward(dy)
    expected = expected_step(module, x, sizes, probs, dy)
    for name, w in module.named_parameters():
        close(w.main_grad.float() - 0.5, expected[name], torch.bfloat16)


def test_discrete_weights_fuse_while_they_are_packed(ref):
    torch.manual_seed(0)
    module = cgm.GroupedMLP(G, H, F, single_grouped_weight=False, dtype=torch.bfloat16)
    one = cgm.GroupedMLP(G, H, F, dtype=torch.bfloat16)
    with torch.no_grad():
        one.fc1.weight.copy_(module.fc1.packed_weight())
        one.fc2.weight.copy_(module.fc2.packed_weight())
    args = operands()
    got, want = step(module, *args), step(one, *args)
    assert type(module.fuser.last_plan.forward_ops[0][0]) is cgm.FusedGroupedMLP
    for name in ("y", "x", "probs"):
        assert torch.equal(got[name], want[name])
    for g in range(G):
        assert torch.equal(got[f"fc1.weight{g}"], want["fc1.weight"][g])
        assert torch.equal(got[f"fc2.weight{g}"], want["fc2.weight"][g])
    module.fc2.weight1 = torch.nn.Parameter(module.fc2.weight1.detach().clone())
    again = step(module, *args)
    (rejection,) = module.fuser.last_plan.rejections
    assert "FC2's weights are not one packed storage" in str(rejection)
    close(again["y"], want["y"].double(), torch.bfloat16)


def test_n3_nan_past_the_sum_reaches_nothing(ref):
    torch.manual_seed(0)
    module = cgm.GroupedMLP(G, H, F, bias=True, dtype=torch.bfloat16)
    x, sizes, probs, dy = operands()
    total = sum(SIZES)
    clean = step(module, x, sizes, probs, dy)
    dirty = [t.detach().clone() for t in (x, probs, dy)]
    for t in dirty:
        t[total:] = float("nan")
    got = step(module, dirty[0], sizes, dirty[1], dirty[2])
    for name in clean:
        assert torch.equal(got[name], clean[name]), name
    for name in ("y", "x", "probs"):
        assert not got[name][total:].any()


@pytest.mark.parametrize("tokens", [0, T])
def test_k1_e9_no_tokens_and_only_empty_groups_fused(ref, tokens):
    module = cgm.GroupedMLP(G, H, F, bias=True, dtype=torch.bfloat16)
    x, probs = torch.randn(tokens, H).bfloat16(), torch.rand(tokens)
    got = step(module, x, torch.zeros(G, dtype=torch.int32), probs, torch.ones(tokens, H).bfloat16())
    assert set(got) == {"y", *NAMES}
    assert all(not t.any() for t in got.values())
    assert got["x"].shape == (tokens, H)
    assert bool(ref.launches) == bool(tokens)


def test_e7_caller_buffers(ref):
    module = cgm.GroupedMLP(G, H, F, dtype=torch.bfloat16)
    x, sizes, probs, dy = operands()
    expected = step(module, x, sizes, probs, dy)
    for recipe in (None, cgm.HighPrecision(enable_cutedsl_fused_grouped_mlp=False)):
        out, grad = (torch.empty(T, H, dtype=torch.bfloat16) for _ in range(2))
        kwargs = {module.fc2: {"output": out}, module.fc1: {"grad_input": grad}}
        with cgm.autocast(recipe=recipe):
            y = module(x, sizes, probs, op_kwargs=kwargs)
        assert y.data_ptr() == out.data_ptr()
        (dx,) = torch.autograd.grad(y, x, dy)
        assert dx.data_ptr() == grad.data_ptr()
        close(out.detach(), expected["y"].double(), torch.bfloat16)
        close(grad, expected["x"].double(), torch.bfloat16)
    for wrong in (torch.empty(T, H), torch.empty(T, H + 1, dtype=torch.bfloat16), torch.empty(H, T).bfloat16().t()):
        with pytest.raises(cgm.ShapeError, match="output"):
            module(x, sizes, probs, op_kwargs={module.fc2: {"output": wrong}})
    with pytest.raises(cgm.ShapeError, match="between the fused operations"):
        module(x, sizes, probs, op_kwargs={module.fc1: {"output": torch.empty(T, 2 * F, dtype=torch.bfloat16)}})
    with pytest.raises(TypeError, match="got bogus"):
        module(x, sizes, probs, op_kwargs={module.fc1: {"bogus": 1}})


def test_k5_fused_wrong_arguments(ref):
    module = cgm.GroupedMLP(G, H, F, dtype=torch.bfloat16)
    x, sizes, probs, _ = operands()
    message = r"fused grouped MLP: input has shape.*split_sizes has shape.*probs has shape"
    with pytest.raises(cgm.ShapeError, match=message):
        module(x[:, :8], sizes[:2], probs[:3])
    with pytest.raises(cgm.ShapeError, match="split_sizes is NoneType"):
        module(x, None, probs)
    with pytest.raises(cgm.ShapeError, match=r"input is torch\.float32"):
        module(x.float(), sizes, probs)
    pipeline = cgm.Sequential(*module)
    with pytest.raises(cgm.ShapeError, match="second split_sizes has shape"):
        pipeline(x, sizes, probs, sizes[:3])


def test_fused_leading_dimensions_strides_and_split_types(ref):
    module = cgm.GroupedMLP(G, H, F, dtype=torch.bfloat16)
    x, sizes, probs, _ = operands()
    y = module(x, sizes, probs)
    assert torch.equal(module(x.view(5, 8, H), sizes, probs.view(5, 8)), y.view(5, 8, H))
    assert torch.equal(module(x, sizes.int(), probs), y)
    assert torch.equal(module(x, sizes_of("strided"), probs), y)
    wide = torch.zeros(T, 2 * H, dtype=torch.bfloat16)
    wide[:, H:] = x
    assert torch.equal(module(wide[:, H:], sizes, torch.stack((probs, probs), 1)[:, 0]), y)


def test_m2_200_values_of_t_make_no_table_grow(ref):
    module = cgm.GroupedMLP(G, H, F, dtype=torch.bfloat16)

    def run(tokens):
        x = torch.randn(tokens, H).bfloat16().requires_grad_()
        sizes = torch.full((G,), tokens // G)
        module(x, sizes, torch.rand(tokens)).sum().backward()

    for power in range(12):
        run(1 << power)
    prepared = len(ref.prepared)
    op = module.fuser.last_plan.forward_ops[0][0]
    tables = len(op._tables)
    for tokens in range(1, 201):
        run(tokens)
    assert len(ref.prepared) == prepared
    assert len(op._tables) == tables


def test_e11_runs_are_bitwise_equal(ref):
    torch.manual_seed(0)
    module = cgm.GroupedMLP(G, H, F, bias=True, dtype=torch.bfloat16)
    args = operands()
    first = step(module, *args)
    for _ in range(3):
        again = step(module, *args)
        assert all(torch.equal(first[name], again[name]) for name in first)


class NoKernels(ReferenceKernels):
    """Kernels that do nothing: what is left is the host's work."""

    def get(self, spec):
        return lambda *arguments: None


def test_h3_no_host_reads_and_no_python_work_that_grows_with_groups(monkeypatch):
    def forbidden(*_, **__):
        raise AssertionError("a host read in the hot path")

    def calls_of(groups):
        module = cgm.GroupedMLP(groups, H, F, bias=True, dtype=torch.bfloat16)
        x = torch.zeros(groups * 4, H, dtype=torch.bfloat16, requires_grad=True)
        sizes, probs = torch.full((groups,), 4), torch.ones(groups * 4, requires_grad=True)
        module(x, sizes, probs).sum().backward()
        counts = []
        for _ in range(2):
            seen = 0

            def count(frame, event, argument):
                nonlocal seen
                seen += event in ("call", "c_call")

            with monkeypatch.context() as patch:
                for name in ("tolist", "item", "numpy", "cpu"):
                    patch.setattr(torch.Tensor, name, forbidden)
                patch.setattr(torch, "from_dlpack", forbidden)
                sys.setprofile(count)
                try:
                    y = module(x, sizes, probs)
                    y.sum().backward()
                finally:
                    sys.setprofile(None)
            counts.append(seen)
        return min(counts)

    with kernels.using(NoKernels()):
        assert calls_of(4) == calls_of(64) == calls_of(256) > 0


@pytest.mark.parametrize("fuse", [True, False])
def test_torch_autocast_casts_inputs_and_weights(ref, fuse):
    torch.manual_seed(0)
    module = cgm.GroupedMLP(G, H, F, dtype=torch.float32)
    x, sizes, probs, dy = operands(torch.float32)
    recipe = cgm.HighPrecision(enable_cutedsl_fused_grouped_mlp=fuse)
    with torch.autocast("cpu", torch.bfloat16), cgm.autocast(recipe=recipe):
        got = step(module, x, sizes, probs, dy.bfloat16())
    assert (type(module.fuser.last_plan.forward_ops[0][0]) is cgm.FusedGroupedMLP) is fuse
    assert got["y"].dtype is torch.bfloat16
    assert got["x"].dtype is torch.float32
    assert got["fc1.weight"].dtype is torch.float32
    half = cgm.GroupedMLP(G, H, F, dtype=torch.bfloat16)
    half.load_state_dict(module.state_dict())
    expected = expected_step(half, x.bfloat16(), sizes, probs, dy.bfloat16(), round_grad=not fuse)
    for name, t in got.items():
        close(t, expected[name], torch.bfloat16)


def test_kernels_are_prepared_before_the_first_launch(ref):
    class Cold(ReferenceKernels):
        def prepare(self, specs, device):
            assert not self.launches
            raise cgm.UnsupportedError("a cold kernel", [s.name for s in specs])

    module = cgm.GroupedMLP(G, H, F, dtype=torch.bfloat16)
    x, sizes, probs, _ = operands()
    args = (x.requires_grad_(), sizes, probs.requires_grad_())
    with kernels.using(Cold()), pytest.raises(cgm.UnsupportedError, match=r"fprop_act.*dgrad_act.*reduce"):
        module(*args)


def test_e8_evaluation_between_training_steps_drops_nothing(ref):
    torch.manual_seed(0)
    module = cgm.GroupedMLP(G, H, F, dtype=torch.bfloat16)
    x, sizes, probs, dy = operands()
    expected = step(module, x, sizes, probs, dy)
    y = module(x, sizes, probs)
    with torch.no_grad():
        other = module(torch.zeros_like(x), sizes, probs)
    with torch.inference_mode():
        module(torch.zeros_like(x), sizes, probs)
    assert not other.requires_grad
    for t in (x, probs, *module.parameters()):
        t.grad = None
    y.backward(dy)
    assert torch.equal(x.grad, expected["x"])
    assert torch.equal(module.fc1.weight.grad, expected["fc1.weight"])
