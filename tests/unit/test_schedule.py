"""The tile scheduler of rendered kernels against brute force, without a GPU.

The scheduler's text runs as plain Python, each of 32 threads standing for a lane of a warp; shuffles and votes meet at
a barrier.
"""

import ast
import dataclasses
import random
import struct
import threading
import types

import pytest

from cute_grouped_mlp.codegen.render import render
from cute_grouped_mlp.codegen.spec import Arch, KernelSpec, Pass, Schedule, TileConfig


class Status(list):
    """The status word, and a pointer to it."""

    iterator = property(lambda self: self)


class Warp:
    """Thirty-two threads in step: what ``cute.arch`` offers to a warp."""

    def __init__(self):
        self.barrier = threading.Barrier(32)
        self.slots = [0] * 32
        self.local = threading.local()
        self.block = self.blocks = 0

    def exchange(self, value):
        """Every lane's value."""
        self.slots[self.local.lane] = value
        self.barrier.wait()
        values = list(self.slots)
        self.barrier.wait()
        return values

    def atomic_or(self, pointer, bits):
        pointer[0] |= bits

    def lane_idx(self):
        return self.local.lane

    def shuffle_sync(self, value, lane):
        return self.exchange(value)[lane & 31]

    def shuffle_sync_up(self, value, distance):
        values, lane = self.exchange(value), self.local.lane
        return values[lane - distance] if lane >= distance else value

    def shuffle_sync_bfly(self, value, mask):
        return self.exchange(value)[self.local.lane ^ mask]

    def vote_ballot_sync(self, condition):
        return sum(1 << lane for lane, on in enumerate(self.exchange(condition)) if on)

    @staticmethod
    def popc(bits):
        return bin(bits).count("1")

    @staticmethod
    def make_warp_uniform(value):
        return value

    @staticmethod
    def block_idx_in_cluster():
        return 0

    def block_idx(self):
        return self.block, 0, 0

    def grid_dim(self):
        return self.blocks, 1, 1

    def run(self, function):
        """Run ``function()`` on every lane; lane 0's result."""
        results, errors = [None] * 32, []

        def lane(index):
            self.local.lane = index
            try:
                results[index] = function()
            except BaseException as error:
                errors.append(error)
                self.barrier.abort()

        threads = [threading.Thread(target=lane, args=(i,)) for i in range(32)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        assert all(r == results[0] for r in results), "lanes disagree"
        return results[0]


class Float32(float):
    def bitcast(self, _):
        return struct.unpack("<i", struct.pack("<f", self))[0]


class Sizes(list):
    """split_sizes: reading past the end is an error, as it would be on the device."""

    def __getitem__(self, index):
        assert 0 <= index < len(self)
        return super().__getitem__(index)


def scheduler(spec, warp):
    """The constants and the schedule's functions of a rendered kernel, its own definitions, as plain Python."""
    arch = type("arch", (), {n: staticmethod(getattr(warp, n)) for n in dir(warp) if not n.startswith("_")})
    cute = type("cute", (), {"jit": staticmethod(lambda f: f), "arch": arch, "Tensor": list})
    cutlass = type("cutlass", (), {"range_constexpr": range, "range": staticmethod(lambda *a, unroll=1: range(*a))})
    scope = {
        "cute": cute,
        "cutlass": cutlass,
        "Int32": int,
        "Boolean": bool,
        "Float32": Float32,
        "BFloat16": types.SimpleNamespace(width=16),
        "dataclass": dataclasses.dataclass,
    }
    tree = ast.parse(render(spec).source)
    defined = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    constants = [node for node in tree.body if isinstance(node, ast.Assign)]
    functions = [defined["Problem"], defined["Window"], defined["Tile"]]
    todo = ["assignment", "first_window", "locate", "k_count"]
    for name in todo:  # and what they call
        functions.append(defined[name])
        called = {
            n.func.id for n in ast.walk(defined[name]) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)
        }
        todo += sorted(name for name in called & defined.keys() if name not in todo and defined[name] not in functions)
    exec(compile(ast.Module([*constants, *functions], []), spec.name, "exec"), scope)
    return scope


