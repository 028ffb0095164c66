"""Grouped MLP kernels for Mixture-of-Experts training: generated, compiled, fused, differentiable.

Imported as ``import cute_grouped_mlp as cgm``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import kernels, patterns, reference, support
from .autocast import autocast, current_recipe
from .checkpoint import checkpoint, checkpoint_context_fn
from .config import settings
from .context import OperationContext
from .errors import (
    ArtifactCorruptError,
    ArtifactUnreadableError,
    CompileError,
    ConfigError,
    FusionError,
    FusionFallbackWarning,
    GroupedMLPError,
    MissingArtifactError,
    RenderError,
    ShapeError,
    UnsupportedError,
)
from .explain import Explanation, explain
from .fuser import OperationFuser
from .fusion import (
    Fusion,
    Match,
    Rejection,
    register_backward_fusion,
    register_forward_backward_fusion,
    register_forward_fusion,
)
from .grouped_mlp import FusedGroupedMLP
from .layout import deinterleave_glu, interleave_glu
from .mlp import GroupedMLP
from .op import BasicOperation, FusedOperation, FusibleOperation
from .ops import GroupedLinear, ScaledActivation, ScaledClampedQGeGLU, ScaledSiTUGLU, ScaledSReLU, ScaledSwiGLU
from .pipeline import Plan
from .recipe import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    HighPrecision,
    MMParams,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
)
from .sequential import Sequential

if TYPE_CHECKING:
    from . import quantization

__all__ = [
    "ArtifactCorruptError",
    "ArtifactUnreadableError",
    "BasicOperation",
    "CompileError",
    "ConfigError",
    "CustomRecipe",
    "DelayedScaling",
    "Explanation",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Format",
    "FusedGroupedMLP",
    "FusedOperation",
    "FusibleOperation",
    "Fusion",
    "FusionError",
    "FusionFallbackWarning",
    "GroupedLinear",
    "GroupedMLP",
    "GroupedMLPError",
    "HighPrecision",
    "MMParams",
    "MXFP8BlockScaling",
    "Match",
    "MissingArtifactError",
    "NVFP4BlockScaling",
    "OperationContext",
    "OperationFuser",
    "Plan",
    "Recipe",
    "Rejection",
    "RenderError",
    "ScaledActivation",
    "ScaledClampedQGeGLU",
    "ScaledSReLU",
    "ScaledSiTUGLU",
    "ScaledSwiGLU",
    "Sequential",
    "ShapeError",
    "UnsupportedError",
    "autocast",
    "checkpoint",
    "checkpoint_context_fn",
    "current_recipe",
    "deinterleave_glu",
    "explain",
    "interleave_glu",
    "kernels",
    "patterns",
    "quantization",
    "reference",
    "register_backward_fusion",
    "register_forward_backward_fusion",
    "register_forward_fusion",
    "settings",
    "support",
]


def __getattr__(name: str) -> Any:
    """Import ``quantization`` at its first use: quantisers are a third of the package's import time."""
    if name != "quantization":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return importlib.import_module(f"{__name__}.quantization")
