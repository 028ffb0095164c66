"""The benchmark scripts: what they measure, that they check it first, and the format of their results."""

import importlib
import json
import math
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import cute_grouped_mlp as cgm
from cute_grouped_mlp import kernels
from cute_grouped_mlp.codegen.spec import Schedule, TileConfig
from cute_grouped_mlp.reference_kernels import ReferenceKernels

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
CPU = torch.device("cpu")


@pytest.fixture
def bench(monkeypatch):
    """The scripts' modules: they import one another from their own folder."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    names = ("workload", "plain_torch", "ours", "timing", "results", "grouped_mlp", "quantize")
    return SimpleNamespace(**{name: importlib.import_module(name) for name in names})


@pytest.fixture
def tiny(bench, monkeypatch):
    """A small workload, with torch's compiler off and plain torch in the kernels' place."""
    monkeypatch.setattr(bench.plain_torch, "compiled", lambda function: function)
    with kernels.using(ReferenceKernels()):
        yield bench.workload.make_workload(bench.workload.Shape("tiny", 4, 100, 64, 48), "zipf", CPU)


# Workloads


def test_splits_sum_to_the_tokens_and_leave_no_group_empty(bench):
    for shape in bench.workload.SHAPES.values():
        for kind in bench.workload.SPLITS:
            sizes = bench.workload.make_splits(kind, shape.groups, shape.tokens)
            assert len(sizes) == shape.groups
            assert sum(sizes) == shape.tokens
            assert min(sizes) > 0


def test_balanced_splits_differ_by_at_most_one(bench):
    assert bench.workload.make_splits("balanced", 4, 10) == [3, 3, 2, 2]


def test_zipf_splits_fall_with_rank_in_a_fixed_shuffled_order(bench):
    sizes = bench.workload.make_splits("zipf", 64, 131072)
    ranked = sorted(sizes, reverse=True)
    assert sizes != ranked
    assert sizes == bench.workload.make_splits("zipf", 64, 131072)
    for rank in (2, 4, 16):
        assert ranked[rank - 1] * rank == pytest.approx(ranked[0], rel=0.02)


def test_unknown_splits_name_what_is_allowed(bench):
    with pytest.raises(ValueError, match="balanced, zipf"):
        bench.workload.make_splits("even", 4, 10)


def test_a_step_is_the_sum_of_its_kernels(bench):
    flops = dict(bench.workload.FLOPS)
    assert flops.pop("step") == sum(flops.values())


def test_workload_is_random_and_scaled(bench):
    w = bench.workload.make_workload(bench.workload.Shape("some", 4, 64, 256, 128), "balanced", CPU)
    for tensor, std in ((w.x, 1.0), (w.dy, 1.0), (w.w1, 256**-0.5), (w.w2, 128**-0.5)):
        assert tensor.float().std().item() == pytest.approx(std, rel=0.05)
    assert w.offs.tolist() == [16, 32, 48, 64]


# What is timed


def test_tiles_are_parsed_as_they_are_printed(bench):
    tile = TileConfig(128, 192, 2, 1, Schedule.PINGPONG)
    assert bench.ours.parse_tile(str(tile)) == tile
    with pytest.raises(ValueError, match="128x256_2x1_co"):
        bench.ours.parse_tile("128x192")


def test_invalid_tile_says_why(bench, tiny):
    spec = bench.ours.specs_of(tiny.shape, CPU).fprop
    with pytest.raises(ValueError, match="tile_n is 24"):
        bench.ours.with_tile(spec, TileConfig(128, 24))


def test_timed_kernels_are_those_that_the_runtime_launches(bench, tiny):
    mlp = cgm.GroupedMLP(4, 64, 48, dtype=torch.bfloat16)
    x = tiny.x.clone().requires_grad_()
    with kernels.using(ReferenceKernels()) as reference:
        mlp(x, tiny.sizes, tiny.probs.clone().requires_grad_()).backward(tiny.dy)
    assert set(reference.launches) == set(bench.ours.specs_of(tiny.shape, CPU).all)


def test_ours_computes_what_torch_computes(bench, tiny):
    for kernel in bench.workload.KERNELS:
        calls = bench.grouped_mlp.make_calls(kernel, tiny, ["ours", "torch"], [])
        assert list(calls) == ["torch", "ours"]


def test_tiles_are_rows_of_their_own(bench, tiny):
    tile = TileConfig(128, 64, 1, 1, Schedule.PINGPONG)
    calls = bench.grouped_mlp.make_calls("fprop", tiny, ["ours"], [tile])
    assert list(calls) == ["ours", f"ours-{tile}"]


def test_a_kernel_that_writes_nothing_is_not_timed(bench, tiny, monkeypatch):
    monkeypatch.setattr(ReferenceKernels, "get", lambda self, spec: lambda *args: None)
    for kernel in bench.workload.KERNELS:
        with pytest.raises(ArithmeticError, match="ours differs from torch"):
            bench.grouped_mlp.make_calls(kernel, tiny, ["ours", "torch"], [])


def test_difference_is_relative_and_nan_is_not_small(bench):
    x = torch.randn(1000)
    assert bench.grouped_mlp.difference(x * 1.01, x) == pytest.approx(0.01, rel=1e-3)
    assert not bench.grouped_mlp.difference(torch.full_like(x, math.nan), x) <= 1e-2


# Timing


def test_every_round_has_every_implementation_in_random_order(bench, monkeypatch):
    order = []

    def time_block(call, launches):
        call()
        return lambda: 1.0

    monkeypatch.setattr(bench.timing, "time_block", time_block)
    monkeypatch.setattr(bench.timing, "warm_up", lambda call: 7)
    calls = {name: (lambda name=name: order.append(name)) for name in "abc"}
    times = bench.timing.interleave(calls, rounds=30, seconds=60, rng=random.Random(0))
    rounds = [tuple(order[i : i + 3]) for i in range(0, len(order), 3)]
    assert len(rounds) == 30
    assert all(set(names) == set("abc") for names in rounds)
    assert len(set(rounds)) > 3
    assert times["a"].launches == 7
    assert times["b"].median == 1.0


def test_time_budget_ends_the_rounds_but_leaves_a_few(bench, monkeypatch):
    monkeypatch.setattr(bench.timing, "time_block", lambda call, launches: lambda: 1.0)
    monkeypatch.setattr(bench.timing, "warm_up", lambda call: 1)
    times = bench.timing.interleave({"a": lambda: None}, rounds=1000, seconds=-1, rng=random.Random(0))
    assert len(times["a"].ms) == bench.timing.MIN_ROUNDS


def test_speed_compares_round_by_round(bench):
    ours, theirs = bench.timing.Times([1.0, 2.0, 4.0], 1), bench.timing.Times([2.0, 4.0, 8.0], 1)
    assert ours.speed_over(theirs) == 2.0
    assert ours.quartiles == (1.5, 3.0)


# Results


def test_rows_and_header_are_in_the_format(bench, tmp_path):
    shape = bench.workload.SHAPES["qwen3-16k"]
    w = SimpleNamespace(shape=shape, split="zipf")
    times = {"torch": bench.timing.Times([4.0] * 5, 1), "ours": bench.timing.Times([2.0] * 5, 1)}
    result = bench.results.environment("abc") | {"rows": bench.grouped_mlp.make_rows("fprop", w, times)}
    assert bench.results.problems(result) == []
    assert result["commit"] == "abc"
    ours = result["rows"][1]
    assert ours["tflops"] == pytest.approx(2 * 131072 * 2048 * 768 / 2e-3 / 1e12, rel=1e-3)
    assert ours["speed_over_torch"] == 2.0
    bench.results.write(result, tmp_path / "some" / "result.json")
    assert json.loads((tmp_path / "some" / "result.json").read_text()) == result


def test_problems_are_all_named(bench):
    row = {"shape": "a", "split": "zipf", "kernel": "step", "impl": "ours", "ms": 1.0, "tflops": math.nan}
    found = bench.results.problems({"gpu": "x", "rows": [row, {}]})
    assert sum("missing" in text for text in found) == len(bench.results.HEADER) - 1
    assert "rows[0].tflops is nan, not above 0" in found
    assert any(text.startswith("rows[1].shape") for text in found)


def test_default_name_has_date_gpu_and_subject(bench):
    result = {"gpu": "NVIDIA H200", "date": "2026-12-01T10:00:00+00:00"}
    assert bench.results.default_path(result, "bf16").name == "2026-12-01-h200-bf16.json"


def test_commit_is_taken_from_the_argument_then_the_environment(bench, monkeypatch):
    monkeypatch.setenv("GIT_COMMIT", "fromenv")
    assert bench.results.find_commit("given") == "given"
    assert bench.results.find_commit(None) == "fromenv"


def test_committed_results_are_in_the_format(bench):
    for path in sorted((BENCHMARKS / "results").glob("*.json")):
        result = json.loads(path.read_text())
        if "-host" in path.stem:
            result["rows"] = []  # figures by name
        elif "-curves" in path.stem:
            expected = 48 if path.stem.endswith("-rht") else 21
            assert len({(row["recipe"], row["seed"], len(row["losses"])) for row in result["rows"]}) == expected
            result["rows"] = []
        assert bench.results.problems(result) == [], path.name


def test_without_a_gpu_it_says_so(bench, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench.grouped_mlp.main([]) == 1
    assert "GPU" in capsys.readouterr().err


def test_bandwidth_counts_the_bytes_of_each_launch(bench, monkeypatch, capsys):
    kernel = SimpleNamespace(get=lambda spec: lambda *arguments: arguments, sm_count=lambda device: 132)
    recorder = bench.quantize.Recorder(kernel)
    recorder.get("a spec")(torch.zeros(3, 5, dtype=torch.bfloat16), torch.zeros(7), 132)
    ((spec, call, moved),) = recorder.launches
    assert (spec, moved, len(call()), len(recorder.launches)) == ("a spec", 2 * 15 + 4 * 7, 3, 1)
    assert recorder.sm_count(None) == 132
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench.quantize.main([]) == 1
    assert "GPU" in capsys.readouterr().err


def test_wrong_names_are_refused_with_what_is_allowed(bench, capsys):
    with pytest.raises(SystemExit):
        bench.grouped_mlp.parse_arguments(["--shapes", "qwen3-16k,nope"])
    assert "allowed: dsv3-ep32" in capsys.readouterr().err


# Running from a checkout


def test_with_links_imports_this_checkout_and_cleans_up():
    code = "import sys, cute_grouped_mlp.codegen as c; print(c.__file__); sys.exit(7)"
    script = BENCHMARKS / "with_links.sh"
    done = subprocess.run(["bash", script, sys.executable, "-c", code], capture_output=True, text=True, cwd="/")
    assert done.returncode == 7, done.stderr
    imported = Path(done.stdout.strip())
    assert imported.parts[-3:-1] == ("cute_grouped_mlp", "codegen")
    assert not imported.exists()


# Loss curves


def test_curves_are_written_after_each_run(bench, tmp_path, monkeypatch, capsys):
    curves = importlib.import_module("recipe_curves")
    lost = {"bf16": 3.0, "mxfp8": 3.5}

    def curve(name, seed, steps, config, device):
        if seed == 2:
            raise KeyboardInterrupt
        return [9.0] * (steps // 4) + [lost[name] + seed] * (steps - steps // 4)

    monkeypatch.setattr(curves, "curve", curve)
    path = tmp_path / "curves.json"
    monkeypatch.setattr("sys.argv", ["", "--steps", "30", "--recipes", "bf16,mxfp8", "--out", str(path)])
    with pytest.raises(KeyboardInterrupt):
        curves.main()
    result = json.loads(path.read_text())
    assert set(bench.results.HEADER) < set(result)
    runs = [(row["recipe"], row["seed"], row["last"], len(row["losses"])) for row in result["rows"]]
    assert runs == [("bf16", 0, 3.0, 30), ("mxfp8", 0, 3.5, 30), ("bf16", 1, 4.0, 30), ("mxfp8", 1, 4.5, 30)]
    assert curves.gaps(result["rows"]) == {"mxfp8": [0.5, 0.5]}
    monkeypatch.setattr("sys.argv", ["", "--recipes", "fp7"])
    with pytest.raises(SystemExit):
        curves.main()
    assert "unknown recipes fp7" in capsys.readouterr().err
