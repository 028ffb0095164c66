"""The operands of a grouped linear layer under a quantising recipe.

fprop reads x and W rowwise; dgrad reads dy rowwise and W columnwise, blocks along the out features; wgrad reads dy and
x columnwise, blocks along each group's tokens.  A Hadamard transform on both of wgrad's operands cancels.  Operands are
bf16 numbers and factors (:class:`EmulatedOperand`).  A recipe's ``backward_override`` replaces backward's operands, as
in Transformer Engine: ``"high_precision"`` by the unquantised tensors, ``"dequantized"`` by those that fprop read; the
gradient of the output is not quantised then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from .. import checks, grouped_gemm, kernels
from ..codegen.spec import KernelSpec
from ..config import settings
from ..context import OperationContext, PlannedKernel
from ..grouped_gemm import GroupedGemm, LinearShape, rows_to_groups
from ..quantizers import launch
from ..quantizers.base import QuantizedTensor, Quantizer
from ..quantizers.emulation import EmulatedOperand, emulate
from ..quantizers.matrices import make_groups
from ..quantizers.per_tensor import DelayedScalingQuantizer
from ..quantizers.prequantized import quantized_of
from ..recipe_state import QuantizedCall, Quantizers

if TYPE_CHECKING:
    from .grouped_linear import GroupedLinear

Tensors = Sequence["torch.Tensor | None"]


class LinearQuantizers(NamedTuple):
    """The quantisers of a layer; None for a tensor that is not quantised."""

    input: Quantizer | None
    weight: Quantizer | None
    grad_output: Quantizer | None
    backward_override: str | None

    @property
    def factors_of_rows(self) -> bool:
        """Whether an input has scales of rows, which kernels do not take."""
        return any(getattr(q, "row_scaled_nvfp4", False) for q in self[:3])

    @property
    def exact(self) -> bool:
        """Whether bf16 holds every operand exactly."""
        return all(q is None or q.exact_in_bf16 for q in self[:3])


def of_linear(quantizers: Quantizers) -> LinearQuantizers:
    """Name the quantisers of a grouped linear layer."""
    (x, w), (dy,) = quantizers.by_mode["forward"], quantizers.by_mode["backward"]
    return LinearQuantizers(x, w, dy, quantizers.backward_override)


def feature_problems(q: LinearQuantizers, in_features: int, out_features: int) -> list[str]:
    """Say why a layer of a size cannot run on such quantisers."""
    problems = []
    along_inputs = max((p.divisor for p in (q.input, q.weight) if p is not None), default=1)
    if in_features % along_inputs:
        problems.append(f"in_features is {in_features}, allowed: a multiple of {along_inputs}")
    if q.backward_override is not None:
        return problems
    divisor = 1 if q.grad_output is None else q.grad_output.divisor
    if out_features % divisor:
        problems.append(f"out_features is {out_features}, allowed: a multiple of {divisor}")
    rht = {getattr(p, "with_rht", False) for p in (q.input, q.grad_output)}
    if len(rht) > 1:
        problems.append("with_rht of the quantisers of input and gradient differs: in wgrad the transforms must cancel")
    alignments = {p.group_alignment for p in (q.input, q.grad_output) if p is not None}
    if len(alignments) > 1:
        problems.append(f"group_alignment of the quantisers of input and gradient differs: {sorted(alignments)}")
    return problems


def gemm_of(shape: LinearShape, quantizers: Quantizers) -> GroupedGemm:
    """Decide how to run a layer of a shape on what its quantisers make."""
    return grouped_gemm.choose_quantized(shape, factors_of_rows=of_linear(quantizers).factors_of_rows)


def forward(
    ctx: OperationContext,
    call: QuantizedCall,
    shape: LinearShape,
    x: torch.Tensor,
    w: torch.Tensor,
    split_sizes: torch.Tensor,
    bias: torch.Tensor | None,
    scale: torch.Tensor | None,
    *,
    wgrad: bool,
    input_: torch.Tensor,
    is_first_microbatch: bool | None,
) -> tuple[GroupedGemm, torch.Tensor, Tensors]:
    """Forward of a layer alone.

    Parameters
    ----------
    ctx
        Says which gradients are needed.
    call, shape
        The layer's quantisation in this call, and its shape.
    x, w, split_sizes, bias, scale
        (T, K), (G, N, K), (G,), (G, N) or None, and (T,) or None.
    wgrad
        Whether the weight requires a gradient.
    input_
        What the caller gave for x: perhaps prequantised.
    is_first_microbatch
        As :func:`forward_operands` takes it.

    Returns
    -------
    gemm
        What runs backward.
    y
        (T, N).
    saved
        For :func:`backward_arguments`.
    """
    gemm = gemm_of(shape, call.quantizers)
    operands = forward_operands(
        call,
        x,
        w,
        split_sizes,
        wgrad=ctx.requires_grad and wgrad,
        dgrad=ctx.requires_grad and ctx.input_requires_grad,
        record=ctx.records_amax,
        prequantized=quantized_of(input_),
        is_first_microbatch=is_first_microbatch,
    )
    alpha = rows_alpha(operands.x, operands.w, split_sizes)
    y = gemm.fprop(operands.x.values, operands.w.values, split_sizes, bias, scale, alpha)
    if call.quantizers.backward_override == "high_precision":
        gemm = grouped_gemm.choose(shape)
    return gemm, y, operands.to_save()


#: Operands, sizes and alpha of a backward pass; None where it is not needed.
Arguments = tuple[torch.Tensor, torch.Tensor, torch.Tensor, "torch.Tensor | None"] | None


def backward_arguments(
    call: QuantizedCall, dy: torch.Tensor, grad_output: torch.Tensor, split_sizes: torch.Tensor, saved: Tensors
) -> tuple[Arguments, Arguments]:
    """Return the arguments of dgrad and of wgrad of a layer alone.

    Parameters
    ----------
    call, saved
        What :func:`forward` ran with, and what it saved.
    dy, split_sizes
        (T, N) and (G,).
    grad_output
        What autograd gave for dy: perhaps prequantised.
    """
    x, w = saved_operands(saved)
    row, column = gradient_operands(
        call, dy, split_sizes, wgrad=x is not None, dgrad=w is not None, prequantized=quantized_of(grad_output)
    )
    dgrad = wgrad = None
    if w is not None and row is not None:
        dgrad = row.values, w.values, split_sizes, rows_alpha(row, w, split_sizes)
    if x is not None and column is not None:
        slots = split_sizes if column.sizes is None else column.sizes
        wgrad = column.values, x.values, slots, groups_alpha(column, x)
    return dgrad, wgrad


class ForwardOperands(NamedTuple):
    """What fprop reads, and what wgrad and dgrad will read; None where that is not needed."""

    x: EmulatedOperand
    w: EmulatedOperand
    wgrad_x: EmulatedOperand | None
    dgrad_w: EmulatedOperand | None

    def to_save(self) -> Tensors:
        """Tensors of what backward reads; :func:`saved_operands` puts them together again."""
        saved = (self.wgrad_x or _NOTHING, self.dgrad_w or _NOTHING)
        return [t for operand in saved for t in (operand.values, operand.alpha, operand.sizes)]


def saved_operands(tensors: Tensors) -> tuple[EmulatedOperand | None, EmulatedOperand | None]:
    """Inverse of :meth:`ForwardOperands.to_save`: x for wgrad, and W for dgrad."""
    x, x_alpha, x_sizes, w, w_alpha, _ = tensors
    return (
        None if x is None else EmulatedOperand(x, x_alpha, x_sizes),
        None if w is None else EmulatedOperand(w, w_alpha),
    )


class _Nothing(NamedTuple):
    values: None = None
    alpha: None = None
    sizes: None = None


_NOTHING = _Nothing()


def forward_operands(
    call: QuantizedCall,
    x: torch.Tensor,
    w: torch.Tensor,
    split_sizes: torch.Tensor,
    *,
    wgrad: bool,
    dgrad: bool,
    record: bool = True,
    prequantized: QuantizedTensor | None = None,
    is_first_microbatch: bool | None = None,
) -> ForwardOperands:
    """Quantise the operands of a forward pass.

    Parameters
    ----------
    call
        The layer's quantisation in this call.
    x, w, split_sizes
        (T, K), (G, N, K) and (G,).
    wgrad, dgrad
        Whether backward will compute the gradients of W and of x.
    record
        Whether amaxes count for delayed scaling.
    prequantized
        What x was quantised to before, to be read rowwise as it is.
    is_first_microbatch
        True: keep the quantised weight.  False: use the one that was kept.  None: neither.  While a CUDA graph is
        captured the weight is always quantised anew, so that replays see its changes.
    """
    q = of_linear(call.quantizers)
    override = q.backward_override
    status = status_word(x.device)
    columns = wgrad and override is None
    if prequantized is None:
        x_row, x_column = _tensor_operands(call, "forward", 0, x, split_sizes, columns, record, status)
    else:
        x_row = _as_it_is(prequantized, x, len(split_sizes), status)
        x_column = None
        if columns:
            _, x_column = _tensor_operands(call, "forward", 0, x, split_sizes, True, record, status, rowwise=False)
    assert x_row is not None
    w_column: EmulatedOperand | None
    if q.weight is None:
        w_row = w_column = EmulatedOperand(w.to(x.dtype))
    else:
        w_row, w_column = _weight_operands(call, w, dgrad and override is None, record, status, is_first_microbatch)
    if override == "high_precision":
        x_column, w_column = EmulatedOperand(x), EmulatedOperand(w.to(x.dtype))
    elif override == "dequantized":
        # Factors of rows cannot be taken out of wgrad's sum over rows.
        x_column = x_row if x_row.alpha is None or x_row.alpha.dim() == 1 else _dequantized(x_row, x.dtype)
        w_column = w_row
    return ForwardOperands(x_row, w_row, x_column if wgrad else None, w_column if dgrad else None)


def gradient_operands(
    call: QuantizedCall,
    dy: torch.Tensor,
    split_sizes: torch.Tensor,
    *,
    wgrad: bool,
    dgrad: bool,
    prequantized: QuantizedTensor | None = None,
) -> tuple[EmulatedOperand | None, EmulatedOperand | None]:
    """Quantise the gradient of the output.

    Parameters
    ----------
    call, split_sizes, wgrad, dgrad, prequantized
        As :func:`forward_operands` takes them.
    dy
        (T, N).

    Returns
    -------
    for_dgrad, for_wgrad : EmulatedOperand or None
    """
    if call.quantizers.backward_override is not None:
        return EmulatedOperand(dy), EmulatedOperand(dy)
    if not (wgrad or dgrad):  # only a bias is trained
        return None, None
    status = status_word(dy.device)
    if prequantized is None:
        return _tensor_operands(call, "backward", 0, dy, split_sizes, wgrad, True, status, rowwise=dgrad)
    row = _as_it_is(prequantized, dy, len(split_sizes), status) if dgrad else None
    column = None
    if wgrad:
        _, column = _tensor_operands(call, "backward", 0, dy, split_sizes, True, True, status, rowwise=False)
    return row, column


def rows_alpha(rows: EmulatedOperand, w: EmulatedOperand, split_sizes: torch.Tensor) -> torch.Tensor | None:
    """Factors of fprop's or dgrad's product: (G,), or (T, 1) where rows have factors of their own."""
    a, b = rows.alpha, w.alpha
    if a is None or b is None:
        return a if b is None else b
    if a.dim() == 2:
        b = torch.cat((b, b.new_zeros(1)))[rows_to_groups(split_sizes, a.shape[0])].unsqueeze(1)
    return a * b


def groups_alpha(dy: EmulatedOperand, x: EmulatedOperand) -> torch.Tensor | None:
    """Factors of wgrad's product: (G,), or (G, 1, K) where columns have factors of their own."""
    a, b = dy.alpha, x.alpha
    if b is not None and b.dim() == 2:
        b = b.unsqueeze(1)
        a = None if a is None else a.view(-1, 1, 1)
    if a is None or b is None:
        return a if b is None else b
    return a * b


