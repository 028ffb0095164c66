"""Every default kernel compiles for sm_90a on a machine without a GPU, and the result is what it should be."""

import itertools
import os
import sys
from pathlib import Path

import filelock
import pytest

from cute_grouped_mlp.codegen import tiles
from cute_grouped_mlp.codegen.aot import build_folder
from cute_grouped_mlp.codegen.artifacts import Artifact
from cute_grouped_mlp.codegen.catalog import default_catalog
from cute_grouped_mlp.codegen.quantize_decisions import shared_bytes
from cute_grouped_mlp.codegen.spec import Arch

CATALOG = default_catalog(Arch.SM90A)
#: Bytes of registers spilled to memory: they move by tens with any edit.
SPILL_LIMIT = 64
#: Kept between runs: what has not changed is not compiled again.
FOLDER = Path(__file__).parents[2] / "build" / "default-aot"

pytestmark = [pytest.mark.timeout(1200), pytest.mark.xdist_group("cross_compile")]


@pytest.fixture(scope="module")
def compiled(pytestconfig):
    """Artifacts of the catalog; a line for each that is compiled now, which takes seconds each."""
    capture, done = pytestconfig.pluginmanager.getplugin("capturemanager"), itertools.count(1)

    def tell(spec, result, compiled):
        count = next(done)
        if compiled:
            with capture.global_and_fixture_disabled():
                print(f"\rcompiled {spec.name}, kernel {count} of {len(CATALOG)}", file=sys.stderr, flush=True)

    FOLDER.parent.mkdir(exist_ok=True)
    with filelock.FileLock(FOLDER.with_suffix(".lock")):  # another test process may be at it
        return build_folder(CATALOG, FOLDER, jobs=min(2, os.cpu_count() or 1), progress=tell)


@pytest.mark.parametrize("spec", CATALOG, ids=str)
def test_k4_default_kernel(compiled, spec):
    artifact = compiled[spec]
    assert isinstance(artifact, Artifact), artifact
    report = artifact.report
    assert report.spill_stores <= SPILL_LIMIT
    assert report.c7512 == 0, "wgmma was serialised"
    assert report.c7519 == 0, "wgmma was serialised behind an injected warpgroup.arrive"
    assert report.tensormap_replaces == 0
    if not spec.kernel.is_gemm:
        assert report.mma == ()
        assert not spec.kernel.quantizes or report.smem == shared_bytes(spec)
        return
    columns, operand = spec.tile.tile_n, spec.types.operand.value.replace("fp", "f")
    assert report.mma == (f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{operand}.{operand}",)
    # K4: what the host planned is what the kernel asks for, but for the barriers within the reserve
    plan = tiles.smem_plan(spec)
    assert report.smem is not None
    assert plan.total - tiles.SMEM_RESERVED <= report.smem <= plan.total <= tiles.SMEM_CAPACITY
