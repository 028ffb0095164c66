"""What training code of other projects asks of modules: arguments, hooks of delayed gradients, containers added."""

import contextlib
import copy

import pytest
import torch
from layers import SIZES, F, G, H, T, close, sizes_of

import cute_grouped_mlp as cgm

BF16 = torch.bfloat16


def operands():
    generator = torch.Generator().manual_seed(1)
    x, dy = (torch.randn(T, H, generator=generator).to(BF16) for _ in range(2))
    return x, sizes_of(), torch.rand(T, generator=generator), dy


# Biases as a list, and the tracker of random numbers ------------------------------------------------------------------


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("recipe", ["none", "current"])
@pytest.mark.parametrize("options", [{}, {"single_grouped_weight": False, "scale_bias": True}])
def test_biases_as_a_list_train_as_one_bias(ref, options, recipe, fuse):
    kind = cgm.Float8CurrentScaling if recipe == "current" else cgm.HighPrecision
    made = kind(enable_cutedsl_fused_grouped_mlp=fuse)
    torch.manual_seed(0)
    one = cgm.GroupedMLP(G, H, F, bias=True, dtype=BF16, **options)
    many = cgm.GroupedMLP(G, H, F, bias=True, dtype=BF16, single_grouped_bias=False, **options)
    x, sizes, probs, dy = operands()
    with torch.no_grad():
        for a, b in ((one.fc1, many.fc1), (one.fc2, many.fc2)):
            assert {n for n, _ in b.named_parameters() if "bias" in n} == {f"bias{g}" for g in range(G)}
            for p, q in zip(a.weights(), b.weights(), strict=True):
                q.copy_(p)
            for p, q in zip(a.bias, b.biases(), strict=True):
                q.copy_(p)
    with cgm.autocast(recipe=made):
        expected, y = one(x, sizes, probs), many(x, sizes, probs)
        expected.backward(dy)
        y.backward(dy)
    assert torch.equal(y, expected)
    assert (len(many.fuser.last_plan.forward_ops) == 1) is fuse
    for a, b in ((one.fc1, many.fc1), (one.fc2, many.fc2)):
        assert torch.equal(torch.stack([q.grad for q in b.biases()]), a.bias.grad)
    frozen = many.fc1.biases()
    for q in frozen:
        q.requires_grad_(False)
        q.grad = None
    with cgm.autocast(recipe=made):
        many(x, sizes, probs).backward(dy)
    assert all(q.grad is None for q in frozen)


def test_biases_as_a_list_are_one_storage():
    op = cgm.GroupedLinear(G, H, F, single_grouped_bias=False)
    for made in (op, copy.deepcopy(op), copy.deepcopy(op).to(BF16)):
        packed = made.plain_bias()
        assert packed.data_ptr() == made.bias0.data_ptr()
        assert packed.shape == (G, F)
        assert torch.equal(packed[2], made.bias2)
    assert not cgm.GroupedLinear(G, H, F, bias=False, single_grouped_bias=False).has_bias
    assert "bias=True" in repr(op)


def test_parameters_are_drawn_inside_the_tracker():
    inside = []

    class Tracker:
        @contextlib.contextmanager
        def fork(self):
            with torch.random.fork_rng():
                torch.manual_seed(5)
                inside.append(True)
                yield

    module = cgm.GroupedMLP(G, H, F, rng_state_tracker_function=Tracker)
    assert len(inside) == 2
    again = cgm.GroupedMLP(G, H, F, rng_state_tracker_function=Tracker, device="meta").to_empty(device="cpu")
    assert len(inside) == 2
    again.reset_parameters()
    assert all(map(torch.equal, module.parameters(), again.parameters()))
    with pytest.raises(cgm.ConfigError, match="rng_state_tracker_function is 3, allowed: a function or None"):
        cgm.GroupedLinear(G, H, F, rng_state_tracker_function=3)


def test_a_module_from_the_meta_device_is_drawn_at_once():
    module = cgm.GroupedMLP(G, H, F, bias=True, device="meta", single_grouped_weight=False).to_empty(device="cpu")
    with torch.no_grad():
        for p in module.parameters():
            p.fill_(float("nan"))
    module.reset_parameters()
    assert all(torch.isfinite(p).all() and p.any() for p in module.parameters())