def planned_alphas(q: LinearQuantizers) -> tuple[bool, bool, bool]:
    """Whether fprop, dgrad and wgrad multiply by alpha."""
    x, w, dy = (made is not None and made.has_alpha for made in q[:3])
    if q.backward_override == "high_precision":
        return x or w, False, False
    if q.backward_override == "dequantized":
        return x or w, w, x
    return x or w, dy or w, dy or x


def planned(
    q: LinearQuantizers,
    *,
    wgrad: bool,
    dgrad: bool,
    record: bool,
    layer: GroupedLinear,
    names: Mapping[str, str] | None = None,
) -> list[PlannedKernel]:
    """List the quantising steps of a layer, for ``explain``.

    Parameters
    ----------
    q
        Its quantisers.
    wgrad, dgrad
        Whether gradients of its weight and of its input are wanted.
    record
        Whether amaxes count for delayed scaling.
    layer
        The layer.
    names
        Names of its operands, ``"x"``, ``"w"`` and ``"dy"``, where they have others.
    """
    columns = q.backward_override is None
    found = []
    for name, made, rowwise, columnwise in (
        ("x", q.input, True, wgrad and columns),
        ("w", q.weight, True, dgrad and columns),
        ("dy", q.grad_output, dgrad and columns, wgrad and columns),
    ):
        ways = [way for way, wanted in (("rowwise", rowwise), ("columnwise", columnwise)) if wanted]
        if made is None or not ways:
            continue
        operand = name if names is None else names[name]
        features = layer.out_features if name == "dy" else layer.in_features
        how = f"{type(made).__name__.removesuffix('Quantizer')} to bfloat16 operands, {' and '.join(ways)}"
        specs = _quantize_specs(made, layer, features, rowwise, columnwise, batched=name == "w", record=record)
        found += [
            PlannedKernel(f"{what}_{operand}", name == "dy", spec, how, emulated=True)
            for what, spec in zip(("amax", "quantize"), specs, strict=True)
            if spec is not None or (what == "quantize")
        ]
    return found


