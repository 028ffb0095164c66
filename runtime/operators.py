"""The grouped MLP as ``torch.library`` operators: functions of tensors and of a configuration, and of no module.

The configuration says as text what tensors do not: the activation, and whether to fuse.  All else is read from the
tensors when the operator runs, so the kernels that run are those of the device that the tensors are on; where kernels
take them not, or the configuration says so, the three steps run one by one (:mod:`.unfused_mlp`), on the CPU too.
What forward keeps for backward is the same in both cases.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from . import kernels
from .caching import LRUCache, get_or_make
from .config import settings
from .errors import ConfigError
from .fuser import OperationFuser
from .grouped_mlp import FusedGroupedMLP
from .ops.activation import ScaledActivation
from .ops.grouped_linear import GroupedLinear
from .ops.grouped_parameters import pack
from .recipe import (
    CLASSES,
    FLAG,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    HighPrecision,
    MMParams,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
)
from .recipe_state import QuantizedCall, RecipeState
from .step import NEED_B1, NEED_B2, NEED_PROBS, NEED_SCALE, NEED_W1, NEED_W2, NEED_X, NEED_Z
from .unfused_mlp import UnfusedGroupedMLP

#: Bits of the gradients in the order in which ``mlp_backward`` returns them.
NEEDS = (NEED_X, NEED_W1, NEED_B1, NEED_PROBS, NEED_W2, NEED_B2, NEED_SCALE)

#: Recipes that ask for a policy of fusion.
_RECIPES = {
    "off": HighPrecision(enable_cutedsl_fused_grouped_mlp=False),
    "default": HighPrecision(),
    "demanded": HighPrecision(enable_cutedsl_fused_grouped_mlp=True),
}

#: Recipes under which quantising depends on nothing but the tensors and the recipe: NVFP4 if it rounds to nearest.
STATELESS = (Float8CurrentScaling, Float8BlockScaling, MXFP8BlockScaling, NVFP4BlockScaling)


@dataclass(frozen=True, slots=True)
class Configuration:
    """What tensors do not say about a grouped MLP.

    Attributes
    ----------
    activation, glu_interleave_size, params
        As :class:`ScaledActivation` has them.
    fusion
        ``"off"``, ``"default"`` (fuse where supported) or ``"demanded"`` (and warn where not).
    recipes
        Of both layers, as :func:`recipe_text_of` writes them; None: the layer is not quantised.
    """

    activation: str
    glu_interleave_size: int | None = None
    params: tuple[float, ...] = ()
    fusion: str = "default"
    recipes: tuple[str | None, str | None] = (None, None)

    def __str__(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    @functools.lru_cache(maxsize=1024)
    def parse(text: str) -> Configuration:
        """Read what ``str`` writes.

        Raises
        ------
        ConfigError
            If it is something else.
        """
        try:
            found = Configuration(**json.loads(text))
        except (ValueError, TypeError) as error:
            raise ConfigError(f"a configuration of the grouped MLP is {text!r}: {error}") from None
        if found.fusion not in _RECIPES:
            raise ConfigError(f"fusion is {found.fusion!r}; allowed: {', '.join(_RECIPES)}")
        first, second = found.recipes
        return replace(found, params=tuple(found.params), recipes=(first, second))


def recipe_text_of(cls: type[Recipe], values: Sequence[Any]) -> str:
    """Write a recipe without state as text.

    Parameters
    ----------
    cls, values
        One of this package's classes, and the values of its fields, in order.
    """
    plain = [_written(value) for value in values]
    return json.dumps([cls.kind, dict(zip([f.name for f in fields(cls)], plain, strict=True))])


def _written(value: Any) -> Any:
    if isinstance(value, Format):
        return value.name
    return value.use_split_accumulator if isinstance(value, MMParams) else value


def _read(text: str, flag: bool | None) -> Recipe:
    """Inverse of :func:`recipe_text_of`, with a fusion flag of its own."""
    kind, written = json.loads(text)
    cls = CLASSES[kind]
    values = {f.name: _as(f.default, written[f.name]) for f in fields(cls)}
    return cls(**{**values, FLAG: flag})


def _as(default: Any, written: Any) -> Any:
    """A field's value, which is of the type of its default."""
    if isinstance(default, Format):
        return Format[written]
    return MMParams(written) if isinstance(default, MMParams) else written


# What runs ------------------------------------------------------------------------------------------------------------

_Stand = tuple[OperationFuser, list[torch.nn.Parameter]]
_stands: LRUCache[_Stand] = LRUCache(256)


