"""The container: grouping, extra inputs and outputs, channels, keyword arguments (acceptance.md, D2, D4)."""

import collections
import pickle

import pytest
import torch

import cute_grouped_mlp as cgm

G, H, F, T = 2, 8, 16, 10


def linear(n_in=H, n_out=H, **options):
    return cgm.GroupedLinear(G, n_in, n_out, **options)


SIZES = torch.tensor([4, 5])


def test_d2_neighbouring_operations_are_grouped():
    module = cgm.Sequential(linear(), linear(), torch.nn.Linear(H, H), linear())
    assert [len(f.basic_ops) for f in module.fusers] == [2, 1]
    with pytest.raises(cgm.FusionError, match="2 fusers"):
        module.fuser  # noqa: B018
    x = torch.randn(T, H)
    y = module(x, SIZES, SIZES, SIZES)
    for op in list(module):
        x = op(x) if isinstance(op, torch.nn.Linear) else op(x, SIZES)
    assert torch.equal(x, y)
    with pytest.raises(cgm.FusionError, match="0 fusers"):
        cgm.Sequential(torch.nn.Linear(H, H)).fuser  # noqa: B018


@pytest.mark.parametrize("count", [0, 2, 4])
def test_d2_a_wrong_count_says_how_many_were_expected(count):
    module = cgm.Sequential(linear(H, 2 * F), cgm.ScaledSwiGLU(), linear(F, H))
    with pytest.raises(cgm.ShapeError, match=f"got {count} extra inputs, expected 3.*ScaledSwiGLU: 1"):
        module(torch.randn(T, H), *[SIZES] * count)
    with pytest.raises(cgm.ShapeError, match="got 0 extra inputs, expected 1"):
        linear()(torch.randn(T, H))


def test_d2_regrouped_after_every_kind_of_mutation():
    module = cgm.Sequential(linear(), linear())
    fuser = module.fuser
    assert module.fuser is fuser
    module.append(linear())
    assert len(module.fuser.basic_ops) == 3
    module[1] = torch.nn.Identity()
    assert [len(f.basic_ops) for f in module.fusers] == [1, 1]
    del module[1]
    assert len(module.fuser.basic_ops) == 2
    module.insert(0, torch.nn.Identity())
    assert [type(m).__name__ for m in module] == ["Identity", "GroupedLinear", "GroupedLinear"]
    assert len(module.fuser.basic_ops) == 2
    assert type(module.pop(0)).__name__ == "Identity"
    module.extend([linear()])
    assert len(module.fuser.basic_ops) == 3
    module.add_module("tail", linear())
    assert len(module.fuser.basic_ops) == 4
    module.tail = linear()
    assert module.fuser.basic_ops[3] is module.tail
    assert len(module[1:3]) == 2
    assert module[1:3][0] is module[1]
    assert module(torch.randn(T, H), *[SIZES] * 4).shape == (T, H)


def test_d2_a_mapping_gives_names():
    module = cgm.Sequential(collections.OrderedDict(a=linear(), b=linear()))
    names = ("weight", "bias", "_extra_state")
    assert set(module.state_dict()) == {f"{layer}.{name}" for layer in "ab" for name in names}
    with pytest.raises(TypeError, match="int"):
        cgm.Sequential(linear(), 3)


class Doubling(cgm.BasicOperation):
    def op_forward(self, ctx, input_, *, prev_op_grad_output_quantizer, next_op_input_quantizer, times=1):
        ctx.factor = 2**times
        return input_ * ctx.factor

    def op_backward(self, ctx, grad_output):
        return grad_output * ctx.factor, ()


def test_d2_keyword_arguments_by_operation_and_by_index():
    first, second = Doubling(), Doubling()
    module = cgm.Sequential(first, torch.nn.Identity(), second)
    x = torch.ones(1, requires_grad=True)
    assert module(x).item() == 4
    y = module(x, op_kwargs={first: {"times": 3}, 2: {"times": 0}})
    y.backward()
    assert (y.item(), x.grad.item()) == (8, 8)
    assert first(x, times=2).item() == 4
    with pytest.raises(cgm.FusionError, match="not a basic operation of this Sequential"):
        module(x, op_kwargs={Doubling(): {}})
    with pytest.raises(cgm.FusionError, match=r"Identity \(1\)"):
        module(x, op_kwargs={1: {}})


class Split(cgm.BasicOperation):
    """Returns its input, and twice and three times its input as extra outputs."""

    num_extra_outputs = 2

    def fuser_forward(self, basic_op_ctxs, input_, *, basic_op_extra_inputs, **unused):
        return input_ * 1, [(input_ * 2, input_ * 3)]

    def fuser_backward(self, basic_op_ctxs, grad_output, *, basic_op_grad_extra_outputs):
        twice, thrice = basic_op_grad_extra_outputs[0]
        self.seen = (twice is not None, thrice is not None)
        grad = grad_output.clone()
        for factor, g in ((2, twice), (3, thrice)):
            if g is not None:
                grad += factor * g
        return grad, [()], [()]