# Hooks of delayed weight gradients ------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"accumulate_into_main_grad": True}, {"single_grouped_weight": False}])
def test_e3_hooks_run_after_each_delayed_gradient(ref, options):
    """Megatron's data parallelism leaves out its own hooks, and registers one of each weight with the layer."""
    torch.manual_seed(0)
    module = cgm.GroupedMLP(G, H, F, dtype=BF16, delay_wgrad_compute=True, **options)
    plain = cgm.GroupedMLP(G, H, F, dtype=BF16, single_grouped_weight=options.get("single_grouped_weight", True))
    plain.load_state_dict(module.state_dict())
    x, sizes, probs, dy = operands()
    reduced = {}

    def hook_of(name, p):
        def hook():
            reduced.setdefault(name, []).append((p.main_grad if "accumulate_into_main_grad" in options else p.grad) * 1)

        return hook

    for sub in module.modules():  # as megatron.core.distributed does it
        if hasattr(sub, "register_wgrad_accumulation_and_reduce_hooks"):
            for name, p in sub.named_parameters():
                assert p.skip_backward_post_hook
                sub.register_wgrad_accumulation_and_reduce_hooks(hook_of(f"{id(sub)} {name}", p))
    for p in module.parameters():
        p.main_grad = torch.zeros(p.shape)
    for count in (1, 2):
        module(x, sizes, probs).backward(dy)
        assert all(len(seen) == count - 1 for seen in reduced.values())
        module.backward_dw()
        assert len(reduced) == len(list(module.parameters()))
        assert all(len(seen) == count for seen in reduced.values())
    module.backward_dw()  # nothing waits: nothing is reduced twice
    assert all(len(seen) == 2 for seen in reduced.values())
    plain(x, sizes, probs).backward(dy)
    for seen, p in zip(reduced.values(), plain.parameters(), strict=True):
        close(seen[0], p.grad, BF16)
        close(seen[1], 2 * p.grad, BF16)
    assert not copy.deepcopy(module).fc1._wgrad_hooks
    with pytest.raises(TypeError, match="wgrad_accumulation_and_reduce_hook is None; allowed: a function"):
        module.fc1.register_wgrad_accumulation_and_reduce_hooks(None)


# Containers -----------------------------------------------------------------------------------------------------------


def test_sequences_are_added():
    def linear():
        return cgm.GroupedLinear(G, H, H)

    a, b, torchs = (
        cgm.Sequential(linear()),
        cgm.Sequential(linear(), linear()),
        torch.nn.Sequential(torch.nn.Identity()),
    )
    both = a + b
    assert type(both) is cgm.Sequential
    assert list(both) == [*a, *b]
    assert len(both.fuser.basic_ops) == 3
    assert list(a + torchs) == [*a, *torchs]
    x, sizes = torch.randn(T, H), torch.tensor(SIZES)
    assert torch.equal(both(x, sizes, sizes, sizes), b(a(x, sizes), sizes, sizes))
    same, first = a, list(a)
    a += b
    assert a is same
    assert list(a) == [*first, *b]
    assert len(a.fuser.basic_ops) == 3
    for other in (3, [linear()], None):
        with pytest.raises(TypeError, match="unsupported operand"):
            a + other
    a += a
    assert len(a) == 6


@pytest.mark.parametrize("value", [1, 0, None, "yes"])
def test_output_to_caller_must_be_a_bool(value):
    class Two(cgm.BasicOperation):
        num_extra_outputs = 1
        num_extra_inputs = 1

    op = Two()
    with pytest.raises(cgm.FusionError, match=r"output_to_caller is .*; allowed: True, False"):
        op.set_extra_output_channel(0, "a", output_to_caller=value)
    assert op._extra_output_channels == [None]
    for index in (True, "0", 0.0):
        with pytest.raises(cgm.FusionError, match=r"the index of an extra .*allowed: an integer"):
            op.set_extra_output_channel(index, "a")
        with pytest.raises(cgm.FusionError, match=r"the index of an extra .*allowed: an integer"):
            op.set_extra_input_channel(index, "a")
