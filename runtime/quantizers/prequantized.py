"""A quantised tensor in the clothes of a torch tensor, so that modules and autograd take it."""

from __future__ import annotations

import torch

from .base import QuantizedTensor


class PrequantizedTensor(torch.Tensor):
    """The dequantised values of a quantised tensor, which a GroupedLinear reads as it was quantised.

    Operations of torch see the dequantised values, and return plain tensors; one that writes in place leaves a plain
    tensor, too.  Made by :func:`prequantized`.

    Attributes
    ----------
    quantized : QuantizedTensor
    """

    quantized: QuantizedTensor
    version: int | None  # of the values that were quantised
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def detach(self) -> PrequantizedTensor:
        """As of any tensor, and as quantised as this one: reentrant checkpoints recompute from detached inputs."""
        detached = super().detach().as_subclass(PrequantizedTensor)
        detached.quantized, detached.version = self.quantized, self.version
        return detached


def prequantized(q: QuantizedTensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return a quantised tensor as an input, or as a gradient, of modules.

    A :class:`GroupedLinear` at the start of a pipeline (or at its end, for a gradient of the output) computes with its
    rowwise data as they are, whatever the recipe's own quantiser would make of the tensor; what it needs columnwise it
    quantises from the dequantised values.  Everything else, unquantised recipes too, sees the dequantised values.

    Parameters
    ----------
    q
        With rowwise data; of (T, C), with the groups of the call or with one scale for all.
    dtype
        Of the tensor; by default that of what was quantised.

    Returns
    -------
    Tensor
        Of the shape of ``q``.
    """
    tensor = q.dequantize("rowwise", dtype).as_subclass(PrequantizedTensor)
    tensor.quantized, tensor.version = q, _version(tensor)
    return tensor


def quantized_of(t: torch.Tensor) -> QuantizedTensor | None:
    """Return what a tensor was quantised to, if :func:`prequantized` made it and nobody wrote to it since."""
    return t.quantized if isinstance(t, PrequantizedTensor) and t.version == _version(t) else None


def _version(t: torch.Tensor) -> int | None:
    return None if t.is_inference() else t._version
