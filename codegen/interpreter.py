"""Commands that start another Python, with the modules of this one and none from the working directory.

``python -c`` and ``-m`` put the working directory in front of the module path, where a ``json.py`` or a ``select.py``
(this package has one) would hide the standard library's; ``-P`` needs Python 3.11.
"""

from __future__ import annotations

import os
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
    return {**os.environ, "PYTHONPATH": os.pathsep.join(os.path.abspath(path) for path in sys.path if path)}


def _interpreter() -> str:
    if not sys.executable:
        raise GroupedMLPError("sys.executable is not set, so no process of Python can be started")
    return sys.executable
