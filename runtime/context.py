"""What passes between operations and whoever calls them: contexts from forward to backward, planned kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from .codegen.spec import KernelSpec
from .recipe_state import QuantizedCall, Quantizers

Tensors = Sequence["torch.Tensor | None"]


class StalePlan(Exception):
    """Raised by a fused operation before it launches anything: what it was planned for has changed.  Plan again."""


class OperationContext:
    """What one basic operation remembers from forward to backward; set any further attributes on it.

    Attributes
    ----------
    requires_grad : bool
        Whether a backward will come for this operation.
    input_requires_grad : bool
        Whether that backward has to return a gradient of the operation's input.
    saved_tensors : sequence of (Tensor or None)
        In backward: what forward passed to :meth:`save_for_backward`.
    records_amax : bool
        Whether any operation of the pipeline has a backward: only then do amaxes count for delayed scaling.
    quantized : QuantizedCall or None
        The plan's quantisers and the operation's state under the call's recipe; None: the call does not quantise.  Not
        read from the operation, where a thread with another recipe may have replaced the state.
    """

    records_amax = True
    quantized: QuantizedCall | None = None
    quantizers: Quantizers | None = None  # in planned_kernels only
    to_save: Tensors = ()
    saved_tensors: Tensors = ()

    def __init__(self, requires_grad: bool = True, input_requires_grad: bool = True) -> None:
        self.requires_grad = requires_grad
        self.input_requires_grad = input_requires_grad

    def save_for_backward(self, *tensors: torch.Tensor | None) -> None:
        """Keep tensors for backward; call it at most once, in forward."""
        self.to_save = tensors

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"forward set no {name!r} on this operation's context")

    if TYPE_CHECKING:  # any attribute may be set

        def __setattr__(self, name: str, value: Any) -> None: ...


@dataclass(frozen=True, slots=True)
class PlannedKernel:
    """One step of what an operation would run, for ``explain``.

    Attributes
    ----------
    role
        ``fprop``, ``wgrad1``, ...
    backward
        Whether it belongs to the backward pass.
    spec
        The kernel; None where plain torch runs.
    how
        What runs where there is no kernel.
    emulated
        Whether quantised operands are read as bf16 numbers, not in their own format.
    """

    role: str
    backward: bool
    spec: KernelSpec | None = None
    how: str = "plain torch"
    emulated: bool = False
