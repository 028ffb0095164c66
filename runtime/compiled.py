"""What ``torch.compile`` traces of a call: one operator of :mod:`.operators`, where one covers it.

What is read while tracing becomes a guard, so it is read from the operations alone and is equal in equal modules: the
blocks of a model, compiled one by one, have one graph.  Of recipes only what decides is read, their class and the
fusion flag; of the settings only ``fuse``.  What no operator covers runs as it does without ``torch.compile``, after
a graph break that says why.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from . import kernels, patterns
from .autocast import in_force
from .config import settings
from .fuser import OperationFuser
from .fusion import registry
from .grouped_gemm import LinearShape, kernel_problems
from .op import BasicOperation, FusibleOperation, expand
from .operators import STATELESS, Configuration, recipe_text_of
from .ops.activation import ScaledActivation
from .ops.grouped_linear import GroupedLinear
from .quantizers.prequantized import PrequantizedTensor
from .recipe import FLAG, Recipe, class_kind
from .sequential import hooks_of
from .step import NEED_B1, NEED_B2, NEED_PROBS, NEED_SCALE, NEED_W1, NEED_W2, NEED_X

#: Why a call runs outside of the graph.
CAUSES = {
    "pipeline": "operators exist for GroupedLinear, activation, GroupedLinear, of these classes or of ones that "
    "override nothing of what they do, without channels and without a scale of FC1's bias",
    "arguments": "an argument is missing, too many, or no tensor: the call raises an error that names it",
    "hooks": "an operation has hooks of its own, and is run by its own call",
    "sharded": "parameters are DTensors: operators take plain tensors",
    "keywords": "it has keyword arguments, such as buffers of the caller, which are no results of an operator",
    "main_grad": "accumulate_into_main_grad is set: backward writes to main_grad and to attributes of the parameter, "
    "and a graph's backward may write to no tensor that other micro-batches' backwards have saved",
    "delayed": "delay_wgrad_compute is set: backward leaves work behind for backward_dw(), and a graph leaves tensors",
    "stateful": "the recipe quantises with what earlier steps or calls left (an amax history, random numbers, weights "
    "kept from the first micro-batch, a prequantised tensor), or with what only its own object knows (a factory, a "
    "foreign class); an operator has tensors and a text",
    "autocast": "the recipe quantises inside of torch.autocast: weights are quantised from their own type",
    "emulated": "the recipe quantises, and kernels run it fused on this device: what they keep for backward has shapes "
    "that depend on each quantiser, and an operator must know the shapes of what it returns",
    "flag": f"the recipe's {FLAG} is not None, True or False: the call raises an error that says so",
    "fusions": "fusions other than this package's are registered, which are asked about the module's own operations",
    "replay": "it is inside of cute_grouped_mlp.checkpoint, and a recipe was entered inside of the checkpointed "
    "function or is an operation's own: it is recorded for the recomputation",
}


def _outside(why: str) -> Callable[..., Any]:
    """Return a function that calls another one outside of the graph, for a reason."""

    def run(function: Callable[..., Any], *arguments: Any) -> Any:
        return function(*arguments)

    reason = f"cute_grouped_mlp runs this call outside of the graph: {why}"
    outside: Callable[..., Any] = torch.compiler.disable(run, reason=reason)  # type: ignore[no-untyped-call]
    return outside


_OUTSIDE = {cause: _outside(why) for cause, why in CAUSES.items()}


# Entries --------------------------------------------------------------------------------------------------------------


def forward(
    container: Any, x: Any, extra_inputs: Sequence[Any], op_kwargs: Mapping[BasicOperation | int, dict[str, Any]] | None
) -> Any:
    """Do what a call of a :class:`Sequential` does, while it is traced.

    Parameters
    ----------
    container, x, extra_inputs, op_kwargs
        As :meth:`Sequential.forward` takes them.
    """
    modules = [*container._modules.values()]
    groups = _groups(modules)
    taken = sum([_inputs_of(ops) for ops, _ in groups])
    if len(extra_inputs) != taken or not isinstance(x, torch.Tensor):
        return _OUTSIDE["arguments"](_run_container, container, x, extra_inputs, op_kwargs)
    keywords: list[dict[str, Any]] = []
    if op_kwargs:
        if not all([_names_one_of(key, modules) for key in op_kwargs]):
            return _OUTSIDE["arguments"](_run_container, container, x, extra_inputs, op_kwargs)
        keywords = [*op_kwargs.values()]
    hooked = any([module is not None and len(ops) > 0 for ops, module in groups])
    outputs: list[Any] = []
    at = 0
    for index, (ops, module) in enumerate(groups):
        if module is not None and not ops:
            x = module(x)
            continue
        extra = extra_inputs[at : at + _inputs_of(ops)]
        at += len(extra)
        cause = _cause(ops, x, extra, keywords)
        if module is not None or (cause == "pipeline" and hooked):
            cause = "hooks"
        if cause is None:
            x = _operator(ops, x, extra)
            continue
        x = _OUTSIDE[cause](_run_group, container, index, x, extra, op_kwargs)
        if isinstance(x, tuple):
            outputs.extend(x[1:])
            x = x[0]
    return (x, *outputs) if outputs else x


def call(
    fuser: OperationFuser,
    x: torch.Tensor,
    extra_inputs: Sequence[torch.Tensor | None],
    basic_op_kwargs: Sequence[dict[str, Any]] | None,
) -> Any:
    """Do what a call of a fuser does, while it is traced.

    Parameters
    ----------
    fuser, x, extra_inputs, basic_op_kwargs
        As :meth:`OperationFuser.run` takes them.
    """
    ops = list(fuser.basic_ops)
    if not isinstance(x, torch.Tensor) or len(extra_inputs) != _inputs_of(ops):
        return _OUTSIDE["arguments"](_run_fuser, fuser, x, extra_inputs, basic_op_kwargs)
    cause = _cause(ops, x, extra_inputs, basic_op_kwargs or [])
    if cause is None:
        return _operator(ops, x, extra_inputs)
    return _OUTSIDE[cause](_run_fuser, fuser, x, extra_inputs, basic_op_kwargs)


def alone(op: BasicOperation, x: torch.Tensor, extra_inputs: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Do what a call of a lone operation does, while it is traced.

    Parameters
    ----------
    op, x, extra_inputs, kwargs
        As :meth:`BasicOperation.forward` takes them.
    """
    return _OUTSIDE["pipeline"](_run_alone, op, x, extra_inputs, kwargs)


