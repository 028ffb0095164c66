"""What a call would run and why: plans, kernels and their origin, and every reason against a fusion."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from . import checks, kernels
from .autocast import current_recipe
from .channels import Routing
from .config import settings
from .context import PlannedKernel
from .errors import FusionError
from .fuser import OperationFuser
from .fusion import Rejection
from .grouped_mlp import FusedGroupedMLP
from .mlp import GroupedMLP
from .op import BasicOperation
from .ops.activation import ScaledActivation
from .ops.grouped_linear import GroupedLinear, take_buffers
from .pipeline import Plan
from .planning import Planned
from .quantizers.prequantized import quantized_of
from .recipe import FLAG, Recipe
from .recipe_state import Quantizers
from .recipe_text import recipe_name
from .sequential import Sequential
from .snapshot import snapshot

_CURRENT = object()


@dataclass(frozen=True, slots=True)
class ExplainedKernel:
    """One kernel, or one step in plain torch.

    Attributes
    ----------
    step
        Role, pass and spec.
    origin
        Where the kernel came from, or will come from.
    """

    step: PlannedKernel
    origin: str

    @property
    def native(self) -> bool:
        """Whether operands are in the recipe's own number formats; False: emulated."""
        return not self.step.emulated

    def __str__(self) -> str:
        kind = "native" if self.native else "emulated"
        if self.step.spec is None:
            return f"{self.step.role:<12} {self.step.how}{'' if self.native else ', emulated'}"
        return f"{self.step.role:<12} {self.step.spec.name}  {kind}, {self.origin}"


@dataclass(frozen=True, slots=True)
class ExplainedPipeline:
    """One run of operations.

    Attributes
    ----------
    plan
        What the fuser picked.
    kernels
        What it runs, forward first.
    """

    plan: Plan
    kernels: tuple[ExplainedKernel, ...]

    @property
    def rejections(self) -> tuple[Rejection, ...]:
        """Fusions that were not used, each with every reason."""
        return self.plan.rejections

    @property
    def fused(self) -> bool:
        """Whether some operations were fused."""
        return any(len(indices) > 1 for _, indices in self.plan.forward_ops + self.plan.backward_ops)

    def lines(self) -> list[str]:
        """Return the printed report, line by line."""
        count = sum(len(indices) for _, indices in self.plan.forward_ops)
        out = [f"plan       {_names(self.plan.forward_ops)}", f"boundary   {self.plan.boundary} of {count} operations"]
        backward = _names(self.plan.backward_ops)
        if self.plan.boundary < count and backward != _names(self.plan.forward_ops):
            out.append(f"backward   {backward}")
        for title, wants in (("forward", False), ("backward", True)):
            steps = [kernel for kernel in self.kernels if kernel.step.backward == wants]
            out += [title, *(f"  {kernel}" for kernel in steps)] if steps else [f"{title:<10} none"]
        for rejection in self.rejections:
            out += [f"not used   {rejection.fusion}", *(f"  - {reason}" for reason in rejection.reasons)]
        return out


@dataclass(frozen=True, slots=True)
class Explanation:
    """A printable report.

    Attributes
    ----------
    module, device, recipe
        What was explained, where, and under which recipe.
    numerics
        Whether operands are quantised.
    policy
        What the fusion flag means.
    pipelines
        One for each run of operations in the module.
    problems
        What is wrong with the arguments, and what the call would do about it.
    """

    module: str
    device: str
    recipe: str
    numerics: str
    policy: str
    pipelines: tuple[ExplainedPipeline, ...]
    problems: tuple[str, ...] = ()

    @property
    def fused(self) -> bool:
        """Whether some operations were fused."""
        return any(pipeline.fused for pipeline in self.pipelines)

    @property
    def reasons(self) -> tuple[str, ...]:
        """Every reason against every fusion that was not used."""
        return tuple(reason for p in self.pipelines for rejection in p.rejections for reason in rejection.reasons)

    def __str__(self) -> str:
        head = [
            f"{self.module} on {self.device}",
            f"recipe     {self.recipe}",
            f"numerics   {self.numerics}",
            f"fusion     {self.policy}",
            *(f"problem    {problem}" for problem in self.problems),
        ]
        return "\n".join(head + [line for pipeline in self.pipelines for line in pipeline.lines()])


