"""Commands that start another Python, with the modules of this one and none from the working directory.

``python -c`` and ``-m`` put the working directory in front of the module path, where a ``json.py`` or a ``select.py``
(this package has one) would hide the standard library's; ``-P`` needs Python 3.11.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

from .errors import GroupedMLPError

_BOOT = (
    "import sys; sys.path[:] = [p for p in sys.path if p]; import runpy; target = sys.argv.pop(1); {run}(target, {how})"
)
_SCRIPT = _BOOT.format(run="runpy.run_path", how="None, '__main__'")
_MODULE = _BOOT.format(run="runpy.run_module", how="None, '__main__', True")


def script_command(path: Path) -> list[str]:
    """Command that runs a file.

    Raises
    ------
    GroupedMLPError
        If this process does not know its interpreter.
    """
    return [_interpreter(), "-c", _SCRIPT, str(path)]


def module_command(name: str, *arguments: str) -> list[str]:
    """Command that runs a module as ``python -m`` does; raises as :func:`script_command`."""
    return [_interpreter(), "-c", _MODULE, name, *arguments]


def environment() -> dict[str, str]:
    """Return the environment for these commands: this process's, with its module path."""
    paths = []
    for path in filter(None, sys.path):
        with contextlib.suppress(FileNotFoundError):  # relative to a working directory that is gone
            paths.append(os.path.abspath(path))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


#: Variable with the number of the pipe that an answer goes to: standard output is anybody's.
_ANSWER = "_CUTE_GROUPED_MLP_ANSWER"


def answer_of(command: list[str]) -> str:
    """Run a command of this module and return what it gives to :func:`answer`.

    Raises
    ------
    GroupedMLPError
        If it fails: with the last line of its error.
    """
    read, write = os.pipe()
    with os.fdopen(read, encoding="utf-8") as answers:
        try:
            process = subprocess.Popen(
                command,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                env={**environment(), _ANSWER: str(write)},
                pass_fds=[write],
            )
        finally:
            os.close(write)
        text = answers.read()
        _, errors = process.communicate()
    if process.returncode or not text:
        raise GroupedMLPError((errors.strip() or f"exit code {process.returncode}").splitlines()[-1])
    return text


def answer(text: str) -> None:
    """Give an answer to whoever runs this process by :func:`answer_of`; to standard output where nobody does."""
    number = os.environ.get(_ANSWER)
    if number is None:
        sys.stdout.write(text)
        return
    with os.fdopen(int(number), "w", encoding="utf-8") as file:
        file.write(text)


def _interpreter() -> str:
    if not sys.executable:
        raise GroupedMLPError("sys.executable is not set, so no process of Python can be started")
    return sys.executable
