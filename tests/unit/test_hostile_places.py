"""Compiling and keeping kernels in places that are not as usual: each works, or gives one clear error."""

import json
import logging
import os
import stat
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import cute_grouped_mlp as cgm
from cute_grouped_mlp.codegen import folders, interpreter
from cute_grouped_mlp.codegen.artifacts import ArtifactStore
from cute_grouped_mlp.codegen.errors import ArtifactUnreadableError, GroupedMLPError
from cute_grouped_mlp.codegen.loading import load_callable

NOT_UTF8 = os.fsdecode(b"caf\xe9")


@pytest.fixture
def place(monkeypatch):
    """Have temporary files in a folder; as tempfile remembers its choice."""

    def at(path):
        monkeypatch.setenv("TMPDIR", str(path))
        monkeypatch.setattr("tempfile.tempdir", None)

    return at


@pytest.mark.parametrize("name", ["with space", NOT_UTF8, 'quote\'s "and" $x;&'], ids=["space", "not UTF-8", "shell"])
@pytest.mark.parametrize("what", ["TMPDIR", "store"])
def test_p1_paths_with_special_characters(small, tmp_path, place, name, what, caplog):
    folder = tmp_path / name
    folder.mkdir()
    if what == "TMPDIR":
        place(folder)
    store = ArtifactStore(folder if what == "store" else tmp_path / "store", render=small)
    artifact = store.get_or_build(small().spec)
    assert load_callable(artifact)
    if what == "store" and name == NOT_UTF8:
        assert "no UTF-8" in caplog.text
        assert not artifact.path.is_relative_to(folder)
    else:
        assert artifact.path.is_relative_to(store.root)


def test_p1_a_built_folder_whose_path_is_no_utf8_is_refused(small, tmp_path):
    from cute_grouped_mlp.codegen.aot import build_folder

    with pytest.raises(GroupedMLPError, match="no UTF-8"):
        build_folder([small().spec], tmp_path / NOT_UTF8)
    assert not (tmp_path / NOT_UTF8).exists()


