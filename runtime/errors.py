"""Errors and warnings of the package, all under one root: :class:`GroupedMLPError`."""

from __future__ import annotations

from .codegen.errors import (
    ArtifactCorruptError,
    ArtifactUnreadableError,
    CompileError,
    ConfigError,
    GroupedMLPError,
    MissingArtifactError,
    RenderError,
    ShapeError,
    UnsupportedError,
)

__all__ = [
    "ArtifactCorruptError",
    "ArtifactUnreadableError",
    "CompileError",
    "ConfigError",
    "FusionError",
    "FusionFallbackWarning",
    "GroupedMLPError",
    "MissingArtifactError",
    "RenderError",
    "ShapeError",
    "UnsupportedError",
]


class FusionError(GroupedMLPError, RuntimeError):
    """A fusion function, an operation or a channel breaks the rules of the operation fuser."""


class FusionFallbackWarning(UserWarning):
    """A recipe asked for fusion and did not get it; the message says every reason."""
