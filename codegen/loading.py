"""Artifact to callable: the one place where compiled kernels come into the process."""

from __future__ import annotations

import ctypes
import functools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from .errors import ArtifactUnreadableError
from .folders import scratch_folder
from .toolchain import runtime_library


class Loadable(Protocol):
    """What :func:`load_callable` needs of an artifact."""

    @property
    def name(self) -> str:
        """Variant name, which is also the name of the exported function."""

    @property
    def object_path(self) -> Path:
        """``kernel.o``."""

    @property
    def library_path(self) -> Path | None:
        """``kernel.so``, if there is one."""


def load_callable(artifact: Loadable) -> Callable[..., None]:
    """Load a kernel.

    The shared library is loaded in milliseconds and without the DSL; an artifact that has only an object file brings
    the DSL into the process.  Neither needs a GPU: CUDA loads the kernel at its first call.

    Only verified artifacts may come here, such as the store and AOT folders give: a library that was cut short kills
    the process that maps it.

    Returns
    -------
    Callable
        A TVM-FFI function that takes the kernel's arguments by position: torch tensors as they are, numbers, no stream
        (it launches on torch's current stream).  It keeps what it needs alive; the files may go.

    Raises
    ------
    ArtifactUnreadableError
        If the files cannot be loaded, also from a copy in the temporary folder, or do not hold the kernel.
    GroupedMLPError
        If the runtime libraries are not installed.
    """
    library = artifact.library_path
    try:
        module = _load_object(artifact.object_path) if library is None else _load_from_anywhere(library)
        function: Callable[..., None] = module[artifact.name]
    except (RuntimeError, AttributeError, OSError) as error:
        raise ArtifactUnreadableError(
            f"cannot load {library or artifact.object_path}, though its files are as they were written: {error}. Where "
            "its folder is mounted noexec, set TMPDIR or CUTE_GROUPED_MLP_CACHE_DIR to one that is not"
        ) from error
    return function


def _load_from_anywhere(path: Path) -> Any:
    """Load a library; from a copy where its own place does not let it be mapped, as a noexec mount does."""
    try:
        return _load_library(path)
    except (RuntimeError, OSError):
        scratch = scratch_folder()
        try:
            return _load_library(Path(shutil.copy(path, scratch)))
        finally:
            shutil.rmtree(scratch, ignore_errors=True)  # what is loaded stays


@functools.cache
def preload_runtime() -> None:
    """Bring the runtime libraries that kernels are linked to into this process, once."""
    import tvm_ffi

    ctypes.CDLL(tvm_ffi.libinfo.find_libtvm_ffi(), ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(runtime_library()), ctypes.RTLD_GLOBAL)


def _load_library(path: Path) -> Any:
    import tvm_ffi

    preload_runtime()
    return tvm_ffi.load_module(str(path))


def _load_object(path: Path) -> Any:
    from cutlass.cute.runtime import load_module

    return load_module(str(path), enable_tvm_ffi=True)