def _quantize_specs(
    made: Quantizer,
    layer: GroupedLinear,
    features: int,
    rowwise: bool,
    columnwise: bool,
    *,
    batched: bool,
    record: bool,
) -> tuple[KernelSpec | None, KernelSpec | None]:
    """Return the kernels that measure and quantise an operand; None where plain torch does, or nothing measures."""
    w = layer.fuser_parameters()[0]
    amax = record and isinstance(made, DelayedScalingQuantizer)
    ways = {"batched": batched, "rowwise": rowwise, "columnwise": columnwise, "amax": amax}
    specs = launch.planned_specs(made, w.dtype, w.device, features, **ways)
    return (None, None) if specs is None else (specs[1], specs[0])


def status_word(device: torch.device) -> torch.Tensor | None:
    """Return the word into which operands outside of bf16's range are reported; None where that is switched off."""
    return kernels.provider().status(device) if settings.check_range else None


def _tensor_operands(
    call: QuantizedCall,
    mode: str,
    index: int,
    x: torch.Tensor,
    split_sizes: torch.Tensor,
    columnwise: bool,
    record: bool,
    status: torch.Tensor | None,
    *,
    rowwise: bool = True,
) -> tuple[EmulatedOperand | None, EmulatedOperand | None]:
    """Quantise a tensor of grouped rows, (T, C)."""
    quantizer = call.quantizers.by_mode[mode][index]
    if quantizer is not None:
        row, column = call.operands(
            mode, index, x, split_sizes, rowwise=rowwise, columnwise=columnwise, record=record, status=status
        )
        if row is not None and row.alpha is not None and getattr(quantizer, "row_scaled_nvfp4", False):
            row = EmulatedOperand(row.values, row.alpha.unsqueeze(1))
        return row, column
    # Unquantised beside a quantised one (a custom recipe): wgrad's operands must have their rows at the same slots.
    q = of_linear(call.quantizers)
    partner = q.grad_output if mode == "forward" else q.input
    column = EmulatedOperand(x)
    if columnwise and partner is not None:
        groups = make_groups(split_sizes, x.shape[0], partner.group_alignment)
        column = EmulatedOperand(groups.pad(groups.clean(x.unsqueeze(0)))[0], sizes=groups.sizes)
    return EmulatedOperand(x), column


