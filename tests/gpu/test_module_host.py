"""The fused grouped MLP and the host: no synchronisation, no work per group, graphs, streams, threads."""

import sys
import threading
import warnings

import pytest
import torch
from gpu_steps import BF16, FP32, SPLITS, UNFUSED, assert_equal, assert_step, is_fused, module_of, operands, step
from references import expected_step

import cute_grouped_mlp as cgm
from cute_grouped_mlp import kernels

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("recipe", [None, cgm.HighPrecision(**UNFUSED)], ids=["fused", "unfused"])
def test_h2_nothing_synchronises(recipe):
    module = module_of(len(SPLITS), 264, 352, bias=True)
    args = operands(SPLITS, 264)
    step(module, *args, recipe=recipe)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
            torch.cuda.set_sync_debug_mode("error")
        step(module, *args, recipe=recipe)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_h1_h3_no_host_reads_and_no_python_work_that_grows_with_groups(monkeypatch):
    def forbidden(*_, **__):
        raise AssertionError("a host read in the hot path")

    def calls_of(groups):
        module = module_of(groups, 128, 128)
        args = operands((16,) * groups, 128)
        step(module, *args)
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
                with torch.autograd.set_multithreading_enabled(False):  # or backward's thread is not counted
                    sys.setprofile(count)
                    try:
                        y = module(*args[:3])
                        y.backward(args[3])
                    finally:
                        sys.setprofile(None)
            counts.append(seen)
        return min(counts)

    assert calls_of(8) == calls_of(64) == calls_of(256)


def test_e5_graph_replays_with_other_splits():
    hidden, ffn, tokens, groups = 264, 352, 1500, 5
    module = module_of(groups, hidden, ffn)
    x, sizes, probs, dy = operands((300,) * groups, hidden)
    for t in (x, probs):
        t.requires_grad_()
    wanted = (x, probs, *module.parameters())

    def run():
        y = module(x, sizes, probs)
        return (y.detach(), *torch.autograd.grad(y, wanted, dy))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = run()
    for splits in ((300,) * 5, (0, 1, 700, 0, 799), (100, 0, 0, 50, 3), (0,) * 5):
        fresh = operands(splits, hidden, tokens=tokens, seed=sum(splits))
        with torch.no_grad():
            for target, source in zip((x, sizes, probs, dy), fresh, strict=True):
                target.copy_(source)
        graph.replay()
        eager = run()
        torch.cuda.synchronize()
        for got, want in zip(outputs, eager, strict=True):
            assert torch.equal(got, want), splits


def test_e5_two_layers_of_equal_shape_in_one_graph():
    groups, hidden, ffn = 4, 264, 352
    first, second = module_of(groups, hidden, ffn), module_of(groups, hidden, ffn)
    with torch.no_grad():
        second.fc1.weight.mul_(-1.0)
    x, sizes, probs, _ = operands((300, 0, 200, 77), hidden)

    def run():
        with torch.no_grad():
            return second(first(x, sizes, probs), sizes, probs)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = run()
    for splits in ((300, 0, 200, 77), (77, 200, 300, 0)):
        fresh = operands(splits, hidden, seed=9)
        for target, source in zip((x, sizes, probs), fresh, strict=False):
            target.copy_(source)
        graph.replay()
        assert torch.equal(output, run())
        assert output.any()


def test_m2_what_changes_in_one_process_is_seen_and_nothing_grows():
    """M2: groups, types and options change; then 200 values of T compile nothing and grow no table."""
    for groups, dtype, options in (
        (4, FP32, {}),
        (8, FP32, {}),
        (8, BF16, {}),
        (8, FP32, {"bias": True}),
        (8, FP32, {"activation": "clamped_qgeglu"}),
        (8, FP32, {"activation": "clamped_qgeglu", "limit": 1.0, "alpha": 1.1}),
        (8, FP32, {"glu_interleave_size": 32}),
    ):
        module = module_of(groups, 128, 96, **options)
        args = operands(tuple(range(40, 40 + groups)), 128, probs=dtype)
        assert_step(step(module, *args), expected_step(module, *args))
    module = module_of(8, 128, 96)
    step(module, *operands((128,) * 8, 128))
    for tokens in (1, 1024, 4096):  # one for each bucket of rows per group that follows
        step(module, *operands((tokens,) + (0,) * 7, 128))
    cache = kernels.provider()
    sizes = len(cache._kernels), len(module.fuser.last_plan.forward_ops[0][0]._tables)
    for tokens in range(1, 4001, 20):
        step(module, *operands((tokens,) + (0,) * 7, 128), poison=False)
    assert len(cache._kernels) == sizes[0]
    assert len(module.fuser.last_plan.forward_ops[0][0]._tables) <= sizes[1] + 12  # buckets: powers of two
    assert module.fuser.plan_cache_info().currsize == 1


