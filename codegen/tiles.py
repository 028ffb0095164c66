"""The one statement of which tile configs are valid, what they cost in shared memory, and the default for a shape."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .activations import ACTIVATIONS
from .spec import GluLayout, KernelSpec, Pass, Schedule, TileConfig

#: Shared memory that a CTA may use on SM90: 227 KiB (CUDA programming guide, table "technical specifications").
SMEM_CAPACITY = 227 * 1024
#: Kept free for barriers and for aligning the buffers to 1024 bytes.
SMEM_RESERVED = 1024


@dataclass(frozen=True, slots=True)
class SmemPlan:
    """How a GEMM kernel divides shared memory.

    Attributes
    ----------
    stages
        Mainloop stages, each one A and one B tile of 128 bytes depth.
    epi_n
        Columns of an epilogue sub-tile (of a in GLU kernels, where z has twice as many).
    epi_stages
        Staging buffers for stores of one sub-tile.
    z_stages
        Buffers of z sub-tiles that ``dgrad_act`` loads ahead; dz is written back in place.  0 elsewhere.
    total
        Bytes in all, reserve included.
    """

    stages: int
    epi_n: int
    epi_stages: int
    z_stages: int
    total: int


def math_warpgroups(tile: TileConfig) -> int:
    """Math warpgroups that share one output tile."""
    if tile.schedule is Schedule.PINGPONG:
        return 1
    return 3 if tile.tile_m == 192 else 2


def is_glu(spec: KernelSpec) -> bool:
    """Whether the kernel has an activation with a gate and an up half."""
    return spec.activation is not None and ACTIVATIONS[spec.activation].glu


def output_columns(spec: KernelSpec) -> int:
    """Columns of the output (a in ``fprop_act``) that one tile covers."""
    tile = _tile(spec)
    return tile.tile_n // 2 if spec.kernel is Pass.FPROP_ACT and is_glu(spec) else tile.tile_n


def smem_plan(spec: KernelSpec) -> SmemPlan:
    """Divide shared memory for a GEMM kernel: epilogue buffers first, mainloop stages from the rest."""
    tile = _tile(spec)
    columns = output_columns(spec)
    element = (spec.out or spec.types.storage).bits // 8
    halves = 2 if is_glu(spec) else 1
    stage = (tile.tile_m + tile.tile_n) * spec.types.tile_k * (spec.types.operand.bits // 8)
    epi_stages = 2
    if spec.kernel is Pass.FPROP_ACT:
        epi_n = 32 if columns % 32 == 0 else 16
        staging = epi_stages * (1 + (halves if spec.store_z else 0))
    elif spec.kernel is Pass.DGRAD_ACT:
        epi_n = 32
        staging = epi_stages if spec.store_act else 0
    else:
        widest = 128 // element  # columns of one swizzle atom
        epi_n = next(n for n in (widest, 32, 16) if columns % n == 0)
        staging = epi_stages
    subtile = tile.tile_m * epi_n * element

    def stages_with(z_stages: int) -> int:
        return max(0, (SMEM_CAPACITY - SMEM_RESERVED - subtile * (staging + halves * z_stages)) // stage)

    z_stages = 0
    if spec.kernel is Pass.DGRAD_ACT:
        # Four buffers of z ahead, three where that makes room for a fourth stage; what is left over deepens them.
        z_stages = 3 if stages_with(4) < 4 <= stages_with(3) else 4
        while z_stages < 6 and stages_with(z_stages + 1) == stages_with(z_stages):
            z_stages += 1
    stages = stages_with(z_stages)
    total = SMEM_RESERVED + subtile * (staging + halves * z_stages) + stages * stage
    return SmemPlan(stages, epi_n, epi_stages, z_stages, total)


def check(spec: KernelSpec) -> list[str]:
    """Every reason why a spec's tile config is not valid; an empty list if it is."""
    if not spec.kernel.is_gemm:
        return [] if spec.tile is None else [f"{spec.kernel.value} takes no tile config"]
    if spec.tile is None:
        return [f"{spec.kernel.value} needs a tile config"]
    tile = spec.tile
    problems = []
    pingpong = tile.schedule is Schedule.PINGPONG
    rows = (64, 128, 192) if pingpong else (128, 192, 256)
    if tile.tile_m not in rows:
        problems.append(f"tile_m is {tile.tile_m}, {tile.schedule.value} allows {rows}")
    if tile.tile_n % 16 or not 32 <= tile.tile_n <= 256:
        problems.append(f"tile_n is {tile.tile_n}, allowed are multiples of 16 from 32 to 256")
    if (tile.cluster_m, tile.cluster_n) not in ((1, 1), (2, 1), (1, 2)):
        problems.append(f"cluster is {tile.cluster_m}x{tile.cluster_n}, allowed are 1x1, 2x1 and 1x2")
    if problems:
        return problems
    registers = tile.tile_m * tile.tile_n // (128 * math_warpgroups(tile))
    limit = 112 if math_warpgroups(tile) == 3 else 208  # 192x256 does not assemble
    if registers > limit:
        problems.append(f"{registers} accumulator registers a thread, at most {limit} leave room for the epilogue")
    if spec.kernel is Pass.FPROP_ACT and is_glu(spec) and tile.tile_n % 32:
        problems.append(f"tile_n is {tile.tile_n}, a GLU tile needs a multiple of 32: 16 columns in each half")
    if spec.kernel is Pass.FPROP_ACT and spec.glu_layout is GluLayout.INTERLEAVED32 and tile.tile_n % 64:
        problems.append(f"tile_n is {tile.tile_n}, weights interleaved by 32 need a multiple of 64")
    if spec.kernel is Pass.DGRAD_ACT and tile.tile_n % 32:
        problems.append(f"tile_n is {tile.tile_n}, dgrad_act reads z in boxes of 32 columns")
    if spec.kernel is not Pass.FPROP_ACT and tile.tile_n % 64 and spec.kernel is not Pass.FPROP:
        problems.append(f"tile_n is {tile.tile_n}, an N-major operand comes in swizzle atoms of 64 columns")
    if not problems and smem_plan(spec).stages < 2:
        problems.append(f"{smem_plan(spec).stages} mainloop stages fit in shared memory, at least 2 are needed")
    return problems