class Add(cgm.BasicOperation):
    num_extra_inputs = 1

    def fuser_forward(self, basic_op_ctxs, input_, *, basic_op_extra_inputs, **unused):
        (other,) = basic_op_extra_inputs[0]
        basic_op_ctxs[0].wanted = other.requires_grad
        return input_ + other, [()]

    def fuser_backward(self, basic_op_ctxs, grad_output, *, basic_op_grad_extra_outputs):
        assert basic_op_ctxs[0].wanted
        return grad_output, [()], [(grad_output,)]


def test_extra_outputs_come_after_the_output():
    module = cgm.Sequential(Split(), torch.nn.Identity(), Split())
    x = torch.ones(1, requires_grad=True)
    y, *extra = module(x)
    assert [t.item() for t in (y, *extra)] == [1, 2, 3, 2, 3]
    (y + extra[0] + 10 * extra[3]).backward()
    assert x.grad.item() == 1 + 2 + 30


def test_d4_channels_feed_later_operations_and_gradients_are_summed():
    split = Split().set_extra_output_channel(0, "twice", output_to_caller=False)
    split.set_extra_output_channel(1, "thrice")
    adds = [Add().set_extra_input_channel(0, "twice") for _ in range(2)]
    module = cgm.Sequential(split, *adds, Add())
    assert module.fuser.num_extra_inputs == 1
    x = torch.ones(1, requires_grad=True)
    other = torch.full((1,), 7.0, requires_grad=True)
    y, thrice = module(x, other)  # hidden: twice; public: thrice
    assert (y.item(), thrice.item()) == (1 + 2 + 2 + 7, 3)
    (y + 10 * thrice).sum().backward()
    assert x.grad.item() == 1 + 2 * 2 + 10 * 3
    assert other.grad.item() == 1
    with torch.no_grad():
        assert module(x, other)[0].item() == 12


def test_d4_wrong_channels():
    def build(*ops):
        return cgm.Sequential(*ops).fuser

    with pytest.raises(cgm.FusionError, match="two producers"):
        build(Split().set_extra_output_channel(0, "a"), Split().set_extra_output_channel(1, "a"))
    with pytest.raises(cgm.FusionError, match="no earlier operation produces"):
        build(Add().set_extra_input_channel(0, "a"), Split().set_extra_output_channel(0, "a"))
    with pytest.raises(cgm.FusionError, match=r"channel 'b'.*channels: \['a'\]"):
        build(Split().set_extra_output_channel(0, "a"), Add().set_extra_input_channel(0, "b"))
    for index, name in ((1, "a"), (-1, "a"), (0, ""), (0, 3)):
        with pytest.raises(cgm.FusionError):
            Add().set_extra_input_channel(index, name)


def test_d4_channels_are_locked_after_first_use():
    add = Add()
    add.set_extra_input_channel(0, "a").set_extra_input_channel(0, None)
    add(torch.ones(1, requires_grad=True), torch.ones(1))
    with pytest.raises(cgm.FusionError, match="locked"):
        add.set_extra_input_channel(0, "a")
    split = Split()
    cgm.Sequential(split).fuser  # noqa: B018
    with pytest.raises(cgm.FusionError, match="locked"):
        split.set_extra_output_channel(0, "a")


class Careless(Split):
    """Returns something wrong as extra outputs."""

    def __init__(self, outputs):
        super().__init__()
        self.outputs = outputs

    def fuser_forward(self, basic_op_ctxs, input_, **unused):
        return input_, self.outputs


@pytest.mark.parametrize("outputs", [[], [(1,)], [(None, torch.ones(1))]])
def test_d4_missing_extra_outputs_are_noticed(outputs):
    with pytest.raises(cgm.FusionError, match="extra output"):
        Careless(outputs)(torch.ones(1))


def test_integer_extra_outputs_take_no_gradient():
    class Count(cgm.BasicOperation):
        num_extra_outputs = 1

        def fuser_forward(self, basic_op_ctxs, input_, **unused):
            return input_ * 2, [(torch.tensor(3),)]

        def fuser_backward(self, basic_op_ctxs, grad_output, **unused):
            return grad_output * 2, [()], [()]

    x = torch.ones(1, requires_grad=True)
    y, count = Count()(x)
    assert count.item() == 3
    y.backward()
    assert x.grad.item() == 2


class Forgetful(cgm.BasicOperation):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))

    def op_forward(self, ctx, input_, *, prev_op_grad_output_quantizer, next_op_input_quantizer):
        return input_ * self.weight

    def op_backward(self, ctx, grad_output):
        return ctx.never_set, ()


