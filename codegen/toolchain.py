"""What compiles and loads kernels on this machine: versions, CUDA flavour and the runtime libraries on disk.

Found without importing the DSL or initialising CUDA.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import platform
import re
from dataclasses import dataclass
from pathlib import Path

from .errors import GroupedMLPError

#: Grows when the arguments that the runtime passes to a kernel of an unchanged spec change.  Part of
#: :attr:`Toolchain.abi`.
LAUNCH_ABI = 1
DSL = "nvidia-cutlass-dsl"
FFI = "apache-tvm-ffi"
RUNTIME_LIBRARY = "libcute_dsl_runtime.so"


@dataclass(frozen=True, slots=True)
class Toolchain:
    """The installed compiler and runtime.

    Attributes
    ----------
    versions
        (distribution, version) of every nvidia-cutlass-dsl* and apache-tvm-ffi distribution, sorted.
    cuda
        CUDA major version of the DSL's libraries in use: the newest installed that the driver can load, as the DSL
        itself chooses; None if none is installed.
    """

    versions: tuple[tuple[str, str], ...]
    cuda: int | None

    def version(self, prefix: str) -> str | None:
        """Version of the first distribution whose name starts with ``prefix``."""
        return next((version for name, version in self.versions if name.startswith(prefix)), None)

    @property
    def folder(self) -> str:
        """Readable and unique name, for a folder of the store."""
        exact = hashlib.sha256(json.dumps([self.versions, self.cuda]).encode()).hexdigest()[:8]
        return f"dsl-{self.version(DSL)}-cu{self.cuda}_ffi-{self.version(FFI)}_{exact}"

    @property
    def abi(self) -> str:
        """What a compiled kernel needs of the process that loads it.

        Patch releases of the DSL and of TVM-FFI do not change it.
        """
        dsl, ffi = (_minor(self.version(name)) for name in (DSL, FFI))
        return f"launch{LAUNCH_ABI}-dsl{dsl}-ffi{ffi}-{platform.machine()}"


def _minor(version: str | None) -> str:
    return ".".join((version or "none").split(".")[:2])


@functools.cache
def toolchain() -> Toolchain:
    """Inspect this environment, once per process; ``toolchain.cache_clear()`` forgets it."""
    found: dict[str, str] = {}
    for distribution in importlib.metadata.distributions():
        name = re.sub(r"[-_.]+", "-", distribution.metadata["Name"] or "").lower()
        if name.startswith(DSL) or name == FFI:
            found.setdefault(name, distribution.version)  # the first on the path is the one that is imported
    flavours, driver = _flavours(), driver_cuda()
    usable = [major for major in flavours if driver is None or major <= driver]
    return Toolchain(tuple(sorted(found.items())), max(usable, default=None))


def runtime_library() -> Path:
    """Path of the DSL's runtime library, which every kernel needs in its process.

    Raises
    ------
    GroupedMLPError
        If none is installed that the CUDA driver can load.
    """
    cuda = toolchain().cuda
    if cuda is None:
        installed = ", ".join(f"cu{major}" for major in sorted(_flavours())) or "nothing"
        driver = driver_cuda()
        raise GroupedMLPError(
            f"no usable {RUNTIME_LIBRARY}: {installed} of {DSL} is installed and the CUDA driver "
            f"{'is absent' if driver is None else f'supports CUDA {driver}'}. Install {DSL} (CUDA 12) or '{DSL}[cu13]'."
        )
    return _flavours()[cuda]


def _flavours() -> dict[int, Path]:
    """CUDA major version -> runtime library, for each flavour of the DSL that is installed."""
    spec = importlib.util.find_spec("nvidia_cutlass_dsl")
    roots = [] if spec is None else [Path(root) for root in spec.submodule_search_locations or ()]
    found: dict[int, Path] = {}
    for root in roots:
        for library in root.glob(f"cu*/lib/{RUNTIME_LIBRARY}"):
            major = library.parent.parent.name[2:]
            if major.isdigit():
                found.setdefault(int(major), library)
    return found


@functools.cache
def driver_cuda() -> int | None:
    """Newest CUDA major version that the driver supports; None without a driver.  Does not initialise CUDA."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    version = ctypes.c_int(0)
    return version.value // 1000 if driver.cuDriverGetVersion(ctypes.byref(version)) == 0 else None
