"""The store of compiled kernels and AOT folders (cases J1, J2, J6), mostly with a compiler that only counts."""

import dataclasses
import errno
import json
import logging
import os
import shutil
import subprocess
import sys
import threading
import time

import pytest

from cute_grouped_mlp.codegen import aot, artifacts, compile, folders, toolchain
from cute_grouped_mlp.codegen.aot import AotFolder, build_folder
from cute_grouped_mlp.codegen.artifacts import META, ArtifactStore, artifact_key, default_root, read_artifact
from cute_grouped_mlp.codegen.compile import Compiled
from cute_grouped_mlp.codegen.errors import (
    ArtifactCorruptError,
    ArtifactUnreadableError,
    CompileError,
    GroupedMLPError,
)
from cute_grouped_mlp.codegen.resources import ResourceReport
from cute_grouped_mlp.codegen.spec import Arch
from cute_grouped_mlp.codegen.toolchain import Toolchain

REPORT = ResourceReport(32, 0, 0, 0, 512, 0, 0, ("wgmma",), 0, 0.5)
FILES = ("kernel.py", "kernel.o", "kernel.so", "meta.json")


class FakeCompiler:
    """Stands for compile_kernel."""

    def __init__(self):
        self.count = 0
        self.hook = lambda: None

    def __call__(self, spec, out_dir, *, rendered=None):
        self.count += 1
        self.hook()
        for name in ("kernel.py", "kernel.o", "kernel.so"):
            (out_dir / name).write_text(f"{name} of {rendered.source}")
        return Compiled(spec, out_dir / "kernel.py", out_dir / "kernel.o", out_dir / "kernel.so", REPORT)


@pytest.fixture
def compiler():
    return FakeCompiler()


@pytest.fixture
def make_store(tmp_path, small, compiler):
    """Make stores of one root, as several processes would."""
    return lambda root=tmp_path / "cache", render=small: ArtifactStore(root, render=render, compile=compiler)


@pytest.fixture
def warnings_of(caplog):
    caplog.set_level(logging.WARNING, "cute_grouped_mlp")
    return lambda: caplog.text


# ------------------------------------------------------------------------------------------------------------- entries


def test_miss_build_hit(make_store, compiler, specs):
    store = make_store()
    assert store.get(specs()) is None
    assert not store.root.exists()  # looking makes nothing
    built = store.get_or_build(specs())
    assert built.path.parent == store.root / "v1" / toolchain.toolchain().folder
    assert built.path.name == f"{specs().name}-{built.meta['key'][:12]}"
    assert sorted(os.listdir(built.path)) == sorted(FILES)
    for found in (store.get(specs()), make_store().get_or_build(specs())):
        assert (found.path, found.meta) == (built.path, built.meta)
    assert (found.spec, found.report, found.name) == (specs(), REPORT, specs().name)
    assert found.library_path.read_text().startswith("kernel.so of")
    assert compiler.count == 1


def test_metadata_is_written_last_and_appears_at_once(make_store, specs, monkeypatch):
    store = make_store()
    seen = []
    rename = os.rename
    monkeypatch.setattr(os, "rename", lambda a, b: (seen.append((sorted(os.listdir(a)), b.exists())), rename(a, b)))
    written = []
    copy = shutil.copyfile
    monkeypatch.setattr(shutil, "copyfile", lambda a, b: (written.append((b.parent / META).exists()), copy(a, b)))
    store.build(specs())
    assert seen == [(sorted(FILES), False)]
    assert written == [False, False, False]


def test_each_kernel_has_an_entry_of_its_own(make_store, compiler, specs):
    store = make_store()
    built = store.get_or_build_many([specs(n) for n in (0, 1, 2, 0)], jobs=3)
    assert compiler.count == 3
    assert {spec: artifact.spec for spec, artifact in built.items()} == {specs(n): specs(n) for n in range(3)}
    assert len(list(store.entries())) == 3
    assert set(store.verify().values()) == {None}
    assert store.clear() == (3, [])
    assert list(store.entries()) == []


