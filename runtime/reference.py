"""The operations in plain torch, on any device and in any precision: the yardstick of every kernel.

The activation is evaluated from the same formulas that the kernels are generated from (``codegen.activations``).
:func:`grouped_mlp` replays a whole training step in float64 and rounds exactly where the kernels store.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .codegen.activations import ACTIVATIONS, Activation

Values = dict[str, Any]


def _elementwise(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Let a binary torch function take Python numbers, as the formulas do."""

    def call(a: Any, b: Any) -> torch.Tensor:
        like = a if isinstance(a, torch.Tensor) else b
        return function(torch.as_tensor(a, dtype=like.dtype, device=like.device), torch.as_tensor(b).to(like))

    return call


_FUNCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "exp": torch.exp,
    "minimum": _elementwise(torch.minimum),
    "maximum": _elementwise(torch.maximum),
    "where": torch.where,
}


@functools.lru_cache(maxsize=256)
def _evaluator(lines: tuple[str, ...]) -> Callable[[Values], Values]:
    """Return a function that runs assignments over named values and returns all names."""
    code = compile("\n".join(lines), "<activation formulas>", "exec")

    def evaluate(values: Values) -> Values:
        names = dict(values)
        exec(code, dict(_FUNCTIONS), names)
        return names

    return evaluate


def activation_of(name: str) -> Activation:
    """Return the entry of the activations table.

    Raises
    ------
    KeyError
        If there is none; the message lists those that there are.
    """
    try:
        return ACTIVATIONS[name]
    except KeyError:
        raise KeyError(f"no activation {name!r}; there are: {', '.join(sorted(ACTIVATIONS))}") from None


