"""The plain-torch reference, and the reference of each kernel (acceptance.md, section E)."""

import ast
import itertools

import pytest
import torch
from references import activation

import cute_grouped_mlp as cgm
from cute_grouped_mlp import reference
from cute_grouped_mlp.codegen.activations import ACTIVATIONS
from cute_grouped_mlp.codegen.select import step_specs
from cute_grouped_mlp.codegen.signature import gemm_tensors
from cute_grouped_mlp.codegen.spec import Arch, DType, GluLayout, KernelSpec, Pass, Schedule, TileConfig
from cute_grouped_mlp.reference_kernels import example_arguments, reference_kernel

#: Parameters as they are by default, smaller, and smallest.
SCALES = (1.0, 0.5, 0.1)
CASES = [
    (name, tuple(scale * value for _, value in entry.params))
    for name, entry in ACTIVATIONS.items()
    for scale in SCALES[: len(SCALES) if entry.params else 1]
]


@pytest.mark.parametrize("interleave", [None, 32])
@pytest.mark.parametrize(("name", "params"), CASES)
def test_activation_and_its_gradient_equal_autograds(name, params, interleave):
    torch.manual_seed(0)
    entry = ACTIVATIONS[name]
    if not entry.glu and interleave:
        pytest.skip("no halves")
    z = torch.randn(7, 128 if entry.glu else 64, dtype=torch.float64, requires_grad=True)
    probs = torch.rand(7, dtype=torch.float64, requires_grad=True)
    a = reference.activation_forward(name, z, probs, interleave, params)
    halves = reference.split_glu(z, interleave) if entry.glu else (z,)
    expected = activation(name, halves, params) * probs[:, None]
    torch.testing.assert_close(a, expected)
    grad = torch.randn_like(a)
    dz, dprobs = torch.autograd.grad(expected, (z, probs), grad)
    got_dz, got_dprobs = reference.activation_backward(name, grad, z.detach(), probs.detach(), interleave, params)
    torch.testing.assert_close(got_dz, dz)
    torch.testing.assert_close(got_dprobs, dprobs)
    got_dz, got_dprobs = reference.activation_backward(name, grad, z.detach(), None, interleave, params)
    assert got_dprobs is None
    torch.testing.assert_close(
        got_dz, torch.autograd.grad(activation(name, _halves(entry, z, interleave), params), z, grad)[0]
    )


def _halves(entry, z, interleave):
    return reference.split_glu(z, interleave) if entry.glu else (z,)


def test_n11_split_and_join_are_inverse_and_blocks_are_as_documented():
    z = torch.arange(128.0).reshape(1, 128)
    gate, up = reference.split_glu(z, 32)
    assert gate[0].tolist() == [*range(32), *range(64, 96)]
    assert up[0].tolist() == [*range(32, 64), *range(96, 128)]
    assert torch.equal(reference.join_glu(gate, up, 32), z)
    assert torch.equal(reference.join_glu(*reference.split_glu(z, None), None), z)


def test_unknown_activation():
    with pytest.raises(KeyError, match=r"there are: .*swiglu"):
        reference.activation_forward("relu6", torch.zeros(1), None)


def test_offsets_are_clamped():
    assert reference.offsets(torch.tensor([2, 0, 3]), 9) == ([0, 2, 2, 5], True)
    assert reference.offsets([4, -1, 9], 6) == ([0, 4, 4, 6], False)
    assert reference.offsets([], 3) == ([0], True)


