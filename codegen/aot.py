"""Folders of kernels that were built ahead of time, and how one is made.

An AOT folder holds ``manifest.json`` and, for each variant, ``<name>/{kernel.py, kernel.o, kernel.so, meta.json}``.
 A process finds a kernel in it by spec, architecture and runtime ABI, renders and compiles nothing, and does not
import the DSL.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .artifacts import Artifact, artifact_key, publish, read_artifact
from .compile import Compiled, compile_many
from .errors import ArtifactCorruptError, ArtifactUnreadableError, CompileError, GroupedMLPError
from .folders import distrust, expand_user, is_entry, path_problem, remove_entry, scratch_folder, warn_once
from .render import render
from .spec import Arch, KernelSpec
from .toolchain import DSL, driver_cuda, toolchain

logger = logging.getLogger("cute_grouped_mlp")

MANIFEST = "manifest.json"
AOT_VARIABLE = "CUTE_GROUPED_MLP_AOT_DIRS"


class AotFolder:
    """A folder that :func:`build_folder` made.

    Parameters
    ----------
    path
        The folder.

    Attributes
    ----------
    manifest
        Content of ``manifest.json``.

    Raises
    ------
    GroupedMLPError
        If it has no readable manifest.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        try:
            self.manifest: dict[str, Any] = json.loads((path / MANIFEST).read_bytes())
            self._names = {v["name"]: v["spec"] for v in self.manifest["variants"]}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise GroupedMLPError(
                f"{path} is not a folder of compiled kernels: {MANIFEST}: {type(error).__name__}: {error}. "
                "Make one with: cute-grouped-mlp build --arch sm_90a --out DIR"
            ) from error

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the variants."""
        return tuple(self._names)

    def mismatch(self) -> str | None:
        """Why no kernel of the folder can be loaded by this process; None if they can."""
        if problem := path_problem(self.path) or distrust(self.path, owners=[os.geteuid(), 0]):
            return problem
        abi = self.manifest.get("abi")
        if abi != toolchain().abi:
            return f"{self.path} was built for runtime ABI {abi}, this process has {toolchain().abi}"
        return None

    def get(self, spec: KernelSpec) -> Artifact | None:
        """Return the artifact of a spec; None if the folder has none that this process can load, which is said once."""
        if self.lacks(spec) is not None:
            return None
        try:
            return self.read(spec.name)
        except (ArtifactCorruptError, ArtifactUnreadableError) as error:
            warn_once(str(error))
            return None

    def lacks(self, spec: KernelSpec) -> str | None:
        """Say why the folder has no kernel of a spec; None if its manifest lists it."""
        if (arch := self.manifest.get("arch")) != spec.arch.value:
            return f"{self.path} was built for {arch}, not for {spec.arch.value}"
        if spec.name not in self._names:
            return f"it is not in {self.path}"
        if self._names[spec.name] != spec.to_dict():
            return f"{self.path} has another kernel of that name"
        return None

    def read(self, name: str) -> Artifact:
        """Read and verify a variant.

        Raises
        ------
        ArtifactCorruptError
            If it is missing, damaged, another one than the manifest says, or for another runtime.
        ArtifactUnreadableError
            If this process may not read it.
        """
        mismatch = self.mismatch()
        if mismatch is not None:
            raise ArtifactCorruptError(mismatch)
        try:
            artifact = read_artifact(self.path / name)
        except FileNotFoundError as error:
            raise ArtifactCorruptError(f"{self.path / name} is in the manifest and not in the folder") from error
        if artifact.meta["spec"] != self._names.get(name):
            raise ArtifactCorruptError(f"{self.path / name} holds another spec than the manifest says")
        driver, cuda = driver_cuda(), artifact.meta["cuda"]
        if driver is not None and cuda is not None and cuda > driver:
            raise ArtifactCorruptError(
                f"{self.path / name} was built with CUDA {cuda}, this machine's driver supports CUDA {driver}"
            )
        return artifact


def configured_folders() -> tuple[Path, ...]:
    """Folders that ``$CUTE_GROUPED_MLP_AOT_DIRS`` names; raises as :func:`expand_user`."""
    return tuple(expand_user(part) for part in os.environ.get(AOT_VARIABLE, "").split(os.pathsep) if part)


@functools.cache
def open_folder(path: Path) -> AotFolder:
    """Open an AOT folder, once per process; ``open_folder.cache_clear()`` forgets them."""
    return AotFolder(path)


def build_folder(
    specs: Sequence[KernelSpec],
    out_dir: Path,
    *,
    jobs: int | None = None,
    progress: Callable[[KernelSpec, Artifact | CompileError, bool], None] = lambda spec, result, compiled: None,
) -> dict[KernelSpec, Artifact | CompileError]:
    """Compile kernels ahead of time into a folder; needs no GPU.

    Variants that the folder already has, and that would come out the same, are kept; so are its other variants.

    Parameters
    ----------
    specs
        The kernels, all of one architecture.
    out_dir
        Folder, made if missing.
    jobs
        Compilations at a time; all cores by default.
    progress
        Called with each kernel as it is done, and whether it was compiled now rather than there already.

    Returns
    -------
    dict
        For each spec its artifact, or why it could not be compiled.

    Raises
    ------
    GroupedMLPError
        If the folder holds something else: no manifest, another architecture or toolchain, or under a kernel's name
        files that were not written by an earlier build.  Nothing is written then.
    """
    specs = list(dict.fromkeys(specs))
    archs = {spec.arch for spec in specs}
    if len(archs) != 1:
        raise GroupedMLPError(
            f"an AOT folder holds one architecture, got {sorted(a.value for a in archs) or 'no kernel'}"
        )
    (arch,) = archs
    kept = _existing(out_dir, arch)
    there = [spec.name for spec in specs if os.path.lexists(out_dir / spec.name)]
    if foreign := [name for name in there if not is_entry(out_dir / name)]:
        raise GroupedMLPError(f"{out_dir} holds {', '.join(foreign)}, which no build wrote: choose another folder")
    out_dir.mkdir(parents=True, exist_ok=True)
    keys = {spec: artifact_key(render(spec)) for spec in specs}
    results: dict[KernelSpec, Artifact | CompileError] = {}
    for spec in specs:
        if spec.name in kept and kept[spec.name].meta["key"] == keys[spec]:
            results[spec] = kept[spec.name]
            progress(spec, results[spec], False)

    def list_kept() -> None:
        _write_manifest(out_dir, arch, [kept[name] for name in sorted(kept)])

    def finish(spec: KernelSpec, compiled: Compiled | CompileError) -> None:
        if isinstance(compiled, Compiled):
            target = out_dir / spec.name
            remove_entry(target)
            publish(compiled, keys[spec], target, 0o777)
            results[spec] = kept[spec.name] = read_artifact(target)
            list_kept()  # after each: a build that is interrupted goes on where it was
        else:
            results[spec] = compiled
        progress(spec, results[spec], isinstance(compiled, Compiled))

    scratch = scratch_folder()
    try:
        compile_many([s for s in specs if s not in results], scratch, jobs=jobs, progress=finish)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    list_kept()
    return {spec: results[spec] for spec in specs}


def _existing(out_dir: Path, arch: Arch) -> dict[str, Artifact]:
    """Return the artifacts of the folder, by name."""
    if problem := path_problem(out_dir):
        raise GroupedMLPError(f"{problem}: choose another folder")
    if not out_dir.exists() or not any(out_dir.iterdir()):
        return {}
    folder = AotFolder(out_dir)
    mine = _identity(arch)
    theirs = {key: folder.manifest.get(key) for key in mine}
    if theirs != mine:
        raise GroupedMLPError(f"{out_dir} holds kernels built for {theirs}, not for {mine}: choose another folder")
    found = {}
    for name in folder.names:
        try:
            found[name] = folder.read(name)
        except (ArtifactCorruptError, ArtifactUnreadableError) as error:
            logger.warning("%s; it is dropped from the manifest", error)
    return found


def _identity(arch: Arch) -> dict[str, str | None]:
    return {"arch": arch.value, "dsl": toolchain().version(DSL), "abi": toolchain().abi}


def _write_manifest(out_dir: Path, arch: Arch, artifacts: list[Artifact]) -> None:
    variants = [
        {
            "name": artifact.name,
            "spec": artifact.meta["spec"],
            "sha256": artifact.meta["sha256"],
            "registers": artifact.report.registers,
            "spills": artifact.report.spill_stores,
            "c7512": artifact.report.c7512,
            "smem": artifact.report.smem,
            "mma": list(artifact.report.mma),
        }
        for artifact in artifacts
    ]
    temporary = out_dir / f".{MANIFEST}.{os.getpid()}"
    temporary.write_text(json.dumps({**_identity(arch), "variants": variants}, indent=1) + "\n")
    os.replace(temporary, out_dir / MANIFEST)