def explain(module: Any, *args: Any, recipe: Any = _CURRENT, **kwargs: Any) -> Explanation:
    """Say what a call would run and why; nothing is computed and no kernel is built.

    Arguments that the call would refuse are named in the report, beside the plan for those that it would take: those of
    operations whose input's shape is known, that is, up to the first that is not this package's.

    Parameters
    ----------
    module
        A Sequential, a GroupedMLP, an operation or a fuser.
    *args, **kwargs
        The same as for the call.
    recipe
        The recipe to explain; by default the one in force.

    Returns
    -------
    Explanation
        ``print`` it.

    Raises
    ------
    ShapeError
        If a kernel met invalid split sizes in an earlier call since the last check: the device's status word is read
        (synchronises), and so are the split sizes.
    TypeError
        If the module is none of the above, arguments do not fit the call's signature, or the input is no tensor.
    """
    now = snapshot(current_recipe() if recipe is _CURRENT else recipe)
    arguments = _arguments(module, args, kwargs)
    x, extra, groups = _inputs(module, arguments)
    kernels.provider().check_status(x.device)
    of_keywords = _keyword_problems(module, arguments)
    keywords = {} if of_keywords else {id(op): given or {} for op, given in _keywords(module, arguments)}
    problems = _problems(groups, x, extra, keywords)
    expected = sum(fuser.num_extra_inputs for fuser in groups)
    extra = [t if isinstance(t, torch.Tensor) else None for t in (*extra, *[None] * expected)][:expected]
    pipelines = []
    x_requires_grad = torch.is_grad_enabled() and x.requires_grad
    at = 0
    for fuser in groups:
        taken = extra[at : at + fuser.num_extra_inputs]
        at += fuser.num_extra_inputs
        plan, steps = fuser.preview(now.recipe, x_requires_grad, x, taken)
        pipelines.append(ExplainedPipeline(plan, tuple(_explained(step) for step in steps)))
        if quantized_of(x) is None:  # such an input may have the operations run one by one
            problems += _hidden_buffers(plan, fuser, keywords)
        x_requires_grad = plan.boundary < len(fuser.basic_ops)
    return Explanation(
        type(module).__name__,
        _device(x.device),
        now.text,
        _numerics(x, [(op, of_op) for p, f in zip(pipelines, groups, strict=True) for op, of_op in _by_op(p.plan, f)]),
        _policy(now.recipe),
        tuple(pipelines),
        tuple(dict.fromkeys([*of_keywords, *problems])),
    )


