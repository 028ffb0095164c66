"""Which quantiser a recipe implies for a tensor."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import ConfigError, UnsupportedError
from ..recipe import Format, recipe_kind
from ..recipe_text import recipe_name
from ..snapshot import is_ours, require_supported, snapshot
from .base import Quantizer
from .block_fp8 import Float8BlockQuantizer
from .formats import E4M3, E5M2
from .mxfp8 import MXFP8Quantizer
from .nvfp4 import NVFP4Quantizer
from .per_tensor import DelayedScalingQuantizer, Float8CurrentScalingQuantizer

ROLES = ("input", "weight", "grad_output")


class QuantizerRole(str):
    """What a quantiser is for, as a factory of :class:`CustomRecipe` is asked: the tensor's name, and more about it.

    A string, ``"input"``, ``"weight"`` or ``"grad_output"``, with the fields of Transformer Engine's ``QuantizerRole``.

    Attributes
    ----------
    tensor_type : str
        The string itself.
    module_type : str
        ``"grouped_linear"``; empty where it is not known.
    name : str
        Name of the layer, ``"fc1"`` or ``"fc2"`` in a :class:`GroupedMLP`; empty where it has none.
    """

    module_type: str
    name: str

    def __new__(cls, tensor_type: str, module_type: str = "", name: str = "") -> QuantizerRole:
        """Make a role of a tensor."""
        role = super().__new__(cls, tensor_type)
        role.module_type, role.name = module_type, name
        return role

    @property
    def tensor_type(self) -> str:
        """The string itself."""
        return str(self)


def quantizer_for(recipe: Any, role: str, *, seed: int = 0) -> Quantizer | None:
    """Return the quantiser that a recipe implies for a tensor of a GEMM, or None where nothing is quantised.

    Parameters
    ----------
    recipe
        None, one of ours, or a foreign one with the same attributes.
    role
        ``"input"``, ``"weight"`` or ``"grad_output"``; with more for a factory to read, a :class:`QuantizerRole`.
    seed
        Of stochastic rounding.

    Raises
    ------
    ConfigError
        If the role is none of these.
    UnsupportedError
        If the recipe is of no known class, lacks fields of its class, or asks for what there is not.
    """
    if role not in ROLES:
        raise ConfigError(f"role is {role!r}; allowed: {', '.join(map(repr, ROLES))}")
    kind = recipe_kind(recipe)
    if kind == "high_precision":
        return None
    if not is_ours(recipe):
        recipe = snapshot(recipe).recipe
    require_supported(recipe)
    if kind == "custom":
        made: Quantizer | None = recipe.qfactory(role if isinstance(role, QuantizerRole) else QuantizerRole(role))
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
        return MXFP8Quantizer(_fp8(recipe, role), role == "weight" and recipe.enable_2d_quantization, recipe.margin)
    if kind == "nvfp4":
        return _nvfp4(recipe, role, seed)
    raise UnsupportedError(f"quantising under {recipe_name(recipe)}", ["it is of no known recipe class"])


def _fp8(recipe: Any, role: str) -> torch.dtype:
    """E5M2 for gradients under HYBRID, E4M3 otherwise."""
    return E5M2 if recipe.fp8_format is Format.HYBRID and role == "grad_output" else E4M3


def _nvfp4(recipe: Any, role: str, seed: int) -> NVFP4Quantizer:
    """Weights have square blocks; the other two are transformed columnwise; gradients are rounded stochastically."""
    if role == "weight":
        return NVFP4Quantizer(with_2d_quantization=not recipe.disable_2d_quantization)
    return NVFP4Quantizer(
        with_rht=not recipe.disable_rht,
        stochastic_rounding=role == "grad_output" and not recipe.disable_stochastic_rounding,
        row_scaled_nvfp4=role == "input" and recipe.row_scaled_activation,
        seed=seed,
    )