def _run_container(container: Any, x: Any, extra_inputs: Any, op_kwargs: Any) -> Any:
    return container(x, *extra_inputs, op_kwargs=op_kwargs)


def _run_group(container: Any, index: int, x: Any, extra_inputs: Any, op_kwargs: Any) -> Any:
    group = container.module_groups()[index]
    return group(x, *extra_inputs, basic_op_kwargs=container.kwargs_of(group, op_kwargs))


def _run_fuser(fuser: OperationFuser, x: Any, extra_inputs: Any, basic_op_kwargs: Any) -> Any:
    return fuser.run(x, extra_inputs, basic_op_kwargs)


def _run_alone(op: BasicOperation, x: Any, extra_inputs: Any, kwargs: Any) -> Any:
    return op.fuser.run(x, extra_inputs, [kwargs])


# What is covered ------------------------------------------------------------------------------------------------------


def _groups(modules: Sequence[torch.nn.Module | None]) -> list[tuple[list[BasicOperation], torch.nn.Module | None]]:
    """Group modules as :meth:`Sequential.module_groups` does.

    Returns
    -------
    list of tuple
        Neighbouring operations and None, an operation with hooks and itself, or nothing and another module.
    """
    groups: list[tuple[list[BasicOperation], torch.nn.Module | None]] = []
    before = False
    for module in modules:
        if module is not None and not isinstance(module, FusibleOperation):
            groups.append(([], module))
        elif module is None:
            pass  # it separates what is before from what is behind
        elif hooks_of(module):
            groups.append(([*expand([module])], module))
        elif before:
            groups[-1][0].extend(expand([module]))
        else:
            groups.append(([*expand([module])], None))
        before = isinstance(module, FusibleOperation) and not hooks_of(module)
    return groups


def _names_one_of(key: Any, modules: Sequence[torch.nn.Module | None]) -> bool:
    """Whether a key of ``op_kwargs`` names a basic operation among modules."""
    if isinstance(key, int):
        return -len(modules) <= key < len(modules) and isinstance(modules[key], BasicOperation)
    return isinstance(key, BasicOperation) and any([key is module for module in modules])


def _inputs_of(ops: Sequence[BasicOperation]) -> int:
    """Extra inputs of a pipeline that come from the caller."""
    return sum([len([c for c in op._extra_input_channels if c is None]) for op in ops])


