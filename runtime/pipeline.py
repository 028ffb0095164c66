"""A planned pipeline as one autograd function."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from . import kernels
from .channels import Routing
from .config import settings
from .context import OperationContext, Tensors
from .errors import FusionError, UnsupportedError
from .fusion import Rejection
from .op import BasicOperation, FusedOperation, FusibleOperation
from .plain import readable_gradient
from .planning import Planned
from .recipe_state import QuantizedCall

_in_functorch = torch._C._are_functorch_transforms_active
_unwrapped = torch._C._functorch.unwrap_if_dead

LocatedOps = list[tuple[FusibleOperation, tuple[int, ...]]]


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """What a pipeline runs.

    Attributes
    ----------
    key
        Recipe text and backward boundary.
    forward_ops, backward_ops
        Operations with the indices of the basic operations that each stands for, both in forward order.
    rejections
        Why fusions were not used.
    state_key
        What recipe state depends on.
    planned : tuple of Planned
        Recipe and quantisers of each basic operation.
    direct
        The operation that is the whole plan and takes calls without contexts and routing; None: there is none.
    """

    key: tuple[str, int]
    forward_ops: LocatedOps
    backward_ops: LocatedOps
    rejections: tuple[Rejection, ...]
    state_key: tuple[Any, ...]
    planned: tuple[Planned, ...]
    direct: FusedOperation | None = None

    @property
    def error(self) -> UnsupportedError | None:
        """What a call raises before it changes anything; None if it can run."""
        return next((planned.error for planned in self.planned if planned.error is not None), None)

    def input_quantizer(self, index: int, op: BasicOperation) -> Any:
        """Quantiser of a basic operation's input; None without."""
        return op.get_input_quantizer() or _first(self.planned[index], "forward")

    def grad_output_quantizer(self, index: int, op: BasicOperation) -> Any:
        """Quantiser of the gradient of a basic operation's output; None without."""
        return op.get_grad_output_quantizer() or _first(self.planned[index], "backward")

    @property
    def boundary(self) -> int:
        """Index of the first basic operation that needs a backward; the number of operations if none does."""
        return self.key[1]


def _first(planned: Planned, mode: str) -> Any:
    made = planned.quantizers
    return None if made is None or not made.by_mode[mode] else made.by_mode[mode][0]


class Call:
    """Everything that one run of a pipeline needs besides its tensors."""

    __slots__ = ("counts", "kwargs", "ops", "plan", "quantized", "routing", "x_requires_grad")

    def __init__(
        self,
        plan: Plan,
        ops: tuple[BasicOperation, ...],
        routing: Routing,
        kwargs: Sequence[dict[str, Any]],
        counts: list[int],
        x_requires_grad: bool,
        quantized: Sequence[QuantizedCall | None],
    ) -> None:
        self.plan = plan
        self.ops = ops
        self.routing = routing
        self.kwargs = kwargs
        self.counts = counts
        self.x_requires_grad = x_requires_grad
        self.quantized = quantized


