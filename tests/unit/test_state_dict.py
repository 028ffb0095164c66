"""State dicts: quantisation state and layouts in them, distributed checkpoints, weights as a list, moves."""

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from quantized_steps import BF16, F, G, H, module_of, operands, recipe_of, step, trained
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

import cute_grouped_mlp as cgm
from cute_grouped_mlp.codegen.activations import ACTIVATIONS

LAYOUT = "activation._extra_state"


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name].nan_to_num(), b[name].nan_to_num()) for name in a)


@pytest.mark.parametrize("options", [{}, {"single_grouped_weight": False}])
def test_every_module_has_the_keys_and_what_holds_no_state_is_empty(options):
    state = module_of(**options).state_dict()
    keys = {name for name in state if name.endswith("_extra_state")}
    assert keys == {"fc1._extra_state", LAYOUT, "fc2._extra_state"}
    assert state["fc1._extra_state"].dtype is torch.uint8
    assert not state["fc1._extra_state"].numel()
    assert state[LAYOUT].dtype is torch.int64
    assert state[LAYOUT].item() == 0
    assert module_of(glu_interleave_size=32).state_dict()[LAYOUT].item() == 32


@pytest.mark.parametrize("name", ["delayed", "nvfp4"])
def test_functional_call_takes_the_modules_own_state_dict(name):
    recipe = recipe_of(name)
    module = trained(module_of(), recipe)
    x, sizes, probs, _ = operands()
    with torch.no_grad(), cgm.autocast(recipe=recipe):
        expected = module(x, sizes, probs)
        got = torch.func.functional_call(module, module.state_dict(), (x, sizes, probs))
    assert torch.equal(got, expected)
    assert module.activation.glu_interleave_size is None
    assert not hasattr(module.fc1, "_extra_state")


@pytest.mark.parametrize("name", ["delayed", "nvfp4"])
def test_distributed_state_dicts_and_checkpoints(tmp_path, name):
    recipe = recipe_of(name)
    module = trained(module_of(), recipe, steps=2)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        assert get_model_state_dict(module).keys() == module.state_dict().keys()
        direct = module_of()
        set_model_state_dict(direct, get_model_state_dict(module))
        dcp.save(module.state_dict(), checkpoint_id=str(tmp_path / "c"))
        fresh = module_of()
        with cgm.autocast(recipe=recipe):
            state = fresh.state_dict()
        dcp.load(state, checkpoint_id=str(tmp_path / "c"))
        fresh.load_state_dict(state)
        without = module_of()
        with pytest.raises(CheckpointException, match=r"Size mismatch .*_extra_state"):  # not silence
            dcp.load(without.state_dict(), checkpoint_id=str(tmp_path / "c"))
    finally:
        dist.destroy_process_group()
    expected = step(module, *operands(), recipe=recipe)
    assert same(step(fresh, *operands(), recipe=recipe), expected)
    assert same(step(direct, *operands(), recipe=recipe), expected)


@pytest.mark.parametrize("how", ["missing", "empty"])
@pytest.mark.parametrize("name", ["delayed", "nvfp4"])
def test_a_checkpoint_without_state_resets_the_state(name, how):
    recipe = recipe_of(name)
    module, plain = trained(module_of(), recipe), module_of()
    state = plain.state_dict()
    if how == "missing":
        state = {key: t for key, t in state.items() if "_extra_state" not in key or key == LAYOUT}
    module.load_state_dict(state)
    torch.manual_seed(3)
    expected = step(plain, *operands(), recipe=recipe)
    torch.manual_seed(3)
    assert same(step(module, *operands(), recipe=recipe), expected)
    assert module.fc1.recipe_state.updates == 1


def test_a_partial_state_dict_leaves_the_state_of_other_layers():
    module = trained(module_of(), recipe_of("delayed"))
    state = module.fc2.recipe_state
    module.load_state_dict({"fc1.weight": module.fc1.weight.detach().clone()}, strict=False)
    assert module.fc1.recipe_state is None
    assert module.fc2.recipe_state is state


@pytest.mark.parametrize("bad", [b"nonsense", b"PK\x03\x04" + bytes(60)])
def test_state_that_is_something_else_is_named_and_nothing_is_written(bad):
    module = module_of()
    state = {name: torch.full_like(t, 7) if "weight" in name else t for name, t in module.state_dict().items()}
    before = [p.detach().clone() for p in module.parameters()]
    for value in (torch.frombuffer(bytearray(bad), dtype=torch.uint8), torch.zeros(3), "text"):
        wrong = {**state, "fc1._extra_state": value, "fc2._extra_state": value}
        with pytest.raises(RuntimeError, match=r"(?s)fc1\._extra_state: it .*fc2\._extra_state: it "):
            module.load_state_dict(wrong)
        assert all(map(torch.equal, before, module.parameters()))
        with pytest.raises(RuntimeError, match=r"0\.fc1\._extra_state"):
            torch.nn.ModuleList([module]).load_state_dict({f"0.{name}": t for name, t in wrong.items()})
        assert all(map(torch.equal, before, module.parameters()))
        with pytest.raises(cgm.ConfigError, match="_extra_state"):
            module.fc1.set_extra_state(value)