def _cause(
    ops: Sequence[BasicOperation], x: torch.Tensor, extra: Sequence[Any], keywords: Sequence[dict[str, Any]]
) -> str | None:
    """Say why no operator covers a pipeline: a key of :data:`CAUSES`, or None."""
    if len(ops) != 3 or not _is_mlp(type(ops[0]), type(ops[1]), type(ops[2])):
        return "pipeline"
    fc1, activation, fc2 = ops
    assert isinstance(fc1, GroupedLinear)
    assert isinstance(fc2, GroupedLinear)
    if len(extra) != 3 + fc2.scale_bias or fc1.scale_bias:
        return "pipeline"
    tensors = [extra[0], *extra[2:]]
    if not all([isinstance(t, torch.Tensor) for t in tensors]) or not isinstance(extra[1], (torch.Tensor, type(None))):
        return "arguments"
    for given in keywords:
        for name, value in given.items():  # unquantised weights are not kept from one micro-batch to the next
            if name != "is_first_microbatch" or not (value is None or isinstance(value, bool)):
                return "keywords"
    if not all([_is_plain(type(p)) for fc in (fc1, fc2) for p in [*fc.weights(), *fc.biases()]]):
        return "sharded"
    if fc1.accumulate_into_main_grad or fc2.accumulate_into_main_grad:
        return "main_grad"
    if fc1.delay_wgrad_compute or fc2.delay_wgrad_compute:
        return "delayed"
    if registry.forward or registry.backward or len(registry.joint) != 1:
        return "fusions"
    if registry.joint[0] is not patterns.fuse_grouped_mlp:
        return "fusions"
    for op in (fc1, activation, fc2):
        if in_force.replay is not None and (op._recipe is not None or in_force.entered_inside):
            return "replay"
        flag = getattr(_recipe_of(op), FLAG, None)
        if flag is not None and not isinstance(flag, bool):
            return "flag"
    quantizing = [recipe for recipe in (_recipe_of(fc1), _recipe_of(fc2)) if not _is_unquantized(recipe)]
    if not quantizing:
        return None
    first = [value for given in keywords for value in given.values() if value is not None]
    if first or not all([_is_stateless(recipe) for recipe in quantizing]) or isinstance(x, PrequantizedTensor):
        return "stateful"
    if _autocasts(x.device):
        return "autocast"
    if _fusion(ops) != "off" and _has_kernels(x.device, settings.sm100, type(kernels._provider)):
        return "emulated"
    return None


def _recipe_of(op: BasicOperation) -> Any:
    """Recipe that counts for an operation."""
    return in_force.recipe if op._recipe is None else op._recipe


def _is_unquantized(recipe: Any) -> bool:
    return recipe is None or _unquantized(type(recipe))


def _is_stateless(recipe: Any) -> bool:
    """Whether quantising under a recipe needs nothing but its fields; NVFP4 has one that says so."""
    answer: bool = _stateless(type(recipe), getattr(recipe, "disable_stochastic_rounding", True))
    return answer


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _stateless(cls: type, rounds_to_nearest: bool) -> bool:
    return cls in STATELESS and rounds_to_nearest


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _has_kernels(device: torch.device, sm100: str, provider: type) -> bool:
    """Whether kernels run on a device; the other arguments are there to be guarded on."""
    return not kernels.provider().unsupported(device)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _is_mlp(fc1: type, activation: type, fc2: type) -> bool:
    """Whether operations of these classes compute what the operators compute."""
    pairs = ((fc1, GroupedLinear), (activation, ScaledActivation), (fc2, GroupedLinear))
    return all(issubclass(cls, base) and not _overridden(cls, base) for cls, base in pairs)


#: What a subclass may define anew without computing anything else.
_HARMLESS = {
    *("__init__", "__doc__", "__module__", "__annotations__", "__firstlineno__", "__static_attributes__"),
    *("extra_repr", "reset_parameters", "name", "module_type"),
}


def _overridden(cls: type, base: type) -> bool:
    own = cls.__mro__[: cls.__mro__.index(base)]
    return any(hasattr(base, name) and name not in _HARMLESS for sub in own for name in vars(sub))


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _is_plain(parameter: type) -> bool:
    return parameter.__name__ != "DTensor"


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _unquantized(recipe: type) -> bool:
    """Whether recipes of a class, ours or foreign, quantise nothing."""
    return class_kind(recipe) == "high_precision"


