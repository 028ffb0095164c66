"""Compiling in worker processes (cases J3, J4, J5, J7), with a small kernel."""

import hashlib
import os
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from cute_grouped_mlp.codegen import compile
from cute_grouped_mlp.codegen.compile import CompileWorker, compile_kernel, compile_many
from cute_grouped_mlp.codegen.errors import ArtifactUnreadableError, CompileError
from cute_grouped_mlp.codegen.link import find_linker
from cute_grouped_mlp.codegen.loading import load_callable
from cute_grouped_mlp.codegen.resources import ResourceReport, read_report
from cute_grouped_mlp.codegen.spec import Arch
from cute_grouped_mlp.codegen.toolchain import RUNTIME_LIBRARY, runtime_library

SLEEPY = "THREADS = 128\nimport time\ntime.sleep(5)"
needs_linker = pytest.mark.skipif(find_linker() is None, reason="needs a C compiler")


def loadable(compiled, *, library=True):
    path = compiled.library_path if library else None
    return SimpleNamespace(name=compiled.spec.name, object_path=compiled.object_path, library_path=path)


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def worker():
    with CompileWorker(Arch.SM90A, timeout=60) as worker:
        yield worker


def test_compiles_reports_and_loads_without_the_dsl(small, worker, tmp_path):
    compiled = worker.compile(small(), tmp_path / "out")
    assert compiled.object_path.stat().st_size > 1000
    assert compiled.source_path.read_text() == small().source
    report = compiled.report
    assert 1 <= report.registers <= 255
    assert report.smem == 128 * 4
    assert (report.spill_stores, report.c7512, report.tensormap_replaces, report.mma) == (0, 0, 0, ())
    assert 0 < report.seconds < 60
    assert callable(load_callable(loadable(compiled)))
    assert "cutlass" not in sys.modules


def test_j3_the_target_is_the_specs_whatever_the_environment_says(small, worker, tmp_path, monkeypatch):
    clean = worker.compile(small(), tmp_path / "clean")
    for name, value in (("ARCH", "sm_100a"), ("LINEINFO", "1"), ("DRYRUN", "1"), ("KEEP_IR", "1")):
        monkeypatch.setenv(f"CUTE_DSL_{name}", value)
    monkeypatch.setenv("PYTHONWARNINGS", "error")
    seen = """THREADS = 128
import os
assert {k: v for k, v in os.environ.items() if k.startswith("CUTE_DSL_")} == {"CUTE_DSL_ARCH": "sm_90a"}
assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
"""
    with CompileWorker(Arch.SM90A) as other:
        other.compile(small(old="THREADS = 128", new=seen), tmp_path / "seen")
        dirty = other.compile(small(), tmp_path / "dirty")
    assert ".target sm_90a" in (tmp_path / "dirty" / "kernel.ptx").read_text()
    assert sha256(clean.object_path) == sha256(dirty.object_path)  # nor does the folder matter
    assert sha256(clean.library_path) == sha256(dirty.library_path)


