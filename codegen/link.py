"""Object file to shared library, which a process loads without the DSL."""

from __future__ import annotations

import logging
import shutil
import subprocess
from pathlib import Path

from .toolchain import RUNTIME_LIBRARY, runtime_library

logger = logging.getLogger("cute_grouped_mlp")


def find_linker() -> str | None:
    """Path of the C compiler that links kernels; None if there is none."""
    return next((path for name in ("cc", "gcc", "clang") if (path := shutil.which(name))), None)


def link(object_path: Path, library_path: Path) -> Path | None:
    """Link a kernel's object file into a shared library.

    The library has no RUNPATH: :mod:`.loading` brings the two runtime libraries into the process first, from wherever
    they are installed.

    Returns
    -------
    Path or None
        ``library_path``; None where no linker is installed.  The kernel can then be loaded from the object file, which
        needs the DSL in the process.

    Raises
    ------
    GroupedMLPError
        If the DSL's runtime library is not installed.
    """
    linker = find_linker()
    if linker is None:
        logger.info("no C compiler found: %s is not linked, loading it will import the DSL", object_path)
        return None
    import tvm_ffi

    ffi = Path(tvm_ffi.libinfo.find_libtvm_ffi())
    runtime = runtime_library()
    command = [linker, "-shared", "-Wl,--build-id=none", "-o", str(library_path), str(object_path)]
    command += [f"-L{runtime.parent}", f"-l:{RUNTIME_LIBRARY}", f"-L{ffi.parent}", f"-l:{ffi.name}"]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        logger.warning("%s is not linked, loading it will import the DSL: %s", object_path, result.stderr.strip())
        return None
    return library_path
