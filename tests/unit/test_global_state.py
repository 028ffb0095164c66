"""A step under torch's global defaults: another default type, another default device."""

import ast
from pathlib import Path

import pytest
import torch
from quantized_steps import RECIPES, module_of, operands, recipe_of, step

import cute_grouped_mlp as cgm
from cute_grouped_mlp import kernels
from cute_grouped_mlp.reference_kernels import ReferenceKernels

FACTORIES = {"zeros", "ones", "empty", "tensor", "full", "arange", "randint", "rand", "randn", "eye", "linspace"}


@pytest.fixture(params=["default device", "default type", "both"])
def elsewhere(request):
    """A context in which factories without device and type make something else."""

    class Elsewhere:
        def __enter__(self):
            self.device = torch.device("meta")
            if request.param != "default type":
                self.device.__enter__()
            if request.param != "default device":
                torch.set_default_dtype(torch.bfloat16)

        def __exit__(self, *error):
            torch.set_default_dtype(torch.float32)
            if request.param != "default type":
                self.device.__exit__(*error)

    return Elsewhere()


@pytest.mark.parametrize("name", [None, *RECIPES])
@pytest.mark.parametrize("plain", [True, False])
def test_a_step_does_not_depend_on_torchs_defaults(elsewhere, name, plain):
    recipe = None if name is None else recipe_of(name)
    with kernels.using(kernels.provider() if plain else ReferenceKernels()):
        args = operands()
        results = []
        for inside in (False, True):
            module = module_of(bias=True)
            torch.manual_seed(3)
            if inside:
                with elsewhere:
                    found = [step(module, *args, recipe=recipe) for _ in range(2)]
                    saved = module.state_dict()
            else:
                found = [step(module, *args, recipe=recipe) for _ in range(2)]
                saved = module.state_dict()
            results.append((found, saved))
        for one, other in zip(results[0][0], results[1][0], strict=True):
            assert all(torch.equal(one[key].nan_to_num(), other[key].nan_to_num()) for key in one)
        one, other = results[0][1], results[1][1]
        assert one.keys() == other.keys()
        assert all(
            a.device.type == b.device.type == "cpu" and torch.equal(a, b)
            for a, b in zip(one.values(), other.values(), strict=True)
        )


def test_every_factory_names_its_type_and_device():
    root = Path(cgm.__file__).parent
    bare = []
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not (
                isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in FACTORIES
            ):
                continue
            if not (isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"):
                continue
            named = {keyword.arg for keyword in node.keywords}
            if not ({"dtype", "device"} <= named or None in named):
                bare.append(f"{path.relative_to(root)}:{node.lineno}")
    assert not bare
