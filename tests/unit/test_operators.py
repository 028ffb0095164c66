"""E10: the operators themselves, on the CPU: opcheck, every shape and type, fake and meta tensors, configurations."""

import pytest
import torch

import cute_grouped_mlp as cgm
from cute_grouped_mlp import kernels
from cute_grouped_mlp.errors import FusionFallbackWarning
from cute_grouped_mlp.operators import NEEDS, Configuration
from cute_grouped_mlp.reference_kernels import ReferenceKernels
from cute_grouped_mlp.step import NEED_B1, NEED_B2, NEED_PROBS, NEED_SCALE, NEED_W1, NEED_W2, NEED_X

G, T = 3, 20
ALL = sum(NEEDS)
OPTIONS = [
    {},
    {"bias": True, "scale_bias": True},
    {"activation": "clamped_qgeglu", "limit": 5.0},
    {"activation": "srelu", "bias": True},
    {"single_grouped_weight": False},
]
forward, backward = torch.ops.cute_grouped_mlp.mlp_forward, torch.ops.cute_grouped_mlp.mlp_backward
reading_sizes = torch.ops.cute_grouped_mlp.mlp_forward_reading_sizes


class OnlyThere(ReferenceKernels):
    """Kernels that run on the CPU and nowhere else, as the real ones run on a GPU and nowhere else."""

    def unsupported(self, device):
        return () if device.type == "cpu" else (f"kernels need the CPU, the tensors are on {device}",)


@pytest.fixture(params=["kernels", "plain torch"])
def provider(request):
    if request.param == "plain torch":
        yield None
        return
    with kernels.using(OnlyThere()) as found:
        yield found


def make(hidden=16, ffn=24, dtype=torch.bfloat16, **options):
    torch.manual_seed(0)
    return cgm.GroupedMLP(G, hidden, ffn, dtype=dtype, **options)


