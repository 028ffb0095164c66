"""What an operation is: a module with a forward and a backward that the operation fuser calls.

The methods and their arguments are those of Transformer Engine's fusible operations.  A basic operation owns parameters
and state; a fused operation computes what a run of basic operations computes, and owns nothing.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from . import extra_state
from .autocast import in_force
from .config import settings
from .context import OperationContext, PlannedKernel, Tensors
from .errors import ConfigError, FusionError, UnsupportedError
from .recipe import Recipe
from .recipe_state import QuantizedCall, Quantizers, RecipeState, make_quantizers, make_recipe_state, states_lock

if TYPE_CHECKING:
    from .fuser import OperationFuser


class FusibleOperation(torch.nn.Module):
    """An operation that can be part of a pipeline: a :class:`BasicOperation` or a :class:`FusedOperation`."""

    @property
    def is_fused_op(self) -> bool:
        """Whether this operation stands for a run of basic ones."""
        raise NotImplementedError

    def pre_first_fuser_forward(self) -> None:
        """Prepare; called before the first forward of a pipeline."""

    def pre_fuser_forward(self, *, requires_grad: bool) -> None:
        """Prepare; called before each forward of a pipeline."""

    def get_input_quantizer(self) -> Any:
        """Quantiser of the operation's input, or None."""
        return None

    def get_grad_output_quantizer(self) -> Any:
        """Quantiser of the gradient of the operation's output, or None."""
        return None

    def planned_kernels(
        self, basic_op_ctxs: Sequence[OperationContext], tokens: int, basic_op_extra_inputs: Sequence[Tensors]
    ) -> list[PlannedKernel]:
        """List what forward and backward would run, without running it.

        Parameters
        ----------
        basic_op_ctxs
            Contexts that say which gradients are needed.
        tokens
            Rows of the input.
        basic_op_extra_inputs
            Extra inputs of each basic operation; None where they come from inside the pipeline.
        """
        name = type(self).__name__
        backward = [PlannedKernel(name, True)] if any(ctx.requires_grad for ctx in basic_op_ctxs) else []
        return [PlannedKernel(name, False), *backward]

    def fuser_forward(
        self,
        basic_op_ctxs: list[OperationContext],
        input_: torch.Tensor,
        *,
        basic_op_extra_inputs: Sequence[Tensors],
        prev_op_grad_output_quantizer: Any,
        next_op_input_quantizer: Any,
        basic_op_kwargs: Sequence[dict[str, Any]],
    ) -> tuple[torch.Tensor, Sequence[Tensors]]:
        """Forward of every basic operation that this one stands for.

        Parameters
        ----------
        basic_op_ctxs
            One context for each basic operation.
        input_
            Output of the operation before.
        basic_op_extra_inputs
            Extra inputs of each basic operation.  An input whose producer is inside this operation is None.
        prev_op_grad_output_quantizer, next_op_input_quantizer
            Quantisers of the neighbours, or None.
        basic_op_kwargs
            Keyword arguments of the call for each basic operation.

        Returns
        -------
        output : Tensor
        extra_outputs : sequence of sequences of (Tensor or None)
            Of each basic operation.  An output may be None if nobody outside this operation uses it.
        """
        raise NotImplementedError(f"{type(self).__name__} has no forward of its own")

    def fuser_backward(
        self,
        basic_op_ctxs: list[OperationContext],
        grad_output: torch.Tensor,
        *,
        basic_op_grad_extra_outputs: Sequence[Tensors],
    ) -> tuple[torch.Tensor | None, Sequence[Iterable[torch.Tensor | None]], Sequence[Tensors]]:
        """Backward of every basic operation that this one stands for.

        Parameters
        ----------
        basic_op_ctxs
            The contexts that forward got.
        grad_output
            Gradient of the operation's output.
        basic_op_grad_extra_outputs
            Gradients of the extra outputs of each basic operation.

        Returns
        -------
        grad_input : Tensor or None
        grad_params : sequence of sequences of (Tensor or None)
            Of each basic operation, in the order of :meth:`BasicOperation.fuser_parameters`.
        grad_extra_inputs : sequence of sequences of (Tensor or None)
        """
        raise NotImplementedError(f"{type(self).__name__} has no backward of its own")


