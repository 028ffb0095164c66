"""Quantisers of every recipe, in plain torch on any device: the yardstick of quantising kernels.

``MXFP8Quantizer().quantize(x)`` and its siblings return a :class:`QuantizedTensor`; :func:`quantizer_for` says which
quantiser a recipe implies, and :func:`emulate` writes a quantised operand in bf16, exactly.
"""

from __future__ import annotations

from .kernels import OUT_OF_RANGE
from .quantizers.base import QuantizedTensor, Quantizer
from .quantizers.block_fp8 import Float8BlockQuantizer
from .quantizers.emulation import EmulatedOperand, emulate, emulated_operands
from .quantizers.layout import swizzle, unswizzle
from .quantizers.matrices import slot_count
from .quantizers.mxfp8 import MXFP8Quantizer
from .quantizers.nvfp4 import NVFP4Quantizer
from .quantizers.per_tensor import DelayedScalingQuantizer, Float8CurrentScalingQuantizer
from .quantizers.prequantized import prequantized
from .quantizers.select import quantizer_for

__all__ = [
    "OUT_OF_RANGE",
    "DelayedScalingQuantizer",
    "EmulatedOperand",
    "Float8BlockQuantizer",
    "Float8CurrentScalingQuantizer",
    "MXFP8Quantizer",
    "NVFP4Quantizer",
    "QuantizedTensor",
    "Quantizer",
    "emulate",
    "emulated_operands",
    "prequantized",
    "quantizer_for",
    "slot_count",
    "swizzle",
    "unswizzle",
]
