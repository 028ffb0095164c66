"""The operation fuser: picks a plan for a pipeline, and runs it as one autograd function.

A **plan** says which (fused) operations run in forward and in backward.  It depends on the recipe's text and on the
**backward boundary**, the index of the first operation that needs a backward; within one structural stamp (device,
dtypes, parameter shapes, settings) these two are the whole key.
"""

from __future__ import annotations

import logging
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from . import checks, fusion, kernels, recipe_text
from .autocast import in_force
from .caching import CacheInfo
from .channels import Routing
from .config import settings
from .context import PlannedKernel, StalePlan
from .errors import FusionError, FusionFallbackWarning, ShapeError
from .fusion import Rejection
from .op import BasicOperation, FusedOperation, FusibleOperation, expand
from .pipeline import Call, Pipeline, Plan, make_contexts, run_direct, run_forward
from .plain import PLAIN, arrived, is_sharded, local, require_plain
from .planning import plan_operation, planning
from .plans import Plans, own_recipe
from .recipe import FLAG, OURS, Recipe
from .recipe_state import QuantizedCall, state_key, states_lock
from .recipe_text import TEXT, recipe_name
from .snapshot import NO_RECIPE, Snapshot, is_ours, snapshot

if TYPE_CHECKING:
    from .checkpoint import RecordedCall

logger = logging.getLogger("cute_grouped_mlp")
#: True while torch.compile traces.
_tracing = torch.compiler.is_dynamo_compiling
_PACKAGE_FOLDER = str(Path(__file__).parent)


