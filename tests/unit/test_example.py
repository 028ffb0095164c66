"""The example: its data, its routing on the device, its gradients, and a short run without a GPU."""

import json
import re

import pytest
import torch
import torch.nn.functional as F

import cute_grouped_mlp as cgm
from cute_grouped_mlp.codegen import recipe_names
from cute_grouped_mlp.examples import moe_report, train_moe
from cute_grouped_mlp.examples.train_moe import Config, MoE, TorchExperts
from cute_grouped_mlp.reference_kernels import ReferenceKernels

TINY = Config(5, 16, 8, 2, sequences=2, length=12, learning_rate=1e-2, context=3)


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(0)


# Data


def test_text_is_the_standard_librarys_and_the_same_every_time():
    text = train_moe.stdlib_text(limit=5000)
    assert text.dtype is torch.uint8
    assert len(text) == 5000
    assert torch.equal(text, train_moe.stdlib_text(limit=6000)[:5000])
    assert b"import" in train_moe.stdlib_text(limit=100_000).numpy().tobytes()


def test_batches_are_windows_of_the_text_in_an_order_that_the_seed_sets():
    text = train_moe.stdlib_text(limit=5000)
    batches = train_moe.make_batches(text, 4, TINY, seed=1)
    assert batches.shape == (4, TINY.sequences, TINY.length + 1)
    assert bytes(batches[3, 1].tolist()) in text.numpy().tobytes()
    assert torch.equal(batches, train_moe.make_batches(text, 4, TINY, seed=1))
    assert not torch.equal(batches, train_moe.make_batches(text, 4, TINY, seed=2))


# Routing


def test_route_keeps_the_largest_probabilities_and_normalises_them(generator):
    logits = torch.randn(50, 7, generator=generator, dtype=torch.bfloat16)
    probs, experts = train_moe.route(logits, 3)
    assert probs.dtype is torch.float32
    torch.testing.assert_close(probs.sum(-1), torch.ones(50))
    softmax = logits.float().softmax(-1)
    chosen = softmax.gather(1, experts)
    torch.testing.assert_close(probs, chosen / chosen.sum(-1, keepdim=True))
    assert (softmax >= chosen.min(-1, keepdim=True).values).sum(-1).min() >= 3
    assert all(len(set(row)) == 3 for row in experts.tolist())


def test_sort_by_expert_is_stable_and_counts_every_row(generator):
    experts = torch.randint(0, 6, (40, 2), generator=generator)
    experts[experts == 3] = 4  # an expert without rows
    order, split_sizes = train_moe.sort_by_expert(experts, 6)
    ids = experts.flatten()
    assert ids[order].tolist() == sorted(ids.tolist())
    assert split_sizes.tolist() == torch.bincount(ids, minlength=6).tolist()
    assert split_sizes[3] == 0
    for expert in range(6):
        of_expert = order[ids[order] == expert]
        assert of_expert.tolist() == sorted(of_expert.tolist())


def test_unpermute_undoes_permute(generator):
    x = torch.randn(30, 4, generator=generator)
    experts = torch.randint(0, 5, (30, 3), generator=generator)
    order, split_sizes = train_moe.sort_by_expert(experts, 5)
    rows = train_moe.permute(x, order, 3)
    first = int(split_sizes[0])
    tokens_of_expert_0 = (experts == 0).nonzero()[:, 0]
    assert torch.equal(rows[:first], x[tokens_of_expert_0])
    torch.testing.assert_close(train_moe.unpermute(rows, order, 3), 3 * x)


def test_reorder_has_the_gradient_of_indexing(generator):
    order = torch.randperm(20, generator=generator)
    x = torch.randn(20, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: train_moe.Reorder.apply(t, order), x)


# The layer


def dense_moe(layer, w1, w2, x):
    """Every expert for every token, weighted by probabilities that are 0 for those not chosen."""
    probs, experts = train_moe.route(x @ layer.router.weight.T, layer.top_k)
    weights = torch.zeros(len(x), len(w1)).scatter(1, experts, probs)
    gate, up = torch.einsum("th,gfh->tgf", x, w1).chunk(2, -1)
    return torch.einsum("tgf,ghf,tg->th", F.silu(gate) * up, w2, weights)


@pytest.mark.parametrize("kind", ["torch", "ours"])
def test_layer_and_its_gradients_equal_a_dense_reference(kind):
    torch.manual_seed(0)
    if kind == "torch":
        experts = TorchExperts(TINY)
        w1, w2 = experts.w1, experts.w2
    else:
        experts = cgm.GroupedMLP(TINY.experts, TINY.hidden, TINY.ffn)
        w1, w2 = experts.fc1.weight, experts.fc2.weight
    layer = MoE(TINY, experts)
    x = torch.randn(24, TINY.hidden, requires_grad=True)
    wanted = (x, layer.router.weight, w1, w2)
    dy = torch.randn(24, TINY.hidden)
    y, expected = layer(x), dense_moe(layer, w1, w2, x)
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)
    got = torch.autograd.grad(y, wanted, dy)
    for gradient, of_dense in zip(got, torch.autograd.grad(expected, wanted, dy), strict=True):
        torch.testing.assert_close(gradient, of_dense, rtol=1e-4, atol=1e-5)


