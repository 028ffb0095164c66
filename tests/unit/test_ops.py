"""GroupedLinear, activations and their modules on the CPU, with torch functions in the kernels' place."""

import pytest
import torch
from layers import SIZES, F, G, H, T, close, rows, sizes_of

import cute_grouped_mlp as cgm
from cute_grouped_mlp import kernels, reference
from cute_grouped_mlp.reference_kernels import ReferenceKernels


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
    with pytest.raises(cgm.ConfigError, match="not a multiple of glu_interleave_size 32"):
        cgm.GroupedMLP(G, H, 24, glu_interleave_size=32)
