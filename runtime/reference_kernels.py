"""The kernels' contract in plain torch: the same arguments, the same results, on any device.

``with kernels.using(ReferenceKernels()):`` runs fused plans without a GPU and without compiling: to test host logic, to
tell a wrong kernel from a wrong call, and as the yardstick of a single kernel.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from . import kernels, reference
from .codegen.activations import ACTIVATIONS
from .codegen.spec import Arch, GluLayout, KernelSpec, Pass
from .grouped_gemm import BIAS_GRAD_COLUMNS
from .kernels import Launch, StatusWords


class ReferenceKernels:
    """A :class:`kernels.KernelProvider` whose kernels are torch functions.

    Attributes
    ----------
    launches : list of KernelSpec
        Every launch, in order.
    prepared : list of KernelSpec
        Every kernel that was asked to be made ready.
    """

    def __init__(self) -> None:
        self.launches: list[KernelSpec] = []
        self.prepared: list[KernelSpec] = []
        self._status = StatusWords()

    def unsupported(self, device: torch.device) -> tuple[str, ...]:
        """Nothing: every device will do."""
        return ()

    def arch(self, device: torch.device) -> Arch:
        """Return the architecture whose specs are chosen."""
        return Arch.SM90A

    def sm_count(self, device: torch.device) -> int:
        """Return that of an H200."""
        return 132

    def prepare(self, specs: Sequence[KernelSpec], device: torch.device) -> None:
        """Note what was asked for."""
        self.prepared.extend(specs)

    def get(self, spec: KernelSpec) -> Launch:
        """Return a torch function with the kernel's arguments."""
        kernel = reference_kernel(spec)

        def launch(*arguments: Any) -> None:
            self.launches.append(spec)
            kernel(*arguments)

        return launch

    def status(self, device: torch.device) -> torch.Tensor:
        """Return the device's status word."""
        return self._status.get(device)

    def check_status(self, device: torch.device) -> None:
        """As :class:`kernels.KernelProvider`."""
        self._status.check(device)

    def locate(self, spec: KernelSpec) -> str:
        """Plain torch."""
        return "plain torch in the kernel's place"

    def names(self) -> list[str]:
        """Roles of the launches so far, in order."""
        return [spec.kernel.value for spec in self.launches]


def reference_kernel(spec: KernelSpec) -> Callable[..., None]:
    """Return a torch function with the arguments of a kernel, which writes what the kernel must write.

    Parameters
    ----------
    spec
        The kernel.
    """
    if spec.kernel is Pass.REDUCE:
        return _reduce
    function = {
        Pass.FPROP_ACT: _fprop_act,
        Pass.FPROP: _fprop,
        Pass.DGRAD_ACT: _dgrad_act,
        Pass.DGRAD: _dgrad,
        Pass.WGRAD: _wgrad,
        Pass.BIAS_GRAD: _bias_grad,
    }[spec.kernel]
    return lambda *arguments: function(spec, list(arguments))


def _ends(sizes: torch.Tensor, tokens: int, status: torch.Tensor | None) -> list[int]:
    ends, valid = reference.offsets(sizes, tokens)
    if not valid and status is not None:
        status.bitwise_or_(kernels.INVALID_SPLITS)
    return ends


def _reduce(partial: torch.Tensor, out: torch.Tensor, num_ctas: int) -> None:
    out.copy_(partial.sum(0))


def _take(arguments: list[Any], present: bool) -> Any:
    """Take the next argument if the kernel has it."""
    return arguments.pop(0) if present else None


def _scaled(weights: torch.Tensor, alpha: torch.Tensor | None) -> torch.Tensor:
    """Matrices of the groups in fp32, each times its factor."""
    return weights.float() if alpha is None else weights.float() * alpha.view(-1, 1, 1)


def _linear(
    x: torch.Tensor, w: torch.Tensor, ends: list[int], bias: torch.Tensor | None, scale: torch.Tensor | None
) -> torch.Tensor:
    """x W^T + bias (times scale) in fp32; rows past the last group are 0."""
    y = reference.fprop(x.float(), w.float(), ends)
    if bias is not None:
        total = ends[-1]
        rows = bias.float()[reference.group_of_rows(ends, len(x), x.device)[:total]]
        y[:total] += rows if scale is None else rows * scale[:total, None].float()
    return y


def _fprop(spec: KernelSpec, arguments: list[Any]) -> None:
    x, w = arguments[:2]
    rest = arguments[2:]
    w = _scaled(w, _take(rest, spec.alpha))
    bias, scale = _take(rest, spec.bias), _take(rest, spec.probs is not None)
    sizes, y, status, _ = rest
    y.copy_(_linear(x, w, _ends(sizes, len(x), status), bias, scale))


