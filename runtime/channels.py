"""Which extra tensors of a pipeline come from the caller, which from earlier operations, and which the caller gets."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .errors import FusionError
from .op import BasicOperation

Slot = tuple[int, int]  #: (index of the basic operation, index of its extra input or output)


class Routing:
    """The wiring of a pipeline's extra inputs and outputs, fixed when the pipeline is made.

    Parameters
    ----------
    ops
        Basic operations; their channels are locked from now on.

    Attributes
    ----------
    inputs : list of Slot
        Extra inputs that the caller passes, in order.
    outputs : list of Slot
        Extra outputs that the caller gets, in order.
    sources : dict of Slot to Slot
        Extra input -> the extra output that feeds it.
    consumers : dict of Slot to list of Slot
        Extra output -> the extra inputs that it feeds.

    Raises
    ------
    FusionError
        If a channel has several producers, or a consumer has no earlier producer.
    """

    __slots__ = ("_counts", "_output_counts", "consumers", "inputs", "outputs", "simple", "sources")

    def __init__(self, ops: Sequence[BasicOperation]) -> None:
        producers: dict[str, Slot] = {}
        for index, op in enumerate(ops):
            for slot, channel in enumerate(op._extra_output_channels):
                if channel is None:
                    continue
                if channel in producers:
                    raise FusionError(
                        f"channel {channel!r} has two producers: operations {producers[channel][0]} and {index}"
                    )
                producers[channel] = (index, slot)
        self.inputs: list[Slot] = []
        self.sources: dict[Slot, Slot] = {}
        self.consumers: dict[Slot, list[Slot]] = {}
        for index, op in enumerate(ops):
            for slot, channel in enumerate(op._extra_input_channels):
                if channel is None:
                    self.inputs.append((index, slot))
                    continue
                source = producers.get(channel)
                if source is None or source[0] >= index:
                    raise FusionError(
                        f"operation {index} ({type(op).__name__}) takes channel {channel!r}, which no earlier "
                        f"operation produces; channels: {sorted(producers) or 'none'}"
                    )
                self.sources[index, slot] = source
                self.consumers.setdefault(source, []).append((index, slot))
        self.outputs: list[Slot] = [
            (index, slot)
            for index, op in enumerate(ops)
            for slot, public in enumerate(op._extra_output_to_caller)
            if public
        ]
        self._counts = [op.num_extra_inputs for op in ops]
        self._output_counts = [op.num_extra_outputs for op in ops]
        #: Whether there is nothing but extra inputs from the caller.
        self.simple = not any(op.num_extra_outputs for op in ops)
        for op in ops:
            op._channels_locked = True

    def empty_outputs(self) -> list[list[torch.Tensor | None]]:
        """Return a slot for the gradient of each extra output of each operation."""
        return [[None] * count for count in self._output_counts]

    def place_outputs(self, grads: Sequence[torch.Tensor | None]) -> list[list[torch.Tensor | None]]:
        """Put the gradients of the public extra outputs into their slots.

        Parameters
        ----------
        grads
            In the order of ``outputs``.
        """
        slots = self.empty_outputs()
        for (index, slot), grad in zip(self.outputs, grads, strict=True):
            slots[index][slot] = grad
        return slots

    def no_input_grads(self) -> list[Sequence[torch.Tensor | None]]:
        """Return the gradients of the extra inputs of operations that did not run: None each."""
        return [(None,) * count for count in self._counts]

    def distribute(self, tensors: Sequence[torch.Tensor | None]) -> list[list[torch.Tensor | None]]:
        """Hand the caller's extra inputs to the operations; inputs from channels are None.

        Parameters
        ----------
        tensors
            In the order of ``inputs``.

        Returns
        -------
        list of lists
            Extra inputs of each operation.
        """
        slots: list[list[torch.Tensor | None]] = []
        if not self.sources:
            at = 0
            for count in self._counts:
                slots.append(list(tensors[at : at + count]))
                at += count
            return slots
        slots = [[None] * count for count in self._counts]
        for (index, slot), tensor in zip(self.inputs, tensors, strict=True):
            slots[index][slot] = tensor
        return slots