# The operator ---------------------------------------------------------------------------------------------------------


def _bias(fc: GroupedLinear) -> torch.Tensor | None:
    """Return the bias of a layer, (G, out): a copy where it is a list."""
    return fc.bias if fc.single_grouped_bias else torch.stack([*fc.biases()])


def _operator(ops: Sequence[Any], x: torch.Tensor, extra: Sequence[Any]) -> torch.Tensor:
    """Call the operator of a pipeline that :func:`_cause` has nothing against."""
    fc1, activation, fc2 = ops
    sizes1, probs, sizes2 = extra[:3]
    scale = extra[3] if fc2.scale_bias else None
    w1, b1, w2, b2 = fc1.weights(), _bias(fc1), fc2.weights(), _bias(fc2)
    dtype = w1[0].dtype
    if _autocasts(x.device):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, w1, w2 = x.to(dtype), [w.to(dtype) for w in w1], [w.to(dtype) for w in w2]
    b1 = None if b1 is None else b1.to(dtype)
    b2 = None if b2 is None else b2.to(dtype)
    configuration = _text(
        *(activation.activation, activation.glu_interleave_size, activation.params, _fusion(ops)),
        *(_recipe_text(fc1), _recipe_text(fc2)),
    )
    needs = 0
    if torch.is_grad_enabled():
        wanted = (([x], NEED_X), (w1, NEED_W1), ([b1], NEED_B1), ([probs], NEED_PROBS), (w2, NEED_W2), ([b2], NEED_B2))
        for tensors, bit in (*wanted, ([scale], NEED_SCALE)):
            if any([t is not None and t.requires_grad for t in tensors]):
                needs += bit
    operator = torch.ops.cute_grouped_mlp.mlp_forward
    if _reads_sizes(_shape(fc1), _shape(fc2), dtype, x.device, settings.sm100, type(kernels._provider)):
        operator = torch.ops.cute_grouped_mlp.mlp_forward_reading_sizes
    y, _, _ = operator(
        x.reshape(-1, x.shape[-1]),
        w1,
        b1,
        None if probs is None else probs.reshape(-1),
        sizes1,
        w2,
        b2,
        None if scale is None else scale.reshape(-1),
        sizes2,
        configuration,
        needs,
    )
    result: torch.Tensor = y.reshape(*x.shape[:-1], y.shape[-1])
    return result


def _shape(fc: GroupedLinear) -> tuple[int, int, int]:
    return fc.num_groups, fc.in_features, fc.out_features


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _reads_sizes(
    shape1: tuple[int, int, int],
    shape2: tuple[int, int, int],
    dtype: torch.dtype,
    device: torch.device,
    sm100: str,
    provider: type,
) -> bool:
    """Whether there are no kernels for both layers, so that plain torch may read the split sizes on the host.

    The last two arguments are there to be guarded on.
    """
    return any(kernel_problems(LinearShape(*shape, dtype, device)) for shape in (shape1, shape2))


def _autocasts(device: torch.device) -> bool:
    return device.type != "meta" and torch.is_autocast_enabled(device.type)


def _fusion(ops: Sequence[Any]) -> str:
    """Say what the recipes and the settings ask for: a policy of :class:`Configuration`."""
    flags = [getattr(_recipe_of(op), FLAG, None) for op in ops]
    if any([flag is False for flag in flags]) or (any([flag is None for flag in flags]) and not settings.fuse):
        return "off"
    return "demanded" if any([flag is True for flag in flags]) else "default"


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _text(
    activation: str,
    glu_interleave_size: int | None,
    params: tuple[float, ...],
    fusion: str,
    recipe1: str | None,
    recipe2: str | None,
) -> str:
    return str(Configuration(activation, glu_interleave_size, params, fusion, (recipe1, recipe2)))


def _recipe_text(fc: GroupedLinear) -> str | None:
    """Write the recipe under which a layer is quantised, from fields that are guarded on."""
    recipe = _recipe_of(fc)
    if _is_unquantized(recipe):
        return None
    text: str = _written(type(recipe), *[getattr(recipe, name) for name in _field_names(type(recipe))])
    return text


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _field_names(cls: type[Recipe]) -> tuple[str, ...]:
    return tuple(f.name for f in dataclasses.fields(cls))


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _written(cls: type[Recipe], *values: Any) -> str:
    return recipe_text_of(cls, values)
