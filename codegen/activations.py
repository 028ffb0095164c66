"""The activations table: one entry adds an activation to every kernel and to the plain-torch reference.

An entry's formulas are written once, as assignments over a small set of functions (:data:`FUNCTIONS`).  The templates
paste them into the epilogues of ``fprop_act`` and ``dgrad_act``; ``runtime.reference`` evaluates the same text with
torch.  So forward, gradient, kernel and reference cannot drift apart.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field

#: Functions that formulas may call.  Everything is elementwise in fp32.
FUNCTIONS = frozenset({"sigmoid", "tanh", "exp", "minimum", "maximum", "where"})


@dataclass(frozen=True, slots=True)
class Activation:
    """One activation function.

    Attributes
    ----------
    name
        Key in :data:`ACTIVATIONS` and part of variant names.
    glu
        Whether the pre-activation has two halves, ``gate`` and ``up``; else there is only ``gate``.
    forward
        Assignments that end by defining ``act``, from ``gate`` (and ``up``) and the parameters.
    backward
        Assignments that define ``dgate`` (and ``dup``) from ``grad``, the gradient of ``act``.  They may use every name
        that ``forward`` defined.
    params
        Names and defaults of parameters.  They are run-time Float32 arguments of the kernel.
    functions
        Names from :data:`FUNCTIONS` that the formulas call, sorted.
    """

    name: str
    glu: bool
    forward: tuple[str, ...]
    backward: tuple[str, ...]
    params: tuple[tuple[str, float], ...] = ()
    functions: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        inputs = {"gate"} | ({"up"} if self.glu else set()) | {name for name, _ in self.params}
        known = _check(self.name, self.forward, inputs)
        known = _check(self.name, self.backward, known | {"grad"})
        missing = ({"act", "dgate"} | ({"dup"} if self.glu else set())) - known
        if missing:
            raise ValueError(f"activation {self.name!r}: formulas do not define {sorted(missing)}")
        # Once, while the table is read: kernels are rendered in several threads at a time (see render.render)
        calls = {
            node.func.id
            for line in self.forward + self.backward
            for node in ast.walk(ast.parse(line))
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        }
        object.__setattr__(self, "functions", tuple(sorted(calls)))


def _check(name: str, lines: tuple[str, ...], known: set[str]) -> set[str]:
    """Check that each line is one assignment over known names; returns the names known afterwards."""
    known = set(known)
    for line in lines:
        body = ast.parse(line).body
        if len(body) != 1 or not isinstance(body[0], ast.Assign) or not isinstance(body[0].targets[0], ast.Name):
            raise ValueError(f"activation {name!r}: {line!r} is not a single assignment to a name")
        read = {n.id for n in ast.walk(body[0].value) if isinstance(n, ast.Name)}
        unknown = read - known - FUNCTIONS
        if unknown:
            raise ValueError(f"activation {name!r}: {line!r} reads undefined names {sorted(unknown)}")
        known.add(body[0].targets[0].id)
    return known


ACTIVATIONS: dict[str, Activation] = {
    a.name: a
    for a in (
        Activation(
            name="swiglu",
            glu=True,
            forward=("sig = sigmoid(gate)", "act = gate * sig * up"),
            backward=("dgate = grad * up * (sig + gate * sig * (1.0 - sig))", "dup = grad * gate * sig"),
        ),
        # gpt-oss: both halves clamped, the linear one shifted
        Activation(
            name="clamped_qgeglu",
            glu=True,
            params=(("limit", 7.0), ("alpha", 1.702), ("glu_linear_offset", 1.0)),
            forward=(
                "clipped = minimum(gate, limit)",
                "linear = minimum(maximum(up, -limit), limit) + glu_linear_offset",
                "sig = sigmoid(alpha * clipped)",
                "act = clipped * sig * linear",
            ),
            backward=(
                "dgate = where(gate > limit, 0.0, grad * linear * (sig + alpha * clipped * sig * (1.0 - sig)))",
                "dup = where(maximum(up, -up) > limit, 0.0, grad * clipped * sig)",
            ),
        ),
        Activation(
            name="situglu",
            glu=True,
            params=(("beta1", 4.0), ("beta2", 25.0)),
            forward=(
                "tg = tanh(gate / beta1)",
                "tu = tanh(up / beta2)",
                "sig = sigmoid(gate)",
                "act = beta1 * tg * sig * (beta2 * tu)",
            ),
            backward=(
                "dgate = grad * (beta2 * tu) * sig * ((1.0 - tg * tg) + beta1 * tg * (1.0 - sig))",
                "dup = grad * (beta1 * tg * sig) * (1.0 - tu * tu)",
            ),
        ),
        Activation(
            name="srelu",
            glu=False,
            forward=("relu = maximum(gate, 0.0)", "act = relu * relu"),
            backward=("dgate = grad * (2.0 * relu)",),
        ),
        Activation(
            name="silu",
            glu=False,
            forward=("sig = sigmoid(gate)", "act = gate * sig"),
            backward=("dgate = grad * (sig + gate * sig * (1.0 - sig))",),
        ),
    )
}
