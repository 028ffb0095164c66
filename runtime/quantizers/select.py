"""Which quantiser a recipe implies for a tensor."""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch

from ..errors import ConfigError, UnsupportedError
from ..recipe import recipe_kind, require_fields
from .base import Quantizer
from .block_fp8 import Float8BlockQuantizer
from .formats import E4M3, E5M2
from .mxfp8 import MXFP8Quantizer
from .nvfp4 import NVFP4Quantizer
from .per_tensor import DelayedScalingQuantizer, Float8CurrentScalingQuantizer

Role = Literal["input", "weight", "grad_output"]


def quantizer_for(recipe: Any, role: Role, *, seed: int = 0) -> Quantizer | None:
    """Return the quantiser that a recipe implies for a tensor of a GEMM, or None where nothing is quantised.

    Parameters
    ----------
    recipe
        None, one of ours, or a foreign one with the same attributes.
    role
        ``"input"``, ``"weight"`` or ``"grad_output"``.
    seed
        Of stochastic rounding.

    Raises
    ------
    ConfigError
        If the role is none of these.
    UnsupportedError
        If the recipe is of no known class, lacks fields of its class, or asks for what there is not.
    """
    if role not in get_args(Role):
        raise ConfigError(f"role is {role!r}; allowed: {', '.join(map(repr, get_args(Role)))}")
    kind = recipe_kind(recipe)
    if kind == "high_precision":
        return None
    require_fields(recipe)
    if kind == "custom":
        made: Quantizer | None = recipe.qfactory(role)
        return made
    if kind == "delayed":
        return DelayedScalingQuantizer(_fp8(recipe, role))
    if kind == "float8_current":
        return Float8CurrentScalingQuantizer(_fp8(recipe, role), recipe.use_power_2_scales)
    if kind == "float8_block":
        dims = {"input": recipe.x_block_scaling_dim, "weight": recipe.w_block_scaling_dim}
        return Float8BlockQuantizer(
            _fp8(recipe, role), not recipe.use_f32_scales, dims.get(role, recipe.grad_block_scaling_dim)
        )
    if kind == "mxfp8":
        square = role == "weight" and getattr(recipe, "enable_2d_quantization", False)
        return MXFP8Quantizer(_fp8(recipe, role), square, recipe.margin)
    if kind == "nvfp4":
        return _nvfp4(recipe, role, seed)
    raise UnsupportedError(f"quantising under {type(recipe).__name__}", ["it is of no known recipe class"])


def _fp8(recipe: Any, role: Role) -> torch.dtype:
    """E5M2 for gradients under HYBRID, E4M3 otherwise; formats go by their names, so that foreign ones will do."""
    name = getattr(recipe.fp8_format, "name", None)
    if name not in ("E4M3", "HYBRID"):
        raise UnsupportedError(
            f"quantising with fp8_format {name or repr(recipe.fp8_format)}",
            ["allowed: members of Format named E4M3 or HYBRID"],
        )
    return E5M2 if name == "HYBRID" and role == "grad_output" else E4M3


def _nvfp4(recipe: Any, role: Role, seed: int) -> NVFP4Quantizer:
    """Weights have square blocks; the other two are transformed columnwise; gradients are rounded by chance."""
    if (extra := getattr(recipe, "nvfp4_4over6", "none")) != "none":
        raise UnsupportedError(f"quantising with nvfp4_4over6={extra!r}", ["only 'none' is implemented"])
    if role == "weight":
        return NVFP4Quantizer(with_2d_quantization=not recipe.disable_2d_quantization)
    return NVFP4Quantizer(
        with_rht=not recipe.disable_rht,
        stochastic_rounding=role == "grad_output" and not recipe.disable_stochastic_rounding,
        row_scaled_nvfp4=role == "input" and getattr(recipe, "row_scaled_activation", False),
        seed=seed,
    )