def candidates(spec: KernelSpec) -> tuple[TileConfig, ...]:
    """Valid tile configs of a kernel's family: what the tuner may try and what the tests prove one by one.

    Parameters
    ----------
    spec
        A GEMM's spec; its own tile config does not matter.
    """
    shapes = [
        (m, n, Schedule.COOPERATIVE)
        for m, n in ((128, 128), (128, 192), (128, 256), (192, 128), (256, 128), (256, 192))
    ]
    shapes += [
        (m, n, Schedule.PINGPONG) for m, n in ((64, 128), (64, 256), (128, 128), (128, 160), (128, 192), (192, 128))
    ]
    tiles = (TileConfig(m, n, *cluster, s) for m, n, s in shapes for cluster in ((1, 1), (2, 1), (1, 2)))
    return tuple(tile for tile in tiles if not check(replace(spec, tile=tile)))


def default_tile(kernel: Pass, *, tokens: int, groups: int, n: int, k: int) -> TileConfig:
    """The tile config to use for a shape when nobody tuned it.

    The rules follow measurements on an H200 with random bf16 data (benchmarks/results/2026-11-30-h200-tiles.json):
    pingpong tiles of 128x192 win nearly everywhere; multicast of A pays where the tile columns pair up, and multicast
    of B in ``dgrad``, whose contraction is long.

    Parameters
    ----------
    kernel
        A GEMM pass.
    tokens, groups
        T (capacity, not the sum of the splits) and G.
    n, k
        GEMM columns (accumulator columns: 2F in a GLU ``fprop_act``) and contraction length (ignored by ``wgrad``).
    """
    del tokens, groups, k
    columns = _columns(n)
    if kernel is Pass.WGRAD or columns == 128:
        return TileConfig(128, columns, 1, 1, Schedule.PINGPONG)
    if kernel is Pass.DGRAD:
        return TileConfig(128, columns, 2, 1, Schedule.PINGPONG)
    pairs = -(-n // columns) % 2 == 0
    return TileConfig(128, columns, 1, 2 if pairs else 1, Schedule.PINGPONG)


def _columns(n: int) -> int:
    """192 columns, or 128 where those leave much less of the last tile empty."""
    padded = {columns: -(-n // columns) * columns for columns in (192, 128)}
    return 128 if padded[192] > 1.15 * padded[128] else 192


def _tile(spec: KernelSpec) -> TileConfig:
    if spec.tile is None:
        raise ValueError(f"{spec.name} has no tile config")
    return spec.tile
