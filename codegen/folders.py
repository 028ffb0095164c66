"""Folders that this package writes to: how they are made, whom they are trusted with, and what may be deleted in them.

Nothing is deleted that an earlier run did not write: entries of compiled kernels go file by file, and a folder that
holds anything else stays.
"""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path, PurePosixPath

from .errors import ConfigError, GroupedMLPError

logger = logging.getLogger("cute_grouped_mlp")

CACHE_VARIABLE = "CUTE_GROUPED_MLP_CACHE_DIR"
SOURCE, OBJECT, LIBRARY, META = "kernel.py", "kernel.o", "kernel.so", "meta.json"
#: All files of a compiled kernel.
ENTRY_FILES = frozenset({SOURCE, OBJECT, LIBRARY, META})
#: Where temporary files may go, beside the system's choice.
_SCRATCH = ("/tmp", "/var/tmp", "/dev/shm")

_warned: set[str] = set()


def warn_once(message: str) -> None:
    """Log a warning, the first time only."""
    if message not in _warned:
        _warned.add(message)
        logger.warning(message)


def default_root() -> Path:
    """Folder of the store: ``$CUTE_GROUPED_MLP_CACHE_DIR``, else the platform's user cache folder.

    Where the user has neither a home nor an entry among the system's users (ordinary in containers) it is a folder of
    the user's in the temporary folder, which is said once.

    Raises
    ------
    GroupedMLPError
        If there is no usable temporary folder either.
    """
    configured = os.environ.get(CACHE_VARIABLE)
    if configured:
        return expand_user(configured)
    import platformdirs

    with contextlib.suppress(RuntimeError):  # newer versions of platformdirs raise it, older return "~/.cache/..."
        path = platformdirs.user_cache_path("cute-grouped-mlp")
        if path.is_absolute():
            return path
    path = Path(scratch_root()) / f"cute-grouped-mlp-{os.geteuid()}"
    warn_once(
        f"this user has no home folder: compiled kernels are kept in {path}; {CACHE_VARIABLE} names another place"
    )
    return path


def expand_user(text: str) -> Path:
    """Return a path with ``~`` replaced.

    Raises
    ------
    ConfigError
        If the user has no home folder.
    """
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"{text!r}: {error}; give an absolute path") from error


def path_problem(path: Path) -> str | None:
    """Say why compiled kernels cannot lie at a path; None if they can."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        return f"the path {str(path)!r} is no UTF-8, which the compiler and the loader need"
    return None


def scratch_root() -> str:
    """Return a folder for temporary files that the compiler can work in.

    Raises
    ------
    GroupedMLPError
        If there is none.
    """
    tried = []
    with contextlib.suppress(FileNotFoundError):  # tempfile's own candidates are all unusable
        tried.append(tempfile.gettempdir())
    tried += [path for path in _SCRATCH if path not in tried]
    for path in tried:
        if path_problem(Path(path)) is None and os.path.isdir(path) and os.access(path, os.W_OK | os.X_OK):
            return path
    raise GroupedMLPError(
        f"there is no usable temporary folder: tried {', '.join(map(repr, tried))}; set TMPDIR to one that exists, can "
        "be written, and whose path is UTF-8"
    )


def scratch_folder() -> Path:
    """Make a temporary folder, which the caller deletes.

    Raises
    ------
    GroupedMLPError
        If there is no place for one.
    """
    root = scratch_root()
    try:
        return Path(tempfile.mkdtemp(prefix="cute-grouped-mlp-", dir=root))
    except OSError as error:
        raise GroupedMLPError(f"no temporary folder can be made in {root}: {error}; set TMPDIR to another") from error


def new_folder(parent: Path, prefix: str, mode: int) -> Path:
    """Make a folder with a name of its own, and a mode of which the umask is taken off.

    ``tempfile.mkdtemp`` makes folders that nobody else can read, which a built folder must not have.
    """
    path = parent / f"{prefix}{os.urandom(6).hex()}"
    path.mkdir(mode)
    return path


def distrust(path: Path, *, owners: Collection[int], strict: bool = False) -> str | None:
    """Say why a folder is not safe to load code from: somebody else's, or others can write to it.  None if it is safe.

    Parameters
    ----------
    path
        The folder; one that cannot be looked at counts as safe, as nothing will be read from it.
    owners
        Users whose folders are trusted.
    strict
        Do not let this process's own group write, either.
    """
    try:
        status = path.stat()
    except OSError:
        return None
    if status.st_uid not in owners:
        others = "" if 0 not in owners else " or to root"
        return f"{path} belongs to user {status.st_uid}, not to this process's user {os.geteuid()}{others}"
    by_group = status.st_mode & 0o020 and (strict or status.st_gid not in (0, os.getegid()))
    if by_group or status.st_mode & 0o002:
        return f"{path} can be written by others: chmod go-w {path}"
    return None


def is_entry(path: Path) -> bool:
    """Whether a folder holds a compiled kernel and nothing else."""
    return path.is_dir() and not path.is_symlink() and {p.name for p in path.iterdir()} <= ENTRY_FILES


def remove_entry(path: Path) -> bool:
    """Delete the files of a compiled kernel, and their folder if nothing else is in it; returns whether it is gone.

    Raises
    ------
    OSError
        If something cannot be deleted.
    """
    if path.is_symlink() or not path.is_dir():
        return False
    for name in ENTRY_FILES:
        if (path / name).is_symlink() or (path / name).is_file():
            (path / name).unlink()
    return remove_if_empty(path)


def remove_if_empty(path: Path) -> bool:
    """Delete a folder if it is empty; returns whether it is gone."""
    if any(path.iterdir()):
        return False
    path.rmdir()
    return True


def inside(folder: Path, path: str) -> Path:
    """Return a path below a folder, of a manifest's text.

    Raises
    ------
    GroupedMLPError
        If it leads out of the folder, by ``..``, as an absolute path, or through a symbolic link.
    """
    parts = PurePosixPath(path).parts
    if not parts or ".." in parts or PurePosixPath(path).is_absolute():
        raise GroupedMLPError(f"{path!r} is no path inside of {folder}")
    below = list(_prefixes(folder, parts))
    if linked := next((p for p in below if p.is_symlink()), None):
        raise GroupedMLPError(f"{linked} is a symbolic link: what it leads to was not written by this command")
    return below[-1]


def _prefixes(folder: Path, parts: tuple[str, ...]) -> Iterator[Path]:
    for part in parts:
        folder = folder / part
        yield folder