def test_k6_more_than_a_thousand_groups():
    module = module_of(1025, 128, 96)
    splits = [0] * 1025
    splits[0], splits[31], splits[32], splits[511], splits[1023], splits[1024] = 70, 1, 130, 9, 64, 300
    args = operands(splits, 128, tokens=sum(splits) + 5)
    got, expected = step(module, *args), expected_step(module, *args)
    busy = torch.tensor(splits, device="cuda") > 0
    for name in ("fc1.weight", "fc2.weight"):  # the RMS of a gradient that is nearly all zeros says nothing
        assert not got[name][~busy].any()
        got[name], expected[name] = got[name][busy], expected[name][busy]
    assert_step(got, expected)


def test_m3_a_cold_kernel_under_capture_is_a_clear_error():
    module = module_of(3, 128, 96)
    args = operands((10, 20, 30), 128)
    cold = kernels.KernelCache()
    with kernels.using(cold):
        graph = torch.cuda.CUDAGraph()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the graph is empty
            with pytest.raises(cgm.UnsupportedError, match="once before capturing"), torch.cuda.graph(graph):
                module(*args[:3])
    step(module, *args)


def test_side_stream_and_other_threads():
    module = module_of(len(SPLITS), 264, 352)
    args = operands(SPLITS, 264)
    want = step(module, *args)
    torch.cuda.synchronize()
    results = []

    def work():
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            x, probs = (t.detach().clone().requires_grad_() for t in (args[0], args[2]))
            y = module(x, args[1], probs)
            grads = torch.autograd.grad(y, (x, probs, *module.parameters()), args[3])
            stream.synchronize()
            results.append((y.detach(), *grads))

    work()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    names = ("y", "x", "probs", "fc1.weight", "fc2.weight")
    for result in results:
        assert_equal(dict(zip(names, result, strict=True)), want, names)
    assert len(results) == 2


def test_invalid_splits_are_reported_where_they_are_asked_for():
    module = module_of(3, 128, 96)
    x, _, probs, dy = operands((50, 50, 50), 128)
    bad = torch.tensor([100, -5, 100], dtype=torch.int32, device="cuda")
    got = step(module, x, bad, probs, dy)
    assert all(bool(torch.isfinite(t).all()) for t in got.values())
    with pytest.raises(cgm.ShapeError, match="split_sizes on cuda:0"):
        cgm.explain(module, x, bad, probs)
    with cgm.settings.override(debug_checks=True), pytest.raises(cgm.ShapeError, match="split_sizes"):
        module(x, bad, probs)
    kernels.provider().check_status(x.device)
    good = torch.tensor([50, 50, 50], dtype=torch.int32, device="cuda")
    with cgm.settings.override(debug_checks=True):
        module(x, good, probs).backward(dy)


def test_switching_the_recipe_changes_what_runs_and_builds_nothing_when_switched_back():
    module = module_of(len(SPLITS), 264, 352)
    args = operands(SPLITS, 264)
    recipe = cgm.HighPrecision()
    step(module, *args, recipe=recipe)
    assert "FusedGroupedMLP" in str(cgm.explain(module, *args[:3], recipe=recipe))
    recipe.enable_cutedsl_fused_grouped_mlp = False
    step(module, *args, recipe=recipe)
    assert not is_fused(module)
    assert "FusedGroupedMLP" not in str(cgm.explain(module, *args[:3], recipe=recipe))
    recipe.enable_cutedsl_fused_grouped_mlp = None
    before = module.fuser.plan_cache_info().misses
    step(module, *args, recipe=recipe)
    assert is_fused(module)
    assert module.fuser.plan_cache_info().misses == before