class OperationFuser:
    """Plans and runs a pipeline of operations.

    Parameters
    ----------
    ops
        The pipeline.  Fused operations in it stand for their basic ones.

    Attributes
    ----------
    basic_ops : tuple of BasicOperation
    num_extra_inputs : int
        Extra inputs that a call takes.
    last_plan : Plan or None
        The plan of the most recent call, for reading.
    recipe_state_resets : int
        How often recipe state was made anew.
    hooked : list of (int, BasicOperation)
        Operations that prepare each forward, with their indices.
    apart : str or None
        Why the pipeline is one operation that is not run with its neighbours; None: it is not so.
    """

    def __init__(self, ops: Iterable[FusibleOperation]) -> None:
        self.basic_ops = expand(ops)
        if not self.basic_ops:
            raise FusionError("a pipeline needs at least one operation")
        self._routing = Routing(self.basic_ops)
        self.num_extra_inputs = len(self._routing.inputs)
        self.last_plan: Plan | None = None
        self.recipe_state_resets = 0
        # Hooks that most operations leave alone are looked up here, not called at each run.
        self.hooked = [(i, op) for i, op in enumerate(self.basic_ops) if _overrides(op, "pre_fuser_forward")]
        self._no_kwargs: list[dict[str, Any]] = [{} for _ in self.basic_ops]
        self._unquantized: tuple[QuantizedCall | None, ...] = (None,) * len(self.basic_ops)
        # Replaced as a whole: a thread sees either the old stamp with its plans or the new one with its own.
        self._plans = Plans(None, (), ())
        self._state_key: tuple[Any, ...] | None = None
        self._reported: set[str] = set()
        self.apart: str | None = None

    # Running ----------------------------------------------------------------------------------------------------------

    def __call__(
        self,
        input: torch.Tensor,
        *extra_inputs: torch.Tensor | None,
        basic_op_kwargs: Sequence[dict[str, Any]] | None = None,
    ) -> Any:
        """Run the pipeline under the recipe in force.

        Parameters
        ----------
        input
            Input of the first operation.
        *extra_inputs
            Extra inputs of the operations, in operation order.
        basic_op_kwargs
            Keyword arguments of each basic operation.

        Returns
        -------
        Tensor or tuple
            The last operation's output, followed by the public extra outputs if there are any.
        """
        if _tracing():
            from . import compiled

            return compiled.call(self, input, extra_inputs, basic_op_kwargs)
        return self.run(input, extra_inputs, basic_op_kwargs)

    def run(
        self,
        input: torch.Tensor,
        extra_inputs: Sequence[torch.Tensor | None],
        basic_op_kwargs: Sequence[dict[str, Any]] | None,
        *,
        again: bool = False,
        recorded: RecordedCall | None = None,
    ) -> Any:
        """Do what a call does, outside of ``torch.compile``'s graphs; ``again`` after a plan that was stale."""
        if len(extra_inputs) != self.num_extra_inputs:
            raise ShapeError(f"got {len(extra_inputs)} extra inputs, {self._expected()}")
        if not isinstance(input, torch.Tensor):
            raise TypeError(f"the input is {type(input).__name__}; allowed: a tensor")
        params: Sequence[torch.Tensor] = self.parameters()
        if not PLAIN.issuperset(map(type, (input, *extra_inputs, *params))):
            input, extra_inputs, params = self._plain(input, extra_inputs, params)
        x_requires_grad = input.requires_grad and torch.is_grad_enabled()
        boundary = 0 if x_requires_grad else self.boundary(False, extra_inputs)
        recipe = in_force.recipe
        if in_force.replay is not None:
            recorded = in_force.replay.call(self.basic_ops) if recorded is None else recorded
            recipe = recorded.recipe
        if recorded is not None and recorded.replayed and recorded.differs(self.basic_ops):
            plan = self._make_once(recorded, boundary)
        else:
            plan = self.select(recipe, boundary, input, params)
            if plan.direct is None and not self._plans.packed(params):
                self._plans.expire()
                plan = self.select(recipe, boundary, input, params)
        if plan.direct is None and plan.error is not None:
            raise plan.error
        self.last_plan = plan
        if basic_op_kwargs:
            self._check_buffers(basic_op_kwargs, input, (*params, *extra_inputs), x_requires_grad, boundary)
        quantized = self._unquantized
        if plan.state_key[0] != "high_precision":
            quantized = self._take_states(plan, recorded)
        elif plan.state_key != self._state_key and (recorded is None or not recorded.replayed):
            self._reset_states(plan)
        for index, op in self.hooked:
            op.pre_fuser_forward(requires_grad=index >= boundary)
        try:
            if plan.direct is None or basic_op_kwargs:
                kwargs = self._no_kwargs if basic_op_kwargs is None else basic_op_kwargs
                counts = [len(op.fuser_parameters()) for op in self.basic_ops]
                call = Call(plan, self.basic_ops, self._routing, kwargs, counts, x_requires_grad, quantized)
                if boundary < len(self.basic_ops):
                    result = Pipeline.apply(input, call, *params, *extra_inputs)  # type: ignore[no-untyped-call]
                else:
                    result = Pipeline.forward(None, input, call, *params, *extra_inputs)
            elif boundary < len(self.basic_ops):
                result = run_direct(plan.direct, input, params, extra_inputs)
            else:
                result = run_forward(plan.direct, input, params, extra_inputs)
        except StalePlan:
            if again:
                raise
            self._plans.expire()
            return self.run(input, extra_inputs, basic_op_kwargs, again=True, recorded=recorded)
        if settings.debug_checks:
            kernels.provider().check_status(input.device)
        return result

    def boundary(self, x_requires_grad: bool, extra_inputs: Sequence[torch.Tensor | None]) -> int:
        """Return the index of the first operation that needs a backward.

        Parameters
        ----------
        x_requires_grad
            Whether a gradient of the input is needed.
        extra_inputs
            Those of a call, or anything that says whether it requires a gradient.
        """
        count = len(self.basic_ops)
        if x_requires_grad:
            return 0
        if not torch.is_grad_enabled():
            return count
        boundary = count
        for (index, _), tensor in zip(self._routing.inputs, extra_inputs, strict=True):
            if getattr(tensor, "requires_grad", False) and index < boundary:
                boundary = index
        for index, op in enumerate(self.basic_ops[:boundary]):
            for parameter in op.fuser_parameters():
                if parameter.requires_grad:
                    return index
        return boundary

    def parameters(self) -> list[torch.nn.Parameter]:
        """Read the parameters of all operations."""
        params: list[torch.nn.Parameter] = []
        for op in self.basic_ops:
            params += op.fuser_parameters()
        return params

    def _check_buffers(
        self,
        kwargs: Sequence[dict[str, Any]],
        input: torch.Tensor,
        tensors: Sequence[torch.Tensor | None],
        x_requires_grad: bool,
        boundary: int,
    ) -> None:
        """Raise ShapeError that names all that is wrong with the caller's buffers, before anything is launched.

        They must not share memory with each other, nor with ``tensors``, the parameters and extra inputs.
        """
        problems: list[str] = []
        buffers: dict[str, Any] = {}
        for index, (op, given) in enumerate(zip(self.basic_ops, kwargs, strict=True)):
            where = f"{type(op).__name__} ({index})"
            backward = index > boundary or (index == 0 and x_requires_grad)
            problems += [f"{where}: {p}" for p in op.buffer_problems(given, input.shape[:-1], backward=backward)]
            names = ("output", *(("grad_input",) if backward else ()))
            buffers |= {f"{name} of {where}": given[name] for name in names if given.get(name) is not None}
        if buffers:
            others = {"the input": input, **{f"parameter or extra input {i}": t for i, t in enumerate(tensors)}}
            problems += checks.apart_problems(buffers, others)
        checks.require("the caller's buffers", problems)

    def _plain(
        self, input: torch.Tensor, extra_inputs: Sequence[Any], params: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, Sequence[Any], Sequence[torch.Tensor]]:
        """Return tensors that kernels can read: of parameters sharded by experts, the part of this process.

        Raises
        ------
        ShapeError
            If an input is a ``DTensor``, or kernels run on the device and something has no data of its own.
        """
        owners = [op for op in self.basic_ops for _ in op.fuser_parameters()]
        params = [local(p, f"a parameter of {type(op).__name__}") for op, p in zip(owners, params, strict=True)]
        input, *extra_inputs = map(arrived, (input, *extra_inputs))
        named = [("the input", input), *((f"extra input {i}", t) for i, t in enumerate(extra_inputs))]
        named += [(f"a parameter of {type(op).__name__}", p) for op, p in zip(owners, params, strict=True)]
        if kernels.provider().unsupported(input.device):
            named = [(name, t) for name, t in named if is_sharded(t)]
        require_plain(named)
        return input, extra_inputs, params

    def _expected(self) -> str:
        slots = [f"{type(self.basic_ops[i]).__name__} ({i})" for i, _ in self._routing.inputs]
        return f"expected {self.num_extra_inputs}" + (f": one each for {', '.join(slots)}" if slots else "")

    def preview(
        self,
        recipe: Any,
        x_requires_grad: bool,
        x: torch.Tensor,
        extra_inputs: Sequence[torch.Tensor | None],
    ) -> tuple[Plan, list[PlannedKernel]]:
        """Plan a call without running it, for ``explain``.

        Parameters
        ----------
        recipe
            None, one of ours, or a foreign one.
        x_requires_grad
            Whether a gradient of the input is needed.
        x, extra_inputs
            Arguments of the call; of ``x`` only dtype, device and rows count.

        Returns
        -------
        Plan
        list of PlannedKernel
            What its operations would run, forward first.
        """
        boundary = self.boundary(x_requires_grad, extra_inputs)
        plan = self.select(recipe, boundary, x, self.parameters())
        slots = self._routing.distribute(extra_inputs)
        contexts = make_contexts(len(slots), boundary, x_requires_grad)
        if plan.error is not None:  # the call would raise it
            return plan, []
        for context, its in zip(contexts, plan.planned, strict=True):
            context.quantizers = its.quantizers
        steps: list[PlannedKernel] = []
        for backward, ops in ((False, plan.forward_ops), (True, plan.backward_ops[::-1])):
            for op, indices in ops:
                run = slice(indices[0], indices[-1] + 1)
                planned = op.planned_kernels(contexts[run], x.shape[:-1].numel(), slots[run])
                steps += [step for step in planned if step.backward == backward]
        return plan, steps

    # Planning ---------------------------------------------------------------------------------------------------------

    def select(self, recipe: Any, boundary: int, x: torch.Tensor, params: Sequence[torch.Tensor]) -> Plan:
        """Return the plan for a recipe and a backward boundary, made where there is none yet.

        Parameters
        ----------
        recipe
            None, one of ours, or a foreign one.
        boundary
            Index of the first operation that needs a backward.
        x, params
            Input and parameters of the call: their dtypes, devices and shapes are the structural stamp.
        """
        plans = self._plans
        if not plans.fit(x, params):
            plans = self._new_plans(x, params)
        now = None
        text = NO_RECIPE if recipe is None else getattr(recipe, TEXT, None)
        if text is None or (recipe is not None and type(recipe) not in OURS):  # changed since, or not one of ours
            if is_ours(recipe):
                text, refusals = recipe_text.describe(recipe)
            else:
                now = snapshot(recipe)
                text, refusals = now.text, now.refusals
            if refusals:
                self._say_once(
                    f"plans are made anew at each call, as the text of the recipe does not say everything: "
                    f"{'; '.join(refusals)}",
                    logger.warning,
                )
                plans.cache.misses += 1
                return self._make((text, boundary), snapshot(recipe), plans.own)
        plan = plans.last
        if plan is not None and plan.key[0] is text and plan.key[1] == boundary:
            plans.cache.hits += 1  # already the most recently used
            return plan
        plan = plans.cache.get((text, boundary))
        if plan is None:
            now = snapshot(recipe) if now is None else now
            # Somebody may have changed the recipe since its text was read: the plan is of the text that it was made of.
            key = (text if now.text == text else now.text, boundary)
            with states_lock:
                plan = plans.cache.peek(key) or plans.cache.put(key, self._make(key, now, plans.own))
        plans.last = plan
        return plan

    def _new_plans(self, x: torch.Tensor, params: Sequence[torch.Tensor]) -> Plans:
        """Start an empty cache for a new stamp; the counters go on."""
        with states_lock:
            old = self._plans
            if not old.fit(x, params):
                self._plans = Plans(x, params, self.basic_ops)
                self._plans.cache.hits, self._plans.cache.misses = old.cache.hits, old.cache.misses
            return self._plans

    def _make_once(self, call: RecordedCall, boundary: int) -> Plan:
        """Make the plan of a recomputation whose operations had other recipes of their own than they have now."""
        now = snapshot(call.recipe)
        self._plans.cache.misses += 1
        return self._make((now.text, boundary), now, call.own)

    def _make(self, key: tuple[str, int], recipe: Snapshot, own: Sequence[Snapshot | None]) -> Plan:
        """Make a plan from snapshots of the recipe and of the operations' own, and from nothing else of them."""
        recipes = [recipe.recipe if mine is None else mine.recipe for mine in own]
        planned = tuple(map(plan_operation, self.basic_ops, recipes))
        with planning(dict(zip(self.basic_ops, planned, strict=True))):
            joint = fusion.apply(fusion.registry.joint, self.basic_ops, recipe.recipe)
            forward = fusion.apply(fusion.registry.forward, joint.ops, recipe.recipe)
            backward = fusion.apply(fusion.registry.backward, joint.ops, recipe.recipe)
        rejections = joint.rejections + forward.rejections + backward.rejections
        if self.apart is not None:
            rejections += (Rejection("a pipeline with its neighbours", (self.apart,)),)
        self._report(recipes, [r for r in rejections if r.wanted])
        state = _state_key_of(recipe.recipe, own)
        first = forward.ops[0]
        direct = (
            isinstance(first, FusedOperation)
            and first.direct
            and first is backward.ops[0]
            and len(forward.ops) == len(backward.ops) == 1
            and self._routing.simple
            and not self._routing.outputs
            and state[0] == "high_precision"
        )
        return Plan(
            key,
            fusion.locate(forward.ops, self.basic_ops),
            fusion.locate(backward.ops, self.basic_ops),
            rejections,
            state,
            planned,
            first if direct and isinstance(first, FusedOperation) else None,
        )

    def _report(self, recipes: Sequence[Recipe], rejections: Sequence[Rejection]) -> None:
        """Warn (a recipe demands fusion) or log (the default policy wants it), once for each set of reasons."""
        if not rejections:
            return
        text = f"not fused: {'. '.join(map(str, rejections))}. cute_grouped_mlp.explain(...) shows the plan."
        demanding = next((r for r in recipes if r.enable_cutedsl_fused_grouped_mlp is True), None)
        if demanding is None:
            self._say_once(text, logger.info)
            return
        message = f"{recipe_name(demanding)}.{FLAG} is True, but {text}"
        self._say_once(message, lambda said: warnings.warn(said, FusionFallbackWarning, stacklevel=_caller_level()))

    def _say_once(self, text: str, say: Callable[[str], None]) -> None:
        if text not in self._reported:
            self._reported.add(text)
            say(text)

    def plan_cache_info(self) -> CacheInfo:
        """Counters of the plan cache; ``misses`` is the number of plans built."""
        return self._plans.cache.info()

    def plan_cache_clear(self) -> None:
        """Forget every plan and reset the counters."""
        with states_lock:
            self._plans = Plans(None, (), ())

    # Recipe state -----------------------------------------------------------------------------------------------------

    def reset_recipe_state(self, recipe: Any = None) -> None:
        """Make the quantisation state of every operation anew, from nothing.

        Parameters
        ----------
        recipe
            The recipe to make it for; by default the next call's.
        """
        with states_lock:
            for op in self.basic_ops:
                op.forget_recipe_state()
            self._state_key = None
            if recipe is not None:
                now, own = snapshot(recipe).recipe, tuple(map(own_recipe, self.basic_ops))
                counted = [now if mine is None else mine.recipe for mine in own]
                self._reset_states_to(counted, _state_key_of(now, own))

    def _take_states(self, plan: Plan, call: RecordedCall | None) -> tuple[QuantizedCall | None, ...]:
        """Return the plan's quantisers on the operations' states, made anew if they are not the recipe's."""
        replayed = call is not None and call.replayed
        group = in_force.amax_reduction_group if call is None else call.amax_reduction_group
        with states_lock:
            if not replayed and plan.state_key != self._state_key:
                self._reset_states(plan)
            calls: list[QuantizedCall | None] = []
            for op, planned in zip(self.basic_ops, plan.planned, strict=True):
                state, scales = op.recipe_state, None
                if call is not None:
                    if replayed:
                        state = call.states.get(op)
                    elif state is not None:
                        call.states[op] = state
                    scales = call.scales.setdefault(op, {})
                if state is None or planned.quantizers is None:
                    calls.append(None)
                    continue
                state.prepare(planned.quantizers)
                state.amax_reduction_group = group
                calls.append(QuantizedCall(planned.quantizers, state, scales))
            return tuple(calls)

    def _reset_states(self, plan: Plan) -> None:
        self._reset_states_to([planned.recipe for planned in plan.planned], plan.state_key)

    def _reset_states_to(self, recipes: Sequence[Recipe], key: tuple[Any, ...]) -> None:
        """Make the state of each operation anew, for the recipe that counts for it."""
        with states_lock:
            if self._state_key is None:
                for op in self.basic_ops:
                    op.pre_first_fuser_forward()
            for op, recipe in zip(self.basic_ops, recipes, strict=True):
                # An operation may be in several pipelines: the state that another one made is gone, unless it is alike.
                if op._state_fusers is None:
                    op._state_fusers = weakref.WeakSet()
                alike = [other for other in op._state_fusers if other._state_key == key]
                op.reset_recipe_state(recipe=recipe)
                for other in alike:
                    other._state_key = key
                op._state_fusers.add(self)
            self._state_key = key
            self.recipe_state_resets += 1

    def expire_state(self) -> None:
        """Have the next call make the operations' quantisation state anew: that of one of them was reset."""
        self._state_key = None

    # A fuser belongs to its container: copies make their own.
    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def __reduce__(self) -> Any:
        return type(None), ()


def _state_key_of(recipe: Recipe, own: Sequence[Snapshot | None]) -> tuple[Any, ...]:
    """Say what a reset of recipe state depends on, of the recipe in force and the operations' own."""
    keys = [state_key(mine.recipe) for mine in own if mine is not None]
    return ("per operation", state_key(recipe), *keys) if keys else state_key(recipe)


def _overrides(op: BasicOperation, method: str) -> bool:
    return getattr(type(op), method) is not getattr(BasicOperation, method)


def _caller_level() -> int:
    """Return the ``stacklevel`` of the first frame outside this package and torch, seen from the warning function."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None:
        file = frame.f_code.co_filename
        if not file.startswith(_PACKAGE_FOLDER) and "/torch/" not in file:
            return level
        frame, level = frame.f_back, level + 1
    return level