def _arguments(module: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by name."""
    called: Callable[..., Any]
    for kind, called in (
        (GroupedMLP, GroupedMLP.forward),
        (Sequential, Sequential.forward),
        (BasicOperation, BasicOperation.forward),
        (OperationFuser, OperationFuser.__call__),
    ):
        if isinstance(module, kind):
            try:
                return inspect.signature(called).bind(module, *args, **kwargs).arguments
            except TypeError as error:
                raise TypeError(f"{type(module).__name__}: {error}") from None
    raise TypeError(f"explain takes a Sequential, a GroupedMLP, an operation or a fuser; got {type(module).__name__}")


def _inputs(module: Any, arguments: dict[str, Any]) -> tuple[torch.Tensor, Sequence[Any], Sequence[OperationFuser]]:
    """Return the input, the extra inputs and the fusers of a module."""
    x = arguments["x" if isinstance(module, GroupedMLP) else "input"]
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"the input is {type(x).__name__}; allowed: a tensor")
    if isinstance(module, GroupedMLP):
        return x, module.pipeline_inputs(x, arguments["split_sizes"], arguments.get("probs")), module.fusers
    extra = arguments.get("extra_inputs", ())
    if isinstance(module, Sequential):
        return x, extra, module.fusers
    return x, extra, (module if isinstance(module, OperationFuser) else module.fuser,)


def _keyword_problems(module: Any, arguments: dict[str, Any]) -> list[str]:
    """Say what is wrong with the keyword arguments of a call's operations."""
    found = []
    try:
        for op, keywords in _keywords(module, arguments):
            if isinstance(op, GroupedLinear):
                take_buffers(op, keywords or {})
            elif isinstance(op, ScaledActivation):
                checks.no_keywords(type(op).__name__, keywords or {})
    except (FusionError, IndexError, TypeError) as error:
        found.append(f"the call would raise {type(error).__name__}: {error}")
    return found


def _keywords(module: Any, arguments: dict[str, Any]) -> list[tuple[BasicOperation, dict[str, Any]]]:
    """Return the operations of a module, each with its keyword arguments in a call."""
    if isinstance(module, BasicOperation):
        return [(module, arguments.get("kwargs", {}))]
    if isinstance(module, OperationFuser):
        return list(zip(module.basic_ops, arguments.get("basic_op_kwargs") or (), strict=False))
    by_op = module._kwargs_by_op(arguments.get("op_kwargs") or {})
    first = arguments.get("is_first_microbatch")
    if first is not None:  # of a GroupedMLP: its layers' own are overruled
        by_op.update({id(op): {**by_op.get(id(op), {}), "is_first_microbatch": first} for op in (module[0], module[2])})
    return [(op, by_op.get(id(op), {})) for fuser in module.fusers for op in fuser.basic_ops]


def _hidden_buffers(plan: Plan, fuser: OperationFuser, keywords: dict[int, dict[str, Any]]) -> list[str]:
    """Name the caller's buffers for what lies between the operations of a fused MLP."""
    found = []
    for fused, indices in plan.forward_ops:
        for index, name in ((indices[0], "output"), (indices[-1], "grad_input")):
            op = fuser.basic_ops[index]
            if isinstance(fused, FusedGroupedMLP) and keywords.get(id(op), {}).get(name) is not None:
                found.append(
                    f"the call would raise ShapeError: {name} of {type(op).__name__}({index}) would never be written: "
                    "it lies between fused operations"
                )
    return found


def _problems(
    fusers: Sequence[OperationFuser], x: torch.Tensor, extra: Sequence[Any], keywords: dict[int, dict[str, Any]]
) -> list[str]:
    """Say what is wrong with the arguments of a call, of every operation whose input's shape is known."""
    expected = sum(fuser.num_extra_inputs for fuser in fusers)
    if len(extra) != expected:
        return [f"the call would raise ShapeError: got {len(extra)} extra inputs, expected {expected}"]
    found: list[str] = []
    warnings: list[str] = []
    at = 0
    for number, fuser in enumerate(fusers):
        routing = Routing(fuser.basic_ops)
        taken = extra[at : at + fuser.num_extra_inputs]
        slots = routing.distribute(taken)
        at += fuser.num_extra_inputs
        if number or routing.sources:  # behind a module that is no operation, or with inputs from other operations
            continue
        current: torch.Tensor | None = x
        x_requires_grad = torch.is_grad_enabled() and x.requires_grad
        boundary = fuser.boundary(x_requires_grad, taken)
        for index, (op, of_op) in enumerate(zip(fuser.basic_ops, slots, strict=True)):
            if current is None:
                break
            given = current
            problems, of_sizes, current = _of_operation(op, given, of_op)
            found += [f"the call would raise ShapeError: {type(op).__name__}({index}): {p}" for p in problems]
            warnings += [] if found else of_sizes  # of a wrong input nobody knows how many rows were meant
            if not problems and current is not None:
                buffers = dict(keywords.get(id(op), {}))
                if not (index > boundary or (index == 0 and x_requires_grad)):
                    buffers.pop("grad_input", None)  # nobody will look at it
                found += _buffer_problems(f"{type(op).__name__}({index})", given, current, buffers)
    return [*found, *warnings]


def _buffer_problems(name: str, x: torch.Tensor, y: torch.Tensor, keywords: dict[str, Any]) -> list[str]:
    """Say what is wrong with the caller's buffers, given what is like an operation's input and output."""
    found = []
    for buffer, like, when in (("output", y, "the call"), ("grad_input", x, "its backward")):
        if keywords.get(buffer) is not None:
            problems = checks.buffer_problems(buffer, keywords[buffer], like.shape, y.dtype, y.device)
            found += [f"{when} would raise ShapeError: {name}: {p}" for p in problems]
    return found


def _of_operation(
    op: BasicOperation, x: torch.Tensor, extra: Sequence[Any]
) -> tuple[list[str], list[str], torch.Tensor | None]:
    """Say what an operation would raise, what kernels would only report, and what the next one gets; None: unknown."""
    if isinstance(op, ScaledActivation):
        features = x.shape[-1] // 2 if op.glu and x.dim() else x.shape[-1:].numel()
        return op.probs_problems(extra[0], x), [], _like(x, features, x.dtype, x.device)
    if not isinstance(op, GroupedLinear):
        return [], [], None
    device = op.fuser_parameters()[0].device
    autocast = kernels.autocast_dtype(device)
    dtype = autocast or op.weights()[0].dtype
    given = x if autocast is None else torch.empty((), dtype=dtype, device=x.device).expand(x.shape)
    problems = op.input_problems(given, extra, dtype)
    warnings: list[str] = []
    if x.dim() < 2:  # no rows that the next one could get
        return problems, warnings, None
    sizes, rows = extra[0], x.shape[:-1].numel()
    if not checks.splits_problems(sizes, op.num_groups, device) and not sizes.is_meta:
        values = sizes.tolist()
        if min(values, default=0) < 0 or sum(values) > rows:
            warnings.append(
                f"split_sizes: the least is {min(values)}, their sum {sum(values)} of {rows} rows; offsets would be "
                "cut at 0 and at the number of rows, and the call would raise ShapeError only under "
                "settings.debug_checks"
            )
    return problems, warnings, _like(x, op.out_features, dtype, device)


def _like(x: torch.Tensor, features: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Stand for a tensor of as many rows, without memory of its own."""
    return torch.empty((), dtype=dtype, device=device).expand(*x.shape[:-1], features)


def _explained(step: PlannedKernel) -> ExplainedKernel:
    return ExplainedKernel(step, "" if step.spec is None else kernels.provider().locate(step.spec))


def _names(ops: Sequence[tuple[Any, tuple[int, ...]]]) -> str:
    return ", ".join(f"{type(op).__name__}({', '.join(map(str, indices))})" for op, indices in ops)


def _device(device: torch.device) -> str:
    if device.type != "cuda":
        return f"{device} (the reference path: plain torch)"
    major, minor = kernels.capability(device)
    return f"{device}, {torch.cuda.get_device_name(device)}, compute capability {major}.{minor}"


def _by_op(plan: Plan, fuser: OperationFuser) -> list[tuple[BasicOperation, Planned]]:
    return list(zip(fuser.basic_ops, plan.planned, strict=True))


def _numerics(x: torch.Tensor, ops: Sequence[tuple[BasicOperation, Planned]]) -> str:
    """Say what operands are quantised to, of which operations, and whether that is exact."""
    found: dict[str, list[str]] = {}
    for index, (op, planned) in enumerate(ops):
        if planned.error is not None:
            return f"{x.dtype}; the call would raise: {planned.error}"
        quantizers = planned.quantizers
        quantizing = any(op.num_quantizers(mode) for mode in ("forward", "backward"))
        if quantizing or quantizers is not None:
            how = "not quantised" if quantizers is None else _emulation(quantizers)
            found.setdefault(how, []).append(f"{type(op).__name__}({index})")
    if len(found) < 2:
        return f"{x.dtype}, {next(iter(found), 'not quantised')}"
    return f"{x.dtype}, " + ", ".join(f"{' and '.join(names)} {how}" for how, names in found.items())


def _emulation(quantizers: Quantizers) -> str:
    made = [q for q in quantizers if q is not None]
    names = sorted({type(q).__name__.removesuffix("Quantizer") for q in made})
    exact = "exactly" if all(q.exact_in_bf16 for q in made) else "rounded to bfloat16: scales are any fp32 number"
    override = quantizers.backward_override
    backward = "" if override is None else f"; backward {override}"
    return f"{recipe_name(quantizers.recipe)} emulated: {', '.join(names)} operands as bfloat16, {exact}{backward}"


def _policy(recipe: Recipe) -> str:
    flag = recipe.enable_cutedsl_fused_grouped_mlp
    if flag is not None:
        return f"{FLAG} is {flag}"
    return f"{FLAG} is None: settings.fuse is {'on' if settings.fuse else 'off'}"
