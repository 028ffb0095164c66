"""Writes the default kernels' sources to ``generated/`` and finds out whether what is there is stale."""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from .catalog import default_catalog
from .errors import GroupedMLPError
from .folders import inside, remove_if_empty
from .render import render
from .spec import Arch, KernelSpec

MANIFEST = "manifest.json"
#: The committed folder.
GENERATED = Path(__file__).resolve().parent.parent / "generated"


def default_files(specs: Iterable[KernelSpec] | None = None) -> dict[str, str]:
    """Render kernels.

    Parameters
    ----------
    specs
        What to render; the default catalogs of all architectures by default.

    Returns
    -------
    dict
        Path below ``generated/`` -> text: ``sm90/bf16/<name>.py`` for each kernel, and ``manifest.json`` with the
        spec and the SHA-256 of each file.
    """
    if specs is None:
        specs = [spec for arch in Arch for spec in default_catalog(arch)]
    files, variants = {}, []
    for spec in specs:
        path = f"{spec.arch.folder}/{spec.numerics}/{spec.name}.py"
        files[path] = render(spec).source
        digest = hashlib.sha256(files[path].encode()).hexdigest()
        variants.append({"name": spec.name, "path": path, "sha256": digest, "spec": spec.to_dict()})
    files[MANIFEST] = json.dumps({"variants": variants}, indent=1) + "\n"
    return files


def write(files: dict[str, str], folder: Path = GENERATED) -> tuple[list[str], list[str]]:
    """Write files into a folder, and delete those that an earlier call wrote and that are no longer among them.

    What was written is recorded in the folder's manifest, with its SHA-256: nothing else is ever deleted, and nothing
    else is overwritten.

    Parameters
    ----------
    files
        Path below the folder -> text, with the manifest among them.
    folder
        Made if missing.  It must be empty, or hold the manifest of an earlier call.

    Returns
    -------
    changed : list of str
        Paths that were written anew, changed or deleted, sorted.
    kept : list of str
        Paths that are no longer wanted, and were edited since they were written: they stay.

    Raises
    ------
    GroupedMLPError
        If the folder holds something else, before anything is written.
    """
    recorded = _recorded(folder, files)
    paths = {path: inside(folder, path) for path in (*files, *recorded)}
    ours = {*recorded, MANIFEST}
    if foreign := sorted(path for path in files if path not in ours and paths[path].exists()):
        raise GroupedMLPError(f"{folder} holds {_some(foreign)}, not written by this command: choose another folder")
    changed = [path for path, text in files.items() if _read(paths[path]) != text]
    surplus = {path for path in recorded.keys() - files.keys() if paths[path].is_file()}
    edited = {path for path in surplus if _digest(paths[path]) != recorded[path]}
    for path in changed:
        paths[path].parent.mkdir(parents=True, exist_ok=True)
        paths[path].write_text(files[path])
    for path in surplus - edited:
        paths[path].unlink()
        parent = paths[path].parent
        while parent != folder and remove_if_empty(parent):
            parent = parent.parent
    return sorted({*changed, *(surplus - edited)}), sorted(edited)


def _recorded(folder: Path, files: dict[str, str]) -> dict[str, str]:
    """Return the SHA-256 of each file that an earlier call wrote into a folder; empty where there was none.

    Without a readable manifest a folder counts as one if it holds nothing but files that are about to be written.

    Raises
    ------
    GroupedMLPError
        If the folder was not made by this command.
    """
    if not folder.exists() and not folder.is_symlink():
        return {}
    if not folder.is_dir():
        raise GroupedMLPError(f"{folder} is no folder")
    there = sorted(path.name for path in folder.iterdir() if path.name not in ("__init__.py", "__pycache__"))
    if not there:
        return {}
    try:
        content = json.loads((folder / MANIFEST).read_bytes())
        return {str(variant["path"]): str(variant["sha256"]) for variant in content["variants"]}
    except (OSError, ValueError) as error:
        held = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()}
        if held - {"__init__.py"} <= files.keys():
            return dict.fromkeys(held - {"__init__.py"}, "")
        why: Exception = error
    except (KeyError, TypeError) as error:
        why = error
    raise GroupedMLPError(
        f"{folder} is neither empty nor made by this command: it holds {_some(there)} and no {MANIFEST} of "
        f"generated kernels ({type(why).__name__}: {why}); choose another folder"
    ) from why


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def diff(files: dict[str, str], folder: Path = GENERATED) -> str:
    """Compare a folder with what it should hold, in bytes and in the set of files.

    Returns
    -------
    str
        A unified diff from what is there to what should be; empty if nothing differs.
    """
    parts = []
    for path in sorted(files.keys() | _present(folder)):
        there, wanted = _read(folder / path), files.get(path)
        if there == wanted:
            continue
        lines = difflib.unified_diff(
            (there or "").splitlines(keepends=True),
            (wanted or "").splitlines(keepends=True),
            fromfile=f"generated/{path}" if there is not None else "/dev/null",
            tofile=f"rendered/{path}" if wanted is not None else "/dev/null",
        )
        text = "".join(line if line.endswith("\n") else f"{line}\n(no newline at the end)\n" for line in lines)
        parts.append(text or f"{path}: {'missing' if there is None else 'not wanted'}, empty\n")
    return "".join(parts)


def _read(path: Path) -> str | None:
    if not path.exists():
        return None
    with path.open(newline="", errors="surrogateescape") as file:  # newline="": other line ends are a difference
        return file.read()


def _present(folder: Path) -> set[str]:
    """Files of a folder that could be generated ones: the manifest, and sources in the folders of architectures."""
    found = [folder / MANIFEST, *(path for arch in Arch for path in (folder / arch.folder).rglob("*"))]
    return {path.relative_to(folder).as_posix() for path in found if path.is_file() and "__pycache__" not in path.parts}
