"""Parameters and inputs that are no plain tensors: by experts sharded ones work, others are refused before a launch."""

import pytest
import torch
import torch.distributed as dist
from quantized_steps import is_fused
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh

import cute_grouped_mlp as cgm
from cute_grouped_mlp import kernels
from cute_grouped_mlp.reference_kernels import ReferenceKernels

G, H, F = 4, 16, 32
BF16 = torch.bfloat16


@pytest.fixture(scope="module")
def mesh(tmp_path_factory):
    store = tmp_path_factory.mktemp("store") / "s"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.fixture
def launched():
    with kernels.using(ReferenceKernels()) as provider:
        yield provider.launches


def module_of(**options):
    torch.manual_seed(0)
    return cgm.GroupedMLP(G, H, F, dtype=BF16, **options)


def inputs():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(20, H, generator=generator).to(BF16).requires_grad_()
    return x, torch.tensor([7, 0, 8, 5]), torch.rand(20, generator=generator).requires_grad_()


def step(module, x, sizes, probs):
    y = module(x, sizes, probs)
    params = list(module.parameters())
    grads = torch.autograd.grad(y, [x, probs, *params], torch.ones_like(y))
    return [y.detach(), *grads]


def plain(t):
    return t.full_tensor() if isinstance(t, DTensor) else t


@pytest.mark.parametrize("recipe", [None, cgm.MXFP8BlockScaling()], ids=["bf16", "mxfp8"])
@pytest.mark.parametrize("options", [{}, {"bias": True}, {"bias": True, "scale_bias": True}], ids=str)
@pytest.mark.parametrize("kernels_run", [True, False])
def test_weights_sharded_by_experts(mesh, recipe, options, kernels_run):
    """``distribute_tensor(weight, mesh, [Shard(0)])``: local experts, and gradients of the same placement."""
    provider = ReferenceKernels() if kernels_run else kernels.provider()
    with kernels.using(provider), cgm.autocast(recipe=recipe):
        module, args = module_of(**options), inputs()
        hidden = {"H": 32} if recipe is not None else {}
        if hidden:
            torch.manual_seed(0)
            module = cgm.GroupedMLP(G, 32, F, dtype=BF16, **options)
            args = (torch.randn(20, 32).to(BF16).requires_grad_(), *args[1:])
        expected = step(module, *args)
        for layer in (module.fc1, module.fc2):
            for name, p in list(layer.named_parameters()):
                setattr(layer, name, torch.nn.Parameter(distribute_tensor(p.detach(), mesh, [Shard(0)])))
        got = step(module, *args)
        assert is_fused(module) is kernels_run
        assert all(isinstance(g, DTensor) and g.placements == (Shard(0),) for g in got[3:])
        assert all(map(torch.equal, map(plain, got), expected))
        assert module.fc1.num_groups == G


@pytest.mark.parametrize("placement", [Replicate(), Shard(1), Partial()], ids=str)
def test_other_placements_say_what_to_do(mesh, launched, placement):
    module, args = module_of(), inputs()
    weight = module.fc1.weight.detach()
    sharded = DTensor.from_local(weight, mesh, [placement])
    module.fc1.weight = torch.nn.Parameter(sharded)
    with pytest.raises(cgm.ShapeError, match="Apply fully_shard to the GroupedMLP"):
        module(*args)
    assert not launched


def test_a_list_of_sharded_weights_is_refused(mesh, launched):
    module, args = module_of(single_grouped_weight=False), inputs()
    for g in range(G):
        weight = distribute_tensor(getattr(module.fc1, f"weight{g}").detach(), mesh, [Shard(0)])
        setattr(module.fc1, f"weight{g}", torch.nn.Parameter(weight))
    with pytest.raises(cgm.ShapeError, match="single_grouped_weight"):
        module(*args)
    assert not launched


@pytest.mark.parametrize("which", ["x", "sizes", "probs"])
def test_inputs_without_data_of_their_own_are_refused(mesh, launched, which):
    module = module_of()
    args = dict(zip(("x", "sizes", "probs"), inputs(), strict=True))
    args[which] = distribute_tensor(args[which].detach(), mesh, [Replicate()])
    with pytest.raises(cgm.ShapeError, match=r"is a DTensor, which kernels cannot read: pass \.to_local\(\)"):
        module(*args.values())
    assert not launched
    with FakeTensorMode(allow_non_fake_inputs=True):
        args[which] = torch.empty(args[which].shape, dtype=args[which].dtype)
    with pytest.raises(cgm.ShapeError, match="FakeTensor"):
        module(*args.values())
    assert not launched


def test_the_result_of_a_collective_is_waited_for(mesh, launched):
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    module, (x, sizes, probs) = module_of(), inputs()
    expected = module(x, sizes, probs)
    assert torch.equal(module(AsyncCollectiveTensor(x.detach()), sizes, probs), expected)


