"""The fused grouped MLP on the CPU, with torch functions in the kernels' place."""

import sys

import pytest
import torch
from layers import SIZES, F, G, H, T, close, sizes_of
from references import expected_step

import cute_grouped_mlp as cgm
from cute_grouped_mlp import kernels, reference
from cute_grouped_mlp.codegen.activations import ACTIVATIONS
from cute_grouped_mlp.reference_kernels import ReferenceKernels

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


@pytest.mark.parametrize("sizes", [(2**32 + 5, 3), (5, 2**62, 2**62), (-(2**32) + 5, 3), (5, 2**31)], ids=str)
@pytest.mark.parametrize("fuse", [None, False])
@pytest.mark.parametrize("plain", [True, False])
def test_k5_sizes_beyond_32_bits_are_cut_and_reported(sizes, fuse, plain):
    """By kernels, fused and unfused, and in plain torch, as other sizes that are too large or negative are."""
    provider = kernels.provider() if plain else ReferenceKernels()
    with kernels.using(provider):
        module = cgm.GroupedMLP(len(sizes), H, F, dtype=torch.bfloat16)
        x = torch.randn(T, H).bfloat16()
        with torch.no_grad(), cgm.autocast(recipe=cgm.HighPrecision(enable_cutedsl_fused_grouped_mlp=fuse)):
            got = module(x, torch.tensor(sizes))
            rows = torch.tensor(reference.offsets(sizes, T)[0]).diff()
            with pytest.raises(cgm.ShapeError, match="split_sizes"):
                provider.check_status(x.device)
            assert torch.equal(got, module(x, rows))


PATHS = [None, cgm.HighPrecision(enable_cutedsl_fused_grouped_mlp=False), cgm.MXFP8BlockScaling()]


@pytest.mark.parametrize("recipe", PATHS, ids=["fused", "unfused", "emulated"])
@pytest.mark.parametrize("buffer", ["output", "grad_input"])
def test_e7_buffers_are_checked_before_the_first_launch(ref, recipe, buffer):
    """That of backward, too: when backward comes it is too late to say so."""
    hidden = 32
    module = cgm.GroupedMLP(G, hidden, F, dtype=torch.bfloat16)
    x = torch.randn(T, hidden).bfloat16().requires_grad_()
    sizes, probs = torch.tensor([T, *[0] * (G - 1)]), torch.rand(T)
    padded = torch.empty(T * hidden + 8, dtype=torch.bfloat16)
    wrong = {
        r"strides are \(1, \d+\), allowed: \(32, 1\)": torch.empty(hidden, T, dtype=torch.bfloat16).t(),
        "shares memory with the input": x.detach(),
        "shares memory with parameter or extra input 0": module.fc1.weight.detach()
        .flatten()[: T * hidden]
        .view(T, hidden)
        if module.fc1.weight.numel() >= T * hidden
        else x.detach(),
        "requires a gradient": torch.empty(T, hidden, dtype=torch.bfloat16, requires_grad=True),
        "has shape": torch.empty(T + 1, hidden, dtype=torch.bfloat16),
        "is torch.float32": torch.empty(T, hidden),
    }
    if module.fc1.weight.numel() < T * hidden:
        del wrong["shares memory with parameter or extra input 0"]
    if recipe is not PATHS[1]:
        wrong["starts 2 bytes behind a multiple of 16"] = padded[1 : 1 + T * hidden].view(T, hidden)
    layer = module.fc2 if buffer == "output" else module.fc1
    ref.launches.clear()
    for message, given in wrong.items():
        with cgm.autocast(recipe=recipe), pytest.raises(cgm.ShapeError, match=message) as error:
            module(x, sizes, probs, op_kwargs={layer: {buffer: given}})
        assert buffer in str(error.value)
    both = torch.empty(T, hidden, dtype=torch.bfloat16)
    with cgm.autocast(recipe=recipe), pytest.raises(cgm.ShapeError, match="shares memory with grad_input of"):
        module(x, sizes, probs, op_kwargs={module.fc1: {"grad_input": both}, module.fc2: {"output": both}})
    assert not ref.launches


def test_e7_every_violation_of_buffers_at_once(ref):
    module = cgm.GroupedMLP(G, H, F, dtype=torch.bfloat16)
    x, sizes, probs, _ = operands()
    x.requires_grad_()
    kwargs = {module.fc1: {"grad_input": torch.empty(3)}, module.fc2: {"output": torch.empty(2)}}
    with pytest.raises(cgm.ShapeError, match=r"grad_input has shape.*output has shape.*output is torch.float32"):
        module(x, sizes, probs, op_kwargs=kwargs)


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
