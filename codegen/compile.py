"""Source to object file and resource report, in worker processes; needs no GPU and no driver.

``cute.compile`` is not thread-safe, brings the DSL into its process and may crash there: so it never runs in ours.  A
worker is a fresh interpreter that runs ``worker.py`` (no fork, and no import of the caller's main module), sees no
GPU, and always gets the target architecture passed.
"""

from __future__ import annotations

import json
import os
import queue
import re
import signal
import subprocess
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from .errors import CompileError, GroupedMLPError
from .interpreter import environment, script_command
from .link import link
from .render import Rendered, render
from .resources import ResourceReport, read_report
from .spec import Arch, KernelSpec

#: Seconds after which a compilation is given up; one takes 1 to 11.
TIMEOUT = 600
_WORKER = Path(__file__).with_name("worker.py")


@dataclass(frozen=True, slots=True)
class Compiled:
    """A compiled kernel on disk, not yet published anywhere.

    Attributes
    ----------
    spec
        The kernel.
    source_path, object_path
        ``kernel.py`` and ``kernel.o``.
    library_path
        ``kernel.so``; None if this machine cannot link.
    report
        Its resources.
    """

    spec: KernelSpec
    source_path: Path
    object_path: Path
    library_path: Path | None
    report: ResourceReport


def compile_options(arch: Arch) -> str:
    """Options of ``cute.compile``; part of an artifact's key."""
    return f"--enable-tvm-ffi --gpu-arch {arch.value} --keep-ptx --keep-cubin remarks{{ptx}}"


def compile_kernel(
    spec: KernelSpec, out_dir: Path, *, rendered: Rendered | None = None, timeout: int = TIMEOUT
) -> Compiled:
    """Render and compile one kernel in a worker process.

    Parameters
    ----------
    spec
        The kernel.
    out_dir
        Folder for ``kernel.py``, ``kernel.o``, ``kernel.so`` (where it can be linked), ``kernel.ptx`` and
        ``compile.log``; made if missing.
    rendered
        Its source, if it was rendered already.
    timeout
        Seconds to wait.

    Raises
    ------
    RenderError
        If the spec cannot be rendered.
    CompileError
        If it does not compile, or takes too long.
    OSError
        If ``out_dir`` cannot be written.
    """
    with CompileWorker(spec.arch, timeout=timeout) as worker:
        return worker.compile(rendered or render(spec), out_dir)


def compile_many(
    specs: Iterable[KernelSpec],
    out_dir: Path,
    *,
    jobs: int | None = None,
    progress: Callable[[KernelSpec, Compiled | CompileError], None] = lambda spec, result: None,
) -> dict[KernelSpec, Compiled | CompileError]:
    """Compile kernels into ``out_dir/<name>``, ``jobs`` at a time; the workers are kept between kernels.

    Parameters
    ----------
    specs
        The kernels, of one architecture or of several.
    out_dir
        Parent of the kernels' folders.
    jobs
        Worker processes; all cores by default.  A worker takes up to a gigabyte.
    progress
        Called in this thread with each kernel as it is done.

    Returns
    -------
    dict
        For each spec what was compiled or why it could not be, in the order of ``specs``.
    """
    specs = list(dict.fromkeys(specs))
    todo: queue.SimpleQueue[KernelSpec] = queue.SimpleQueue()
    done: queue.SimpleQueue[tuple[KernelSpec, Compiled | CompileError | BaseException]] = queue.SimpleQueue()
    for spec in sorted(specs, key=lambda s: s.arch.value):
        todo.put(spec)

    workers: set[CompileWorker] = set()
    interrupted = threading.Event()

    def work() -> None:
        worker: CompileWorker | None = None
        try:
            while True:
                try:
                    spec = todo.get_nowait()
                except queue.Empty:
                    return
                try:
                    if worker is None or worker.arch is not spec.arch:
                        if worker is not None:
                            worker.close()
                        worker = CompileWorker(spec.arch)
                        workers.add(worker)
                        if interrupted.is_set():  # whoever interrupted may have looked before it was there
                            worker.kill()
                    done.put((spec, worker.compile(render(spec), out_dir / spec.name)))
                except BaseException as error:  # handed to the caller's thread, which raises or reports it
                    done.put((spec, error))
        finally:
            if worker is not None:
                worker.close()

    threads = [threading.Thread(target=work) for _ in range(min(jobs or os.cpu_count() or 1, len(specs)))]
    results: dict[KernelSpec, Compiled | CompileError] = {}
    try:
        for thread in threads:
            thread.start()
        for _ in specs:
            spec, result = done.get()
            if not isinstance(result, Compiled | CompileError):
                raise result
            results[spec] = result
            progress(spec, result)
    except KeyboardInterrupt:
        interrupted.set()
        _drain(todo)
        for started in tuple(workers):  # whoever interrupts does not wait for what they compile
            started.kill()
        raise
    finally:
        _drain(todo)  # after an error: let the threads finish what they have, and no more
        for thread in threads:
            if thread.is_alive():  # an interrupt may have come before it was started
                thread.join()
    return {spec: results[spec] for spec in specs}