def test_key_depends_on_everything_that_the_object_does(small, specs, monkeypatch):
    keys = {artifact_key(small())}

    def differs(rendered=None):
        keys.add(artifact_key(rendered or small()))
        return len(keys)

    assert differs() == 1
    assert differs(small(old="THREADS = 128", new="THREADS = 64")) == 2
    assert differs(small(specs(1))) == 3  # the exported name
    assert differs(small(dataclasses.replace(specs(), arch=Arch.SM100A))) == 4
    monkeypatch.setattr(artifacts, "compile_options", lambda arch: f"{compile.compile_options(arch)} --more")
    assert differs() == 5
    tools = toolchain.toolchain()
    for index, (name, version) in enumerate(tools.versions):
        changed = (*tools.versions[:index], (name, f"{version}.1"), *tools.versions[index + 1 :])
        monkeypatch.setattr(artifacts, "toolchain", lambda changed=changed: Toolchain(changed, tools.cuda))
        assert differs() == 6 + index
    monkeypatch.setattr(artifacts, "toolchain", lambda: Toolchain(tools.versions, 99))
    assert differs() == 6 + len(tools.versions)


def test_toolchain_names_every_distribution():
    names = [name for name, _ in toolchain.toolchain().versions]
    assert {"nvidia-cutlass-dsl", "nvidia-cutlass-dsl-libs-base", "apache-tvm-ffi"} <= set(names)
    assert "cutlass" not in sys.modules


# -------------------------------------------------------------------------------------- J2: what is a hit, what a miss


def test_j2_an_edited_template_is_a_miss(make_store, compiler, small, specs):
    make_store().get_or_build(specs())
    edited = make_store(render=lambda spec: small(spec, "THREADS = 128", "THREADS = 64"))
    assert edited.get(specs()) is None
    edited.get_or_build(specs())
    assert compiler.count == 2
    assert make_store().get(specs()) is not None  # and the old one is still there


def test_j2_times_place_and_links_do_not_matter(make_store, compiler, specs, tmp_path):
    path = make_store().get_or_build(specs()).path
    for name in FILES:
        os.utime(path / name, (0, 0))
    assert make_store().get(specs())
    os.rename(tmp_path / "cache", tmp_path / "moved")
    assert make_store(tmp_path / "moved").get(specs())
    (tmp_path / "link").symlink_to(tmp_path / "moved")
    assert make_store(tmp_path / "link").get_or_build(specs()).path.is_relative_to(tmp_path / "link")
    assert compiler.count == 1


def test_j2_two_toolchains_share_a_root(make_store, compiler, specs, monkeypatch):
    mine = toolchain.toolchain()
    other = Toolchain(tuple((name, "4.8.2") for name, _ in mine.versions), mine.cuda)
    for _ in range(3):
        for tools in (mine, other):
            monkeypatch.setattr(artifacts, "toolchain", lambda tools=tools: tools)
            assert make_store().get_or_build(specs()).meta["toolchain"] == dict(tools.versions)
    assert compiler.count == 2
    assert len(list(make_store().entries())) == 2