def inputs(module, tokens=T, **like):
    generator = torch.Generator().manual_seed(1)
    weight = module.fc1.weights()[0]
    x = torch.randn(tokens, weight.shape[-1], generator=generator).to(weight.dtype).requires_grad_()
    return x, torch.tensor([tokens // 2, 0, tokens // 4]), torch.rand(tokens, generator=generator).requires_grad_()


def step(call, x, sizes, probs, parameters):
    y = call(x, sizes, probs)
    return [y.detach(), *torch.autograd.grad(y, (x, probs, *parameters), torch.ones_like(y))]


def assert_same(one, other):
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("hidden", "ffn"), [(32, 37), (32, 12), (30, 7)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_e10_fullgraph_in_plain_torch(hidden, ffn, dtype, options):
    """Clients' tests have features that no kernel takes; on the CPU nothing has kernels."""
    torch.compiler.reset()
    module = make(hidden, ffn, dtype, **options)
    graph = torch.compile(module, backend="aot_eager", fullgraph=True)
    parameters = list(module.parameters())
    for tokens in (T, 0):
        expected = step(module, *inputs(module, tokens), parameters)
        assert_same(step(graph, *inputs(module, tokens), parameters), expected)


@pytest.mark.parametrize("features", [(32, 37), (32, 12)])
def test_e10_features_that_no_kernel_takes_are_said(provider, features, caplog):
    torch.compiler.reset()
    module, recipe = make(*features), cgm.HighPrecision(enable_cutedsl_fused_grouped_mlp=True)
    graph = torch.compile(module, backend="aot_eager", fullgraph=True)
    with cgm.autocast(recipe=recipe), pytest.warns(FusionFallbackWarning, match=r"HighPrecision\.enable_.* is True"):
        graph(*inputs(module))


def arguments(module, layout="rows"):
    x, sizes, probs = inputs(module)
    if layout == "columns":
        x = x.detach().t().contiguous().t().requires_grad_()
    fc1, activation, fc2 = module
    scale = torch.rand(T, requires_grad=True) if fc2.scale_bias else None
    configuration = str(Configuration(activation.activation, activation.glu_interleave_size, activation.params))
    biases = 0 if fc1.bias is not None else NEED_B1 | NEED_B2
    needs = ALL & ~(biases | (0 if scale is not None else NEED_SCALE))
    return (x, fc1.weights(), fc1.bias, probs, sizes, fc2.weights(), fc2.bias, scale, sizes, configuration, needs)


@pytest.mark.parametrize("layout", ["rows", "columns"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_e10_opcheck(provider, options, layout):
    """torch.library.opcheck: schema, fake tensors, autograd registration and AOT dispatch with dynamic shapes."""
    args = arguments(make(**options), layout)
    torch.library.opcheck(forward, args)
    y, z, a = forward(*args)
    x, w1, b1, probs, sizes1, w2, b2, scale, sizes2, configuration, needs = args
    w1, w2 = ([w.detach() for w in weights] for weights in (w1, w2))
    plain = [None if t is None else t.detach() for t in (y, x, b2, z, a, probs, scale)]
    dy, x, b2, z, a, probs, scale = plain
    saved = (dy, x, w1, b1 is not None, w2, b2, z, a, probs, scale, sizes1, sizes2, configuration, needs)
    torch.library.opcheck(backward, saved)


def test_e10_opcheck_of_features_that_no_kernel_takes(provider):
    torch.library.opcheck(reading_sizes, arguments(make(32, 37, bias=True, scale_bias=True)))


def test_e10_what_reads_sizes_on_the_host_is_no_part_of_a_cuda_graph(provider):
    """Inductor captures no operator with the tag; where kernels run nothing is read, and the operator has none."""
    graphs = []

    def backend(graph, _):
        graphs[:] = [graph]
        return graph

    for features, kernel in (((16, 24), provider is not None), ((32, 37), False)):
        torch.compiler.reset()
        module = make(*features)
        with torch.no_grad():
            torch.compile(module, backend=backend, fullgraph=True)(*inputs(module))
        (called,) = {node.target for node in graphs[0].graph.nodes if "mlp_forward" in str(node.target)}
        assert called is (forward if kernel else reading_sizes)
        assert (torch.Tag.cudagraph_unsafe in called.default.tags) is not kernel


@pytest.mark.parametrize("needs", [0, NEED_W2, NEED_B2, NEED_PROBS, NEED_X, NEED_W1 | NEED_W2])
def test_e10_only_what_is_needed_is_kept_and_returned(provider, needs):
    *args, _ = arguments(make(bias=True))
    with torch.no_grad():
        y, z, a = forward(*args, needs)
    assert y.shape == (T, 16)
    assert (z.shape == (T, 48)) is bool(needs & (NEED_X | NEED_W1 | NEED_PROBS))
    assert (a.shape == (T, 24)) is (needs == NEED_W2)
    x, w1, _, probs, sizes, w2, b2, scale, *_, configuration = args
    with torch.no_grad():
        grads = backward(y, x, w1, True, w2, b2, z, a, probs, scale, sizes, sizes, configuration, needs)
    assert len(grads) == needs.bit_count()


def test_e10_meta_tensors_have_a_forward(provider):
    *args, configuration, needs = arguments(make(bias=True))
    meta = [None if t is None else [w.to("meta") for w in t] if isinstance(t, list) else t.to("meta") for t in args]
    y, z, a = forward(*meta, configuration, needs)
    assert [t.shape for t in (y, z, a)] == [(T, 16), (T, 48), (0,)]
    assert {t.device.type for t in (y, z, a)} == {"meta"}


def test_e10_a_functional_call_is_planned_from_its_tensors():
    """F15: a module on the meta device, with parameters where kernels run; and the other way round."""
    torch.compiler.reset()
    module, real = make(bias=True), make(bias=True)
    parameters = {name: p.detach().clone().requires_grad_() for name, p in real.named_parameters()}
    module.to("meta")

    def call(*args):
        return torch.func.functional_call(module, parameters, args)

    with kernels.using(OnlyThere()) as provider:
        graph = torch.compile(call, backend="aot_eager", fullgraph=True)
        found = step(graph, *inputs(real), parameters.values())
        assert "fprop_act" in provider.names()
        assert_same(found, step(real, *inputs(real), list(real.parameters())))
        provider.launches.clear()
        on_meta = {name: p.detach().to("meta") for name, p in parameters.items()}
        arguments = [t.detach().to("meta") for t in inputs(real)]
        y = torch.compile(
            lambda *args: torch.func.functional_call(real, on_meta, args), backend="aot_eager", fullgraph=True
        )(*arguments)
        assert y.device.type == "meta"
        assert not provider.launches


def test_e10_weights_as_a_list_are_read_where_they_are(provider, monkeypatch):
    """One storage in order is read as it is; weights that were replaced are copied together, and the numbers stay."""
    torch.compiler.reset()
    module = make(single_grouped_weight=False)
    parameters = list(module.parameters())
    expected = step(module, *inputs(module), parameters)
    copies, stack = [], torch.stack
    monkeypatch.setattr(torch, "stack", lambda *args: copies.append(args) or stack(*args))
    graph = torch.compile(module, backend="aot_eager", fullgraph=True)
    assert_same(step(graph, *inputs(module), parameters), expected)
    assert not copies
    module.fc1.weight1 = torch.nn.Parameter(module.fc1.weight1.detach().clone())
    found = step(graph, *inputs(module), list(module.parameters()))
    assert copies
    assert_same(found, expected)


def test_e10_frozen_weights_of_a_list(provider):
    torch.compiler.reset()
    module = make(single_grouped_weight=False)
    module.fc1.weight0.requires_grad_(False)
    trained = [p for p in module.parameters() if p.requires_grad]
    graph = torch.compile(module, backend="aot_eager", fullgraph=True)
    assert_same(step(graph, *inputs(module), trained), step(module, *inputs(module), trained))


def test_e10_torch_autocast_does_not_reach_into_the_operator(provider):
    *args, needs = arguments(make())
    expected = forward(*args, needs)
    with torch.autocast("cpu", dtype=torch.float16):
        assert_same([t.detach() for t in forward(*args, needs)], [t.detach() for t in expected])


def test_e10_a_wrong_argument_is_named(provider):
    x, w1, b1, probs, sizes, *rest = arguments(make())
    with pytest.raises(cgm.ShapeError, match=r"split_sizes has shape \(2,\)"):
        forward(x, w1, b1, probs, sizes[:2], *rest)
    with pytest.raises(cgm.ShapeError, match=r"input is torch\.float32, the weight is torch\.bfloat16"):
        forward(x.float(), w1, b1, probs, sizes, *rest)
    with pytest.raises(cgm.ShapeError, match=r"probs has shape \(3,\)"):
        forward(x, w1, b1, probs[:3], sizes, *rest)


@pytest.mark.parametrize(
    "text", ["", "{}", '{"activation": "swiglu", "other": 1}', '{"activation": "swiglu", "fusion": "x"}']
)
def test_e10_a_wrong_configuration_is_named(text):
    *args, _, needs = arguments(make())
    with pytest.raises(cgm.ConfigError, match=r"configuration|fusion"):
        forward(*args, text, needs)


def test_e10_a_configuration_is_its_text():
    found = Configuration("situglu", 32, (0.1, 25.0), "off")
    assert Configuration.parse(str(found)) == found
