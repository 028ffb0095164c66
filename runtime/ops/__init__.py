"""The basic operations."""

from __future__ import annotations

from .activation import ScaledActivation, ScaledClampedQGeGLU, ScaledSiTUGLU, ScaledSReLU, ScaledSwiGLU
from .grouped_linear import GroupedLinear

__all__ = ["GroupedLinear", "ScaledActivation", "ScaledClampedQGeGLU", "ScaledSReLU", "ScaledSiTUGLU", "ScaledSwiGLU"]