# ---------------------------------------------------------------------------------------------------------- J1: damage


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("damage", ["missing", "empty", "cut", "flipped", "folder"])
def test_j1_a_damaged_entry_is_moved_aside_and_rebuilt(make_store, compiler, specs, warnings_of, file, damage):
    path = make_store().get_or_build(specs()).path / file
    content = bytearray(path.read_bytes())
    path.unlink()
    if damage == "folder":
        path.mkdir()
    elif damage != "missing":
        content[len(content) // 2] ^= 1
        path.write_bytes({"empty": b"", "cut": content[: len(content) // 2], "flipped": content}[damage])
    with pytest.raises(ArtifactCorruptError):
        read_artifact(path.parent)
    assert list(make_store().verify().values()) != [None]
    rebuilt = make_store().get_or_build(specs())
    assert compiler.count == 2
    assert rebuilt.path == path.parent
    assert read_artifact(path.parent).meta == rebuilt.meta
    assert "built again" in warnings_of()
    assert len(list(path.parent.parent.glob(".bad-*"))) == 1


def test_an_entry_of_another_kernel_in_the_same_place_is_a_miss(make_store, compiler, specs):
    path = make_store().get_or_build(specs()).path
    meta = json.loads((path / "meta.json").read_text())
    (path / "meta.json").write_text(json.dumps({**meta, "key": meta["key"][:12] + "0" * 52}))
    assert make_store().get(specs()) is None


def test_an_entry_that_cannot_be_read_stays_and_is_said_once(make_store, compiler, specs, warnings_of, monkeypatch):
    """What fails to be read may be as it should: only a checksum says that an entry is damaged."""
    path = make_store().get_or_build(specs()).path
    real = artifacts._sha256

    def refuse(file):
        if file.parent == path:
            raise PermissionError(13, "Permission denied", str(file))
        return real(file)

    monkeypatch.setattr(artifacts, "_sha256", refuse)
    folders._warned.clear()
    with pytest.raises(ArtifactUnreadableError, match="Permission denied"):
        read_artifact(path)
    for _ in range(3):
        assert make_store().get(specs()) is None
    assert warnings_of().count("it stays as it is") == 1
    monkeypatch.undo()
    assert make_store().get(specs()).path == path


def test_damaged_entries_that_are_kept_are_few(make_store, compiler, specs):
    for _ in range(12):
        path = make_store().get_or_build(specs()).path
        (path / "kernel.o").write_bytes(b"")
    make_store().get_or_build(specs())
    assert len(list(path.parent.glob(".bad-*"))) == 8


# Enters codegen without the package's root, which would import torch: these processes are many.
SCRIPT = """
import importlib.util, os, pathlib, sys, time, types
root = types.ModuleType("cute_grouped_mlp")
root.__path__ = list(importlib.util.find_spec("cute_grouped_mlp").submodule_search_locations)
sys.modules["cute_grouped_mlp"] = root
from cute_grouped_mlp.codegen.artifacts import ArtifactStore
from cute_grouped_mlp.codegen.compile import Compiled
from cute_grouped_mlp.codegen.render import Rendered
from cute_grouped_mlp.codegen.resources import ResourceReport
from cute_grouped_mlp.codegen.spec import Arch, DType, KernelSpec, Pass
here, what = pathlib.Path(sys.argv[1]), sys.argv[2]

def compile(spec, out, *, rendered):
    with open(here / "compiled", "a") as file:
        file.write(f"{os.getpid()}\\n")
    time.sleep(0.5 if what == "race" else 0)
    if what == "die compiling":
        os.kill(os.getpid(), 9)
    for name in ("kernel.py", "kernel.o"):
        (out / name).write_text(name)
    return Compiled(spec, out / "kernel.py", out / "kernel.o", None, ResourceReport(1, 0, 0, 0, 0, 0, 0, (), 0, 0.1))

if what == "die publishing":
    import shutil
    shutil.copyfile = lambda a, b: (b.write_text("half"), os.kill(os.getpid(), 9))
spec = KernelSpec(Arch.SM90A, Pass.REDUCE, probs=DType.FP32)
store = ArtifactStore(here / "cache", render=lambda spec: Rendered(spec, "source", ""), compile=compile)
print("ready", flush=True)
sys.stdin.readline()
print(store.get_or_build(spec).path)
"""


def start(tmp_path, what):
    command = [sys.executable, "-c", SCRIPT, str(tmp_path), what]
    (tmp_path / "tmp").mkdir(exist_ok=True)
    # What a killed process leaves behind goes with the test.
    variables = {**os.environ, "TMPDIR": str(tmp_path / "tmp")}
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=variables)


def test_j1_six_processes_one_cold_key_one_compile(tmp_path):
    processes = [start(tmp_path, "race") for _ in range(6)]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    outputs = []
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in processes:
        outputs.append(process.communicate(timeout=60)[0])
        assert process.returncode == 0
    assert len((tmp_path / "compiled").read_text().splitlines()) == 1
    assert len(set(outputs)) == 1


@pytest.mark.parametrize("when", ["die compiling", "die publishing"])
def test_j1_the_next_run_recovers_from_a_killed_one(tmp_path, when):
    killed = start(tmp_path, when)
    killed.communicate("go\n", timeout=60)
    assert killed.returncode == -9
    recovered = start(tmp_path, "go on")
    path = recovered.communicate("go\n", timeout=60)[0].splitlines()[-1]
    assert recovered.returncode == 0
    assert read_artifact(tmp_path / path).name
    (toolchain_folder,) = (tmp_path / "cache" / "v1").iterdir()
    left = list(toolchain_folder.glob(".tmp-*"))
    assert bool(left) == (when == "die publishing")
    for folder in left:  # what is left is swept a day later
        os.utime(folder, (time.time() - 2 * 24 * 3600,) * 2)
    ArtifactStore(tmp_path / "cache")._sweep()
    assert not list(toolchain_folder.glob(".tmp-*"))


def test_threads_that_ask_for_one_kernel_share_one_compile(make_store, compiler, specs):
    compiler.hook = lambda: time.sleep(0.2)
    store, got = make_store(), []
    threads = [threading.Thread(target=lambda: got.append(store.get_or_build(specs()).path)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert compiler.count == 1
    assert len(got) == 8
    assert len(set(got)) == 1


# ------------------------------------------------------------------------ J1: a store that cannot be used fails no run


def use_own_build(store, compiler, specs, warnings_of, reason):
    """A store that cannot be written gives the process its own build, which it compiles once."""
    own = store.get_or_build(specs())
    assert not own.path.is_relative_to(store.root)
    assert read_artifact(own.path).meta == own.meta
    assert store.get_or_build(specs()).path == store.get(specs()).path == own.path
    assert compiler.count == 1
    assert reason in warnings_of()


def test_an_own_build_is_gone_when_the_process_ends(tmp_path):
    (tmp_path / "cache").write_text("")
    process = start(tmp_path, "go on")
    path = process.communicate("go\n", timeout=60)[0].splitlines()[-1]
    assert process.returncode == 0
    assert path.startswith(str(tmp_path / "tmp"))
    assert os.listdir(tmp_path / "tmp") == []


def test_a_root_that_is_a_file(make_store, compiler, specs, warnings_of, tmp_path):
    (tmp_path / "file").write_text("")
    use_own_build(make_store(tmp_path / "file" / "cache"), compiler, specs, warnings_of, "Not a directory")


def test_a_read_only_file_system(make_store, compiler, specs, warnings_of, monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError(errno.EROFS, "Read-only file system")

    store = make_store()
    monkeypatch.setattr(store, "_make_folder", refuse)
    use_own_build(store, compiler, specs, warnings_of, "Read-only file system")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_write_permission(make_store, compiler, specs, warnings_of, tmp_path):
    (tmp_path / "cache").mkdir(mode=0o500)
    use_own_build(make_store(), compiler, specs, warnings_of, "Permission denied")


def test_a_full_disk(make_store, compiler, specs, warnings_of, monkeypatch):
    def full(source, target):
        target.write_bytes(b"hal")
        raise OSError(errno.ENOSPC, "No space left on device")

    store = make_store()
    monkeypatch.setattr(shutil, "copyfile", full)
    use_own_build(store, compiler, specs, warnings_of, "No space left on device")
    assert not list(store.folder.glob(".tmp-*"))


def test_a_rename_that_fails_while_the_winner_is_invisible(make_store, compiler, specs, warnings_of, monkeypatch):
    def refuse(source, target):
        raise OSError(errno.ENOTEMPTY, "Directory not empty")

    monkeypatch.setattr(os, "rename", refuse)
    use_own_build(make_store(), compiler, specs, warnings_of, "Directory not empty")


def test_a_store_that_vanishes_while_compiling(make_store, compiler, specs):
    store = make_store()
    compiler.hook = lambda: shutil.rmtree(store.root)
    assert read_artifact(store.get_or_build(specs()).path).spec == specs()


def test_no_locks(make_store, compiler, specs, monkeypatch):
    def refuse(self, *args, **kwargs):
        raise NotImplementedError("no flock here")

    monkeypatch.setattr(artifacts.filelock.FileLock, "acquire", refuse)
    assert make_store().get_or_build(specs()).path.is_relative_to(make_store().root)


def test_no_room_for_compiling_is_one_clean_error(make_store, compiler, specs):
    def full():
        raise OSError(errno.ENOSPC, "No space left on device")

    compiler.hook = full
    with pytest.raises(CompileError, match=f"{specs().name} cannot be compiled in .*No space left"):
        make_store().get_or_build(specs())


# ------------------------------------------------------------------------------------------ artifacts are code: whose?


@pytest.mark.parametrize("place", ["", "v1", "v1/*"])
@pytest.mark.parametrize("mode", [0o777, 0o770, 0o722])
def test_a_folder_that_others_can_write_is_refused(make_store, compiler, specs, warnings_of, place, mode):
    make_store().get_or_build(specs())
    (folder,) = make_store().root.glob(place) if place else (make_store().root,)
    folder.chmod(mode)
    store = make_store()
    assert store.get(specs()) is None
    assert f"chmod go-w {folder}" in warnings_of()
    assert not store.get_or_build(specs()).path.is_relative_to(store.root)
    folder.chmod(0o755)
    assert make_store().get(specs()) is not None


def test_a_folder_of_another_user_is_refused(make_store, compiler, specs, monkeypatch):
    make_store().get_or_build(specs())
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    store = make_store()
    assert "not to this process's user 12345" in store.refusal()
    assert store.get(specs()) is None


def test_folders_are_made_private_whatever_the_umask(make_store, specs):
    before = os.umask(0)
    try:
        store = make_store()
        path = store.get_or_build(specs()).path
    finally:
        os.umask(before)
    assert store.refusal() is None
    assert not path.stat().st_mode & 0o077


def test_default_root(monkeypatch, tmp_path):
    monkeypatch.setenv("CUTE_GROUPED_MLP_CACHE_DIR", str(tmp_path / "x"))
    assert ArtifactStore().root == tmp_path / "x"
    monkeypatch.delenv("CUTE_GROUPED_MLP_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert default_root() == tmp_path / "xdg" / "cute-grouped-mlp"


# ----------------------------------------------------------------------------------------------------------------- AOT


@pytest.fixture
def fake_aot(monkeypatch, small, compiler):
    """Make build_folder use the small kernel and the compiler that counts."""

    def compile_many(specs, out_dir, *, jobs, progress):
        for spec in specs:
            (out_dir / spec.name).mkdir()
            progress(spec, compiler(spec, out_dir / spec.name, rendered=small(spec)))

    monkeypatch.setattr(aot, "render", small)
    monkeypatch.setattr(aot, "compile_many", compile_many)


def test_l2_a_built_folder_can_be_read_by_others_as_the_umask_says(fake_aot, specs, tmp_path, monkeypatch):
    """A container's image is built by root and run by another user."""
    before = os.umask(0o022)
    try:
        build_folder([specs()], tmp_path / "out")
    finally:
        os.umask(before)
    for path in (tmp_path / "out", *(tmp_path / "out").rglob("*")):
        assert path.stat().st_mode & 0o777 == (0o755 if path.is_dir() else 0o644), path
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1000)
    assert (AotFolder(tmp_path / "out").mismatch() is None) == (owner == 0)  # root's are trusted, another user's not
    monkeypatch.undo()
    assert AotFolder(tmp_path / "out").mismatch() is None
    (tmp_path / "out").chmod(0o757)
    assert "can be written by others" in AotFolder(tmp_path / "out").mismatch()
    assert AotFolder(tmp_path / "out").get(specs()) is None


@pytest.mark.parametrize("there", ["notes.txt", "sub/notes.txt"])
def test_l1_build_keeps_files_that_no_build_wrote(fake_aot, specs, tmp_path, there):
    """Under a kernel's name, and beside kernels."""
    mine = tmp_path / "out" / specs(0).name / there
    build_folder([specs(1)], tmp_path / "out")
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    beside = tmp_path / "out" / "README"
    beside.write_text("mine")
    manifest = (tmp_path / "out" / "manifest.json").read_bytes()
    with pytest.raises(GroupedMLPError, match=f"holds {specs(0).name}, which no build wrote"):
        build_folder([specs(0)], tmp_path / "out")
    assert (tmp_path / "out" / "manifest.json").read_bytes() == manifest
    build_folder([specs(2)], tmp_path / "out")
    assert mine.read_text() == beside.read_text() == "mine"


def test_l1_build_follows_no_link(fake_aot, specs, tmp_path):
    build_folder([specs(1)], tmp_path / "out")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kernel.py").write_text("mine")
    (tmp_path / "out" / specs(0).name).symlink_to(outside)
    with pytest.raises(GroupedMLPError, match="which no build wrote"):
        build_folder([specs(0)], tmp_path / "out")
    assert (outside / "kernel.py").read_text() == "mine"


def test_l1_clear_deletes_what_the_store_wrote_and_nothing_else(make_store, specs):
    store = make_store()
    path = store.get_or_build(specs()).path
    mine = [store.root / "v1" / "a.txt", store.folder / "notes.txt", store.folder / "project" / "kernel.cu",
            path.parent / "other" / "sub" / "kernel.py", store.root / "README"]  # fmt: skip
    for file in mine:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("mine")
    count, others = store.clear()
    assert count == 1
    assert {str(p.relative_to(store.root / "v1")).split("/")[-1] for p in others} == {
        "a.txt",
        "notes.txt",
        "project",
        "other",
    }
    assert [file.read_text() for file in mine] == ["mine"] * len(mine)
    assert not path.exists()


def test_manifest(fake_aot, specs, tmp_path):
    wanted = [specs(1), specs(0)]
    results = build_folder(wanted, tmp_path / "out")
    assert list(results) == wanted
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest.keys() == {"arch", "dsl", "abi", "variants"}
    assert manifest["arch"] == "sm_90a"
    assert manifest["dsl"] == toolchain.toolchain().version("nvidia-cutlass-dsl")
    by_name = {variant["name"]: variant for variant in manifest["variants"]}
    for spec in wanted:
        assert by_name[spec.name] == {
            "name": spec.name,
            "spec": spec.to_dict(),
            "sha256": results[spec].meta["sha256"],
            "registers": 32,
            "spills": 0,
            "c7512": 0,
            "smem": 512,
            "mma": ["wgmma"],
        }
    assert sorted(os.listdir(tmp_path / "out")) == sorted([specs(0).name, specs(1).name, "manifest.json"])


def test_a_second_build_adds_to_a_folder_and_compiles_what_changed(
    fake_aot, compiler, small, specs, tmp_path, monkeypatch
):
    build_folder([specs(0), specs(1)], tmp_path)
    build_folder([specs(1), specs(2)], tmp_path)
    assert compiler.count == 3
    assert set(AotFolder(tmp_path).names) == {specs(n).name for n in range(3)}
    monkeypatch.setattr(aot, "render", lambda spec: small(spec, "THREADS = 128", "THREADS = 64"))
    build_folder([specs(1)], tmp_path)
    assert compiler.count == 4
    (tmp_path / specs(1).name / "kernel.so").write_text("damaged")
    build_folder([specs(1)], tmp_path)
    assert compiler.count == 5
    assert AotFolder(tmp_path).get(specs(1)) is not None


def test_a_build_that_is_interrupted_goes_on_where_it_was(fake_aot, compiler, specs, tmp_path):
    def interrupt(spec, result, compiled):
        if spec == specs(1):
            raise KeyboardInterrupt

    wanted = [specs(0), specs(1), specs(2)]
    with pytest.raises(KeyboardInterrupt):
        build_folder(wanted, tmp_path, progress=interrupt)
    assert set(AotFolder(tmp_path).names) == {specs(0).name, specs(1).name}
    build_folder(wanted, tmp_path)
    assert compiler.count == 3
    assert set(AotFolder(tmp_path).names) == {spec.name for spec in wanted}


def test_a_folder_of_something_else_is_left_alone(fake_aot, specs, tmp_path):
    (tmp_path / "precious").write_text("")
    with pytest.raises(GroupedMLPError, match="not a folder of compiled kernels"):
        build_folder([specs()], tmp_path)
    assert os.listdir(tmp_path) == ["precious"]
    other = tmp_path.parent / "other"
    build_folder([specs()], other)
    with pytest.raises(GroupedMLPError, match="choose another folder"):
        build_folder([dataclasses.replace(specs(), arch=Arch.SM100A)], other)
    with pytest.raises(GroupedMLPError, match="one architecture"):
        build_folder([specs(), dataclasses.replace(specs(), arch=Arch.SM100A)], other)


def test_a_folder_is_matched_by_spec_arch_and_abi(fake_aot, specs, tmp_path, monkeypatch, warnings_of):
    build_folder([specs()], tmp_path)
    folder = AotFolder(tmp_path)
    assert folder.get(specs()).spec == specs()
    assert folder.get(specs(1)) is None
    assert folder.get(dataclasses.replace(specs(), arch=Arch.SM100A)) is None
    mine = toolchain.toolchain()

    def with_dsl(version):
        versions = tuple((n, version if n.startswith("nvidia") else v) for n, v in mine.versions)
        monkeypatch.setattr(aot, "toolchain", lambda: Toolchain(versions, mine.cuda))

    with_dsl("4.8.9")  # a patch release does not discard a folder
    assert folder.get(specs()) is not None
    with_dsl("4.9.0")
    assert folder.get(specs()) is None
    assert "runtime ABI" in folder.mismatch()
    assert "runtime ABI" in warnings_of()


def test_a_kernel_of_a_newer_cuda_than_the_drivers_is_not_used(fake_aot, specs, tmp_path, monkeypatch):
    build_folder([specs()], tmp_path)
    monkeypatch.setattr(aot, "driver_cuda", lambda: 11)
    with pytest.raises(ArtifactCorruptError, match="driver supports CUDA 11"):
        AotFolder(tmp_path).read(specs().name)
    monkeypatch.setattr(aot, "driver_cuda", lambda: 99)
    assert AotFolder(tmp_path).read(specs().name)


def test_j6_a_fresh_process_loads_a_built_folder_without_compiler_or_dsl(small, specs, tmp_path, monkeypatch):
    monkeypatch.setattr(aot, "render", small)
    monkeypatch.setattr(compile, "render", small)
    wanted = [specs(0), specs(1)]
    build_folder(wanted, tmp_path / "out", jobs=2)
    os.rename(tmp_path / "out", tmp_path / "shipped")
    script = f"""
import pathlib, subprocess, sys
from cute_grouped_mlp.codegen.aot import open_folder
from cute_grouped_mlp.codegen.loading import load_callable
from cute_grouped_mlp.codegen.spec import KernelSpec
def refuse(*args, **kwargs):
    raise AssertionError("started a process")
subprocess.Popen = refuse
folder = open_folder(pathlib.Path({str(tmp_path / "shipped")!r}))
for data in {[spec.to_dict() for spec in wanted]!r}:
    assert callable(load_callable(folder.get(KernelSpec.from_dict(data))))
assert "cutlass" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60, env={**os.environ, "PATH": ""})
