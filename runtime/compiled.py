"""The fused grouped MLP in graphs of ``torch.compile``: ``torch.library`` operators, and what is traced around them.

A traced call looks for its plan once, while it is traced, and becomes one operator.  ``torch.compile`` guards on what
that plan depends on: recipe text, settings, gradients wanted, types, shapes.  What no operator covers runs as it does
without ``torch.compile``, after a graph break: other plans than the one fused operation, quantising recipes, a recipe
whose text is not kept (changed since the last call, or foreign), ``main_grad``, delayed weight gradients, weights that
are a list, and callers' buffers.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from . import kernels, sequential
from .autocast import in_force
from .config import settings
from .errors import GroupedMLPError
from .fuser import OperationFuser, by_number
from .grouped_mlp import FusedGroupedMLP
from .ops.grouped_linear import GroupedLinear
from .pipeline import make_contexts
from .recipe_text import TEXT
from .snapshot import NO_RECIPE
from .step import NEED_B1, NEED_B2, NEED_PROBS, NEED_SCALE, NEED_W1, NEED_W2, NEED_X, NEED_Z

_NEEDS = (NEED_X, NEED_W1, NEED_B1, NEED_PROBS, NEED_W2, NEED_B2, NEED_SCALE)
_BITS = 8  # of a choice, for NEED_* bits


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def group(number: int) -> bool:
    """Group a container's modules while its call is traced, for real: what is traced next finds its fusers there."""
    sequential.by_number[number].module_groups()
    return True


def call(
    fuser: OperationFuser,
    x: torch.Tensor,
    extra_inputs: Sequence[torch.Tensor | None],
    basic_op_kwargs: Sequence[dict[str, Any]] | None,
) -> Any:
    """Do what a call of a fuser does, while ``torch.compile`` traces it.

    Parameters
    ----------
    fuser, x, extra_inputs, basic_op_kwargs
        As :meth:`OperationFuser.run` takes them.
    """
    recipe = in_force.recipe
    text = NO_RECIPE if recipe is None else getattr(recipe, TEXT, None)
    choice = -1
    takes_three = len(extra_inputs) == fuser.num_extra_inputs >= 3
    if text is not None and takes_three and not basic_op_kwargs and not _writes_elsewhere(fuser):
        sizes1, probs, sizes2 = extra_inputs[:3]
        scale = extra_inputs[3] if len(extra_inputs) == 4 else None
        grad = torch.is_grad_enabled()
        choice = _choose(
            fuser.number,
            text,
            settings.stamp,
            x.dtype,
            x.device,
            grad,
            grad and x.requires_grad,
            grad and probs is not None and probs.requires_grad,
            grad and scale is not None and scale.requires_grad,
        )
        if choice >= 0:
            fc1, _, fc2 = fuser.basic_ops
            y = _traced(fc1, fc2, x, sizes1, probs, sizes2, scale, choice)
            return y.reshape(x.shape)
    return _run(fuser, x, extra_inputs, basic_op_kwargs)


def _writes_elsewhere(fuser: OperationFuser) -> bool:
    """Whether backward does more than to return gradients; asked while tracing, so that it is guarded on."""
    for op in fuser.basic_ops:
        if getattr(op, "accumulate_into_main_grad", False) or getattr(op, "delay_wgrad_compute", False):
            return True
    return False