def test_mistakes_in_custom_operations_are_named():
    class NoForward(cgm.BasicOperation):
        pass

    class NoGradient(Forgetful):
        def op_backward(self, ctx, grad_output):
            return grad_output, ()

    with pytest.raises(NotImplementedError, match="NoForward defines neither"):
        NoForward()(torch.ones(1))
    with pytest.raises(AttributeError, match="never_set"):
        Forgetful()(torch.ones(1)).backward()
    with pytest.raises(cgm.FusionError, match="returned 0 parameter gradients, it has 1"):
        NoGradient()(torch.ones(1)).backward()

    class Extra(Forgetful):
        num_extra_inputs = 1

    with pytest.raises(cgm.FusionError, match="must override fuser_forward"):
        Extra()(torch.ones(1), torch.ones(1))


def test_containers_can_be_pickled():
    module = cgm.Sequential(linear(), torch.nn.Linear(H, H))
    x = torch.randn(T, H)
    y = module(x, SIZES)
    assert torch.equal(pickle.loads(pickle.dumps(module))(x, SIZES), y)


def test_quantizers_of_the_neighbours_are_handed_over():
    seen = {}

    class Quantised(Doubling):
        def get_input_quantizer(self):
            return f"input of {self.tag}"

        def get_grad_output_quantizer(self):
            return f"grad of {self.tag}"

        def op_forward(self, ctx, input_, *, prev_op_grad_output_quantizer, next_op_input_quantizer):
            seen[self.tag] = (prev_op_grad_output_quantizer, next_op_input_quantizer)
            return input_

    ops = [Quantised(), Quantised()]
    ops[0].tag, ops[1].tag = "a", "b"
    cgm.Sequential(*ops)(torch.ones(1))
    assert seen == {"a": (None, "input of b"), "b": ("grad of a", None)}


# Hooks ----------------------------------------------------------------------------------------------------------------


def grouped_mlp_and_inputs(**options):
    torch.manual_seed(0)
    module = cgm.GroupedMLP(3, 8, 16, **options)
    x, probs = torch.randn(10, 8, requires_grad=True), torch.rand(10, requires_grad=True)
    return module, (x, torch.tensor([4, 0, 6]), probs)


@pytest.mark.parametrize("layer", ["fc1", "activation", "fc2"])
def test_hooks_on_an_operation_run_and_take_it_out_of_the_fusion(ref, layer):
    module, args = grouped_mlp_and_inputs(dtype=torch.bfloat16)
    args = (args[0].detach().bfloat16().requires_grad_(), *args[1:])
    expected = module(*args)
    assert len(module.fuser.last_plan.forward_ops) == 1
    seen, op = [], getattr(module, layer)
    handles = [
        op.register_forward_pre_hook(lambda m, inputs: seen.append("pre")),
        op.register_forward_hook(lambda m, inputs, output: seen.append("forward")),
        op.register_full_backward_pre_hook(lambda m, grads: seen.append("backward pre")),
        op.register_full_backward_hook(lambda m, into, out: seen.append("backward")),
    ]
    y = module(*args)
    assert seen == ["pre", "forward"]
    assert torch.allclose(y.float(), expected.float(), atol=2e-2)
    y.sum().backward()
    assert seen == ["pre", "forward", "backward pre", "backward"]
    report = cgm.explain(module, *args)
    assert not report.fused
    assert f"{type(op).__name__} has forward and forward pre- and backward and backward pre- hooks" in str(report)
    for handle in handles:
        handle.remove()
    seen.clear()
    assert torch.equal(module(*args), expected)
    assert len(module.fuser.last_plan.forward_ops) == 1
    assert not seen


def test_hooks_that_change_what_passes_are_obeyed():
    module, args = grouped_mlp_and_inputs()
    module.fc1.register_forward_hook(lambda m, inputs, output: output * 0)
    assert not module(*args).any()


def test_an_operation_with_hooks_gets_its_keyword_arguments():
    module, args = grouped_mlp_and_inputs()
    expected = module(*args)
    module.fc2.register_forward_pre_hook(lambda m, inputs: None)
    out = torch.empty_like(expected)
    assert module(*args, op_kwargs={2: {"output": out}}).data_ptr() == out.data_ptr()
    assert torch.allclose(out, expected)


def test_only_hooks_of_calls_count():
    module, args = grouped_mlp_and_inputs()
    module.fc1._register_load_state_dict_pre_hook(lambda *a: None)
    module.fc1.register_state_dict_post_hook(lambda *a: None) if hasattr(
        module, "register_state_dict_post_hook"
    ) else None
    module(*args)
    assert len(module.fusers) == 1


def test_fully_shard_of_a_layer_gathers_it_by_its_hooks(tmp_path):
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import init_device_mesh

    module, args = grouped_mlp_and_inputs()
    expected = module(*args)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 's'}", rank=0, world_size=1)
    try:
        for layer in (module.fc1, module.fc2):
            fully_shard(layer, mesh=init_device_mesh("cpu", (1,)))
        y = module(*args)
        assert torch.allclose(y, expected)
        y.sum().backward()
        assert module.fc1.weight.grad.full_tensor().any()
    finally:
        dist.destroy_process_group()
