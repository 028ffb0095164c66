"""Steps of a grouped MLP in float64, and activations: the reference of tests on the CPU and on GPUs."""

import torch

from cute_grouped_mlp import reference, reference_quantized
from cute_grouped_mlp.reference_quantized import LinearReplay

#: Activations written down a second time, in torch's functions.  One that is not here is compared with itself: its
#: gradient with autograd's of its own forward.
FORMULAS = {
    "swiglu": lambda gate, up: torch.nn.functional.silu(gate) * up,
    "clamped_qgeglu": lambda gate, up, limit, alpha, offset: (
        gate.clamp(max=limit) * torch.sigmoid(alpha * gate.clamp(max=limit)) * (up.clamp(-limit, limit) + offset)
    ),
    "situglu": lambda gate, up, b1, b2: b1 * torch.tanh(gate / b1) * torch.sigmoid(gate) * b2 * torch.tanh(up / b2),
    "srelu": lambda gate: torch.relu(gate) ** 2,
    "silu": torch.nn.functional.silu,
}


def activation(name, halves, params):
    """An activation of the table, by its formula here, or else by the table's forward alone."""
    if name in FORMULAS:
        return FORMULAS[name](*halves, *params)
    return reference.activation_forward(name, torch.cat(halves, -1), None, None, params)


def expected_step(module, x, sizes, probs, dy, **options):
    """y and every gradient by name, without those that there are not; options are the reference's."""
    s = reference.grouped_mlp(*_operands(module, x, sizes, probs, dy), **_settings(module), **options)
    return _by_name(module, s)


def replays_of(module):
    """What was quantised, and with which scales, of the module's layers as they are now."""
    return [
        LinearReplay() if fc.recipe_state is None else LinearReplay.of_state(fc.recipe_state)
        for fc in (module.fc1, module.fc2)
    ]


def replayed(module, x, sizes, probs, dy, replays, round_grad=False):
    """As :func:`expected_step`, with each quantisation point replayed."""
    s = reference_quantized.grouped_mlp(
        *_operands(module, x, sizes, probs, dy),
        **_settings(module),
        fc1=replays[0],
        fc2=replays[1],
        round_grad=round_grad,
    )
    return _by_name(module, s)


def _operands(module, x, sizes, probs, dy):
    w1, w2 = (fc.packed_weight().detach() for fc in (module.fc1, module.fc2))
    return x.detach(), w1, w2, sizes, None if probs is None else probs.detach(), dy


def _settings(module):
    act = module.activation
    b1, b2 = (None if fc.bias is None else fc.bias.detach() for fc in (module.fc1, module.fc2))
    return {
        "activation": act.activation,
        "interleave": act.glu_interleave_size,
        "params": act.params,
        "b1": b1,
        "b2": b2,
    }


def _by_name(module, s):
    found = {"y": s.y, "x": s.dx, "probs": s.dprobs, "fc1.bias": s.db1, "fc2.bias": s.db2}
    for name, fc, dw in (("fc1", module.fc1, s.dw1), ("fc2", module.fc2, s.dw2)):
        if fc.single_grouped_weight:
            found[f"{name}.weight"] = dw
        else:
            found |= {f"{name}.weight{group}": part for group, part in enumerate(dw)}
    return {name: t for name, t in found.items() if t is not None}