class Pipeline(torch.autograd.Function):
    """A whole pipeline as one node: forward and backward may be fused differently."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, call: Call, *tensors: torch.Tensor | None) -> Any:
        """Run the plan's forward operations; ``ctx`` is None where no backward will come."""
        plan, ops, routing = call.plan, call.ops, call.routing
        boundary = plan.key[1]
        contexts = make_contexts(len(ops), boundary, call.x_requires_grad)
        for context, quantized in zip(contexts, call.quantized, strict=True):
            context.quantized = quantized
        extra_inputs = routing.distribute(tensors[len(tensors) - len(routing.inputs) :])
        extra_outputs: dict[int, Sequence[torch.Tensor | None]] = {}

        for op, indices in plan.forward_ops:
            first, last = indices[0], indices[-1]
            if not routing.simple:
                _receive(routing, indices, extra_inputs, extra_outputs)
            x, produced = op.fuser_forward(
                contexts[first : last + 1],
                x,
                basic_op_extra_inputs=extra_inputs[first : last + 1],
                prev_op_grad_output_quantizer=plan.grad_output_quantizer(first - 1, ops[first - 1]) if first else None,
                next_op_input_quantizer=plan.input_quantizer(last + 1, ops[last + 1]) if last + 1 < len(ops) else None,
                basic_op_kwargs=call.kwargs[first : last + 1],
            )
            if not routing.simple:
                _check_outputs(ops, routing, op, indices, produced)
                for index, tensors_of_op in zip(indices, produced, strict=True):
                    extra_outputs[index] = tensors_of_op
                    if ctx is not None and index >= boundary:
                        _require_grad_inside(routing, index, tensors_of_op)

        if ctx is not None:
            saved: list[torch.Tensor | None] = []
            ends = []
            for context in contexts:
                saved += context.to_save
                context.to_save = ()
                ends.append(len(saved))
            ctx.save_for_backward(*saved)
            ctx.call, ctx.contexts, ctx.ends = call, contexts, ends
        if routing.outputs:
            public = [extra_outputs[index][slot] for index, slot in routing.outputs]
            if ctx is not None:
                ctx.mark_non_differentiable(*[t for t in public if t is not None and not t.is_floating_point()])
            return (x, *public)
        return x

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        """Run the plan's backward operations, the plan being the one that forward ran with."""
        return _once(Pipeline._backward, ctx, *grad_outputs)

    @staticmethod
    def _backward(ctx: Any, grad: torch.Tensor, *grad_outputs: torch.Tensor | None) -> tuple[Any, ...]:
        call: Call = ctx.call
        contexts: list[OperationContext] = ctx.contexts
        ops, routing, boundary = call.ops, call.routing, call.plan.key[1]
        grad = readable_gradient(grad)
        saved, start = ctx.saved_tensors, 0
        for context, end in zip(contexts, ctx.ends, strict=True):
            context.saved_tensors = saved[start:end]
            start = end
        extra_grads = routing.empty_outputs() if routing.simple else routing.place_outputs(grad_outputs)
        param_grads: list[Sequence[torch.Tensor | None]] = [(None,) * count for count in call.counts]
        input_grads = routing.no_input_grads()

        grad_input: torch.Tensor | None = grad
        for op, indices in reversed(call.plan.backward_ops):
            first, last = indices[0], indices[-1]
            if last < boundary:
                grad_input = None
                break
            if grad_input is None:
                raise FusionError(f"{type(op).__name__} needs a gradient that the operation after it did not return")
            grad_input, of_params, of_inputs = op.fuser_backward(
                contexts[first : last + 1], grad_input, basic_op_grad_extra_outputs=extra_grads[first : last + 1]
            )
            for index, param_grad, input_grad in zip(indices, of_params, of_inputs, strict=True):
                if len(input_grad) != len(input_grads[index]):
                    raise FusionError(
                        f"{type(op).__name__} returned {len(input_grad)} extra input gradients for operation {index}, "
                        f"which has {len(input_grads[index])}"
                    )
                param_grads[index], input_grads[index] = tuple(param_grad), input_grad
                contexts[index].saved_tensors = ()
                if routing.sources:
                    _send_back(routing, indices, index, input_grad, extra_grads)

        flat: list[torch.Tensor | None] = []
        for index, (op_grads, count) in enumerate(zip(param_grads, call.counts, strict=True)):
            if len(op_grads) != count:
                raise FusionError(
                    f"{type(ops[index]).__name__} (operation {index}) returned {len(op_grads)} parameter gradients, "
                    f"it has {count} parameters"
                )
            flat += op_grads
        if call.plan.state_key[0] != "high_precision":
            # Also of operations without a backward: their inputs and weights are quantised
            for updated, quantized in zip(ops, call.quantized, strict=True):
                updated.update_recipe_state(quantized)
        if settings.debug_checks:
            kernels.provider().check_status(grad.device)
        return (grad_input, None, *flat, *[input_grads[index][slot] for index, slot in routing.inputs])


class Direct(torch.autograd.Function):
    """A plan that is one operation, as one node with nothing between autograd and that operation."""

    @staticmethod
    def forward(ctx: Any, op: FusedOperation, x: torch.Tensor, *tensors: torch.Tensor | None) -> torch.Tensor:
        """Run the operation's forward."""
        y, state, saved = op.direct_forward(ctx.needs_input_grad[1:], x, tensors)
        ctx.save_for_backward(*saved)
        ctx.ran = op, state
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        """Run the operation's backward."""
        return _once(_backward, ctx, grad) if torch.is_grad_enabled() else _backward(ctx, grad)


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    op, state = ctx.ran
    grad = readable_gradient(grad)
    grads = op.direct_backward(state, ctx.saved_tensors, grad)
    if settings.debug_checks:
        kernels.provider().check_status(grad.device)
    return (None, *grads)


#: What ``Direct.apply`` ends in.  Before it torch looks at every argument in Python, which takes longer than the call.
_apply_direct = super(torch.autograd.Function, Direct).apply


#: What extra inputs are as a rule.
_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})


def run_direct(
    op: FusedOperation, x: torch.Tensor, params: Sequence[torch.Tensor], extra_inputs: Sequence[torch.Tensor | None]
) -> torch.Tensor:
    """Run a plan that is one operation, with a backward to come.

    Parameters
    ----------
    op
        The operation.
    x, params, extra_inputs
        Input, parameters of the basic operations in order, and their extra inputs in order.
    """
    if _in_functorch():
        result: torch.Tensor = Direct.apply(op, x, *params, *extra_inputs)  # type: ignore[no-untyped-call]
        return result
    result = _apply_direct(op, _unwrapped(x), *params, *_alive(extra_inputs))  # type: ignore[no-untyped-call]
    return result