def test_step_in_float64_equals_autograd():
    torch.manual_seed(0)
    tokens, hidden, ffn, sizes = 13, 8, 6, [4, 0, 7]
    x = torch.randn(tokens, hidden, dtype=torch.float64, requires_grad=True)
    w1 = torch.randn(3, 2 * ffn, hidden, dtype=torch.float64, requires_grad=True)
    w2 = torch.randn(3, hidden, ffn, dtype=torch.float64, requires_grad=True)
    probs = torch.rand(tokens, dtype=torch.float64, requires_grad=True)
    rows = torch.repeat_interleave(torch.arange(3), torch.tensor(sizes))
    z = torch.einsum("th,tnh->tn", x[:11], w1[rows])
    a = activation("swiglu", z.chunk(2, -1), ()) * probs[:11, None]
    y = torch.cat((torch.einsum("tf,thf->th", a, w2[rows]), torch.zeros(2, hidden, dtype=torch.float64)))
    dy = torch.randn_like(y)
    dx, dw1, dw2, dprobs = torch.autograd.grad(y, (x, w1, w2, probs), dy)
    step = reference.grouped_mlp(x, w1, w2, sizes, probs, dy)
    for got, want in zip((step.y, step.dx, step.dw1, step.dw2, step.dprobs), (y, dx, dw1, dw2, dprobs), strict=True):
        torch.testing.assert_close(got, want)
    without = reference.grouped_mlp(x, w1, w2, sizes, None, dy)
    ones = reference.grouped_mlp(x, w1, w2, sizes, torch.ones_like(probs), dy)
    assert without.dprobs is None
    assert torch.equal(without.dx, ones.dx)


def test_step_rounds_to_storage():
    torch.manual_seed(0)
    x, w1, w2 = (torch.randn(*s).bfloat16() for s in ((5, 8), (1, 12, 8), (1, 8, 6)))
    step = reference.grouped_mlp(x, w1, w2, [5], torch.rand(5), torch.randn(5, 8).bfloat16())
    for t in (step.y, step.z, step.a, step.dx, step.dw1, step.dw2, step.dz):
        assert torch.equal(t, t.bfloat16().double())
    assert torch.equal(step.dprobs, step.dprobs.float().double())
    assert not torch.equal(step.dprobs, step.dprobs.bfloat16().double())


def test_group_of_rows():
    rows = reference.group_of_rows([0, 2, 2, 5], 7, torch.device("cpu"))
    assert rows.tolist() == [0, 0, 2, 2, 2, 3, 3]


# The kernels' contract -----------------------------------------------------------------------------------------------


def all_specs(activation="swiglu", probs=DType.FP32):
    chosen = step_specs(
        Arch.SM90A,
        "bf16",
        activation,
        GluLayout.CONTIGUOUS,
        probs,
        tokens=64,
        groups=3,
        hidden=16,
        ffn=24,
        backward=True,
    )
    return list(chosen.all)


@pytest.mark.parametrize("activation", ["swiglu", "clamped_qgeglu", "srelu"])
@pytest.mark.parametrize("probs", [None, DType.FP32, DType.BF16])
def test_reference_kernels_write_every_element_and_note_bad_splits(activation, probs):
    for spec in all_specs(activation, probs):
        arguments, outputs = example_arguments(spec, sizes=[5, 0, 20], tokens=30, n=24, k=16, device="cpu")
        assert all(torch.isnan(out).all() for out in outputs)
        reference_kernel(spec)(*arguments, 132)
        assert all(torch.isfinite(out).all() for out in outputs), spec.name
        if spec.kernel is Pass.REDUCE:
            continue
        status = next(a for a in arguments if isinstance(a, torch.Tensor) and a.shape == (1,))
        assert status.item() == 0
        if spec.kernel is Pass.WGRAD:
            assert not outputs[0][1].any()
        else:
            rows = [out[..., 25:] if out.dtype is torch.float32 else out[25:] for out in outputs]
            assert not any(tail.any() for tail in rows)
        arguments, _ = example_arguments(spec, sizes=[5, -2, 60], tokens=30, n=24, k=16, device="cpu")
        reference_kernel(spec)(*arguments, 132)
        assert next(a for a in arguments if isinstance(a, torch.Tensor) and a.shape == (1,)).item() == 1


