"""generated/ is what the templates render now; a difference in bytes or in the set of files is found."""

import hashlib
import json

import pytest

from cute_grouped_mlp.codegen import generated
from cute_grouped_mlp.codegen.catalog import default_catalog
from cute_grouped_mlp.codegen.spec import Arch, KernelSpec


@pytest.fixture(scope="module")
def files():
    return generated.default_files(default_catalog(Arch.SM90A)[:2])


@pytest.fixture
def folder(files, tmp_path):
    (tmp_path / "__init__.py").write_text('"""Stays."""')
    assert generated.write(files, tmp_path) == sorted(files)
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
    assert generated.write(files, folder) == []
    (folder / "sm90" / "old.py").write_text("x = 1\n")
    (folder / "__pycache__").mkdir()
    (folder / "__pycache__" / "x.pyc").write_text("")
    assert generated.write(files, folder) == ["sm90/old.py"]
    assert not (folder / "sm90" / "old.py").exists()
    assert (folder / "__init__.py").exists()


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
        assert generated.write(files, folder) == [path]
        assert generated.diff(files, folder) == ""


@pytest.mark.parametrize("content", ["x = 1\n", ""])
def test_a_surplus_file_is_shown(files, folder, content):
    (folder / "sm90" / "extra.py").write_text(content)
    assert "sm90/extra.py" in generated.diff(files, folder)