def _dgrad(spec: KernelSpec, arguments: list[Any]) -> None:
    dy, w = arguments[:2]
    rest = arguments[2:]
    w = _scaled(w, _take(rest, spec.alpha))
    sizes, dx, status, _ = rest
    dx.copy_(reference.dgrad(dy.float(), w, _ends(sizes, len(dy), status)))


def _wgrad(spec: KernelSpec, arguments: list[Any]) -> None:
    dy, x = arguments[:2]
    rest = arguments[2:]
    alpha = _take(rest, spec.alpha)
    sizes, dw, status, _ = rest
    ends = _ends(sizes, len(x), status)
    result = reference.wgrad(dy.float(), x.float(), ends)
    if alpha is not None:  # an empty group's gradient is 0 whatever its factor is
        filled = torch.tensor(
            [start < end for start, end in itertools.pairwise(ends)], dtype=torch.bool, device=x.device
        )
        result = torch.where(filled.view(-1, 1, 1), _scaled(result, alpha), 0.0)
    dw.copy_(dw.float() + result if spec.accumulate else result)


def _bias_grad(spec: KernelSpec, arguments: list[Any]) -> None:
    dy = arguments[0]
    rest = arguments[1:]
    scale = _take(rest, spec.probs is not None)
    sums = spec.sum_probs and scale is not None
    bias = _take(rest, sums)
    sizes, db, *partial = rest
    ends = _ends(sizes, len(dy), None)
    weighted = dy.float() if scale is None else dy.float() * scale.float()[:, None]
    result = torch.stack([weighted[start:end].sum(0) for start, end in itertools.pairwise(ends)])
    db.copy_(db.float() + result if spec.accumulate else result)
    if sums:
        total = ends[-1]
        products = dy[:total].float() * bias.float()[reference.group_of_rows(ends, len(dy), dy.device)[:total]]
        _partial_sums(partial[0], products, BIAS_GRAD_COLUMNS)


def _partial_sums(partial: torch.Tensor, values: torch.Tensor, columns: int) -> None:
    """Write the sums of blocks of columns; 0 for rows past those given."""
    partial.zero_()
    for block, part in enumerate(torch.split(values, columns, -1)):
        partial[block, : len(values)] = part.sum(-1)


def _interleave(spec: KernelSpec) -> int | None:
    return 32 if spec.glu_layout is GluLayout.INTERLEAVED32 else None


def _activate(spec: KernelSpec, z: torch.Tensor, probs: torch.Tensor | None, params: Sequence[float]) -> torch.Tensor:
    rows = None if probs is None else probs[: len(z)]
    act = reference.activation_forward(str(spec.activation), z.float(), rows, _interleave(spec), params)
    return act.to(z.dtype)


def _fprop_act(spec: KernelSpec, arguments: list[Any]) -> None:
    x, w = arguments[:2]
    rest = arguments[2:]
    w = _scaled(w, _take(rest, spec.alpha))
    bias, probs = _take(rest, spec.bias), _take(rest, spec.probs is not None)
    sizes = rest.pop(0)
    z_out = _take(rest, spec.store_z)
    a, status, *params, _ = rest
    ends = _ends(sizes, len(x), status)
    z = _linear(x, w, ends, bias, None).to(a.dtype)
    if z_out is not None:
        z_out.copy_(z)
    a.zero_()
    a[: ends[-1]] = _activate(spec, z[: ends[-1]], probs, params)


def _dgrad_act(spec: KernelSpec, arguments: list[Any]) -> None:
    dy, w = arguments[:2]
    rest = arguments[2:]
    w = _scaled(w, _take(rest, spec.alpha))
    z = rest.pop(0)
    probs = _take(rest, spec.probs is not None)
    sizes, dz = rest[:2]
    rest = rest[2:]
    a = _take(rest, spec.store_act)
    partial = _take(rest, spec.sum_probs and probs is not None)
    status, *params, _ = rest
    ends = _ends(sizes, len(dy), status)
    total = ends[-1]
    grad = reference.dgrad(dy.float(), w.float(), ends)[:total]
    rows = None if probs is None else probs[:total]
    valid = z[:total].float()
    dz.zero_()
    dz[:total], _ = reference.activation_backward(str(spec.activation), grad, valid, rows, _interleave(spec), params)
    if a is not None:
        a.zero_()
        a[:total] = _activate(spec, z[:total], probs, params)
    if partial is not None and spec.tile is not None:
        act = reference.activation_forward(str(spec.activation), valid, None, _interleave(spec), params)
        _partial_sums(partial, grad * act, spec.tile.tile_n)


