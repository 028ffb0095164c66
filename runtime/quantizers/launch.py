"""Quantising by generated kernels: the same bits as the quantisers in plain torch, in one read of the tensor."""

from __future__ import annotations

import functools
from typing import Any

import torch

from .. import kernels, support
from ..codegen.select import amax_spec, quantize_spec
from ..codegen.spec import Arch, Element, KernelSpec, Quantization, Scaling
from .base import QuantizedTensor, Quantizer
from .block_fp8 import Float8BlockQuantizer
from .formats import E2M1_MAX, E4M3, FP8_MAX
from .matrices import slot_count
from .mxfp8 import MXFP8Quantizer
from .nvfp4 import NVFP4Quantizer
from .per_tensor import DelayedScalingQuantizer, Float8CurrentScalingQuantizer, _PerTensorQuantizer

#: Rows of a tensor that a kernel's schedule can count.
_MAX_ROWS = 2**26
#: NVFP4: what an amax is divided by to give a group's factor.
_NVFP4_LARGEST = E2M1_MAX * FP8_MAX[E4M3]
#: Words for reports that nobody asked for.
_UNREPORTED = kernels.StatusWords()

#: Numbers in bf16, factor of each matrix or group or None, and slots of each group or None.
Emulated = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]
Specs = tuple[KernelSpec, KernelSpec | None]


def quantization_of(
    quantizer: Quantizer, *, rowwise: bool, columnwise: bool, batched: bool, emulate: bool = True, amax: bool = False
) -> Quantization | None:
    """Return what a kernel has to do for a quantiser; None if there is no such kernel.

    Parameters
    ----------
    quantizer
        Of one of this package's classes; a subclass may compute anything.
    rowwise, columnwise
        Directions that are wanted.
    batched
        Whether the tensor is a batch of matrices of equal size, or one matrix.
    emulate
        Whether results are bf16 numbers.
    amax
        Whether delayed scaling's amax is wanted.
    """
    fields: dict[str, Any] = {"rowwise": rowwise, "columnwise": columnwise, "batched": batched, "emulate": emulate}
    kind = type(quantizer)
    if not (rowwise or columnwise):
        return None
    if kind is NVFP4Quantizer and isinstance(quantizer, NVFP4Quantizer):
        if quantizer.row_scaled_nvfp4:
            return None
        fields["two_dimensional"] = quantizer.with_2d_quantization
        fields["rht"] = quantizer.with_rht and columnwise
        return Quantization(Scaling.NVFP4, Element.E2M1, stochastic=quantizer.stochastic_rounding, **fields)
    element = Element.E4M3 if getattr(quantizer, "fp8_dtype", None) is E4M3 else Element.E5M2
    if kind is MXFP8Quantizer and isinstance(quantizer, MXFP8Quantizer):
        fields |= {"two_dimensional": quantizer.with_2d_quantization, "margin": quantizer.margin}
        return Quantization(Scaling.MXFP8, element, **fields)
    if kind is Float8BlockQuantizer and isinstance(quantizer, Float8BlockQuantizer):
        fields |= {"two_dimensional": quantizer.two_dimensional, "power_of_two": quantizer.force_pow_2_scales}
        return Quantization(Scaling.BLOCK_FP8, element, **fields)
    if kind in (DelayedScalingQuantizer, Float8CurrentScalingQuantizer):
        return Quantization(Scaling.PER_TENSOR, element, amax=amax and kind is DelayedScalingQuantizer, **fields)
    return None


@functools.lru_cache(maxsize=1024)
def _specs(
    arch: Arch, quantizer: Quantizer, rowwise: bool, columnwise: bool, batched: bool, emulate: bool, amax: bool
) -> Specs | None:
    """Return the kernel that quantises, and the one that measures before, if any."""
    quantization = quantization_of(
        quantizer, rowwise=rowwise, columnwise=columnwise, batched=batched, emulate=emulate, amax=amax
    )
    if quantization is None:
        return None
    measured = isinstance(quantizer, NVFP4Quantizer | Float8CurrentScalingQuantizer)
    if measured or (amax and not quantization.amax):
        return quantize_spec(arch, quantization), amax_spec(arch, batched=batched, rht=quantization.rht)
    return quantize_spec(arch, quantization), None