class BasicOperation(FusibleOperation):
    """One operation, with its parameters and its quantisation state.

    A subclass without extra inputs and outputs defines :meth:`op_forward` and :meth:`op_backward`; others set
    ``num_extra_inputs`` or ``num_extra_outputs`` (on the class, or before ``super().__init__()``) and override
    ``fuser_forward`` and ``fuser_backward``.
    """

    num_extra_inputs: int = 0
    num_extra_outputs: int = 0
    _recipe: Any = None

    def __init__(self) -> None:
        super().__init__()
        self._extra_input_channels: list[str | None] = [None] * self.num_extra_inputs
        self._extra_output_channels: list[str | None] = [None] * self.num_extra_outputs
        self._extra_output_to_caller: list[bool] = [True] * self.num_extra_outputs
        self._channels_locked = False
        self._recipe_state: RecipeState | None = None
        self._parked_state: RecipeState | None = None  # of the time before an unquantised call, to go on with
        self._state_fusers: weakref.WeakSet[OperationFuser] | None = None  # those that believe to know the state
        self._loaded_state: dict[str, torch.Tensor] = {}
        self._lone_fuser: OperationFuser | None = None

    @property
    def is_fused_op(self) -> bool:
        """False."""
        return False

    @property
    def recipe(self) -> Any:
        """Recipe of this operation, whatever recipe is in force; None: the one in force."""
        return self._recipe

    @recipe.setter
    def recipe(self, recipe: Any) -> None:
        self.__dict__["_recipe"] = recipe
        settings.touch()  # plans depend on it

    def fuser_parameters(self) -> list[torch.nn.Parameter]:
        """Return the parameters, read anew at each call, in the order in which backward returns their gradients."""
        if self._modules:
            return list(self.parameters())
        own = self._parameters
        return [p for p in own.values() if p is not None] if own else []

    def buffer_problems(self, kwargs: dict[str, Any], rows: torch.Size, *, backward: bool) -> list[str]:
        """Say what is wrong with buffers that a caller gave, before anything runs.

        Parameters
        ----------
        kwargs
            The operation's keyword arguments.
        rows
            All dimensions of the pipeline's input but the last.
        backward
            Whether the gradient of the operation's input will be computed.
        """
        return []

    def fuser_stamp(self) -> Any:
        """State besides device, dtypes and parameter shapes that a plan depends on; None once: none ever."""
        return None

    def op_forward(
        self,
        ctx: OperationContext,
        input_: torch.Tensor,
        *,
        prev_op_grad_output_quantizer: Any,
        next_op_input_quantizer: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Forward of an operation without extra inputs and outputs: returns the output."""
        raise NotImplementedError(f"{type(self).__name__} defines neither op_forward nor fuser_forward")

    def op_backward(
        self, ctx: OperationContext, grad_output: torch.Tensor
    ) -> tuple[torch.Tensor | None, Iterable[torch.Tensor | None]]:
        """Backward of an operation without extra inputs and outputs: returns gradients of input and parameters."""
        raise NotImplementedError(f"{type(self).__name__} defines neither op_backward nor fuser_backward")

    def fuser_forward(
        self,
        basic_op_ctxs: list[OperationContext],
        input_: torch.Tensor,
        *,
        basic_op_extra_inputs: Sequence[Tensors],
        prev_op_grad_output_quantizer: Any,
        next_op_input_quantizer: Any,
        basic_op_kwargs: Sequence[dict[str, Any]],
    ) -> tuple[torch.Tensor, Sequence[Tensors]]:
        """Forward through :meth:`op_forward`."""
        self._require_no_extras("fuser_forward")
        output = self.op_forward(
            basic_op_ctxs[0],
            input_,
            prev_op_grad_output_quantizer=prev_op_grad_output_quantizer,
            next_op_input_quantizer=next_op_input_quantizer,
            **basic_op_kwargs[0],
        )
        return output, [()]

    def fuser_backward(
        self,
        basic_op_ctxs: list[OperationContext],
        grad_output: torch.Tensor,
        *,
        basic_op_grad_extra_outputs: Sequence[Tensors],
    ) -> tuple[torch.Tensor | None, Sequence[Iterable[torch.Tensor | None]], Sequence[Tensors]]:
        """Backward through :meth:`op_backward`."""
        self._require_no_extras("fuser_backward")
        grad_input, grad_params = self.op_backward(basic_op_ctxs[0], grad_output)
        return grad_input, [grad_params], [()]

    def forward(self, input: torch.Tensor, *extra_inputs: torch.Tensor | None, **kwargs: Any) -> Any:
        """Apply the operation alone.

        Parameters
        ----------
        input
            Input of the operation.
        *extra_inputs
            Its extra inputs.
        **kwargs
            Keyword arguments of its forward.
        """
        if torch.compiler.is_dynamo_compiling():
            from . import compiled

            return compiled.alone(self, input, extra_inputs, kwargs)
        return self.fuser(input, *extra_inputs, basic_op_kwargs=[kwargs])

    @property
    def fuser(self) -> OperationFuser:
        """The fuser that runs this operation alone."""
        if self._lone_fuser is None:
            from .fuser import OperationFuser

            with states_lock:  # of several threads that call it first one makes it
                if self._lone_fuser is None:
                    self._lone_fuser = OperationFuser([self])
        return self._lone_fuser

    def _require_no_extras(self, method: str) -> None:
        if self.num_extra_inputs or self.num_extra_outputs:
            raise FusionError(
                f"{type(self).__name__} has {self.num_extra_inputs} extra inputs and {self.num_extra_outputs} extra "
                f"outputs: it must override {method}"
            )

    # Channels ---------------------------------------------------------------------------------------------------------

    def set_extra_input_channel(self, index: int, channel: str | None) -> BasicOperation:
        """Take an extra input from the earlier operation whose extra output has the same channel name.

        Parameters
        ----------
        index
            Which extra input.
        channel
            Name of the channel; None: from the caller.

        Raises
        ------
        FusionError
            If the index or name is wrong, or a pipeline that contains the operation was already made.
        """
        self._check_channel("input", index, self.num_extra_inputs, channel)
        self._extra_input_channels[index] = channel
        return self

    def set_extra_output_channel(
        self, index: int, channel: str | None, *, output_to_caller: bool = True
    ) -> BasicOperation:
        """Give an extra output a channel name under which later operations can take it.

        Parameters
        ----------
        index
            Which extra output.
        channel
            Name of the channel; None: only to the caller.
        output_to_caller
            Whether the pipeline also returns it.

        Raises
        ------
        FusionError
            If the index or name is wrong, or a pipeline that contains the operation was already made.
        """
        self._check_channel("output", index, self.num_extra_outputs, channel)
        if not isinstance(output_to_caller, bool):
            raise FusionError(f"output_to_caller is {output_to_caller!r}; allowed: True, False")
        self._extra_output_channels[index] = channel
        self._extra_output_to_caller[index] = output_to_caller or channel is None
        return self

    def _check_channel(self, what: str, index: int, count: int, channel: str | None) -> None:
        name = type(self).__name__
        if self._channels_locked:
            raise FusionError(f"channels of {name} are locked: a pipeline with it was already made")
        if not isinstance(index, int) or isinstance(index, bool):
            raise FusionError(f"the index of an extra {what} of {name} is {index!r}; allowed: an integer")
        if not 0 <= index < count:
            raise FusionError(f"{name} has {count} extra {what}s, there is no number {index}")
        if channel is not None and (not isinstance(channel, str) or not channel):
            raise FusionError(f"the channel of extra {what} {index} of {name} is {channel!r}; allowed: a name or None")

    # Recipe state -----------------------------------------------------------------------------------------------------

    def num_quantizers(self, mode: str) -> int:
        """Return the number of quantised tensors in ``"forward"`` or ``"backward"``."""
        return 0

    def num_scales(self) -> int:
        """Return the number of matrices or groups in each quantised tensor, which have scales of their own."""
        return 1

    @property
    def recipe_state(self) -> RecipeState | None:
        """Quantisation state under the recipe of the last reset; None before the first and without quantisation."""
        return self._recipe_state

    def reset_recipe_state(self, *, recipe: Any = None) -> None:
        """Make the quantisation state anew, keeping what the old one hands over.

        Parameters
        ----------
        recipe
            The recipe to make it for; None: no quantisation.
        """
        with states_lock:
            for fuser in self._state_fusers or ():
                fuser.expire_state()
            previous = self._recipe_state or self._parked_state
            self._recipe_state = make_recipe_state(recipe, self, previous)
            self._parked_state = previous if self._recipe_state is None else None
            made = self._recipe_state
            if made is not None and self._loaded_state and self._loaded_state.keys() <= made.state_dict().keys():
                made.load_state_dict(self._loaded_state)
                self._loaded_state = {}

    def make_quantizers(self, recipe: Recipe) -> Quantizers | None:
        """Return new quantisers under a recipe, or None where nothing is quantised.

        Parameters
        ----------
        recipe
            The recipe that counts for the operation: a frozen copy of its own, or else of the one in force.
        """
        return make_quantizers(recipe, self)

    def forget_recipe_state(self) -> None:
        """Drop the quantisation state and what an earlier one would hand over."""
        with states_lock:
            self.reset_recipe_state(recipe=None)
            self._parked_state = None

    def update_recipe_state(self, call: QuantizedCall | None) -> None:
        """Advance a recipe state; called once at the end of each backward.

        Parameters
        ----------
        call
            What forward ran with.
        """
        if call is not None:
            call.update()

    # Moves, copies and checkpoints ------------------------------------------------------------------------------------

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> BasicOperation:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        settings.touch()  # parameters keep their identity and change type, device or storage
        parameter = next(self.parameters(recurse=recurse), None)
        for state in (self._recipe_state, self._parked_state):
            if state is not None and parameter is not None:
                if not parameter.is_meta and any(t.is_meta for t in state.state_dict().values()):
                    self.forget_recipe_state()  # made on the meta device: there is nothing to move
                    break
                state.to(parameter.device)
        return self

    def get_extra_state(self) -> torch.Tensor:
        """Return the quantisation state as one uint8 tensor on the CPU, for a state dict; empty where there is none.

        Inside of :class:`autocast` an operation that has none makes it, as its first call would: a distributed
        checkpoint is loaded into a state dict of the same sizes.
        """
        with states_lock:
            tensors = self._state_tensors()
            recipe = in_force.recipe if self.recipe is None else self.recipe
            if not tensors and self._recipe_state is None and recipe is not None:
                with contextlib.suppress(UnsupportedError):  # the call says it
                    self.reset_recipe_state(recipe=recipe)
                tensors = self._state_tensors()
            return extra_state.packed(tensors)

    def _state_tensors(self) -> dict[str, torch.Tensor]:
        state = self._recipe_state or self._parked_state
        return {**self._loaded_state, **({} if state is None else state.state_dict())}

    def set_extra_state(self, state: torch.Tensor | None) -> None:
        """Take what :meth:`get_extra_state` gave; None or an empty tensor: the next call makes the state anew.

        Parameters
        ----------
        state
            Of a state dict.

        Raises
        ------
        ConfigError
            If it is something else.
        """
        if problems := self.extra_state_problems(state):
            raise ConfigError(f"{type(self).__name__}: {'; '.join(problems)}")
        found = extra_state.unpacked(state)
        with states_lock:
            current = self._recipe_state
            self._loaded_state = {}
            if not found:
                self.forget_recipe_state()
            elif current is not None and found.keys() <= current.state_dict().keys():
                current.load_state_dict(found)
            else:  # the first forward under its recipe takes it
                self._parked_state = None
                self._loaded_state = found

    def extra_state_problems(self, state: Any) -> list[str]:
        """Say why :meth:`set_extra_state` cannot take something; empty if it can.

        Parameters
        ----------
        state
            Of a state dict; None: it has none.
        """
        try:
            extra_state.unpacked(state)
        except ValueError as error:
            return [f"{extra_state.KEY}: {error}; without this key the state is made anew"]
        return []

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        key = prefix + extra_state.KEY
        if problems := self.extra_state_problems(state_dict.get(key)):
            error_msgs += [f"{prefix}{problem}" for problem in problems]
            return  # nothing of this operation is written
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        if key in missing_keys:
            missing_keys.remove(key)
        if not extra_state.is_given(state_dict.get(key)):
            with_weights = any(prefix + name in state_dict for name in self._parameters)
            self._extra_state_is_missing(key, missing_keys, with_weights)

    def _extra_state_is_missing(self, key: str, missing_keys: list[str], with_weights: bool) -> None:
        """Have the state made anew where a state dict brought weights and no state."""
        if with_weights:
            self.set_extra_state(None)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_lone_fuser": None, "_state_fusers": None}


class FusedOperation(FusibleOperation):
    """An operation that computes what a run of basic operations computes.

    Made by a fusion function; reads parameters from its basic operations and keeps none.

    Parameters
    ----------
    basic_ops
        The operations that it stands for, in order; fused ones are expanded.

    Attributes
    ----------
    basic_ops : ModuleList of BasicOperation
    """

    def __init__(self, basic_ops: Iterable[FusibleOperation]) -> None:
        super().__init__()
        self.basic_ops = torch.nn.ModuleList(expand(basic_ops))
        if not len(self.basic_ops):
            raise FusionError(f"{type(self).__name__} stands for no basic operation")

    #: Whether a plan of this operation alone may skip contexts and routing; it then has the two methods below.
    direct: bool = False

    def direct_forward(
        self, wanted: tuple[bool, ...], x: torch.Tensor, tensors: Tensors
    ) -> tuple[torch.Tensor, Any, Tensors]:
        """Forward of a pipeline that is this operation alone, without caller's keyword arguments.

        Parameters
        ----------
        wanted
            Whether backward has to return the gradient of ``x`` and of each of ``tensors``; empty: none will come.
        x
            Input.
        tensors
            Parameters of the basic operations in order, then their extra inputs in order.

        Returns
        -------
        output : Tensor
        state
            Anything, for :meth:`direct_backward`.
        saved : sequence of (Tensor or None)
            For autograd to keep.
        """
        raise NotImplementedError(f"{type(self).__name__} has no direct forward")

    def direct_backward(self, state: Any, saved: Tensors, grad_output: torch.Tensor) -> tuple[Any, ...]:
        """Backward of the same: gradients of the input, then of ``tensors``.

        Parameters
        ----------
        state, saved
            What forward returned.
        grad_output
            Gradient of the output.
        """
        raise NotImplementedError(f"{type(self).__name__} has no direct backward")

    @property
    def is_fused_op(self) -> bool:
        """True."""
        return True

    def get_input_quantizer(self) -> Any:
        """Quantiser of the first basic operation's input."""
        return expand([self])[0].get_input_quantizer()

    def get_grad_output_quantizer(self) -> Any:
        """Quantiser of the gradient of the last basic operation's output."""
        return expand([self])[-1].get_grad_output_quantizer()

    def forward(
        self,
        input: torch.Tensor,
        *extra_inputs: torch.Tensor | None,
        basic_op_kwargs: Sequence[dict[str, Any]] | None = None,
    ) -> Any:
        """Apply the operation alone.

        Parameters
        ----------
        input
            Input of the first basic operation.
        *extra_inputs
            Extra inputs of the basic operations, in order.
        basic_op_kwargs
            Keyword arguments for each basic operation.
        """
        from .fuser import OperationFuser

        return OperationFuser([self])(input, *extra_inputs, basic_op_kwargs=basic_op_kwargs)


def expand(ops: Iterable[FusibleOperation]) -> tuple[BasicOperation, ...]:
    """Return the basic operations that a list of operations stands for.

    Raises
    ------
    FusionError
        If something in it is not an operation.
    """
    found: list[BasicOperation] = []
    for op in ops:
        if isinstance(op, FusedOperation):
            found.extend(op.basic_ops)  # type: ignore[arg-type]  # a ModuleList made by expand()
        elif isinstance(op, BasicOperation):
            found.append(op)
        else:
            raise FusionError(f"{type(op).__name__} is not a BasicOperation or FusedOperation")
    return tuple(found)