def split_glu(z: torch.Tensor, interleave: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Gate and up halves of z.

    Parameters
    ----------
    z : Tensor (..., 2F)
    interleave
        None: ``[gate | up]``.  A number: blocks of that many columns take turns, gate first.
    """
    if interleave is None:
        gate, up = z.chunk(2, -1)
        return gate, up
    blocks = z.reshape(*z.shape[:-1], z.shape[-1] // (2 * interleave), 2, interleave)
    return blocks[..., 0, :].flatten(-2), blocks[..., 1, :].flatten(-2)


def join_glu(gate: torch.Tensor, up: torch.Tensor, interleave: int | None) -> torch.Tensor:
    """Inverse of :func:`split_glu`."""
    if interleave is None:
        return torch.cat((gate, up), -1)
    blocks = [half.reshape(*half.shape[:-1], half.shape[-1] // interleave, interleave) for half in (gate, up)]
    return torch.stack(blocks, -2).flatten(-3)


def _inputs(entry: Activation, z: torch.Tensor, interleave: int | None, params: Sequence[float]) -> Values:
    values: Values = dict(zip((name for name, _ in entry.params), params, strict=True))
    if entry.glu:
        values["gate"], values["up"] = split_glu(z, interleave)
    else:
        values["gate"] = z
    return values


def activation_forward(
    name: str, z: torch.Tensor, probs: torch.Tensor | None, interleave: int | None = None, params: Sequence[float] = ()
) -> torch.Tensor:
    """Return the activation times the router's probability, in the precision of ``z``.

    Parameters
    ----------
    name
        Entry of the activations table.
    z : Tensor (..., 2F), or (..., F) without a gate
        Pre-activation.
    probs : Tensor (...) or None
        Factor of each row.
    interleave, params
        Layout of z, and values of the activation's parameters.

    Returns
    -------
    Tensor (..., F)
    """
    entry = activation_of(name)
    act: torch.Tensor = _evaluator(entry.forward)(_inputs(entry, z, interleave, params))["act"]
    return act if probs is None else act * probs.to(z.dtype).unsqueeze(-1)


def activation_backward(
    name: str,
    grad: torch.Tensor,
    z: torch.Tensor,
    probs: torch.Tensor | None,
    interleave: int | None = None,
    params: Sequence[float] = (),
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gradients of :func:`activation_forward`.

    Parameters
    ----------
    name, z, probs, interleave, params
        As for :func:`activation_forward`.
    grad : Tensor (..., F)
        Gradient of a, in the precision of ``z``.

    Returns
    -------
    dz : Tensor, like z
    dprobs : Tensor (...) in the precision of z, or None if probs is None
    """
    entry = activation_of(name)
    values = _evaluator(entry.forward)(_inputs(entry, z, interleave, params))
    dprobs = None if probs is None else (grad * values["act"]).sum(-1)
    values["grad"] = grad if probs is None else grad * probs.to(z.dtype).unsqueeze(-1)
    values = _evaluator(entry.backward)(values)
    dz = join_glu(values["dgate"], values["dup"], interleave) if entry.glu else values["dgate"]
    return dz, dprobs


def offsets(sizes: torch.Tensor | Sequence[int], tokens: int) -> tuple[list[int], bool]:
    """First row of each group and the end of the last, on the host.

    Negative sizes count as 0 and offsets are cut at ``tokens``, as the kernels do.

    Returns
    -------
    list of int
        G + 1 offsets.
    bool
        Whether every size was valid.
    """
    listed = sizes.tolist() if isinstance(sizes, torch.Tensor) else list(sizes)
    ends = [0]
    for size in listed:
        ends.append(min(tokens, ends[-1] + max(0, size)))
    return ends, all(size >= 0 for size in listed) and sum(listed) <= tokens


def fprop(x: torch.Tensor, w: torch.Tensor, ends: Sequence[int]) -> torch.Tensor:
    """Compute y = x W^T for each group; rows past the last group are 0.

    Parameters
    ----------
    x : Tensor (T, K)
    w : Tensor (G, N, K)
    ends
        Offsets, as :func:`offsets` gives them.

    Returns
    -------
    Tensor (T, N)
    """
    y = x.new_zeros(x.shape[0], w.shape[1])
    for group, (start, end) in enumerate(itertools.pairwise(ends)):
        if end > start:
            torch.matmul(x[start:end], w[group].t(), out=y[start:end])
    return y


def dgrad(dy: torch.Tensor, w: torch.Tensor, ends: Sequence[int]) -> torch.Tensor:
    """Compute dx = dy W for each group; rows past the last group are 0.

    Parameters
    ----------
    dy : Tensor (T, N)
    w : Tensor (G, N, K)
    ends
        Offsets, as :func:`offsets` gives them.

    Returns
    -------
    Tensor (T, K)
    """
    return fprop(dy, w.transpose(1, 2), ends)


def wgrad(dy: torch.Tensor, x: torch.Tensor, ends: Sequence[int]) -> torch.Tensor:
    """Compute dW = dy^T x over the tokens of each group; an empty group's is 0.

    Parameters
    ----------
    dy : Tensor (T, N)
    x : Tensor (T, K)
    ends
        Offsets, as :func:`offsets` gives them.

    Returns
    -------
    Tensor (G, N, K)
    """
    dw = x.new_zeros(len(ends) - 1, dy.shape[1], x.shape[1])
    for group, (start, end) in enumerate(itertools.pairwise(ends)):
        if end > start:
            torch.matmul(dy[start:end].t(), x[start:end], out=dw[group])
    return dw


def group_of_rows(ends: Sequence[int], tokens: int, device: torch.device) -> torch.Tensor:
    """Group of each row, (T,) int64; rows past the last group get G."""
    counts = [end - start for start, end in itertools.pairwise(ends)] + [tokens - ends[-1]]
    return torch.repeat_interleave(
        torch.arange(len(counts), dtype=torch.int64, device=device),
        torch.tensor(counts, dtype=torch.int64, device=device),
    )


@dataclass(frozen=True, slots=True)
class Step:
    """Every tensor of a training step of the grouped MLP, in float64, rounded to storage where kernels store.

    Attributes
    ----------
    y, z, a
        Output, pre-activation and activation as stored.
    dx, dz, dw1, dw2
        Gradients.
    dprobs, db1, db2, dscale
        Gradients; None where the step has no such input.
    """

    y: torch.Tensor
    z: torch.Tensor
    a: torch.Tensor
    dx: torch.Tensor
    dz: torch.Tensor
    dw1: torch.Tensor
    dw2: torch.Tensor
    dprobs: torch.Tensor | None = None
    db1: torch.Tensor | None = None
    db2: torch.Tensor | None = None
    dscale: torch.Tensor | None = None


@torch.no_grad()
def grouped_mlp(
    x: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    sizes: torch.Tensor | Sequence[int],
    probs: torch.Tensor | None,
    dy: torch.Tensor,
    *,
    activation: str = "swiglu",
    interleave: int | None = None,
    params: Sequence[float] = (),
    b1: torch.Tensor | None = None,
    b2: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    storage: torch.dtype | None = None,
    round_grad: bool = False,
) -> Step:
    """One training step of the grouped MLP in float64, replaying the rounding points of the kernels.

    Parameters
    ----------
    x : Tensor (T, H)
    w1 : Tensor (G, 2F, H), or (G, F, H) without a gate
    w2 : Tensor (G, H, F)
    sizes : (G,) integers
    probs : Tensor (T,) or None
    dy : Tensor (T, H)
        Gradient of y.
    activation, interleave, params
        As for :func:`activation_forward`.
    b1, b2 : Tensor (G, 2F) and (G, H), or None
        Biases.
    scale : Tensor (T,) or None
        Scale of each row's b2.
    storage
        Type in which z, a, y and the gradients are stored; that of x by default.  float64 rounds nowhere.
    round_grad
        Whether the gradient of a is stored between FC2's dgrad and the activation's gradient, as the unfused path does.
    """
    store = x.dtype if storage is None else storage
    tokens = x.shape[0]

    def stored(t: torch.Tensor) -> torch.Tensor:
        return t.to(store).double()

    ends, _ = offsets(sizes, tokens)
    total = ends[-1]
    groups = group_of_rows(ends, tokens, x.device)[:total]

    def valid(t: torch.Tensor | None) -> torch.Tensor | None:
        return None if t is None else t[:total].double()

    def padded(t: torch.Tensor) -> torch.Tensor:
        return torch.cat((t, t.new_zeros(tokens - total, *t.shape[1:])))

    def sums(t: torch.Tensor) -> torch.Tensor:
        return torch.stack([t[start:end].sum(0) for start, end in itertools.pairwise(ends)])

    xd, w1d, w2d, dyd, p = x.double(), w1.double(), w2.double(), dy.double(), valid(probs)
    s = x.new_ones(total, dtype=torch.float64) if scale is None else scale[:total].double()
    z = fprop(xd, w1d, ends)
    if b1 is not None:
        z[:total] += b1.double()[groups]
    z = stored(z)
    a = padded(stored(activation_forward(activation, z[:total], p, interleave, params)))
    y = fprop(a, w2d, ends)
    if b2 is not None:
        y[:total] += b2.double()[groups] * s[:, None]
    grad = dgrad(dyd, w2d, ends)[:total]
    if round_grad:
        grad = stored(grad)
    dz, dprobs = activation_backward(activation, grad, z[:total], p, interleave, params)
    dz = padded(stored(dz))
    dscale = None
    if scale is not None and b2 is not None:
        dscale = padded((dyd[:total] * b2.double()[groups]).sum(-1).to(scale.dtype).double())
    return Step(
        y=stored(y),
        z=z,
        a=a,
        dx=stored(dgrad(dz, w1d, ends)),
        dz=dz,
        dw1=stored(wgrad(dz, xd, ends)),
        dw2=stored(wgrad(dyd, a, ends)),
        dprobs=None if probs is None or dprobs is None else padded(dprobs.to(probs.dtype).double()),
        db1=None if b1 is None else stored(sums(dz)),
        db2=None if b2 is None else stored(sums(dyd[:total] * s[:, None])),
        dscale=dscale,
    )