def _steps(
    configuration: str, x: torch.Tensor, w1: torch.Tensor, bias1: bool, w2: torch.Tensor, bias2: bool, scale: bool
) -> FusedGroupedMLP | UnfusedGroupedMLP:
    """Plan a call from its tensors, as a module of these operations with such parameters would be planned."""
    key = (configuration, w1.shape, w1.dtype, w1.device, bias1, w2.shape, w2.dtype, w2.device, bias2, scale)
    fuser, params = get_or_make(_stands, key, lambda: _stand_in(*key))
    fusion = Configuration.parse(configuration).fusion
    if fusion == "default" and not settings.fuse:
        fusion = "demanded"  # the setting was changed since forward, whose plan backward follows
    plan = fuser.select(_RECIPES[fusion], 0, x, params)
    if plan.error is not None:
        raise plan.error
    op = plan.forward_ops[0][0]
    if type(op) is FusedGroupedMLP:
        return op
    fc1, activation, fc2 = fuser.basic_ops
    calls = []
    for fc, planned in ((fc1, plan.planned[0]), (fc2, plan.planned[2])):
        made = planned.quantizers
        calls.append(None if made is None else QuantizedCall(made, RecipeState(made, fc)))
    return UnfusedGroupedMLP(fc1, activation, fc2, calls)  # type: ignore[arg-type]  # as they were made


def _stand_in(
    configuration: str,
    shape1: Sequence[int],
    dtype1: torch.dtype,
    device1: torch.device,
    bias1: bool,
    shape2: Sequence[int],
    dtype2: torch.dtype,
    device2: torch.device,
    bias2: bool,
    scale: bool,
) -> _Stand:
    """Make the pipeline of a configuration, with parameters that have a shape, a type and a device, and no memory."""
    found = Configuration.parse(configuration)
    (groups1, width, hidden), (groups2, out, ffn) = shape1, shape2
    with torch.inference_mode(False), FakeTensorMode():
        fc1 = GroupedLinear(groups1, hidden, width, bias=bias1, device=device1, dtype=dtype1)
        fc2 = GroupedLinear(groups2, ffn, out, bias=bias2, scale_bias=scale, device=device2, dtype=dtype2)
    activation = ScaledActivation(found.activation, glu_interleave_size=found.glu_interleave_size)
    activation.params = found.params or activation.params
    flag = _RECIPES[found.fusion].enable_cutedsl_fused_grouped_mlp
    fc1.recipe, fc2.recipe = (None if text is None else _read(text, flag) for text in found.recipes)
    fuser = OperationFuser((fc1, activation, fc2))
    return fuser, fuser.parameters()


_NOTHING_TO_LEAVE: AbstractContextManager[None] = contextlib.nullcontext()


def _unautocast(device: torch.device) -> AbstractContextManager[Any]:
    """Keep ``torch.autocast`` out: graphs cast before the operator, which computes in the weights' type."""
    if kernels.autocast_dtype(device) is None:
        return _NOTHING_TO_LEAVE
    return torch.autocast(device.type, enabled=False)


def _keeps_a(needs: int) -> bool:
    """Whether backward reads a from forward: where it needs z, it computes a from that."""
    return bool(needs & NEED_W2) and not needs & NEED_Z


# Operators ------------------------------------------------------------------------------------------------------------