def specs_of(
    quantizer: Quantizer,
    x: torch.Tensor,
    split_sizes: torch.Tensor | None,
    *,
    batched: bool,
    rowwise: bool,
    columnwise: bool,
    emulate: bool = True,
    amax: bool = False,
) -> Specs | None:
    """Return the kernel that quantises a tensor and the one that measures it before, if any; None: use plain torch.

    Kernels are for valid arguments, and bf16 tensors of at least one element on a device that has kernels, with columns
    that are a multiple of 8.  To write bytes columnwise, a matrix's rows, or groups' alignment, must be one too.
    """
    if not x.is_cuda or not x.numel() or x.shape[:-1].numel() >= _MAX_ROWS:
        return None
    if quantizer._argument_problems(x, split_sizes, batched, swizzled=False):
        return None  # plain torch raises
    if columnwise and not emulate and (x.shape[-2] if split_sizes is None else quantizer.group_alignment) % 8:
        return None
    return planned_specs(
        quantizer,
        x.dtype,
        x.device,
        x.shape[-1],
        batched=split_sizes is None,
        rowwise=rowwise,
        columnwise=columnwise,
        emulate=emulate,
        amax=amax,
    )


def planned_specs(
    quantizer: Quantizer,
    dtype: torch.dtype,
    device: torch.device,
    columns: int,
    *,
    batched: bool,
    rowwise: bool,
    columnwise: bool,
    emulate: bool = True,
    amax: bool = False,
) -> Specs | None:
    """Return the same before there is a tensor: of what its type, device and columns allow.

    Parameters
    ----------
    quantizer, batched, rowwise, columnwise, emulate, amax
        As :func:`quantization_of` takes them.
    dtype, device, columns
        Of the tensor to come.
    """
    if columns % 8 or device.type == "cpu" or support.emulation_reasons(dtype, device):
        return None
    return _specs(kernels.provider().arch(device), quantizer, rowwise, columnwise, batched, emulate, amax)


def emulated(
    quantizer: Quantizer,
    specs: Specs,
    x: torch.Tensor,
    split_sizes: torch.Tensor | None = None,
    *,
    batched: bool = False,
    scale: torch.Tensor | None = None,
    rng: torch.Tensor | None = None,
    amax: torch.Tensor | None = None,
    status: torch.Tensor | None = None,
) -> tuple[Emulated | None, Emulated | None]:
    """Quantise a tensor and write what was quantised as bf16 operands.

    Parameters
    ----------
    specs
        The kernels, of :func:`specs_of`.
    quantizer, x, split_sizes, batched, scale, rng, amax, status
        As :func:`.emulation.emulated_operands` takes them.  ``status`` also gets the bit of invalid split sizes.

    Returns
    -------
    rowwise, columnwise : tuple or None
        Values, alpha and sizes of each :class:`.emulation.EmulatedOperand`.
    """
    call = _Call(quantizer, specs[0], x, split_sizes, batched)
    outputs = call.outputs()
    measured, factors = _run(call, specs, outputs, scale, rng, amax, status)
    outputs = call.flat(outputs)
    row_alpha = column_alpha = None
    if factors is not None:
        row_alpha = column_alpha = factors.reciprocal()
    elif measured is not None:
        alphas = measured * (1 / _NVFP4_LARGEST)
        row_alpha, column_alpha = alphas[0], alphas[-1]
    rowwise, columnwise = outputs.get("rowwise"), outputs.get("columnwise")
    return (
        None if rowwise is None else (rowwise, row_alpha, None),
        None if columnwise is None else (columnwise, column_alpha, outputs.get("slot_sizes")),
    )