def _traced(
    fc1: Any,
    fc2: Any,
    x: torch.Tensor,
    sizes1: Any,
    probs: torch.Tensor | None,
    sizes2: Any,
    scale: torch.Tensor | None,
    choice: int,
) -> torch.Tensor:
    w1, b1, w2, b2 = fc1.weight, fc1.bias, fc2.weight, fc2.bias
    dtype = w1.dtype
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, w1, w2 = x.to(dtype), w1.to(dtype), w2.to(dtype)
    b1 = None if b1 is None else b1.to(dtype)
    b2 = None if b2 is None else b2.to(dtype)
    y, _, _ = torch.ops.cute_grouped_mlp.mlp_forward(
        x.reshape(-1, x.shape[-1]),
        w1,
        b1,
        None if probs is None else probs.reshape(-1),
        sizes1,
        w2,
        b2,
        None if scale is None else scale.reshape(-1),
        sizes2,
        choice,
    )
    result: torch.Tensor = y
    return result


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _choose(
    number: int,
    text: str,
    stamp: str,
    dtype: torch.dtype,
    device: torch.device,
    grad: bool,
    x_requires_grad: bool,
    probs_require_grad: bool,
    scale_requires_grad: bool,
) -> int:
    """Plan a call while it is traced: NEED_* bits and, above them, the operation's number; -1: no operator covers it.

    ``stamp`` is there to be guarded on.
    """
    recipe = in_force.recipe
    if text != (NO_RECIPE if recipe is None else getattr(recipe, TEXT, None)):
        return -1  # autocast was entered inside the function that is traced, which has not happened yet
    fuser = by_number[number]
    x: Any = SimpleNamespace(dtype=dtype, device=device, requires_grad=x_requires_grad)
    probs: Any = SimpleNamespace(requires_grad=probs_require_grad)
    scale: Any = SimpleNamespace(requires_grad=scale_requires_grad)
    extra = (None, probs, None, scale)[: fuser.num_extra_inputs]
    boundary = fuser.boundary(x_requires_grad, extra) if grad else len(fuser.basic_ops)
    plan = fuser.select(recipe, boundary, x, fuser.parameters())
    op = plan.forward_ops[0][0]
    covered = (
        not fuser.hooked  # what they prepare is no function of tensors
        and len(plan.forward_ops) == 1
        and type(op) is FusedGroupedMLP
        and plan.backward_ops[0][0] is op
        and op.compilable()
        and all(isinstance(fuser.basic_ops[i], GroupedLinear) for i in (0, 2))
    )
    if not covered:
        return -1
    assert isinstance(op, FusedGroupedMLP)
    fuser.last_plan = plan
    needs = op.needs(make_contexts(3, boundary, x_requires_grad), probs, scale)
    index = next((i for i, known in fuser.compiled.items() if known is op), len(fuser.compiled))
    fuser.compiled[index] = op
    return ((number << 16) + index << _BITS) + needs


def _operation(choice: int) -> tuple[FusedGroupedMLP, int]:
    """Return the operation of a choice, and its NEED_* bits."""
    which, needs = choice >> _BITS, choice & (1 << _BITS) - 1
    fuser = by_number.get(which >> 16)
    op = None if fuser is None else fuser.compiled.get(which & 0xFFFF)
    if not isinstance(op, FusedGroupedMLP):
        raise GroupedMLPError("a compiled graph outlived the module that it was compiled from")
    return op, needs


_REASON = (
    "no operator covers this call of cute_grouped_mlp, whose explain(...) shows its plan: only the fused grouped MLP "
    "has one, without quantisation, main_grad, delayed weight gradients and weights as a list"
)


@torch.compiler.disable(reason=_REASON)  # type: ignore[untyped-decorator, no-untyped-call]
def _run(fuser: OperationFuser, x: Any, extra_inputs: Any, basic_op_kwargs: Any) -> Any:
    return fuser.run(x, extra_inputs, basic_op_kwargs)


# Operators ------------------------------------------------------------------------------------------------------------