def _weight_operands(
    call: QuantizedCall,
    w: torch.Tensor,
    columnwise: bool,
    record: bool,
    status: torch.Tensor | None,
    is_first_microbatch: bool | None,
) -> tuple[EmulatedOperand, EmulatedOperand | None]:
    """Quantise the weights, or take those that were kept."""
    if w.is_cuda and is_first_microbatch is not None and torch.cuda.is_current_stream_capturing():
        is_first_microbatch = None
    quantizer, state = call.quantizers.by_mode["forward"][1], call.state
    if is_first_microbatch is False and state.kept is not None:
        made_by, row, column = state.kept
        if made_by == quantizer and (column is not None or not columnwise):
            return row, column
    row, column = call.operands(
        "forward", 1, w, batched=True, rowwise=True, columnwise=columnwise, record=record, status=status
    )
    assert row is not None
    if column is not None and column.values.shape[1] != w.shape[1]:  # filled up to whole blocks
        column = EmulatedOperand(column.values[:, : w.shape[1]].contiguous(), column.alpha)
    if is_first_microbatch is not None:
        state.kept = (quantizer, row, column)
    return row, column


def _dequantized(operand: EmulatedOperand, dtype: torch.dtype) -> EmulatedOperand:
    assert operand.alpha is not None
    return EmulatedOperand((operand.values.float() * operand.alpha).to(dtype))


def _as_it_is(q: QuantizedTensor, x: torch.Tensor, groups: int, status: torch.Tensor | None) -> EmulatedOperand:
    """Rowwise operand of what was quantised before."""
    per_row = getattr(q.quantizer, "row_scaled_nvfp4", False)
    problems = []
    if q.matrices.stacked or q.shape[:-1].numel() != x.shape[0]:
        problems.append(f"it was quantised with shape {tuple(q.shape)}, allowed: {tuple(x.shape)}, not as a batch")
    elif not per_row and q.matrices.count not in (1, groups):
        problems.append(f"it was quantised in {q.matrices.count} groups, allowed: 1 or {groups}")
    checks.require("a tensor of prequantized()", problems)
    values, alpha = emulate(q, "rowwise", exact=False, status=status)
    values = values.reshape(x.shape)
    if not q.quantizer.has_alpha:
        return EmulatedOperand(values)
    return EmulatedOperand(values, alpha.unsqueeze(1) if per_row else alpha.expand(groups).contiguous())
