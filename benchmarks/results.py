"""The results file: who measured what, where, and with which command.

{"gpu", "driver", "torch", "dsl", "commit", "date", "command", "rows": [...]}
"""

from __future__ import annotations

import datetime
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from cute_grouped_mlp.codegen.toolchain import DSL, toolchain

ROOT = Path(__file__).resolve().parent.parent
HEADER = ("gpu", "driver", "torch", "dsl", "commit", "date", "command")
ROW = {"shape": str, "split": str, "kernel": str, "impl": str, "ms": float, "tflops": float}


def find_commit(given: str | None) -> str:
    """Commit that is measured: as given, else ``$GIT_COMMIT``, else what git says, else "unknown"."""
    commit = given or os.environ.get("GIT_COMMIT")
    if commit:
        return commit
    return _output("git", "-C", str(ROOT), "describe", "--always", "--abbrev=40", "--dirty") or "unknown"


def environment(commit: str | None) -> dict[str, Any]:
    """Describe the machine and the software: all keys of a results file but ``rows``."""
    gpu = torch.cuda.is_available()
    query = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return {
        "gpu": torch.cuda.get_device_name() if gpu else "none",
        "driver": (_output(*query).splitlines() or ["unknown"])[0] if gpu else "none",
        "torch": torch.__version__,
        "dsl": toolchain().version(DSL) or "none",
        "commit": find_commit(commit),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join(["python3", *sys.argv]),
    }


def problems(result: dict[str, Any]) -> list[str]:
    """Say everything that is wrong with a results file's content."""
    found = [f"{key} is missing or empty" for key in HEADER if not isinstance(result.get(key), str) or not result[key]]
    rows = result.get("rows")
    if not isinstance(rows, list):
        return [*found, "rows is not a list"]
    for number, row in enumerate(rows):
        for key, kind in ROW.items():
            if not isinstance(row.get(key), kind):
                found.append(f"rows[{number}].{key} is {row.get(key)!r}, not a {kind.__name__}")
            elif kind is float and not row[key] > 0:
                found.append(f"rows[{number}].{key} is {row[key]}, not above 0")
    return found


def default_path(result: dict[str, Any], what: str) -> Path:
    """``benchmarks/results/<date>-<gpu>-<what>.json``."""
    gpu = re.sub(r"[^a-z0-9]+", "-", result["gpu"].lower().replace("nvidia", "")).strip("-")
    return ROOT / "benchmarks" / "results" / f"{result['date'][:10]}-{gpu}-{what}.json"


def write(result: dict[str, Any], path: Path) -> None:
    """Write a results file: one line a row, so that two files compare well."""
    header = {key: value for key, value in result.items() if key != "rows"}
    lines = json.dumps(header, indent=1).removesuffix("\n}")
    rows = ",\n".join("  " + json.dumps(row) for row in result["rows"])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{lines},\n "rows": [\n{rows}\n ]\n}}\n')


def _output(*command: str) -> str:
    """Standard output of a command; empty if it cannot be run or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