def test_models_start_equal():
    ours, theirs = train_moe.make_models(TINY, torch.device("cpu"), seed=3)
    pairs = list(zip(ours.parameters(), theirs.parameters(), strict=True))
    assert all(torch.equal(mine, other) for mine, other in pairs)
    assert ours.moe.experts.fc1.weight.shape == theirs.moe.experts.w1.shape
    assert all(mine.data_ptr() != other.data_ptr() for mine, other in pairs)


def test_model_sees_no_byte_after_the_one_it_predicts():
    model = train_moe.make_models(TINY, torch.device("cpu"), seed=0)[1]
    tokens = torch.randint(0, 256, (1, TINY.length), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[0, 7] = (changed[0, 7] + 1) % 256
    same = (model(tokens) == model(changed)).all(-1)
    assert same[:7].all()
    assert not same[7 : 7 + TINY.context].any()
    assert same[7 + TINY.context :].all()


# The run


def test_three_steps_on_the_cpu(monkeypatch, capsys):
    full_size = []
    monkeypatch.setattr(moe_report, "show_cross_compiled", lambda *shape: full_size.append(shape))
    assert train_moe.main(["--steps", "3", "--device", "cpu"]) == 0
    printed = capsys.readouterr().out
    assert "the curves agree" in printed
    assert "enable_cutedsl_fused_grouped_mlp" in printed
    assert re.findall(r"^step (\d) of 3, \d+ s$", printed, re.MULTILINE) == ["1", "2", "3"]
    assert "both are plain torch here" in printed
    assert "times the speed" not in printed
    assert "2 built, 1 found" in printed  # flipped back: the first plan again
    assert full_size == [(65536, 128, 2048, 768)]


def test_a_recipe_trains_and_its_losses_are_written(tmp_path, capsys):
    file = tmp_path / "losses.json"
    assert train_moe.main(["--steps", "2", "--device", "cpu", "--recipe", "mxfp8", "--losses", str(file)]) == 0
    run = json.loads(file.read_text())
    assert run["recipe"] == str(cgm.MXFP8BlockScaling())
    assert (run["steps"], run["seed"], len(run["ours"])) == (2, 0, 2)
    assert run["ours"] != run["torch"]
    assert max(abs(a - b) for a, b in zip(run["ours"], run["torch"], strict=True)) < moe_report.LOSS_BOUND
    printed = capsys.readouterr().out
    assert "MXFP8BlockScaling emulated" in printed
    assert "agree" not in printed


def test_recipes_have_the_names_that_list_and_build_take(capsys):
    for text, (name, numerics) in recipe_names.RECIPES.items():
        if numerics == "bf16":
            assert isinstance(train_moe.RECIPES[train_moe.recipe_name(text.upper())](), getattr(cgm, name))
    assert {*train_moe.RECIPES} - {*recipe_names.RECIPES} == {"nvfp4_no_rht"}
    for text in ("fp8_current", "fp16"):
        with pytest.raises(SystemExit):
            train_moe.main(["--recipe", text])
        assert f"'{text}' is no recipe of this example; allowed: bf16, delayed" in capsys.readouterr().err


@pytest.mark.parametrize("other", [1.0 + 2 * moe_report.LOSS_BOUND, float("nan")])
def test_curves_that_differ_are_noticed(other, capsys):
    losses = torch.ones(7, 2)
    assert moe_report.show_losses(losses)
    losses[4, 0] = other
    assert not moe_report.show_losses(losses)
    assert "DISAGREE" in capsys.readouterr().out


def test_kernels_are_timed_by_the_spec_that_launched_them(monkeypatch, capsys):
    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self): ...

        def elapsed_time(self, end):
            return 0.5

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    mlp = cgm.GroupedMLP(3, 16, 8, dtype=torch.bfloat16)
    x = torch.randn(9, 16, dtype=torch.bfloat16, requires_grad=True)
    inputs = (x, torch.tensor([4, 0, 5]), torch.rand(9, requires_grad=True))
    with cgm.kernels.using(ReferenceKernels()) as reference:
        moe_report.show_kernels(mlp, inputs, unit=10**9, steps=2)
    printed = capsys.readouterr().out
    assert len(reference.launches) == 3 * 7  # a warm-up and two steps of seven launches
    for spec in set(reference.launches):
        assert spec.name in printed
