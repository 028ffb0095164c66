"""generated/ is what the templates render now; a difference in bytes or in the set of files is found."""

import hashlib
import json

import pytest

from cute_grouped_mlp.codegen import generated
from cute_grouped_mlp.codegen.catalog import default_catalog
from cute_grouped_mlp.codegen.errors import GroupedMLPError
from cute_grouped_mlp.codegen.spec import Arch, KernelSpec


@pytest.fixture(scope="module")
def files():
    return generated.default_files(default_catalog(Arch.SM90A)[:2])


@pytest.fixture
def folder(files, tmp_path):
    (tmp_path / "__init__.py").write_text('"""Stays."""')
    assert generated.write(files, tmp_path) == (sorted(files), [])
    return tmp_path


def test_the_committed_folder_is_up_to_date():
    difference = generated.diff(generated.default_files())
    assert not difference, f"run `cute-grouped-mlp generate`:\n{difference[:2000]}"


def test_manifest_has_the_spec_and_the_checksum_of_each_file(files):
    specs = default_catalog(Arch.SM90A)[:2]
    variants = json.loads(files["manifest.json"])["variants"]
    assert [KernelSpec.from_dict(variant["spec"]) for variant in variants] == list(specs)
    assert {variant["path"] for variant in variants} == {f"sm90/bf16/{spec.name}.py" for spec in specs}
    for variant in variants:
        assert hashlib.sha256(files[variant["path"]].encode()).hexdigest() == variant["sha256"]
    assert len(files) == 3


def test_write_is_idempotent_and_deletes_what_is_not_wanted(files, folder):
    assert generated.diff(files, folder) == ""
    assert generated.write(files, folder) == ([], [])
    more = generated.default_files(default_catalog(Arch.SM90A)[:5])
    surplus = sorted(more.keys() - files.keys())
    generated.write(more, folder)
    (folder / "sm90" / "old.py").write_text("x = 1\n")
    (folder / "__pycache__").mkdir()
    (folder / "__pycache__" / "x.pyc").write_text("")
    (folder / surplus[1]).write_text("edited")
    assert generated.write(files, folder) == (sorted(["manifest.json", surplus[0], surplus[2]]), [surplus[1]])
    assert not (folder / surplus[0]).exists()
    for kept in ("__init__.py", "__pycache__/x.pyc", "sm90/old.py", surplus[1]):
        assert (folder / kept).exists(), kept


def contents(folder):
    return {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize(
    "there",
    [
        {"notes.txt": "x"},
        {".git/config": "x", "a.py": "x"},
        {"manifest.json": "{}"},
        {"manifest.json": '{"name": "a browser extension"}', "src/a.js": "x"},
        {"manifest.json": '{"variants": [{"name": "x"}]}'},
        {"manifest.json": "[]", "sm90/bf16/mine.py": "x"},
    ],
    ids=lambda there: " ".join(there),
)
def test_a_folder_that_is_neither_empty_nor_ours_is_refused_and_left_alone(files, tmp_path, there):
    for path, text in there.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    before = contents(tmp_path)
    with pytest.raises(GroupedMLPError, match="neither empty nor made by this command"):
        generated.write(files, tmp_path)
    assert contents(tmp_path) == before


def test_what_a_manifest_does_not_record_is_neither_overwritten_nor_deleted(files, folder, tmp_path):
    manifest = json.loads((folder / "manifest.json").read_text())
    first = manifest["variants"].pop(0)["path"]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    (folder / first).write_text("mine")
    before = contents(folder)
    with pytest.raises(GroupedMLPError, match="not written by this command"):
        generated.write(files, folder)
    assert contents(folder) == before


@pytest.mark.parametrize("path", ["../outside.py", "/etc/passwd", "sm90/../../outside.py", "linked/outside.py"])
def test_a_manifest_that_leads_out_of_the_folder_deletes_nothing(files, folder, tmp_path_factory, path):
    outside = tmp_path_factory.mktemp("outside") / "outside.py"
    outside.write_text("mine")
    (folder.parent / "outside.py").write_text("mine")
    (folder / "linked").symlink_to(outside.parent)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["variants"].append({"path": path, "sha256": hashlib.sha256(b"mine").hexdigest()})
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(GroupedMLPError, match=r"no path inside of|symbolic link"):
        generated.write(files, folder)
    assert outside.exists()
    assert (folder.parent / "outside.py").exists()


def test_a_file_in_the_folders_place_is_an_error(files, tmp_path):
    (tmp_path / "d").write_text("x")
    with pytest.raises(GroupedMLPError, match="is no folder"):
        generated.write(files, tmp_path / "d")


def damage(path, how):
    text = path.read_bytes()
    if how == "deleted":
        path.unlink()
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "line ends":
        path.write_bytes(text.replace(b"\n", b"\r\n"))
    elif how == "one byte":
        path.write_bytes(text[:-2] + b"~" + text[-1:])
    elif how == "no newline":
        path.write_bytes(text[:-1])
    elif how == "not text":
        path.write_bytes(b"\xff" + text)


@pytest.mark.parametrize("how", ["deleted", "empty", "line ends", "one byte", "no newline", "not text"])
def test_every_kind_of_difference_is_shown(files, folder, how):
    for path in files:
        damage(folder / path, how)
        difference = generated.diff(files, folder)
        assert path in difference
        assert "rendered/" in difference
        assert generated.write(files, folder) == ([path], [])
        assert generated.diff(files, folder) == ""


@pytest.mark.parametrize("content", ["x = 1\n", ""])
def test_a_surplus_file_is_shown(files, folder, content):
    (folder / "sm90" / "extra.py").write_text(content)
    assert "sm90/extra.py" in generated.diff(files, folder)