def tiles_of(spec, sizes, tokens, clusters, **extents):
    """Every tile that each of ``clusters`` clusters is given, and whether a bad size was reported."""
    warp = Warp()
    scope = scheduler(spec, warp)
    problem = scope["Problem"](tokens=tokens, groups=len(sizes), **extents)
    status, sizes = Status([0]), Sizes(sizes)

    def cluster(number):
        size = spec.tile.cluster_m * spec.tile.cluster_n
        warp.block, warp.blocks = number * size + size - 1, clusters * size

        def lane():
            window = scope["first_window"](sizes, problem, status)
            found, turn = [], 0
            while True:
                tile, window = scope["locate"](scope["assignment"](turn), window, sizes, problem, status)
                if not tile.live:
                    return found
                found.append((tile.group, tile.m, tile.n, tile.row, tile.rows, scope["k_count"](tile, problem)))
                turn += 1

        return warp.run(lane)

    return [cluster(number) for number in range(clusters)], status[0]


def clamped(sizes, tokens):
    """First row and rows of each group as kernels see them."""
    at, groups = 0, []
    for size in sizes:
        start = min(at, tokens)
        at += max(size, 0)
        groups.append((start, min(at, tokens) - start))
    return groups


CASES = [
    ([0, 1, 127, 128, 0, 129, 300, 0], 1000),
    ([0, 0, 0], 40),
    ([5], 5),
    ([64] * 40, 3000),
    ([300] + [0] * 40 + [7] * 37 + [513], 1100),
    ([0] * 31 + [9] + [0] * 32 + [1000], 1009),
    ([400, 300, 800, 200], 1000),
    ([400, -300, 100], 1000),
]


@pytest.mark.parametrize(("sizes", "tokens"), CASES, ids=range(len(CASES)))
@pytest.mark.parametrize("tile", [TileConfig(128, 192, 1, 1, Schedule.PINGPONG), TileConfig(128, 256, 2, 1)], ids=str)
def test_varlen_m_covers_every_row_once(sizes, tokens, tile):
    spec = KernelSpec(Arch.SM90A, Pass.FPROP, tile=tile)
    n_tiles, rows = 3, tile.tile_m * tile.cluster_m
    found, reported = tiles_of(spec, sizes, tokens, 4, n_tiles=n_tiles, k_tiles=5)
    flat = [t for cluster in found for t in cluster]
    groups = clamped(sizes, tokens)
    groups.append((groups[-1][0] + groups[-1][1], tokens - groups[-1][0] - groups[-1][1]))  # the tail
    step = tile.cluster_m
    expected = {
        (g, m * step, n, start, length, 0 if g == len(sizes) else 5)
        for g, (start, length) in enumerate(groups)
        for m in range(-(-length // rows))
        for n in range(n_tiles)
    }
    assert len(flat) == len(set(flat))
    assert set(flat) == expected
    assert reported == (min(sizes) < 0 or sum(max(s, 0) for s in sizes) > tokens)


@pytest.mark.parametrize(("sizes", "tokens"), CASES, ids=range(len(CASES)))
def test_varlen_k_gives_every_tile_once_longest_first(sizes, tokens):
    spec = KernelSpec(Arch.SM90A, Pass.WGRAD, tile=TileConfig(128, 192, 1, 1, Schedule.PINGPONG))
    found, _ = tiles_of(spec, sizes, tokens, 3, m_tiles=2, n_tiles=3)
    flat = [t for cluster in found for t in cluster]
    expected = {
        (g, m, n, start, rows, -(-rows // 64))
        for g, (start, rows) in enumerate(clamped(sizes, tokens))
        for m in range(2)
        for n in range(3)
    }
    assert len(flat) == len(set(flat))
    assert {(g, m, n) for g, m, n, *_ in flat} == {(g, m, n) for g, m, n, *_ in expected}
    assert {t for t in flat if t[4]} == {t for t in expected if t[4]}
    for cluster in found:  # four size classes to an octave: a later group is at most a fourth longer
        lengths = [t[4] for t in cluster]
        assert all(later <= 1.25 * min(lengths[: i + 1]) + 1 for i, later in enumerate(lengths))


def test_work_of_skewed_weight_gradients_is_even():
    """Zipf splits: the busiest cluster has at most a fifth more work than the mean, or one longest tile."""
    ranks = [1 / (i + 1) for i in range(64)]
    random.Random(1).shuffle(ranks)
    sizes = [int(16384 * r / sum(ranks)) for r in ranks]
    spec = KernelSpec(Arch.SM90A, Pass.WGRAD, tile=TileConfig(128, 192, 1, 1, Schedule.PINGPONG))
    found, _ = tiles_of(spec, sizes, 16384, 12, m_tiles=2, n_tiles=2)
    work = [sum(t[5] for t in cluster) for cluster in found]
    longest = max(t[5] for cluster in found for t in cluster)
    assert max(work) <= max(1.2 * sum(work) / len(work), longest)
