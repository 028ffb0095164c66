"""Writes the default kernels' sources to ``generated/`` and finds out whether what is there is stale."""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from .catalog import default_catalog
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


def write(files: dict[str, str], folder: Path = GENERATED) -> list[str]:
    """Write files into a folder, and delete generated files that are no longer among them.

    Returns
    -------
    list of str
        Paths that were written anew, changed or deleted, sorted.
    """
    changed = [path for path, text in files.items() if _read(folder / path) != text]
    for path in changed:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(files[path])
    surplus = _present(folder) - files.keys()
    for path in surplus:
        (folder / path).unlink()
    return sorted({*changed, *surplus})


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
    """Generated files that a folder holds: everything but the package's own ``__init__.py`` and Python's caches."""
    return {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path != folder / "__init__.py"
    }
