"""Streams, devices and CUDA graphs: C3, C5, M4 on a Hopper GPU."""

import threading

import pytest
import torch

import cute_grouped_mlp as cgm
from cute_grouped_mlp.ops import grouped_parameters

pytestmark = pytest.mark.gpu

SPLITS, HIDDEN, FFN = (0, 70, 129, 1), 128, 96
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def operands(splits=SPLITS, device="cuda"):
    generator = torch.Generator(device).manual_seed(1)
    tokens = sum(splits)
    x = torch.randn(tokens, HIDDEN, device=device, generator=generator).bfloat16().requires_grad_()
    probs = torch.rand(tokens, device=device, generator=generator).requires_grad_()
    dy = torch.randn(tokens, HIDDEN, device=device, generator=generator).bfloat16()
    return x, torch.tensor(splits, dtype=torch.int32, device=device), probs, dy


def module_of(device="cuda", **options):
    torch.manual_seed(0)
    return cgm.GroupedMLP(len(SPLITS), HIDDEN, FFN, device=device, dtype=torch.bfloat16, **options)


def gradients(module, x, sizes, probs, dy):
    y = module(x, sizes, probs)
    return [y.detach(), *torch.autograd.grad(y, (x, probs, *module.parameters()), dy)]


def assert_same(one, other):
    for a, b in zip(one, other, strict=True):
        assert torch.equal(a.cpu(), b.cpu())


def test_c3_no_lookup_of_the_current_device(monkeypatch):
    """torch is asked for no current device, and for no stream without a device."""
    module, args = module_of(), operands()
    expected = gradients(module, *args)
    asked = []

    def current_stream(device=None):
        asked.append(device)
        return original(device)

    def forbidden():
        raise AssertionError("torch.cuda.current_device on the hot path")

    original = torch.cuda.current_stream
    monkeypatch.setattr(torch.cuda, "current_stream", current_stream)
    monkeypatch.setattr(torch.cuda, "current_device", forbidden)
    found = gradients(module, *args)
    empty = gradients(module, *operands((0,) * len(SPLITS)))
    monkeypatch.undo()
    assert None not in asked
    assert_same(found, expected)
    assert len(empty[0]) == 0


def kernel_streams(function):
    """Names and streams of the kernels that a function runs."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        function()
        torch.cuda.synchronize()
    events = [e for e in profile.profiler.kineto_results.events() if e.device_type() == torch.autograd.DeviceType.CUDA]
    return {(e.name(), e.device_resource_id()) for e in events if e.name().startswith("sm90a_")}


@pytest.mark.filterwarnings("ignore:.*Profiler clears events")
def test_c3_a_profile_shows_each_kernel_by_its_name_and_on_the_stream_it_was_called_on():
    module, args = module_of(), operands()
    kernel_streams(lambda: gradients(module, *args))  # the first profile of a process may miss what starts it
    default = kernel_streams(lambda: gradients(module, *args))
    side = torch.cuda.Stream()

    def on_side():
        with torch.cuda.stream(side):
            gradients(module, *args)
            side.synchronize()

    other = kernel_streams(on_side)
    assert {name for name, _ in default} == {name for name, _ in other}, (default, other)
    roles = ("fprop_act", "fprop_1", "dgrad_act", "dgrad_1", "wgrad_1", "reduce")
    assert all(any(f"bf16_{role}" in name for name, _ in default) for role in roles), default
    assert len({stream for _, stream in default}) == len({stream for _, stream in other}) == 1
    assert {stream for _, stream in default} != {stream for _, stream in other}


@pytest.mark.filterwarnings("ignore:.*Profiler clears events")
def test_c3_delayed_wgrad_runs_on_the_stream_that_is_current_when_it_runs():
    module, args = module_of(delay_wgrad_compute=True), operands()
    module(*args[:3]).backward(args[3])
    module.backward_dw()
    module(*args[:3]).backward(args[3])
    torch.cuda.synchronize()
    side = torch.cuda.Stream()

    def on_side():
        with torch.cuda.stream(side):
            module.backward_dw()
            side.synchronize()

    seen = kernel_streams(on_side)
    assert len({stream for _, stream in seen}) == 1
    assert all("wgrad" in name for name, _ in seen)
    module(*args[:3]).backward(args[3])
    assert not seen & kernel_streams(module.backward_dw)


def test_c3_first_launch_from_a_fresh_thread():
    module, args = module_of(), operands()
    results = []
    thread = threading.Thread(target=lambda: results.append(gradients(module, *args)))
    thread.start()
    thread.join()
    assert_same(results[0], gradients(module, *args))


@two_gpus
def test_c3_tensors_on_another_device_than_the_current_one():
    expected = gradients(module_of(), *operands())
    with torch.cuda.device(0):
        other = torch.device("cuda", 1)
        module = module_of()
        module.to(other)
        args = [t.to(other).detach().requires_grad_(t.requires_grad) for t in operands()]
        assert_same(gradients(module, *args), expected)


@pytest.mark.parametrize("splits", [SPLITS, (0,) * len(SPLITS)], ids=["tokens", "none"])
@pytest.mark.parametrize("delay", [False, True], ids=["now", "delayed"])
def test_c5_wgrad_on_a_side_stream(splits, delay):
    args = operands(splits)
    reference = module_of()
    expected = gradients(reference, *args)[-2:]
    module = module_of(delay_wgrad_compute=delay)
    side = torch.cuda.Stream()
    module(*args[:3]).backward(args[3])
    if delay:
        assert all(p.grad is None for p in module.parameters())
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            module.backward_dw()
        torch.cuda.current_stream().wait_stream(side)
    assert_same([p.grad for p in module.parameters()], expected)


def test_m4_what_is_made_during_capture_is_not_published():
    """The shared dummy gradient that a capture makes lives in the graph's memory: eager code makes its own."""
    module, args = module_of(accumulate_into_main_grad=True), operands()
    for p in module.parameters():
        p.main_grad = torch.zeros_like(p, dtype=torch.float32)
        p.grad_added_to_main_grad = False

    def step():
        module(*args[:3]).backward(args[3])

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    grouped_parameters.dummy_gradients.clear()
    for p in module.parameters():
        p.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    assert grouped_parameters.dummy_gradients.info().currsize == 0
    captured = {p.grad.data_ptr() for p in module.parameters()}
    for p in module.parameters():
        p.grad = None
    step()
    assert grouped_parameters.dummy_gradients.info().currsize == 2
    assert not captured & {p.grad.data_ptr() for p in module.parameters()}
    before = [p.main_grad.clone() for p in module.parameters()]
    graph.replay()
    assert all(not torch.equal(p.main_grad, b) for p, b in zip(module.parameters(), before, strict=True))