@pytest.mark.parametrize("activation", ["swiglu", "clamped_qgeglu", "srelu"])
@pytest.mark.parametrize("probs", [None, DType.FP32])
def test_reference_kernels_take_the_arguments_of_the_rendered_ones(activation, probs):
    render = pytest.importorskip("cute_grouped_mlp.codegen.render").render
    for spec in all_specs(activation, probs):
        tree = ast.parse(render(spec).source)
        launch = next(n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "launch")
        names = [argument.arg for argument in launch.args.args]
        arguments, _ = example_arguments(spec, sizes=[5, 0, 20], tokens=30, n=24, k=16, device="cpu")
        assert names[-2:] == ["num_ctas", "stream"], spec.name
        assert len(names) - 2 == len(arguments), (spec.name, names)
        if spec.kernel.is_gemm:
            check_tensors(spec, names, arguments)
        kinds = ["Tensor" if isinstance(a, torch.Tensor) else "Float32" for a in arguments]
        annotations = [ast.unparse(a.annotation) for a in launch.args.args[:-2]]
        assert all(kind in annotation for kind, annotation in zip(kinds, annotations, strict=True)), spec.name
        params = {} if spec.activation is None else dict(ACTIVATIONS[spec.activation].params)
        numbers = {n: a for n, a in zip(names, arguments, strict=False) if not isinstance(a, torch.Tensor)}
        assert numbers == params, spec.name


TYPES = {"BFloat16": torch.bfloat16, "Float16": torch.float16, "Float32": torch.float32, "Int32": torch.int32}


def check_tensors(spec, names, arguments):
    """Each tensor has the type and the extents of the parameter in its place; all extents differ."""
    glu = 2 if spec.activation is not None and ACTIVATIONS[spec.activation].glu else 1
    extents = {"tokens": 30, "groups": 3, "contraction": 16, "columns": 24, "z_columns": 24 * glu, "1": 1}
    if spec.kernel is Pass.WGRAD:
        extents |= {"rows": 24, "columns": 16}
    if spec.tile is not None:
        extents["n_tiles"] = -(-24 // spec.tile.tile_n)
    declared = gemm_tensors(spec)
    assert names[: len(declared)] == [argument.name for argument in declared]
    for argument, given in zip(declared, arguments, strict=False):
        assert given.dtype is TYPES[argument.dtype], (spec.name, argument.name)
        assert given.shape == tuple(extents[e] for e in argument.shape), (spec.name, argument.name)
    assert not any(isinstance(a, torch.Tensor) for a in arguments[len(declared) :])


def test_reference_kernels_take_each_tensor_in_its_place():
    """In every variant of every GEMM: optional tensors come and go, and the others stay in their order."""
    tile = TileConfig(128, 128, 1, 1, Schedule.PINGPONG)
    switches = {
        Pass.FPROP_ACT: ("alpha", "bias", "store_z"),
        Pass.FPROP: ("alpha", "bias"),
        Pass.DGRAD_ACT: ("alpha", "store_act", "sum_probs"),
        Pass.DGRAD: ("alpha",),
        Pass.WGRAD: ("alpha", "accumulate"),
    }
    seen = 0
    for kernel, names in switches.items():
        for values in itertools.product((False, True), repeat=len(names)):
            given = dict(zip(names, values, strict=True))
            for probs in (None, DType.FP32, DType.BF16):
                scaled = kernel.has_activation or (kernel is Pass.FPROP and given["bias"])
                activation = "swiglu" if kernel.has_activation else None
                fields = {"activation": activation, "probs": probs if scaled else None, **given}
                spec = KernelSpec(Arch.SM90A, kernel, tile=tile, **fields)
                arguments, _ = example_arguments(spec, sizes=[5, 0, 20], tokens=30, n=24, k=16, device="cpu")
                check_tensors(spec, [argument.name for argument in gemm_tensors(spec)], arguments)
                reference_kernel(spec)(*arguments, 132)
                seen += 1
    assert seen == 3 * (8 + 4 + 8 + 2 + 4)


def test_reference_kernels_are_a_provider():
    from cute_grouped_mlp import kernels
    from cute_grouped_mlp.reference_kernels import ReferenceKernels

    before = kernels.provider()
    with kernels.using(ReferenceKernels()) as ref:
        assert kernels.provider() is ref
        spec = KernelSpec(Arch.SM90A, Pass.REDUCE, probs=DType.FP32)
        out = torch.empty(3)
        ref.get(spec)(torch.ones(2, 3), out, 132)
        assert out.tolist() == [2, 2, 2]
        assert ref.names() == ["reduce"]
    assert kernels.provider() is before
    assert cgm.kernels.provider() is before