def quantized(
    quantizer: Quantizer,
    specs: Specs,
    x: torch.Tensor,
    split_sizes: torch.Tensor | None = None,
    *,
    batched: bool = False,
    scale: torch.Tensor | None = None,
    rng: torch.Tensor | None = None,
) -> QuantizedTensor:
    """Quantise a tensor into bytes and compact scales; as :meth:`Quantizer.quantize`, whose arguments these are.

    The result's ``amax`` and ``columnwise_amax`` are those that the scales were made of; 0 where scales of blocks need
    none.
    """
    call = _Call(quantizer, specs[0], x, split_sizes, batched)
    outputs = call.outputs()
    measured, factors = _run(call, specs, outputs, scale, rng, None, None)
    outputs = call.flat(outputs)
    if measured is None:
        measured = torch.zeros(1, call.count, dtype=torch.float32, device=x.device)
    scales = {name: outputs.get(f"{name}_scale") for name in ("rowwise", "columnwise")}
    if quantizer.outer_dim_major_scales:
        scales = {name: None if t is None else t.mT for name, t in scales.items()}
    if factors is not None:
        scales = {name: factors.reciprocal() if name in outputs else None for name in scales}

    def typed(t: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
        return t if t is None or t.dtype is torch.float32 else t.view(dtype)

    rowwise = typed(outputs.get("rowwise"), quantizer.data_dtype)
    return QuantizedTensor(
        shape=x.shape,
        dtype=x.dtype,
        quantizer=quantizer,
        matrices=quantizer._matrices(x, split_sizes, batched),
        rowwise_data=None if rowwise is None else rowwise.reshape(*x.shape[:-1], rowwise.shape[-1]),
        rowwise_scale_inv=typed(scales["rowwise"], quantizer.scale_dtype),
        columnwise_data=typed(outputs.get("columnwise"), quantizer.data_dtype),
        columnwise_scale_inv=typed(scales["columnwise"], quantizer.scale_dtype),
        amax=measured[0],
        columnwise_amax=measured[-1],
    )


class _Call:
    """A tensor as kernels see it: (T, C) with split sizes, or (count, R, C)."""

    def __init__(
        self, quantizer: Quantizer, spec: KernelSpec, x: torch.Tensor, split_sizes: torch.Tensor | None, batched: bool
    ) -> None:
        assert spec.quantization is not None  # the kernel quantises
        self.quantizer, self.spec, self.what = quantizer, spec, spec.quantization
        self.batched, self.device = batched, x.device
        columns = x.shape[-1]
        x = kernels.launchable(x)
        if split_sizes is None:
            self.x = x if batched else x.reshape(1, -1, columns)
            self.count, rows = self.x.shape[:2]
            self.sizes: list[torch.Tensor] = []
            self.slots = -(-rows // quantizer.block) * quantizer.block
        else:
            self.x = x.reshape(-1, columns)
            self.count = split_sizes.shape[0]
            self.sizes = [kernels.int32_sizes(split_sizes)]
            self.slots = slot_count(self.x.shape[0], self.count, quantizer.group_alignment)

    def outputs(self) -> dict[str, torch.Tensor]:
        """Empty outputs, in the kernel's order and shapes."""
        q, block, slots = self.what, self.quantizer.block, self.slots
        rows, columns = self.x.shape[-2:]
        leading = () if self.sizes else (self.count,)
        per_byte = 2 if q.element is Element.E2M1 else 1
        scale_dtype = torch.float32 if q.scaling is Scaling.BLOCK_FP8 else torch.uint8
        square = q.scaling is Scaling.BLOCK_FP8 and q.two_dimensional
        transposed, outer_dim_major = q.scaling is not Scaling.MXFP8, self.quantizer.outer_dim_major_scales

        def empty(dtype: torch.dtype, *shape: int) -> torch.Tensor:
            return torch.empty(*leading, *shape, dtype=dtype, device=self.device)

        found = {}
        if q.rowwise and q.emulate:
            found["rowwise"] = empty(torch.bfloat16, rows, columns)
        elif q.rowwise:
            found["rowwise"] = empty(torch.uint8, rows, columns // per_byte)
            if block > 1:
                shape = slots // block if square else rows, -(-columns // block)
                found["rowwise_scale"] = empty(scale_dtype, *(shape[::-1] if outer_dim_major else shape))
        if q.columnwise and q.emulate:
            found["columnwise"] = empty(torch.bfloat16, slots, columns)
        elif q.columnwise:
            across = -(-columns // block) if square else columns
            shapes = (columns, slots // per_byte), (across, slots // block)
            data, scales = shapes if transposed else tuple(shape[::-1] for shape in shapes)
            found["columnwise"] = empty(torch.uint8, *data)
            if block > 1:
                found["columnwise_scale"] = empty(scale_dtype, *(scales[::-1] if outer_dim_major else scales))
        if q.columnwise and self.sizes:
            found["slot_sizes"] = torch.empty(self.count, dtype=torch.int32, device=self.device)
        return found

    def flat(self, outputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Outputs without the dimension of a batch, where there was none."""
        return outputs if self.batched or self.sizes else {name: t[0] for name, t in outputs.items()}

    def extents(self) -> list[int]:
        """Slots and alignment, where the kernel asks for them."""
        q = self.what
        if not q.columnwise and not (q.scaling is Scaling.BLOCK_FP8 and q.two_dimensional and not q.emulate):
            return []
        return [self.slots, self.quantizer.group_alignment] if self.sizes else [self.slots]


def _run(
    call: _Call,
    specs: Specs,
    outputs: dict[str, torch.Tensor],
    scale: torch.Tensor | None,
    rng: torch.Tensor | None,
    amax: torch.Tensor | None,
    status: torch.Tensor | None,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Launch the kernels; returns the amaxes (1 or 2, count) and factors (count,) that scales were made of, if any."""
    spec, measuring = specs
    q, device, quantizer = call.what, call.device, call.quantizer
    provider = kernels.provider()
    provider.prepare([spec] if measuring is None else [measuring, spec], device)
    multiprocessors = provider.sm_count(device)
    unreported = _UNREPORTED.get(device)  # made at the first call, which is not captured
    status = unreported if status is None else status
    measured = factors = None
    with kernels.device_guard(device):
        arguments: list[Any] = [call.x, *call.sizes]
        if measuring is not None:
            if q.scaling in (Scaling.NVFP4, Scaling.PER_TENSOR):
                measured = torch.zeros(1 + q.rht, call.count, dtype=torch.float32, device=device)
            raised = [amax] if measured is None else list(measured)
            provider.get(measuring)(*arguments, *raised, *([status] if call.sizes else []), multiprocessors)
            if measured is not None and amax is not None:
                torch.maximum(amax, measured[0], out=amax)
        if q.scaling is Scaling.NVFP4 and measured is not None:
            arguments += [measured[0]] if q.rowwise or not q.rht else []
            arguments += [measured[1]] if q.rht else []
        if isinstance(quantizer, _PerTensorQuantizer):
            largest = torch.empty(call.count, dtype=torch.float32, device=device) if measured is None else measured[0]
            factors = quantizer._scale(largest, scale)
            arguments += [amax, factors] if q.amax else [factors]
        if isinstance(quantizer, NVFP4Quantizer) and q.stochastic:
            arguments.append(quantizer.default_rng(device) if rng is None else rng)
        arguments += outputs.values()
        ranged = q.emulate and q.scaling in (Scaling.MXFP8, Scaling.BLOCK_FP8)
        if call.sizes or ranged:
            arguments.append(status)
        provider.get(spec)(*arguments, *call.extents(), multiprocessors)
    return measured, factors