@torch.library.custom_op("cute_grouped_mlp::mlp_forward", mutates_args=())
def mlp_forward(
    x: torch.Tensor,
    w1: torch.Tensor,
    b1: torch.Tensor | None,
    probs: torch.Tensor | None,
    sizes1: torch.Tensor,
    w2: torch.Tensor,
    b2: torch.Tensor | None,
    scale: torch.Tensor | None,
    sizes2: torch.Tensor,
    choice: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Forward of the fused grouped MLP.

    Parameters
    ----------
    x : Tensor (T, H)
    w1, b1, probs, sizes1, w2, b2, scale, sizes2
        As :meth:`FusedGroupedMLP.functional_forward` takes them.
    choice
        The operation, and the gradients that will be asked for.

    Returns
    -------
    y, z, a
        z and a are empty where backward does not read them from forward.
    """
    op, needs = _operation(choice)
    y, z, a = op.functional_forward(x, w1, b1, probs, sizes1, w2, b2, scale, sizes2, needs)
    if settings.debug_checks:
        kernels.provider().check_status(x.device)
    nothing = x.new_empty(0)
    rows = (len(x),) if needs & NEED_Z else (0,)
    z = x.new_empty(*rows, w1.shape[1]) if z is None and needs & NEED_Z else nothing if z is None else z
    return y, z, _kept(x, a, w2.shape[2], needs)


def _kept(x: torch.Tensor, a: torch.Tensor | None, ffn: int, needs: int) -> torch.Tensor:
    """Return the a that backward reads from forward, or nothing."""
    if a is not None:
        return a
    return x.new_empty(len(x), ffn) if _keeps_a(needs) else x.new_empty(0)


def _keeps_a(needs: int) -> bool:
    return bool(needs & NEED_W2) and not needs & NEED_Z


@mlp_forward.register_fake
def _(
    x: Any, w1: Any, b1: Any, probs: Any, sizes1: Any, w2: Any, b2: Any, scale: Any, sizes2: Any, choice: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    needs = choice & (1 << _BITS) - 1
    z = x.new_empty(x.shape[0], w1.shape[1]) if needs & NEED_Z else x.new_empty(0)
    a = x.new_empty(x.shape[0], w2.shape[2]) if _keeps_a(needs) else x.new_empty(0)
    return x.new_empty(x.shape), z, a


@torch.library.custom_op("cute_grouped_mlp::mlp_backward", mutates_args=())
def mlp_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    b2: torch.Tensor | None,
    z: torch.Tensor,
    a: torch.Tensor,
    probs: torch.Tensor | None,
    scale: torch.Tensor | None,
    sizes1: torch.Tensor,
    sizes2: torch.Tensor,
    choice: int,
) -> list[torch.Tensor]:
    """Backward of the fused grouped MLP.

    Parameters
    ----------
    dy : Tensor (T, H)
    x, w1, w2, b2, z, a, probs, scale, sizes1, sizes2
        What forward took and returned.
    choice
        The operation, and the gradients that are asked for.

    Returns
    -------
    list of Tensor
        Those of dx, dW1, db1, dprobs, dW2, db2 and dscale that are asked for.
    """
    op, needs = _operation(choice)
    grads = op.functional_backward(
        dy,
        x,
        w1,
        w2,
        b2,
        z if needs & NEED_Z else None,
        a if _keeps_a(needs) else None,
        probs,
        scale,
        sizes1,
        sizes2,
        needs,
    )
    if settings.debug_checks:
        kernels.provider().check_status(x.device)
    return [grad for grad, bit in zip(grads, _NEEDS, strict=True) if grad is not None and needs & bit]


@mlp_backward.register_fake
def _(
    dy: Any,
    x: Any,
    w1: Any,
    w2: Any,
    b2: Any,
    z: Any,
    a: Any,
    probs: Any,
    scale: Any,
    sizes1: Any,
    sizes2: Any,
    choice: int,
) -> list[torch.Tensor]:
    groups, hidden = w2.shape[:2]
    likes = (
        (x, x.shape),
        (w1, w1.shape),
        (w1, w1.shape[:2]),
        (probs, None if probs is None else probs.shape),
        (w2, w2.shape),
        (w2, (groups, hidden)),
        (scale, None if scale is None else scale.shape),
    )
    return [like.new_empty(shape) for (like, shape), bit in zip(likes, _NEEDS, strict=True) if choice & bit]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    x, w1, _, probs, sizes1, w2, b2, scale, sizes2, choice = inputs
    _, z, a = output
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, w1, w2, b2, z, a, probs, scale, sizes1, sizes2)
    ctx.choice = choice


def _backward(ctx: Any, dy: torch.Tensor | None, *_: Any) -> tuple[Any, ...]:
    if dy is None:
        return (None,) * 10
    found = iter(torch.ops.cute_grouped_mlp.mlp_backward(dy.contiguous(), *ctx.saved_tensors, ctx.choice))
    dx, dw1, db1, dprobs, dw2, db2, dscale = (next(found) if ctx.choice & bit else None for bit in _NEEDS)
    return dx, dw1, db1, dprobs, None, dw2, db2, dscale, None, None


mlp_forward.register_autograd(_backward, setup_context=_setup_context)