def example_arguments(
    spec: KernelSpec, *, sizes: Sequence[int], tokens: int, n: int, k: int, device: torch.device | str, seed: int = 0
) -> tuple[list[Any], list[torch.Tensor]]:
    """Random arguments for one kernel: N(0, 1) inputs, weights scaled by 1 / sqrt(fan-in), outputs filled with NaN.

    Parameters
    ----------
    spec
        The kernel.
    sizes, tokens
        Split sizes, and T.
    n, k
        Output features and contraction length of the GEMM.  ``fprop_act`` has F = n and H = k, ``dgrad_act`` H = k and
        F = n, ``dgrad`` returns (T, n), ``wgrad`` (G, n, k), ``bias_grad`` (G, n), ``reduce`` has n partials.
    device, seed
        Where, and the seed.

    Returns
    -------
    arguments : list
        For the kernel, without ``num_ctas`` (which ``bias_grad`` does not take).
    outputs : list of Tensor
        Those of the arguments that it writes.
    """
    generator = torch.Generator(device=device).manual_seed(seed)
    types = {value: key for key, value in kernels.DTYPES.items()}
    dtype = types[spec.types.storage]
    groups = len(sizes)

    def normal(*shape: int, fan_in: int = 1) -> torch.Tensor:
        values: torch.Tensor = torch.randn(*shape, generator=generator, device=device, dtype=torch.float32)
        return torch.div(values, fan_in**0.5).to(dtype)

    def poisoned(*shape: int, of: torch.dtype = dtype) -> torch.Tensor:
        return torch.full(shape, float("nan"), dtype=of, device=device)

    splits = torch.tensor(sizes, dtype=torch.int32, device=device)
    alpha = [torch.rand(groups, generator=generator, dtype=torch.float32, device=device) + 0.5] if spec.alpha else []
    status = torch.zeros(1, dtype=torch.int32, device=device)
    probs = (
        [torch.rand(tokens, generator=generator, dtype=torch.float32, device=device).to(types[spec.probs])]
        if spec.probs
        else []
    )
    out_dtype = types[spec.out] if spec.out else dtype
    if spec.kernel is Pass.REDUCE:
        out = poisoned(tokens, of=types[spec.probs] if spec.probs else torch.float32)
        return [torch.randn(n, tokens, generator=generator, dtype=torch.float32, device=device), out], [out]
    if spec.kernel is Pass.BIAS_GRAD:
        sums = bool(probs) and spec.sum_probs
        db = normal(groups, n).to(out_dtype) if spec.accumulate else poisoned(groups, n, of=out_dtype)
        partial = [poisoned(-(-n // BIAS_GRAD_COLUMNS), tokens, of=torch.float32)] if sums else []
        return [normal(tokens, n), *probs, *([normal(groups, n)] if sums else []), splits, db, *partial], [db, *partial]
    if spec.kernel is Pass.WGRAD:
        dw = normal(groups, n, k).to(out_dtype) if spec.accumulate else poisoned(groups, n, k, of=out_dtype)
        return [normal(tokens, n), normal(tokens, k), *alpha, splits, dw, status], [dw]
    if spec.kernel in (Pass.FPROP, Pass.DGRAD):
        weight = normal(groups, n, k, fan_in=k) if spec.kernel is Pass.FPROP else normal(groups, k, n, fan_in=k)
        bias = [normal(groups, n)] if spec.bias else []
        out = poisoned(tokens, n)
        return [normal(tokens, k), weight, *alpha, *bias, *probs, splits, out, status], [out]
    entry = ACTIVATIONS[str(spec.activation)]
    params = [default for _, default in entry.params]
    width = (2 if entry.glu else 1) * n
    a = poisoned(tokens, n)
    if spec.kernel is Pass.FPROP_ACT:
        bias = [normal(groups, width)] if spec.bias else []
        z_out = [poisoned(tokens, width)] if spec.store_z else []
        w1 = normal(groups, width, k, fan_in=k)
        return [normal(tokens, k), w1, *alpha, *bias, *probs, splits, *z_out, a, status, *params], [*z_out, a]
    z = normal(tokens, width)
    act = [a] if spec.store_act else []
    dz = poisoned(tokens, width)
    assert spec.tile is not None
    sums = bool(probs) and spec.sum_probs
    partial = [poisoned(-(-n // spec.tile.tile_n), tokens, of=torch.float32)] if sums else []
    w2 = normal(groups, k, n, fan_in=k)
    return [normal(tokens, k), w2, *alpha, z, *probs, splits, dz, *act, *partial, status, *params], [dz, *act, *partial]
