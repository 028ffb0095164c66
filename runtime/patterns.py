"""The fusions of this package: which runs of operations become which fused operation, and why not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from . import kernels, support
from .codegen.spec import NUMERICS
from .config import settings
from .fusion import Fusion, Match, Rejection, register_forward_backward_fusion, sweep
from .grouped_mlp import NAME, FusedGroupedMLP
from .op import BasicOperation, FusibleOperation
from .ops.activation import ScaledActivation
from .ops.grouped_linear import GroupedLinear
from .planning import Planned, planned_for
from .recipe import FLAG
from .snapshot import snapshot
from .step import LAYOUTS


def fuse_grouped_mlp(ops: list[FusibleOperation], *, recipe: Any) -> Fusion:
    """Replace every GroupedLinear, activation, GroupedLinear that the kernels can run.

    Parameters
    ----------
    ops
        The pipeline.
    recipe
        The recipe in force, or None.
    """
    found = sweep(ops, 3, lambda run: _attempt(run, recipe))
    if len(found.ops) == len(ops) and not found.rejections and sum(isinstance(op, GroupedLinear) for op in ops) > 1:
        names = ", ".join(type(op).__name__ for op in ops)
        return Fusion(
            found.ops, (Rejection(NAME, (f"it takes GroupedLinear, activation, GroupedLinear; got {names}",)),)
        )
    return found


def _attempt(run: Sequence[FusibleOperation], recipe: Any) -> Match | Rejection | None:
    fc1, activation, fc2 = run
    if not (
        isinstance(fc1, GroupedLinear) and isinstance(activation, ScaledActivation) and isinstance(fc2, GroupedLinear)
    ):
        return None
    ops = (fc1, activation, fc2)
    planned = tuple(planned_for(op, recipe) for op in ops)
    if forbidden := _forbidden(ops, planned):
        return Rejection(NAME, forbidden, wanted=False)
    device = fc1.fuser_parameters()[0].device
    dtype = kernels.autocast_dtype(device) or fc1.weights()[0].dtype
    reasons = conditions(fc1, activation, fc2, planned, dtype)
    if reasons:
        return Rejection(NAME, reasons)
    first, second = planned[0].quantizers, planned[2].quantizers
    if first is None or second is None:
        return Match(FusedGroupedMLP(fc1, activation, fc2, dtype))
    from . import emulated_mlp

    return Match(emulated_mlp.EmulatedGroupedMLP(fc1, activation, fc2, dtype, (first, second)))


def _forbidden(ops: Sequence[BasicOperation], planned: Sequence[Planned]) -> tuple[str, ...]:
    """Say which recipe forbids the fusion: the one in force, or an operation's own."""
    found: dict[str, None] = {}
    for name, op, its in zip(("FC1's ", "the activation's ", "FC2's "), ops, planned, strict=True):
        whose = "" if op.recipe is None else name
        flag = its.recipe.enable_cutedsl_fused_grouped_mlp
        if flag is False:
            found[f"{whose}recipe.{FLAG} is False"] = None
        elif flag is None and not settings.fuse:
            found[f"settings.fuse is off and {whose}recipe.{FLAG} is None"] = None
    return tuple(found)


def conditions(
    fc1: GroupedLinear,
    activation: ScaledActivation,
    fc2: GroupedLinear,
    planned: Sequence[Planned],
    dtype: torch.dtype,
) -> tuple[str, ...]:
    """Every condition of the fusion that is not met.

    Parameters
    ----------
    fc1, activation, fc2
        The run of operations.
    planned
        Recipe and quantisers of each.
    dtype
        Type to compute in.
    """
    device = fc1.fuser_parameters()[0].device
    problems = quantizer_problems(planned, dtype, device)
    numerics = NUMERICS.get(kernels.NUMERICS_OF.get(dtype, ""))
    factor = 2 if activation.glu else 1
    if fc1.num_groups != fc2.num_groups:
        problems.append(f"FC1 has {fc1.num_groups} groups, FC2 has {fc2.num_groups}")
    if fc1.out_features != factor * fc2.in_features:
        problems.append(
            f"FC1 has {fc1.out_features} output features, {activation.activation} of FC2's {fc2.in_features} input "
            f"features needs {factor * fc2.in_features}"
        )
    if fc2.out_features != fc1.in_features:
        problems.append(f"FC2 has {fc2.out_features} output features, FC1 has {fc1.in_features} input features")
    alignment = 8 if numerics is None else numerics.alignment
    for name, size in (("hidden size", fc1.in_features), ("ffn size", fc2.in_features)):
        if size % alignment:
            problems.append(f"the {name} is {size}, kernels need a multiple of {alignment}")
    interleave = activation.glu_interleave_size
    if interleave not in LAYOUTS:
        problems.append(f"glu_interleave_size is {interleave}, kernels take None and 32")
    elif interleave is not None and fc2.in_features % interleave:
        problems.append(f"the ffn size is {fc2.in_features}, not a multiple of glu_interleave_size {interleave}")
    if fc1.scale_bias:
        problems.append("FC1 scales its bias, which only FC2's kernels do")
    for name, fc in (("FC1", fc1), ("FC2", fc2)):
        if not fc.is_packed():
            problems.append(f"{name}'s weights are not one packed storage any more")
        if fc.fuser_parameters()[0].device != device:
            problems.append(f"{name} is on {fc.fuser_parameters()[0].device}, FC1 on {device}")
    if any(w.dtype != fc1.weights()[0].dtype for w in fc2.weights()) and kernels.autocast_dtype(device) is None:
        problems.append(f"FC1 is {fc1.weights()[0].dtype}, FC2 is {fc2.weights()[0].dtype}")
    return tuple(problems)


def quantizer_problems(planned: Sequence[Planned], dtype: torch.dtype, device: torch.device) -> list[str]:
    """Every condition on device, types and quantisers of both layers that is not met.

    What the support predicate answers is asked here, and nowhere else: where it says yes the plan is native.

    Parameters
    ----------
    planned, dtype
        As :func:`conditions` takes them.
    device
        Of the parameters.
    """
    first, _, second = planned
    errors = {name: its.error for name, its in (("FC1", first), ("FC2", second)) if its.error is not None}
    problems = [f"{name}: {reason}" for name, error in errors.items() for reason in error.reasons]
    made = [its.quantizers for its in (first, second) if its.quantizers is not None]
    if made or problems:
        native = support.fuser_grouped_tensor_supported
        supported = all(native(its.recipe, dtype, device=device) for its in (first, second))
        problems += () if supported else support.emulation_reasons(dtype, device)
    else:  # nothing is quantised, whatever the recipe is called
        problems += support.fuser_grouped_tensor_supported(None, dtype, device=device).reasons
    own = [snapshot(its.recipe).text for its in (first, second)]
    if own[0] != own[1] and (made or problems):
        problems.append(f"FC1 runs under {own[0]}, FC2 under {own[1]}")
    if made:
        from .emulated_mlp import quantizer_problems as problems_of
        from .ops.quantized_linear import of_linear

        problems += [problem for q in made for problem in problems_of(of_linear(q))]
    return list(dict.fromkeys(problems))


register_forward_backward_fusion(fuse_grouped_mlp)
