"""What this machine can run: ``python -m cute_grouped_mlp.doctor`` prints it as JSON.

``cute-grouped-mlp doctor`` runs this in a process of its own, so that a torch or a driver that crashes is a finding
and not the end of the command.
"""

from __future__ import annotations

import json
import platform
from typing import Any

import torch

from . import recipe as recipes
from . import support
from .codegen.interpreter import answer
from .config import SETTINGS, settings

_RECIPES = (
    recipes.HighPrecision,
    recipes.Float8CurrentScaling,
    recipes.DelayedScaling,
    recipes.Float8BlockScaling,
    recipes.MXFP8BlockScaling,
    recipes.NVFP4BlockScaling,
)


def report() -> dict[str, Any]:
    """Versions, devices, and what each recipe runs as.

    Returns
    -------
    dict
        ``python``, ``torch``, ``torch_cuda`` (None for a CPU build), ``cuda_problem`` (why torch cannot use a GPU, or
        None), ``settings`` (what is wrong with each that is; the rest is reported as if it had its default),
        ``devices`` (name, capability, multiprocessors, memory in GiB), and ``recipes``: for each recipe and type
        ``status`` ("native", "emulated" by bfloat16 kernels, or "unfused" in plain torch) and ``why``.
    """
    problems = settings.problems()
    with settings.override(**{name: SETTINGS[name].default for name in problems}):
        return {**_report(), "settings": list(problems.values())}


def _report() -> dict[str, Any]:
    problem = None
    devices = []
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            devices.append(
                {
                    "name": properties.name,
                    "capability": f"{properties.major}.{properties.minor}",
                    "multiprocessors": properties.multi_processor_count,
                    "memory_gib": round(properties.total_memory / 2**30, 1),
                }
            )
    except (AssertionError, RuntimeError) as error:  # a CPU build raises the first, a missing driver the second
        problem = str(error).splitlines()[0]
    device = torch.device("cuda", 0) if devices else torch.device("cpu")
    rows = []
    for recipe in _RECIPES:
        for dtype in (torch.bfloat16, torch.float16):
            answer = support.fuser_grouped_tensor_supported.uncached(recipe(), dtype, device=device)
            emulated = () if recipe is recipes.HighPrecision else support.emulation_reasons(dtype, device)
            status = "native" if answer else "unfused" if emulated or recipe is recipes.HighPrecision else "emulated"
            rows.append(
                {
                    "recipe": recipe.__name__,
                    "dtype": str(dtype).removeprefix("torch."),
                    "status": status,
                    "why": "; ".join(dict.fromkeys([*answer.reasons, *emulated])),
                }
            )
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "cuda_problem": problem,
        "devices": devices,
        "recipes": rows,
    }


if __name__ == "__main__":
    answer(json.dumps(report()))
