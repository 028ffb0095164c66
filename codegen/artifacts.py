"""The on-disk store of compiled kernels.

Layout: ``<root>/v1/<toolchain>/<variant>-<sha12>/{kernel.py, kernel.o, kernel.so, meta.json}``.  An entry's name is
the SHA-256 of all that its object code depends on, so nothing ever expires and two toolchains share a root in peace.
 An entry appears by one rename and holds its own checksums; reading takes no lock.  A store that cannot be written or
is not safe to read never fails a run: it goes on with kernels of its own, in a temporary folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import shutil
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import filelock

from .compile import TIMEOUT, Compiled, compile_kernel, compile_options
from .errors import ArtifactCorruptError, ArtifactUnreadableError, CompileError, GroupedMLPError
from .folders import (
    LIBRARY,
    META,
    OBJECT,
    SOURCE,
    default_root,
    distrust,
    new_folder,
    path_problem,
    remove_entry,
    remove_if_empty,
    scratch_folder,
    warn_once,
)
from .render import Rendered, render
from .resources import ResourceReport
from .spec import KernelSpec
from .toolchain import toolchain

logger = logging.getLogger("cute_grouped_mlp")

LAYOUT = "v1"
_TEMPORARY, _BAD = ".tmp-", ".bad-"
_DAY = 24 * 3600
#: Damaged entries that are kept to be looked at.
_BAD_KEPT = 8


@dataclass(frozen=True, slots=True)
class Artifact:
    """A compiled kernel on disk, whose files are what its metadata says.

    Attributes
    ----------
    path
        Its folder.
    meta
        Content of ``meta.json``.
    """

    path: Path
    meta: dict[str, Any]

    @property
    def name(self) -> str:
        """Variant name, which is also the name of the exported function."""
        return str(self.meta["name"])

    @property
    def spec(self) -> KernelSpec:
        """The kernel's spec."""
        return KernelSpec.from_dict(self.meta["spec"])

    @property
    def report(self) -> ResourceReport:
        """The resources it uses."""
        return ResourceReport.from_dict(self.meta["report"])

    @property
    def source_path(self) -> Path:
        """``kernel.py``."""
        return self.path / SOURCE

    @property
    def object_path(self) -> Path:
        """``kernel.o``."""
        return self.path / OBJECT

    @property
    def library_path(self) -> Path | None:
        """``kernel.so``; None if it was built without a linker."""
        return self.path / LIBRARY if LIBRARY in self.meta["files"] else None