def mlp_forward(
    x: torch.Tensor,
    w1: Sequence[torch.Tensor],
    b1: torch.Tensor | None,
    probs: torch.Tensor | None,
    sizes1: torch.Tensor,
    w2: Sequence[torch.Tensor],
    b2: torch.Tensor | None,
    scale: torch.Tensor | None,
    sizes2: torch.Tensor,
    configuration: str,
    needs: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Forward of the grouped MLP.

    Parameters
    ----------
    x : Tensor (T, H)
    w1, w2 : list of Tensor
        One weight (G, out, in), or G of (out, in); read without a copy where these are views of one storage, in order.
    b1, probs, sizes1, b2, scale, sizes2
        (G, out) or None, (T,) or None, (G,), and the same of the second layer, whose bias ``scale`` (T,) scales.
    configuration
        Text of a :class:`Configuration`.
    needs
        NEED_* bits of the gradients that will be asked for.

    Returns
    -------
    y : Tensor (T, out)
    z : Tensor (T, 2F)
        Pre-activation; empty where backward does not read it.
    a : Tensor (T, F)
        Activation; empty where backward does not read it from forward.
    """
    with _unautocast(x.device):
        packed1, packed2 = pack(w1), pack(w2)
        steps = _steps(configuration, x, packed1, b1 is not None, packed2, b2 is not None, scale is not None)
        y, z, a = steps.functional_forward(x, packed1, b1, probs, sizes1, packed2, b2, scale, sizes2, needs)
    if settings.debug_checks:
        kernels.provider().check_status(x.device)
    return y.contiguous(), *_kept(x, z, a, packed1.shape[1], packed2.shape[2], needs)


def _kept(
    x: torch.Tensor, z: torch.Tensor | None, a: torch.Tensor | None, width: int, ffn: int, needs: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return z and a as the operator does: made where forward made none, as without tokens; empty where not needed."""
    rows = x.shape[0]
    if not needs & NEED_Z:
        z = x.new_empty(0)
    elif z is None:
        z = x.new_empty(rows, width)
    if not _keeps_a(needs):
        a = x.new_empty(0)
    elif a is None:
        a = x.new_empty(rows, ffn)
    return z.contiguous(), a.contiguous()


def _fake_forward(
    x: Any,
    w1: Any,
    b1: Any,
    probs: Any,
    sizes1: Any,
    w2: Any,
    b2: Any,
    scale: Any,
    sizes2: Any,
    configuration: str,
    needs: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    (_, width, _), (_, out, ffn) = _packed_shape(w1), _packed_shape(w2)
    return x.new_empty(x.shape[0], out), *_kept(x, None, None, width, ffn, needs)


def _packed_shape(weights: Sequence[torch.Tensor]) -> tuple[int, int, int]:
    """Shape (G, out, in) of one weight, or of G."""
    groups, out, features = (len(weights), *weights[0].shape) if weights[0].dim() == 2 else weights[0].shape
    return groups, out, features


def mlp_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    w1: Sequence[torch.Tensor],
    bias1: bool,
    w2: Sequence[torch.Tensor],
    b2: torch.Tensor | None,
    z: torch.Tensor,
    a: torch.Tensor,
    probs: torch.Tensor | None,
    scale: torch.Tensor | None,
    sizes1: torch.Tensor,
    sizes2: torch.Tensor,
    configuration: str,
    needs: int,
) -> list[torch.Tensor]:
    """Backward of the grouped MLP.

    Parameters
    ----------
    dy : Tensor (T, out)
    x, w1, w2, b2, z, a, probs, scale, sizes1, sizes2, configuration
        What forward took and returned.
    bias1
        Whether it took b1.
    needs
        NEED_* bits of the gradients that are asked for.

    Returns
    -------
    list of Tensor
        Those of dx, dW1, db1, dprobs, dW2, db2 and dscale that are asked for; dW are (G, out, in).
    """
    with _unautocast(x.device):
        packed1, packed2 = pack(w1), pack(w2)
        steps = _steps(configuration, x, packed1, bias1, packed2, b2 is not None, scale is not None)
        grads = steps.functional_backward(
            dy,
            x,
            packed1,
            packed2,
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
    wanted = zip(grads, NEEDS, strict=True)
    return [grad.contiguous() for grad, bit in wanted if grad is not None and needs & bit]


def _fake_backward(
    dy: Any,
    x: Any,
    w1: Any,
    bias1: bool,
    w2: Any,
    b2: Any,
    z: Any,
    a: Any,
    probs: Any,
    scale: Any,
    sizes1: Any,
    sizes2: Any,
    configuration: str,
    needs: int,
) -> list[torch.Tensor]:
    shape1, shape2 = _packed_shape(w1), _packed_shape(w2)
    likes = (
        (x, x.shape),
        (w1[0], shape1),
        (w1[0], shape1[:2]),
        (probs, None if probs is None else probs.shape),
        (w2[0], shape2),
        (w2[0], shape2[:2]),
        (scale, None if scale is None else scale.shape),
    )
    return [like.new_empty(shape) for (like, shape), bit in zip(likes, NEEDS, strict=True) if needs & bit]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    x, w1, b1, probs, sizes1, w2, b2, scale, sizes2, configuration, needs = inputs
    _, z, a = output
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*w1, *w2, x, b2, z, a, probs, scale, sizes1, sizes2)
    ctx.counts, ctx.bias1, ctx.configuration, ctx.needs = (len(w1), len(w2)), b1 is not None, configuration, needs


def _of_each(dw: torch.Tensor | None, weights: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """Gradients of one weight (G, out, in), or of G weights (out, in)."""
    if dw is None:
        return [None] * len(weights)
    return [dw] if weights[0].dim() == 3 else list(dw.unbind(0))


def _define(suffix: str, tags: Sequence[torch.Tag]) -> None:
    """Define the two operators, with a suffix to their names."""
    forward: Any = torch.library.custom_op(
        f"cute_grouped_mlp::mlp_forward{suffix}", mlp_forward, mutates_args=(), tags=tags
    )
    backward: Any = torch.library.custom_op(
        f"cute_grouped_mlp::mlp_backward{suffix}", mlp_backward, mutates_args=(), tags=tags
    )

    def gradients(ctx: Any, dy: torch.Tensor | None, *_: Any) -> tuple[Any, ...]:
        count1, count2 = ctx.counts
        if dy is None:
            return None, [None] * count1, None, None, None, [None] * count2, None, None, None, None, None
        saved = list(ctx.saved_tensors)
        w1, w2 = saved[:count1], saved[count1 : count1 + count2]
        x, *rest = saved[count1 + count2 :]
        grads = iter(backward(dy.contiguous(), x, w1, ctx.bias1, w2, *rest, ctx.configuration, ctx.needs))
        dx, dw1, db1, dprobs, dw2, db2, dscale = (next(grads) if ctx.needs & bit else None for bit in NEEDS)
        return dx, _of_each(dw1, w1), db1, dprobs, None, _of_each(dw2, w2), db2, dscale, None, None, None

    forward.register_fake(_fake_forward)
    backward.register_fake(_fake_backward)
    forward.register_autograd(gradients, setup_context=_setup_context)


_define("", ())
#: The same where plain torch may read the split sizes on the host, which no CUDA graph captures.
READS_SIZES = "_reading_sizes"
_define(READS_SIZES, (torch.Tag.cudagraph_unsafe,))