def _drain(todo: queue.SimpleQueue[KernelSpec]) -> None:
    """Empty a queue."""
    while True:
        try:
            todo.get_nowait()
        except queue.Empty:
            return


class CompileWorker:
    """A worker process that compiles kernels for one architecture, one after another.  Not thread-safe."""

    def __init__(self, arch: Arch, *, timeout: int = TIMEOUT) -> None:
        self.arch = arch
        self._timeout = timeout
        self._process: subprocess.Popen[str] | None = None
        self._replies: IO[str] | None = None
        self._killed = False

    def __enter__(self) -> CompileWorker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the process; the next :meth:`compile` starts another."""
        if self._process is None:
            return
        self._process.kill()
        with self._process:  # closes the pipes and waits
            self._process = None
        if self._replies is not None:
            self._replies.close()
            self._replies = None

    def kill(self) -> None:
        """End the process from another thread, for good: what it compiles fails there, and so does what comes later."""
        self._killed = True  # first: a process that is being started is looked for in _ask
        process = self._process
        if process is not None:
            process.kill()

    def compile(self, rendered: Rendered, out_dir: Path) -> Compiled:
        """Compile a rendered kernel into a folder; as :func:`compile_kernel`."""
        spec = rendered.spec
        out_dir = out_dir.absolute()
        out_dir.mkdir(parents=True, exist_ok=True)
        source_path, object_path = out_dir / "kernel.py", out_dir / "kernel.o"
        source_path.write_text(rendered.source)
        request = {
            "source": str(source_path),
            "output": str(out_dir),
            "name": spec.name,
            "options": compile_options(spec.arch),
            "timeout": self._timeout,
        }
        reply = self._ask(request)
        log = (out_dir / "compile.log").read_text(errors="replace") if (out_dir / "compile.log").exists() else ""
        if "error" in reply:
            raise _compile_error(rendered, source_path, reply["error"], reply.get("line"), log)
        ir_path = out_dir / "kernel.mlir"
        try:
            report = read_report(
                log=log, ptx=(out_dir / "kernel.ptx").read_text(), ir=ir_path.read_text(), seconds=reply["seconds"]
            )
        except ValueError as error:
            raise _compile_error(rendered, source_path, str(error), None, log) from error
        ir_path.unlink()
        return Compiled(spec, source_path, object_path, link(object_path, out_dir / "kernel.so"), report)

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        if self._process is None and not self._killed:
            self._process, self._replies = _start(self.arch)
        if self._killed or self._process is None:  # before the process was there, or while it was being started
            self.close()
            return {"error": "compiling was interrupted"}
        assert self._process.stdin is not None
        assert self._replies is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            text = self._replies.readline()
        except BrokenPipeError:
            text = ""
        except BaseException:  # an interrupt: the reply that is still to come must not be read as the next one's
            self.close()
            raise
        if text:
            reply: dict[str, Any] = json.loads(text)
            return reply
        code = self._process.wait()
        self.close()
        if code == -signal.SIGALRM:
            return {"error": f"compiling took more than {self._timeout} s"}
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return {"error": f"the compiling process ended with {how}"}


def _start(arch: Arch) -> tuple[subprocess.Popen[str], IO[str]]:
    """Start a worker, and return it with the pipe of its replies: what else prints in it must not be taken for one.

    It inherits the environment less what would change the code that the DSL generates.
    """
    if not _WORKER.is_file():
        raise CompileError(
            f"cannot compile: {_WORKER} is no file, as the package was imported from an archive; install it unpacked"
        )
    variables = {k: v for k, v in environment().items() if not k.startswith("CUTE_DSL_") and k != "PYTHONWARNINGS"}
    variables["CUTE_DSL_ARCH"] = arch.value
    variables["CUDA_VISIBLE_DEVICES"] = ""
    try:
        command = script_command(_WORKER)
    except GroupedMLPError as error:
        raise CompileError(f"cannot compile: {error}") from None
    read, write = os.pipe()
    replies = os.fdopen(read)
    try:
        process = subprocess.Popen(
            [*command, str(write)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,  # each request has a log of its own
            env=variables,
            text=True,
            pass_fds=[write],
            cwd="/",  # ours may be gone; each request brings its own
            start_new_session=True,  # an interrupt from the terminal is for us alone
        )
    except BaseException:
        replies.close()
        raise
    finally:
        os.close(write)
    return process, replies


def _compile_error(rendered: Rendered, source_path: Path, message: str, line: int | None, log: str) -> CompileError:
    """Compose the error: what, where in the rendered file and in the template, and the end of the compiler's output."""
    template = None
    if line is not None:
        origin = rendered.line_map[line - 1] if line <= len(rendered.line_map) else None
        template = None if origin is None else f"{origin[0]}:{origin[1]}"
    where = f"{source_path}{'' if line is None else f':{line}'}"
    if template is not None:
        where += f" (template {template})"
    tail = "\n".join(re.sub(r"\x1b\[[0-9;]*m", "", log).strip().splitlines()[-8:])
    return CompileError(
        f"{rendered.spec.name} does not compile: {message}\n  in {where}" + (f"\n{tail}" if tail else ""),
        spec=rendered.spec,
        source_path=source_path,
        template=template,
    )