def test_fully_shard_of_the_module(mesh, launched):
    module, args = module_of(), inputs()
    expected = step(module, *args)
    fully_shard(module, mesh=mesh)
    y = module(*args)
    y.backward(torch.ones_like(y))
    assert is_fused(module)
    assert torch.equal(y, expected[0])
    assert torch.equal(module.fc1.weight.grad.full_tensor(), expected[3])


# torch 2.13 looks at .grad of the output when it resumes after a graph break
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_e10_sharded_weights_are_left_out_of_the_graph(mesh, launched):
    """With the reason, and with the numbers of the call without torch.compile."""
    torch.compiler.reset()
    module = module_of()
    for name, p in list(module.named_parameters()):
        owner, _, attribute = name.rpartition(".")
        sharded = torch.nn.Parameter(distribute_tensor(p.detach(), mesh, [Shard(0)]))
        setattr(module.get_submodule(owner), attribute, sharded)
    expected = module(*inputs())
    torch.testing.assert_close(torch.compile(module, backend="aot_eager")(*inputs()), expected, rtol=0, atol=0)
    torch.compiler.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="parameters are DTensors"):
        torch.compile(module, backend="aot_eager", fullgraph=True)(*inputs())


RECIPES = {"fused": None, "unfused": cgm.HighPrecision(enable_cutedsl_fused_grouped_mlp=False)}
WIDE = 32  # blocks of MXFP8 fit


def wide():
    torch.manual_seed(0)
    x = torch.randn(20, WIDE).to(BF16)
    return cgm.GroupedMLP(G, WIDE, F, dtype=BF16, bias=True), x, torch.tensor([7, 0, 8, 5]), torch.rand(20)


def freed(t):
    t = t.clone()
    t.untyped_storage().resize_(0)
    return t


@pytest.mark.parametrize("recipe", [*RECIPES.values(), cgm.MXFP8BlockScaling()], ids=[*RECIPES, "mxfp8"])
@pytest.mark.parametrize("kind", ["dtensor", "freed"])
def test_gradients_without_data_of_their_own_are_refused(mesh, launched, kind, recipe):
    module, *args = wide()
    with cgm.autocast(recipe=recipe):
        y = module(*args)
    launched.clear()
    dy = torch.ones_like(y)
    dy = freed(dy) if kind == "freed" else DTensor.from_local(dy, mesh, [Replicate()])
    with pytest.raises(cgm.ShapeError, match="the gradient of the output"):
        y.backward(dy)
    assert not launched


@pytest.mark.parametrize("recipe", [*RECIPES.values(), cgm.MXFP8BlockScaling()], ids=[*RECIPES, "mxfp8"])
def test_a_gradient_from_a_collective_is_waited_for(mesh, launched, monkeypatch, recipe):
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    from cute_grouped_mlp import reference_kernels

    module, *args = wide()
    given = []
    original = reference_kernels.reference_kernel

    def watched(spec):
        kernel = original(spec)
        return lambda *arguments: (given.extend(map(type, arguments)), kernel(*arguments))

    monkeypatch.setattr(reference_kernels, "reference_kernel", watched)
    with cgm.autocast(recipe=recipe):
        module(*args).backward(AsyncCollectiveTensor(torch.ones(20, WIDE, dtype=BF16)))
        grad = module.fc1.weight.grad.clone()
        module.zero_grad()
        module(*args).backward(torch.ones(20, WIDE, dtype=BF16))
    assert given
    assert AsyncCollectiveTensor not in given
    assert torch.equal(grad, module.fc1.weight.grad)


@pytest.mark.parametrize("recipe", [*RECIPES.values(), cgm.MXFP8BlockScaling()], ids=[*RECIPES, "mxfp8"])
@pytest.mark.parametrize("which", ["x", "sizes", "probs", "weight", "bias"])
def test_tensors_whose_memory_was_freed_are_refused(launched, which, recipe):
    module, *args = wide()
    with cgm.autocast(recipe=recipe):
        module(*args)
        launched.clear()
        if which in ("weight", "bias"):
            getattr(module.fc1, which).untyped_storage().resize_(0)
        else:
            index = ("x", "sizes", "probs").index(which)
            args[index] = freed(args[index])
        with pytest.raises(cgm.ShapeError, match=r"has no memory behind it.*Allowed: tensors with data"):
            module(*args)
    assert recipe is RECIPES["unfused"] or not launched
    assert which == "probs" or not launched


@pytest.mark.parametrize("which", ["x", "probs"])
def test_inputs_that_are_dtensors_are_refused_in_plain_torch_with_the_same_advice(mesh, which):
    args = dict(zip(("x", "sizes", "probs"), inputs(), strict=True))
    args[which] = distribute_tensor(args[which].detach(), mesh, [Replicate()])
    with pytest.raises(cgm.ShapeError, match=r"is a DTensor, which kernels cannot read: pass \.to_local\(\)"):
        module_of()(*args.values())
