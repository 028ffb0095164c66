"""What all tests share: GPU tests are skipped, and counted, without a GPU; no test hangs or uses the user's cache."""

import os
from pathlib import Path

import pytest

# Before the package reads its settings.  Kept between runs: what has not changed is not compiled again.
os.environ.setdefault("CUTE_GROUPED_MLP_CACHE_DIR", str(Path(__file__).parent.parent / "build" / "test-cache"))

if "PYTEST_XDIST_WORKER" in os.environ:  # workers are as many as cores: threads of torch on top only wait
    os.environ.setdefault("OMP_NUM_THREADS", "1")

#: Seconds that a test may take unless it says otherwise (pytest-timeout, where it is installed).
UNIT_TIMEOUT, GPU_TIMEOUT = 120, 300
NO_GPU = "needs an NVIDIA GPU of compute capability 9.0"


def has_gpu() -> bool:
    """Whether the first CUDA device is a Hopper GPU."""
    import torch

    return torch.cuda.is_available() and torch.cuda.get_device_capability(0) == (9, 0)


def pytest_collection_modifyitems(config, items):
    skip = None if not any("gpu" in item.keywords for item in items) or has_gpu() else pytest.mark.skip(reason=NO_GPU)
    for item in items:
        gpu = item.get_closest_marker("gpu") is not None
        if gpu and skip is not None:
            item.add_marker(skip)
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(GPU_TIMEOUT if gpu else UNIT_TIMEOUT))


def pytest_terminal_summary(terminalreporter):
    skipped = sum(NO_GPU in str(report.longrepr) for report in terminalreporter.stats.get("skipped", []))
    if skipped:
        terminalreporter.write_line(f"{skipped} GPU tests were skipped: no NVIDIA GPU of compute capability 9.0 here")