def test_imports_nothing_from_the_working_directory(small, worker, tmp_path, monkeypatch):
    for name in ("json", "signal", "cutlass", "re"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('imported from the working directory')\n")
    monkeypatch.chdir(tmp_path)
    assert worker.compile(small(), tmp_path / "out").report.registers


def test_without_an_interpreter_nothing_is_compiled(small, worker, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", "")
    with pytest.raises(CompileError, match=r"cannot compile: sys\.executable is not set"):
        worker.compile(small(), tmp_path)


@pytest.mark.parametrize(
    ("old", "new", "line_of", "message"),
    [
        ("dst[index] = staged", "dst[index] = nothing", "dst[index] = nothing", "'nothing' is not defined"),
        ("grid=(num_ctas, 1, 1)", "grid=(num_ctas, 1, 'a')", "grid=(num_ctas", "must be an integer"),
        ("THREADS = 128", "THREADS = = 128", "THREADS = =", "invalid syntax"),
    ],
)
def test_an_error_names_the_line_of_the_template(small, worker, tmp_path, old, new, line_of, message):
    rendered = small(old=old, new=new)
    line = next(n for n, text in enumerate(rendered.source.splitlines(), 1) if line_of in text)
    with pytest.raises(CompileError) as caught:
        worker.compile(rendered, tmp_path)
    error = caught.value
    assert error.template == f"sm90/small.py.jinja:{100 + line}"
    assert error.spec == rendered.spec
    assert error.source_path.read_text() == rendered.source
    for part in (rendered.spec.name, message, f"{error.source_path}:{line}", error.template):
        assert part in str(error)
    assert "\x1b" not in str(error)


def test_a_worker_that_dies_or_hangs_is_an_error_and_is_replaced(small, worker, tmp_path):
    died = "THREADS = 128\nimport os, signal\nos.kill(os.getpid(), signal.SIGSEGV)"
    with pytest.raises(CompileError, match="ended with SIGSEGV"):
        worker.compile(small(old="THREADS = 128", new=died), tmp_path)
    with pytest.raises(CompileError, match="ended with exit code 3"):
        worker.compile(small(old="THREADS = 128", new="THREADS = 128\nimport os\nos._exit(3)"), tmp_path)
    assert worker.compile(small(), tmp_path).report.registers
    with CompileWorker(Arch.SM90A, timeout=1) as hasty, pytest.raises(CompileError, match="more than 1 s"):
        hasty.compile(small(old="THREADS = 128", new="THREADS = 128\nimport time\ntime.sleep(60)"), tmp_path)


@needs_linker
def test_j7_two_kernels_in_one_library(small, specs, worker, tmp_path):
    one, two = (worker.compile(small(specs(n)), tmp_path / str(n)) for n in (0, 1))
    library = tmp_path / "both.so"
    flags = [f"-L{runtime_library().parent}", f"-l:{RUNTIME_LIBRARY}", "-Wl,--allow-shlib-undefined"]
    subprocess.run(
        [find_linker(), "-shared", "-o", library, one.object_path, two.object_path, *flags], check=True, timeout=60
    )
    for compiled in (one, two):
        assert callable(load_callable(SimpleNamespace(name=compiled.spec.name, object_path=None, library_path=library)))


def test_j5_threads_and_processes_do_not_pile_up(small, specs, tmp_path, monkeypatch):
    monkeypatch.setattr("cute_grouped_mlp.codegen.compile.render", small)
    wanted = [specs(n) for n in range(6)]
    before = threading.active_count(), len(os.listdir("/proc/self/fd"))
    done = []
    results = compile_many(wanted, tmp_path, jobs=2, progress=lambda spec, result: done.append(spec))
    assert list(results) == wanted
    assert set(done) == set(wanted)
    assert all((tmp_path / spec.name / "kernel.o").exists() for spec in wanted)
    assert (threading.active_count(), len(os.listdir("/proc/self/fd"))) == before


def test_an_interrupt_does_not_wait_for_what_is_being_compiled(small, specs, tmp_path, monkeypatch):
    slow = "THREADS = 128\nimport time\ntime.sleep(300)"
    renders = {specs(0): small(specs(0)), specs(1): small(specs(1), "THREADS = 128", slow)}
    monkeypatch.setattr("cute_grouped_mlp.codegen.compile.render", renders.get)
    before = threading.active_count()

    def interrupt(spec, result):
        raise KeyboardInterrupt

    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        compile_many(renders, tmp_path, jobs=2, progress=interrupt)
    assert time.monotonic() - started < 100
    assert threading.active_count() == before


def test_a_worker_that_was_killed_compiles_nothing_more(small, tmp_path, monkeypatch):
    started = []

    def start(arch):
        started.append(real(arch))
        worker.kill()  # what another thread may do before it sees the process
        return started[0]

    real = compile._start
    monkeypatch.setattr(compile, "_start", start)
    with CompileWorker(Arch.SM90A, timeout=60) as worker:
        with pytest.raises(CompileError, match="compiling was interrupted"):
            worker.compile(small(), tmp_path)
        assert started[0][0].poll() is not None
        with pytest.raises(CompileError, match="compiling was interrupted"):
            worker.compile(small(), tmp_path)
    assert len(started) == 1
    with CompileWorker(Arch.SM90A, timeout=60) as worker:
        worker.kill()
        with pytest.raises(CompileError, match="compiling was interrupted"):
            worker.compile(small(), tmp_path)
    assert len(started) == 1


def test_an_interrupt_reaches_a_worker_that_is_made_after_it(small, specs, tmp_path, monkeypatch):
    """A thread has taken a kernel and has no worker yet when the interrupt comes."""
    slow, first, killed = specs(1), threading.Event(), threading.Event()

    class Late(CompileWorker):
        def __init__(self, arch):
            if first.is_set():
                killed.wait(60)
            first.set()
            super().__init__(arch, timeout=20)

    def drain(todo):
        real(todo)
        if drained:  # the second time, in `finally`: workers have been looked for
            killed.set()
        drained.append(todo)

    def interrupt(spec, result):
        raise KeyboardInterrupt

    real, drained, started = compile._drain, [], []
    monkeypatch.setattr(compile, "CompileWorker", Late)
    monkeypatch.setattr(compile, "_drain", drain)
    monkeypatch.setattr(compile, "render", small)
    monkeypatch.setattr(compile, "_start", lambda arch, start=compile._start: started.append(arch) or start(arch))
    with pytest.raises(KeyboardInterrupt):
        compile_many([specs(0), slow], tmp_path, jobs=2, progress=interrupt)
    assert killed.is_set()
    assert len(started) == 1


def test_an_interrupt_while_threads_are_started_leaves_none(small, specs, tmp_path, monkeypatch):
    def start(thread):
        if begun:
            raise KeyboardInterrupt
        begun.append(thread)
        real(thread)

    real, begun = threading.Thread.start, []
    monkeypatch.setattr(threading.Thread, "start", start)
    monkeypatch.setattr(compile, "render", lambda spec: small(spec, "THREADS = 128", SLEEPY))
    with pytest.raises(KeyboardInterrupt):
        compile_many([specs(n) for n in range(4)], tmp_path, jobs=2)
    assert not begun[0].is_alive()


def test_compile_many_goes_on_after_a_failure(small, specs, tmp_path, monkeypatch):
    bad = specs(1)

    def render(spec):
        return small(spec, "THREADS = 128", "THREADS = nothing") if spec == bad else small(spec)

    monkeypatch.setattr("cute_grouped_mlp.codegen.compile.render", render)
    results = compile_many([specs(0), bad, specs(2)], tmp_path, jobs=1)
    assert [isinstance(result, CompileError) for result in results.values()] == [False, True, False]


def test_j4_fork_after_a_compile_and_no_need_for_a_main_guard(small, tmp_path):
    (tmp_path / "kernel.py.txt").write_text(small().source)
    script = tmp_path / "script.py"
    script.write_text(
        """
import os, pathlib, sys
from cute_grouped_mlp.codegen.compile import compile_kernel
from cute_grouped_mlp.codegen.render import Rendered
from cute_grouped_mlp.codegen.spec import Arch, DType, KernelSpec, Pass
here = pathlib.Path(__file__).parent
print("started", flush=True)
spec = KernelSpec(Arch.SM90A, Pass.REDUCE, probs=DType.FP32)
rendered = Rendered(spec, (here / "kernel.py.txt").read_text(), "")
compile_kernel(spec, here / "parent", rendered=rendered)
child = os.fork()
compile_kernel(spec, here / f"after-fork-{child == 0}", rendered=rendered)
if child:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    )
    result = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "started\n"  # a worker does not run the caller's script again
    assert len(list(tmp_path.glob("*/kernel.o"))) == 3


def test_an_object_without_a_library_loads_through_the_dsl(small, tmp_path, monkeypatch):
    monkeypatch.setattr("cute_grouped_mlp.codegen.link.find_linker", lambda: None)
    compiled = compile_kernel(small().spec, tmp_path, rendered=small())
    assert compiled.library_path is None
    script = f"""
import pathlib, sys, types
from cute_grouped_mlp.codegen.loading import load_callable
function = load_callable(types.SimpleNamespace(
    name={compiled.spec.name!r}, object_path=pathlib.Path({str(compiled.object_path)!r}), library_path=None))
assert callable(function) and "cutlass" in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_what_cannot_be_loaded_says_so(small, worker, tmp_path):
    compiled = worker.compile(small(), tmp_path)
    other = SimpleNamespace(name="another_name", object_path=None, library_path=compiled.library_path)
    with pytest.raises(ArtifactUnreadableError, match="another_name"):
        load_callable(other)
    text = tmp_path / "text.so"
    text.write_text("not a library")
    with pytest.raises(ArtifactUnreadableError, match=r"text\.so.*noexec"):
        load_callable(SimpleNamespace(name=compiled.spec.name, object_path=None, library_path=text))


LOG = """
\x1b[96mremark[ptxas info]:\x1b[0m ptxas output: ptxas info    : 0 bytes gmem
ptxas info    : (C7512) Potential Performance Loss: wgmma.mma_async instructions are serialized due to ...
ptxas info    : Compiling entry function 'kernel' for 'sm_90a'
ptxas         .     8 bytes stack frame, 12 bytes spill stores, 16 bytes spill loads
ptxas info    : Used 168 registers, used 2 barriers, 8 bytes stack, 64 bytes smem
"""
PTX = """
.visible .entry kernel(
wgmma.mma_async.sync.aligned.m64n192k16.f32.bf16.bf16 {%f1}, %rd1, %rd2, p, 1, 1, 0, 0;
@%p1 wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%f1}, %rd1, %rd2, p, 1, 1, 0, 0;
wgmma.mma_async.sync.aligned.m64n192k16.f32.bf16.bf16 {%f1}, %rd1, %rd2, p, 1, 1, 0, 0;
tensormap.replace.tile.global_address.global.b1024.b64 [%rd1], %rd2;
"""
IR = """
    %1 = llvm.mlir.constant(7 : i64) : i64
  }
    %1 = llvm.mlir.constant(1000 : i64) : i64
    %2 = llvm.getelementptr %0[0, 2] : (!llvm.ptr) -> !llvm.ptr, !llvm.struct<(array<3 x i32>, array<3 x i32>, i64, ptr, ptr, i32)>
    llvm.store %1, %2 : i64, !llvm.ptr
  }
    %1 = llvm.mlir.constant(9 : i64) : i64
"""  # noqa: E501


def test_report():
    report = read_report(log=LOG, ptx=PTX, ir=IR, seconds=1.23456)
    assert report == ResourceReport(
        registers=168,
        spill_stores=12,
        spill_loads=16,
        stack=8,
        smem=1064,
        c7512=1,
        c7519=0,
        mma=(
            "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16",
            "wgmma.mma_async.sync.aligned.m64n192k16.f32.bf16.bf16",
        ),
        tensormap_replaces=1,
        seconds=1.235,
    )
    assert ResourceReport.from_dict(report.to_dict()) == report


def test_no_report_is_not_a_report_of_zeros():
    with pytest.raises(ValueError, match="no ptxas remarks"):
        read_report(log="nothing", ptx=PTX, ir=IR, seconds=1.0)
    unknown = read_report(log=LOG, ptx=PTX, ir=IR.replace("constant(1000", "call @f("), seconds=1.0)
    assert unknown.smem != 1064
