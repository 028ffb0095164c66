"""The activations table against autograd, in float64."""

import pytest
import torch
from references import FORMULAS, activation

from cute_grouped_mlp import reference
from cute_grouped_mlp.codegen.activations import ACTIVATIONS, Activation


def test_formulas_belong_to_entries():
    assert FORMULAS.keys() <= ACTIVATIONS.keys()


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("scale", [1.0, 6.0])
def test_forward_and_gradient(name, scale):
    entry = ACTIVATIONS[name]
    generator = torch.Generator().manual_seed(3)
    z = torch.randn(64, 32, dtype=torch.float64, generator=generator).mul(scale).requires_grad_()
    probs = torch.rand(64, dtype=torch.float64, generator=generator).requires_grad_()
    params = tuple(value for _, value in entry.params)
    halves = z.chunk(2, -1) if entry.glu else (z,)
    expected = activation(name, halves, params) * probs[:, None]
    grad = torch.randn(expected.shape, dtype=torch.float64, generator=generator)
    dz, dp = torch.autograd.grad(expected, (z, probs), grad)
    with torch.no_grad():
        actual = reference.activation_forward(name, z, probs, None, params)
        dz_actual, dp_actual = reference.activation_backward(name, grad, z, probs, None, params)
    torch.testing.assert_close(actual, expected.detach())
    torch.testing.assert_close(dz_actual, dz)
    torch.testing.assert_close(dp_actual, dp)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"forward": ("act = gate * gat",)}, r"reads undefined names \['gat'\]"),
        ({"forward": ("a = gate", "b = 1.0")}, r"do not define \['act'\]"),
        ({"backward": ("dup = grad",)}, r"do not define \['dgate'\]"),
        ({"forward": ("import os",)}, "not a single assignment"),
        ({"forward": ("act = gate; os = 1",)}, "not a single assignment"),
        ({"forward": ("act = open(gate)",)}, r"reads undefined names \['open'\]"),
    ],
)
def test_a_bad_entry_is_refused(changes, message):
    good = {"name": "bad", "glu": True, "forward": ("act = gate * up",), "backward": ("dgate = grad", "dup = grad")}
    with pytest.raises(ValueError, match=message):
        Activation(**{**good, **changes})


def test_functions_are_those_that_the_formulas_call():
    assert ACTIVATIONS["swiglu"].functions == ("sigmoid",)
    assert ACTIVATIONS["clamped_qgeglu"].functions == ("maximum", "minimum", "sigmoid", "where")
