"""Every error that the package raises on purpose, under one root.

``codegen`` never imports ``runtime``, so the classes live here; ``cute_grouped_mlp.errors`` hands them on to users.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .spec import KernelSpec


class GroupedMLPError(Exception):
    """Root of all errors of this package."""


class UnsupportedError(GroupedMLPError):
    """What was asked for is not supported here.

    Parameters
    ----------
    what
        What was asked for, as the start of a sentence: ``"the fused grouped MLP"``.
    reasons
        Every reason at once, one phrase each.

    Attributes
    ----------
    reasons : tuple of str
        The reasons, in the order given.
    """

    def __init__(self, what: str, reasons: Iterable[str]) -> None:
        self.what = what
        self.reasons = tuple(reasons)
        super().__init__(f"{what} is not supported: " + "; ".join(self.reasons))


class ConfigError(GroupedMLPError, ValueError):
    """A recipe or a setting has a value that is not allowed."""


class ShapeError(GroupedMLPError, ValueError):
    """An argument has a wrong shape, dtype, device or layout."""


class FieldTypeError(GroupedMLPError, TypeError):
    """A field of a spec holds something else than its type says."""


class RenderError(GroupedMLPError):
    """A template cannot be rendered for a spec, or rendered to something that is not Python."""


class CompileError(GroupedMLPError):
    """The DSL or its assembler refused a rendered kernel.

    Attributes
    ----------
    spec : KernelSpec or None
        The kernel that was compiled.
    source_path : Path or None
        The rendered file, kept for reading.
    template : str or None
        ``"sm90/gemm.py.jinja:123"``, the template line behind the failing line, where that is known.
    """

    def __init__(
        self,
        message: str,
        *,
        spec: KernelSpec | None = None,
        source_path: Path | None = None,
        template: str | None = None,
    ) -> None:
        self.spec = spec
        self.source_path = source_path
        self.template = template
        super().__init__(message)


class MissingArtifactError(GroupedMLPError):
    """A kernel is neither built nor allowed to be built now.

    Attributes
    ----------
    spec : KernelSpec
        The kernel that is missing.
    """

    def __init__(self, spec: KernelSpec, why: str) -> None:
        self.spec = spec
        super().__init__(
            f"no compiled kernel for {spec.name}: {why}. Build it with: "
            f"cute-grouped-mlp build --arch {spec.arch.value} --variant {spec.name} --out DIR"
        )


class ArtifactCorruptError(GroupedMLPError):
    """An artifact on disk is not what its metadata says.  The store catches it, moves the entry aside and rebuilds."""


class ArtifactUnreadableError(GroupedMLPError):
    """An artifact on disk may be as it should, and this process cannot read or load it: it is left alone."""