# Layouts --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("case", ["missing", "empty", "another", "no number"])
def test_n11_a_layout_that_is_not_the_modules_is_an_error_before_anything_is_written(case, nested):
    module = module_of(glu_interleave_size=32)
    state = {name: torch.full_like(t, 7) if "weight" in name else t for name, t in module.state_dict().items()}
    if case == "missing":
        del state[LAYOUT]
    else:
        state[LAYOUT] = {"empty": torch.empty(0), "another": torch.tensor(0), "no number": torch.ones(3)}[case]
    before = [p.detach().clone() for p in module.parameters()]
    root = torch.nn.ModuleDict({"mlp": module}) if nested else module
    if nested:
        state = {f"mlp.{name}": t for name, t in state.items()}
    lacking = case in ("missing", "empty")
    message = r"Missing key.*strict=False.*interleave_glu" if lacking else "GLU weights"
    with pytest.raises(RuntimeError, match="(?s)" + message):
        root.load_state_dict(state)
    if not (nested and lacking):  # torch itself loads what there is before it reports missing keys
        assert all(map(torch.equal, before, module.parameters()))
    if lacking:
        keys = root.load_state_dict(state, strict=False)
        assert keys.missing_keys == ["mlp." * nested + LAYOUT]
        assert (module.fc1.weight == 7).all()
    else:
        with pytest.raises(RuntimeError, match="GLU weights"):
            root.load_state_dict(state, strict=False)


def test_n11_the_other_layout_after_conversion():
    torch.manual_seed(0)
    ours, theirs = (cgm.GroupedMLP(G, H, F, bias=True, dtype=BF16, glu_interleave_size=size) for size in (None, 32))
    state = ours.state_dict()
    with pytest.raises(RuntimeError, match=r"saved contiguous.*them interleaved by 32.*interleave_glu\(t, 32\)"):
        theirs.load_state_dict(state)
    with pytest.raises(RuntimeError, match=r"saved interleaved by 32.*contiguous.*deinterleave_glu\(t, 32\)"):
        ours.load_state_dict(theirs.state_dict())
    for name in ("fc1.weight", "fc1.bias"):
        state[name] = cgm.interleave_glu(state[name])
    theirs.load_state_dict({**state, LAYOUT: torch.tensor(32)})
    x, sizes, probs, _ = operands()
    torch.testing.assert_close(theirs(x, sizes, probs)[:100], ours(x, sizes, probs)[:100])


@pytest.mark.parametrize("shape", [(2, 128, 5), (2, 128)])
@pytest.mark.parametrize("size", [1, 16, 32, 64])
def test_glu_conversions_are_inverse(shape, size):
    t = torch.arange(torch.Size(shape).numel()).view(shape)
    mixed = cgm.interleave_glu(t, size)
    assert torch.equal(cgm.deinterleave_glu(mixed, size), t)
    assert mixed.is_contiguous()
    z = torch.stack(torch.broadcast_tensors(*cgm.reference.split_glu(mixed.movedim(1, -1), size)))
    assert torch.equal(z, torch.stack(t.movedim(1, -1).chunk(2, -1)))


def test_glu_conversions_name_what_is_wrong():
    for convert in (cgm.interleave_glu, cgm.deinterleave_glu):
        with pytest.raises(cgm.ShapeError, match=r"size is True.*has shape \(4,\), allowed: FC1's weight"):
            convert(torch.zeros(4), True)
        with pytest.raises(cgm.ShapeError, match=r"size is 0.*is list"):
            convert([1], 0)
        with pytest.raises(cgm.ShapeError, match=r"has 48 output features, allowed: a multiple of 2 \* size = 64"):
            convert(torch.zeros(2, 48, 3))


def test_activations_without_a_gate_need_no_layout():
    for name, entry in ACTIVATIONS.items():
        op = cgm.ScaledActivation(name)
        assert bool(op.get_extra_state().numel()) is entry.glu
    module = module_of(activation="srelu")
    module.load_state_dict({name: t for name, t in module.state_dict().items() if "weight" in name})


# Weights as a list ----------------------------------------------------------------------------------------------------


def packed(module):
    return module.fc1.is_packed() and module.fc2.is_packed()


def test_weights_as_a_list_stay_packed_in_copies_and_loads():
    torch.manual_seed(0)
    module = module_of(single_grouped_weight=False)
    x, sizes, probs, _ = operands()
    expected = module(x, sizes, probs)
    saved = {name: t.clone() for name, t in module.state_dict().items()}
    for copied in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert packed(copied)
        assert copied.fc1.weight0.data_ptr() != module.fc1.weight0.data_ptr()
        assert torch.equal(copied(x, sizes, probs).nan_to_num(), expected.nan_to_num())
    assigned = module_of(single_grouped_weight=False)
    assigned(x, sizes, probs)
    for device in ("cpu", "meta"):
        target = assigned if device == "cpu" else module_of(single_grouped_weight=False, device="meta")
        target.load_state_dict(saved, assign=True)
        assert packed(target)
        assert torch.equal(target(x, sizes, probs).nan_to_num(), expected.nan_to_num())


def test_weights_as_a_list_can_be_saved_with_safetensors(tmp_path):
    from safetensors.torch import load_model, save_model

    module = module_of(single_grouped_weight=False, bias=True)
    save_model(module, str(tmp_path / "m.safetensors"))
    other = module_of(single_grouped_weight=False, bias=True)
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    load_model(other, str(tmp_path / "m.safetensors"))
    assert all(map(torch.equal, module.parameters(), other.parameters()))
    module.state_dict()["fc1.weight1"].fill_(3)  # as of any module, entries are the parameters themselves
    assert (module.fc1.weight1 == 3).all()


@pytest.mark.parametrize("options", [{}, {"single_grouped_weight": False}])
def test_modules_are_moved_by_swapping(options):
    module = module_of(**options)
    x, sizes, probs, dy = operands()
    step(module, x, sizes, probs, dy)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        module.to(torch.float32)
        with torch.no_grad():  # torch swaps no parameter that a graph holds
            y = module(x.float(), sizes, probs)
        module.to(BF16)
        module.load_state_dict(module_of(**options).state_dict())
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert y.dtype is torch.float32
    assert torch.equal(module(x, sizes, probs).nan_to_num(), module_of(**options)(x, sizes, probs).nan_to_num())