def test_p1_the_working_directory_was_deleted(small, tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    monkeypatch.syspath_prepend("relative")
    try:
        assert load_callable(ArtifactStore(tmp_path / "store", render=small).get_or_build(small().spec))
    finally:
        os.chdir(tmp_path)


def test_p1_no_usable_temporary_folder(small, tmp_path, place, monkeypatch):
    place(tmp_path / "missing")
    monkeypatch.setattr(folders, "_SCRATCH", (str(tmp_path / "missing too"),))
    monkeypatch.setattr("tempfile._candidate_tempdir_list", lambda: [str(tmp_path / "missing")])
    with pytest.raises(cgm.CompileError, match=r"no usable temporary folder.*set TMPDIR"):
        ArtifactStore(tmp_path / "store", render=small).get_or_build(small().spec)
    assert not list((tmp_path / "store").glob("v1/*/sm*"))


def test_p1_what_is_printed_at_start_is_not_taken_for_an_answer(small, tmp_path, monkeypatch):
    """A sitecustomize that greets: in workers, and in processes that are asked something."""
    (tmp_path / "sitecustomize.py").write_text("print('hello'); print('{}')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    said = subprocess.run([sys.executable, "-c", "pass"], capture_output=True, text=True).stdout
    assert "hello" in said
    assert load_callable(ArtifactStore(tmp_path / "store", render=small).get_or_build(small().spec))
    found = json.loads(interpreter.answer_of(interpreter.module_command("cute_grouped_mlp.doctor")))
    assert found["recipes"]


def test_p1_a_package_in_an_archive_says_what_to_do(tmp_path):
    root = Path(cgm.__file__).parent
    with zipfile.ZipFile(tmp_path / "p.zip", "w") as archive:
        for name, folder in (
            ("", root),
            ("codegen/", root.parent / "codegen"),
            ("templates/", root.parent / "templates"),
        ):
            for file in folder.rglob("*"):
                if file.suffix in (".py", ".jinja") and "__pycache__" not in file.parts:
                    archive.write(file, f"cute_grouped_mlp/{name}{file.relative_to(folder)}")
    code = f"""
import pathlib, sys
sys.meta_path[:] = [f for f in sys.meta_path if "editable" not in type(f).__module__ + repr(f)]
sys.path.insert(0, {str(tmp_path / "p.zip")!r})
import cute_grouped_mlp as cgm
from cute_grouped_mlp.codegen.artifacts import ArtifactStore
from cute_grouped_mlp.codegen.catalog import default_catalog
from cute_grouped_mlp.codegen.spec import Arch
assert "p.zip" in cgm.__file__
try:
    ArtifactStore(pathlib.Path({str(tmp_path)!r}) / "s").get_or_build(default_catalog(Arch.SM90A)[0])
except cgm.GroupedMLPError as error:
    print("said", error)
"""
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert "said" in shown.stdout
    assert "install it unpacked" in shown.stdout


def test_p2_a_library_that_its_folder_does_not_let_be_mapped_is_loaded_from_a_copy(small, tmp_path, monkeypatch):
    from cute_grouped_mlp.codegen import loading

    artifact = ArtifactStore(tmp_path / "store", render=small).get_or_build(small().spec)
    real, tried = loading._load_library, []

    def noexec(path):
        tried.append(path)
        if path.is_relative_to(tmp_path):
            raise RuntimeError(f"{path}: failed to map segment from shared object: Operation not permitted")
        return real(path)

    monkeypatch.setattr(loading, "_load_library", noexec)
    assert load_callable(artifact)
    assert len(tried) == 2
    assert not tried[1].exists()
    monkeypatch.setattr(loading, "scratch_folder", lambda: Path(os.makedirs(tmp_path / "t") or tmp_path / "t"))
    with pytest.raises(ArtifactUnreadableError, match=r"Operation not permitted.*noexec"):
        load_callable(artifact)
    assert artifact.library_path.exists()


def test_p3_no_home_and_no_such_user(monkeypatch, tmp_path, place, caplog):
    """Ordinary in containers: `docker run --user 12345`, without HOME."""
    import pwd

    def unknown(uid):
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    for name in ("HOME", "XDG_CACHE_HOME", "CUTE_GROUPED_MLP_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    place(tmp_path)
    folders._warned.clear()
    with caplog.at_level(logging.WARNING, "cute_grouped_mlp"):
        for _ in range(2):
            assert ArtifactStore().root == tmp_path / f"cute-grouped-mlp-{os.geteuid()}"
    assert len(caplog.records) == 1
    with pytest.raises(cgm.ConfigError, match="CUTE_GROUPED_MLP_CACHE_DIR is '~/x'"):
        cgm.config.Settings({"CUTE_GROUPED_MLP_CACHE_DIR": "~/x"}).values()


def test_p3_commands_work_without_a_home(tmp_path):
    environ = {k: v for k, v in os.environ.items() if k not in ("HOME", "XDG_CACHE_HOME", "CUTE_GROUPED_MLP_CACHE_DIR")}
    for command in (["list", "--pass", "reduce"], ["cache", "info"]):
        code = (
            "import pwd, sys; pwd.getpwuid = lambda uid: {}[uid]; from cute_grouped_mlp.codegen import cli; "
            f"sys.argv = ['cute-grouped-mlp', *{command}]; cli.main()"
        )
        shown = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env={**environ, "TMPDIR": str(tmp_path)},
        )
        assert shown.returncode == 0, shown.stderr
    assert not (tmp_path / "~").exists()


def test_new_folders_have_the_mode_that_was_asked_for(tmp_path):
    before = os.umask(0o027)
    try:
        assert stat.S_IMODE(folders.new_folder(tmp_path, "x", 0o777).stat().st_mode) == 0o750
    finally:
        os.umask(before)


def test_clear_leaves_folders_that_are_named_otherwise_and_a_store_that_is_a_link(tmp_path):
    from cute_grouped_mlp.codegen.artifacts import ArtifactStore

    folders = {"real": "proj", "linked": "proj-0123456789ab"}  # the second is named as an entry
    for name, folder in folders.items():
        mine = tmp_path / name / "v1" / "train" / folder
        mine.mkdir(parents=True)
        (mine / "kernel.py").write_text("my code\n")
        (mine / "meta.json").write_text("{}\n")
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "v1").symlink_to(tmp_path / "linked" / "v1")
    for root in ("real", "store"):
        count, others = ArtifactStore(tmp_path / root).clear()
        assert count == 0
        assert others
    for name, folder in folders.items():
        assert len(list((tmp_path / name / "v1" / "train" / folder).iterdir())) == 2