def run_forward(
    op: FusedOperation, x: torch.Tensor, params: Sequence[torch.Tensor], extra_inputs: Sequence[torch.Tensor | None]
) -> torch.Tensor:
    """Do what :func:`run_direct` does where no backward will come."""
    return op.direct_forward((), _unwrapped(x), (*params, *_alive(extra_inputs)))[0]


def _alive(extra_inputs: Sequence[torch.Tensor | None]) -> Iterable[Any]:
    """Unwrap tensors that were left over from a transform of torch.func, as torch's own apply does."""
    if _TENSORS.issuperset(map(type, extra_inputs)):
        return map(_unwrapped, extra_inputs)  # type: ignore[arg-type]  # there is no None
    return [_unwrapped(t) if isinstance(t, torch.Tensor) else t for t in extra_inputs]


class _Once(torch.autograd.Function):
    """Passes gradients on and refuses to differentiate them."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients; ``anchor`` is there to require a gradient."""
        return tuple(None if g is None else g.detach() for g in grads)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Refuse."""
        raise RuntimeError("operations of cute_grouped_mlp are once_differentiable: their gradients have no gradient")


def _once(backward: Callable[..., tuple[Any, ...]], ctx: Any, *grads: Any) -> tuple[Any, ...]:
    """Run a backward; under ``create_graph`` its results refuse to be differentiated.

    Torch's own ``once_differentiable`` takes them for constants where dy requires no gradient: a gradient penalty would
    silently count for nothing.
    """
    if not torch.is_grad_enabled():
        return backward(ctx, *grads)
    with torch.no_grad():
        found = backward(ctx, *grads)
    refusing: tuple[Any, ...] = _Once.apply(
        torch.empty(0, dtype=torch.float32, device="cpu", requires_grad=True), *found
    )  # type: ignore[no-untyped-call]
    return refusing


class _InferenceContext(OperationContext):
    """Context of a call that no backward follows."""

    records_amax = False


def make_contexts(count: int, boundary: int, x_requires_grad: bool) -> list[OperationContext]:
    """Make a context for each basic operation, which says whether gradients of it and of its input are needed."""
    kind = OperationContext if boundary < count else _InferenceContext
    return [kind(index >= boundary, index > boundary or (index == 0 and x_requires_grad)) for index in range(count)]


def _receive(
    routing: Routing,
    indices: tuple[int, ...],
    extra_inputs: list[list[torch.Tensor | None]],
    extra_outputs: dict[int, Sequence[torch.Tensor | None]],
) -> None:
    """Fill the extra inputs whose producers ran before; those inside the same fused operation stay None."""
    for (index, slot), (producer, output) in routing.sources.items():
        if index in indices and producer not in indices:
            extra_inputs[index][slot] = extra_outputs[producer][output]


def _send_back(
    routing: Routing,
    indices: tuple[int, ...],
    index: int,
    input_grads: Tensors,
    extra_grads: list[list[torch.Tensor | None]],
) -> None:
    """Add gradients of channel inputs to those of the outputs that fed them, unless the same fused operation did."""
    for slot, tensor in enumerate(input_grads):
        producer, output = routing.sources.get((index, slot), (index, 0))
        if tensor is not None and producer not in indices:
            before = extra_grads[producer][output]
            extra_grads[producer][output] = tensor if before is None else before + tensor


def _check_outputs(
    ops: Sequence[BasicOperation], routing: Routing, op: FusibleOperation, indices: tuple[int, ...], produced: Any
) -> None:
    """Raise FusionError unless an operation returned every extra output that somebody outside it needs."""
    name = type(op).__name__
    if len(produced) != len(indices):
        raise FusionError(f"{name} returned extra outputs of {len(produced)} operations, it stands for {len(indices)}")
    for index, tensors in zip(indices, produced, strict=True):
        if len(tensors) != ops[index].num_extra_outputs:
            raise FusionError(
                f"{name} returned {len(tensors)} extra outputs for operation {index}, which has "
                f"{ops[index].num_extra_outputs}"
            )
        for slot, tensor in enumerate(tensors):
            outside = any(consumer not in indices for consumer, _ in routing.consumers.get((index, slot), ()))
            if tensor is None and (outside or (index, slot) in routing.outputs):
                raise FusionError(f"{name} returned None for extra output {slot} of operation {index}, which is used")


def _require_grad_inside(routing: Routing, index: int, tensors: Sequence[torch.Tensor | None]) -> None:
    """Mark channel tensors, so that their consumers see that a gradient is wanted."""
    for slot, tensor in enumerate(tensors):
        if tensor is not None and (index, slot) in routing.consumers and tensor.is_floating_point():
            tensor.requires_grad_(True)