def artifact_key(rendered: Rendered) -> str:
    """SHA-256 of canonical JSON of everything that determines the object code.

    Source, signature (what is compiled, and the exported name), architecture, options and the exact toolchain; no
    path, time or version of this package.
    """
    spec = rendered.spec
    content = {
        "source": rendered.source,
        "signature": {"entry": "launch", "arguments": "fake_arguments", "export": spec.name},
        "arch": spec.arch.value,
        "options": compile_options(spec.arch),
        "toolchain": [toolchain().versions, toolchain().cuda],
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def read_artifact(path: Path) -> Artifact:
    """Read and verify an artifact.

    Raises
    ------
    FileNotFoundError
        If there is no such folder.
    ArtifactCorruptError
        If its metadata or a file is missing, cut short or changed.
    ArtifactUnreadableError
        If this process may not read it, or the disk fails: it may be as it should.
    """
    try:
        artifact = Artifact(path, json.loads((path / META).read_bytes()))
        files = artifact.meta["files"]
        if artifact.spec.name != artifact.name or not {SOURCE, OBJECT} <= files.keys():
            raise ValueError(f"{META} contradicts itself")
        artifact.report  # noqa: B018 - raises if it is not complete
        changed = [name for name, expected in files.items() if _sha256(path / name) != expected]
    except FileNotFoundError as error:
        if not path.exists():
            raise
        raise ArtifactCorruptError(f"{path} is not a complete artifact: {error}") from error
    except (NotADirectoryError, IsADirectoryError) as error:
        raise ArtifactCorruptError(f"{path} is not a complete artifact: {error}") from error
    except OSError as error:
        raise ArtifactUnreadableError(f"{path} cannot be read: {error}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArtifactCorruptError(f"{path} is not a complete artifact: {type(error).__name__}: {error}") from error
    if changed:
        raise ArtifactCorruptError(f"{path} was damaged: the SHA-256 of {', '.join(changed)} is not that in {META}")
    return artifact


def write_artifact(compiled: Compiled, key: str, path: Path) -> None:
    """Copy a compiled kernel to ``path`` under its final names, metadata last; in place if it lies there already."""
    files = {SOURCE: compiled.source_path, OBJECT: compiled.object_path}
    if compiled.library_path is not None:
        files[LIBRARY] = compiled.library_path
    for name, source in files.items():
        if source != path / name:
            shutil.copyfile(source, path / name)
    sums = {name: _sha256(path / name) for name in files}
    meta = {
        "name": compiled.spec.name,
        "key": key,
        "sha256": sums[OBJECT],
        "spec": compiled.spec.to_dict(),
        "arch": compiled.spec.arch.value,
        "options": compile_options(compiled.spec.arch),
        "toolchain": dict(toolchain().versions),
        "cuda": toolchain().cuda,
        "abi": toolchain().abi,
        "files": sums,
        "report": compiled.report.to_dict(),
    }
    (path / META).write_text(json.dumps(meta, indent=1, sort_keys=True) + "\n")


def publish(compiled: Compiled, key: str, path: Path, mode: int) -> None:
    """Make a compiled kernel appear at ``path`` as a whole.

    Parameters
    ----------
    compiled, key, path
        As :func:`write_artifact` takes them.
    mode
        Of the folder, less the umask.

    Raises
    ------
    OSError
        If it cannot be written, or something is there already.
    """
    temporary = new_folder(path.parent, _TEMPORARY, mode)
    try:
        write_artifact(compiled, key, temporary)
        os.rename(temporary, path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _remove(path: Path, process: int) -> None:
    """Delete a folder of this process; a forked child's end leaves it to its parent."""
    if os.getpid() == process:
        shutil.rmtree(path, ignore_errors=True)


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


#: How names of what the store makes look: a variant and the start of its key, or folders under way or set aside.
_ENTRY_NAME = re.compile(r"-[0-9a-f]{12}$|^\.")


class ArtifactStore:
    """Compiled kernels on disk, shared by the processes of one user.  Thread-safe.

    Parameters
    ----------
    root
        Folder, made at the first build; :func:`default_root` by default.
    render, compile
        How a spec becomes source, and source a compiled kernel in a folder.
    """

    def __init__(
        self,
        root: Path | None = None,
        *,
        render: Callable[[KernelSpec], Rendered] = render,
        compile: Callable[..., Compiled] = compile_kernel,
    ) -> None:
        # Not resolved: a link to a store that moves keeps working.
        self.root = (default_root() if root is None else root).absolute()
        self._render = render
        self._compile = compile
        self._own: dict[str, Artifact] = {}  # by key: builds of this process that could not be published

    @property
    def folder(self) -> Path:
        """Folder of this toolchain's entries."""
        return self.root / LAYOUT / toolchain().folder

    def refusal(self) -> str | None:
        """Why the store is not used: artifacts are code, and others could have put them there.  None if it is safe."""
        problem = path_problem(self.root)
        for path in (self.root, self.root / LAYOUT, self.folder):
            problem = problem or distrust(path, owners=[os.geteuid()], strict=True)
        return problem

    def get(self, spec: KernelSpec) -> Artifact | None:
        """Look an artifact up, without building it.

        A damaged entry is moved aside and counts as missing.
        """
        return self._get(spec, artifact_key(self._render(spec)))

    def build(self, spec: KernelSpec) -> Artifact:
        """Compile a kernel, whether or not it is there, and publish it.

        Raises
        ------
        RenderError, CompileError
            If that fails.  A store that cannot be written is no failure.
        """
        rendered = self._render(spec)
        return self._build(rendered, artifact_key(rendered))

    def get_or_build(self, spec: KernelSpec) -> Artifact:
        """Return the artifact of a spec, compiled now if it is not there; as :meth:`obtain`."""
        return self.obtain(spec)[0]

    def obtain(self, spec: KernelSpec) -> tuple[Artifact, bool]:
        """Return the artifact of a spec, and whether this call compiled it.

        Of several processes that ask for one kernel, one compiles it and the others wait.  Raises as :meth:`build`.
        """
        rendered = self._render(spec)
        key = artifact_key(rendered)
        artifact = self._get(spec, key)
        if artifact is not None:
            return artifact, False
        with self._lock(self._path(spec, key)):
            artifact = self._get(spec, key)
            return (self._build(rendered, key), True) if artifact is None else (artifact, False)

    def get_or_build_many(self, specs: Iterable[KernelSpec], *, jobs: int | None = None) -> dict[KernelSpec, Artifact]:
        """Return the artifacts of several specs; ``jobs`` of those that are missing are compiled at a time (all cores).

        Raises as :meth:`build`, for the first that fails.
        """
        specs = list(dict.fromkeys(specs))
        with ThreadPoolExecutor(jobs or os.cpu_count(), thread_name_prefix="cute-grouped-mlp-build") as pool:
            return dict(zip(specs, pool.map(self.get_or_build, specs), strict=True))

    def entries(self) -> Iterator[Path]:
        """Folders of all entries, of every toolchain."""
        for folder in sorted(self.root.glob(f"{LAYOUT}/*/*")):
            if folder.is_dir() and not folder.name.startswith("."):
                yield folder

    def verify(self) -> dict[Path, str | None]:
        """Check every entry; returns what is wrong with each, None where nothing is."""
        result: dict[Path, str | None] = {}
        for path in self.entries():
            try:
                read_artifact(path)
                result[path] = None
            except (FileNotFoundError, ArtifactCorruptError, ArtifactUnreadableError) as error:
                result[path] = str(error)
        return result

    def clear(self) -> tuple[int, list[Path]]:
        """Delete all entries of every toolchain, and what this package left over; nothing else.

        Returns
        -------
        count : int
            Entries that were deleted.
        others : list of Path
            What lies among the entries and was not written by this package: it stays.

        Raises
        ------
        OSError
            If something cannot be deleted.
        """
        count, others = 0, []
        if (self.root / LAYOUT).is_symlink():
            return 0, [self.root / LAYOUT]
        for folder in sorted(self.root.glob(f"{LAYOUT}/*")):
            if not folder.is_dir() or folder.is_symlink():
                others.append(folder)
                continue
            for path in sorted(folder.iterdir()):
                if path.name.startswith(".") and path.name.endswith(".lock"):
                    path.unlink()
                elif not _ENTRY_NAME.search(path.name) or not remove_entry(path):
                    others.append(path)
                elif not path.name.startswith("."):
                    count += 1
            remove_if_empty(folder)
        if (self.root / LAYOUT).is_dir():
            remove_if_empty(self.root / LAYOUT)
        return count, others

    def _path(self, spec: KernelSpec, key: str) -> Path:
        return self.folder / f"{spec.name}-{key[:12]}"

    def _get(self, spec: KernelSpec, key: str) -> Artifact | None:
        path = self._path(spec, key)
        if key in self._own:
            return self._own[key]
        reason = self.refusal()
        if reason is not None:
            warn_once(f"the store of compiled kernels is not used: {reason}")
            return None
        try:
            artifact = read_artifact(path)
        except FileNotFoundError:
            return None
        except ArtifactCorruptError as error:
            logger.warning("%s; it is moved aside and built again", error)
            self._set_aside(path)
            return None
        except ArtifactUnreadableError as error:
            warn_once(f"{error}; it stays as it is")
            return None
        if artifact.meta["key"] != key or artifact.spec != spec:
            return None  # twelve digits in common
        return artifact

    def _build(self, rendered: Rendered, key: str) -> Artifact:
        spec = rendered.spec
        try:
            scratch = scratch_folder()
        except GroupedMLPError as error:
            raise CompileError(f"{spec.name} cannot be compiled: {error}", spec=spec) from error
        remove = weakref.finalize(
            ArtifactStore, _remove, scratch, os.getpid()
        )  # called below, or when the process ends
        started = time.perf_counter()
        try:
            compiled = self._compile(spec, scratch, rendered=rendered)
        except OSError as error:
            raise CompileError(f"{spec.name} cannot be compiled in {scratch}: {error}", spec=spec) from error
        path = self._path(spec, key)
        reason = self.refusal()
        if reason is None:
            try:
                self._make_folder()
                self._sweep()
                publish(compiled, key, path, 0o700)
                artifact = read_artifact(path)
                remove()
            except (OSError, ArtifactCorruptError, ArtifactUnreadableError) as error:
                reason = str(error)
        if reason is not None:
            logger.warning("%s is compiled but not stored for other processes: %s", spec.name, reason)
            write_artifact(compiled, key, scratch)
            artifact = self._own[key] = read_artifact(scratch)
        logger.info(
            "compiled %s in %.1f s: %d registers, %d bytes of spill stores; in %s",
            spec.name,
            time.perf_counter() - started,
            compiled.report.registers,
            compiled.report.spill_stores,
            artifact.path,
        )
        return artifact

    @contextlib.contextmanager
    def _lock(self, path: Path) -> Iterator[None]:
        """Hold the lock of an entry.  Where locks do not work a kernel may be compiled twice, no more."""
        with contextlib.ExitStack() as stack:
            if self.refusal() is None:
                try:
                    self._make_folder()
                    lock = filelock.FileLock(path.with_name(f".{path.name}.lock"), timeout=TIMEOUT)
                    stack.enter_context(lock)
                except (OSError, NotImplementedError) as error:  # filelock.Timeout is an OSError
                    logger.debug("no lock for %s: %s", path, error)
            yield

    def _set_aside(self, path: Path) -> None:
        with contextlib.suppress(OSError):  # read-only, or another process was faster
            os.rename(path, new_folder(path.parent, _BAD, 0o700))
            for old in sorted(path.parent.glob(f"{_BAD}*"), key=lambda p: p.stat().st_mtime)[:-_BAD_KEPT]:
                remove_entry(old)

    def _make_folder(self) -> None:
        self.root.parent.mkdir(parents=True, exist_ok=True)
        for path in (self.root, self.folder.parent, self.folder):
            path.mkdir(mode=0o700, exist_ok=True)

    def _sweep(self) -> None:
        """Remove what killed processes left behind, and what was set aside a week ago."""
        now = time.time()
        for prefix, age in ((_TEMPORARY, _DAY), (_BAD, 7 * _DAY)):
            for path in self.folder.glob(f"{prefix}*"):
                with contextlib.suppress(OSError):
                    if now - path.stat().st_mtime > age:
                        remove_entry(path)
