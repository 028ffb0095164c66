import dataclasses

import pytest

from cute_grouped_mlp.codegen import tiles
from cute_grouped_mlp.codegen.spec import Arch, DType, GluLayout, KernelSpec, Pass, Schedule, TileConfig

GEMMS = [p for p in Pass if p.is_gemm]


def spec(kernel, tile=None, **fields):
    if kernel.has_activation:
        fields = {"activation": "swiglu", "probs": DType.FP32} | fields
    return KernelSpec(Arch.SM90A, kernel, tile=tile, **fields)


@pytest.mark.parametrize("kernel", GEMMS, ids=str)
def test_every_default_is_valid(kernel):
    for n in (8, 128, 136, 192, 384, 768, 1536, 4096, 14336):
        for k in (8, 2048, 4096, 7168):
            for tokens, groups in ((1, 1), (4096, 8), (131072, 1025)):
                tile = tiles.default_tile(kernel, tokens=tokens, groups=groups, n=n, k=k)
                assert tiles.check(spec(kernel, tile)) == []


@pytest.mark.parametrize("kernel", GEMMS, ids=str)
def test_candidates_are_valid_distinct_and_have_the_default(kernel):
    found = tiles.candidates(spec(kernel))
    assert len(set(found)) == len(found) > 20
    for tile in found:
        assert tiles.check(spec(kernel, tile)) == []
        plan = tiles.smem_plan(spec(kernel, tile))
        assert plan.stages >= 2
        assert plan.total <= tiles.SMEM_CAPACITY
    assert tiles.default_tile(kernel, tokens=4096, groups=8, n=4096, k=2048) in found


@pytest.mark.parametrize(
    ("kernel", "tile", "fields", "message"),
    [
        (Pass.FPROP, None, {}, "needs a tile config"),
        (Pass.FPROP, TileConfig(96, 128), {}, "tile_m is 96"),
        (Pass.FPROP, TileConfig(128, 264), {}, "tile_n is 264"),
        (Pass.FPROP, TileConfig(128, 128, 2, 2), {}, "cluster is 2x2"),
        (Pass.FPROP, TileConfig(128, 256, 1, 1, Schedule.PINGPONG), {}, "256 accumulator registers"),
        (Pass.FPROP, TileConfig(192, 256), {}, "at most 112"),
        (Pass.FPROP_ACT, TileConfig(128, 208, 1, 1, Schedule.PINGPONG), {}, "tile_n is 208"),
        (Pass.DGRAD, TileConfig(128, 160, 1, 1, Schedule.PINGPONG), {}, "swizzle atoms of 64"),
        (Pass.FPROP_ACT, TileConfig(128, 160), {"glu_layout": GluLayout.INTERLEAVED32}, "multiple of 64"),
        (Pass.REDUCE, TileConfig(128, 128), {"probs": DType.FP32}, "takes no tile config"),
    ],
)
def test_what_is_not_valid_is_said(kernel, tile, fields, message):
    problems = tiles.check(spec(kernel, tile, **fields))
    assert any(message in problem for problem in problems), problems


def test_every_violation_is_said_at_once():
    assert len(tiles.check(spec(Pass.FPROP, TileConfig(96, 264, 3, 3)))) == 3


def test_wide_output_takes_narrower_subtiles():
    narrow = tiles.smem_plan(spec(Pass.WGRAD, TileConfig(128, 192)))
    wide = tiles.smem_plan(dataclasses.replace(spec(Pass.WGRAD, TileConfig(128, 192)), out=DType.FP32))
    assert (narrow.epi_n, wide.epi_n) == (64, 32)
    assert narrow.total == wide.total
