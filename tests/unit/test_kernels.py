"""From a spec to a callable: process, AOT folders, store, compiling (docs/acceptance.md, J5, M3, M5)."""

import logging
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import cute_grouped_mlp as cgm
from cute_grouped_mlp import kernels
from cute_grouped_mlp.codegen import aot, folders, loading
from cute_grouped_mlp.codegen.spec import Arch, DType, KernelSpec, Pass, TileConfig
from cute_grouped_mlp.kernels import KernelCache

REDUCE = [KernelSpec(Arch.SM90A, Pass.REDUCE, probs=p) for p in (DType.FP32, DType.BF16, DType.FP16)]
SPEC = REDUCE[0]


class FakeStore:
    """A store in memory; building takes a moment and is counted."""

    def __init__(self, seconds=0.0):
        self.root = Path("/nowhere")
        self.seconds = seconds
        self.artifacts, self.built = {}, []

    def get(self, spec):
        return self.artifacts.get(spec)

    def obtain(self, spec):
        missing = spec not in self.artifacts
        if missing:
            time.sleep(self.seconds)
            self.built.append(spec)
            self.artifacts[spec] = SimpleNamespace(path=self.root / spec.name, spec=spec)
        return self.artifacts[spec], missing

    def get_or_build(self, spec):
        return self.obtain(spec)[0]

    def refusal(self):
        return None


@pytest.fixture
def loads(monkeypatch):
    """Loading gives a function that returns its artifact; loads are noted."""
    seen = []

    def load(artifact):
        if getattr(artifact, "broken", False):
            raise cgm.ArtifactUnreadableError(f"{artifact.path} cannot be mapped")
        seen.append(artifact.spec)
        return lambda *args: artifact

    monkeypatch.setattr(loading, "load_callable", load)
    return seen


@pytest.fixture
def cache(loads):
    found = KernelCache()
    found._stores[cgm.settings.cache_dir] = FakeStore()
    return found


def store_of(cache):
    return cache._stores[cgm.settings.cache_dir]


def test_a_miss_compiles_and_a_hit_does_nothing(cache, loads):
    first = cache.get(SPEC)
    assert store_of(cache).built == [SPEC]
    assert cache.origin(SPEC).kind == "jit"
    for _ in range(3):
        assert cache.get(SPEC) is first
    equal = KernelSpec.from_dict(SPEC.to_dict())
    assert equal is not SPEC
    assert cache.get(equal) is first
    assert store_of(cache).built == [SPEC]
    assert loads == [SPEC]


def test_the_store_is_looked_at_before_compiling(cache):
    store_of(cache).get_or_build(SPEC)
    store_of(cache).built.clear()
    cache.get(SPEC)
    assert store_of(cache).built == []
    assert cache.origin(SPEC).kind == "store"
    assert "loaded from the on-disk store" in str(cache.origin(SPEC))


def test_aot_folders_come_first_in_order(cache, monkeypatch):
    class Folder:
        def __init__(self, path):
            self.path = path

        def get(self, spec):
            has = spec == SPEC and self.path.name == "b"
            return SimpleNamespace(path=self.path / spec.name, spec=spec) if has else None

        def lacks(self, spec):
            return f"it is not in {self.path}" if self.path.name != "c" else None

        def mismatch(self):
            return f"{self.path} was built for another ABI" if self.path.name == "c" else None

    monkeypatch.setattr(aot, "open_folder", Folder)
    with cgm.settings.override(aot_dirs=(Path("/a"), Path("/b"), Path("/c")), jit=False):
        assert "not loaded yet, is in the AOT folder /b" in cache.locate(SPEC)
        cache.get(SPEC)
        assert cache.origin(SPEC).kind == "aot"
        assert "AOT folder /b" in cache.locate(SPEC)
        with pytest.raises(cgm.MissingArtifactError) as error:
            cache.get(REDUCE[1])
        for text in (REDUCE[1].name, "not in /a", "another ABI", "cute-grouped-mlp build", "CUTE_GROUPED_MLP_JIT=off"):
            assert text in str(error.value)
        assert error.value.spec == REDUCE[1]


def test_jit_off_makes_a_miss_an_error_and_the_store_still_serves(cache):
    with cgm.settings.override(jit=False):
        with pytest.raises(cgm.MissingArtifactError, match=r"sm90a_bf16_reduce_pfp32.*build --arch sm_90a"):
            cache.get(SPEC)
        assert "missing" in cache.locate(SPEC)
        store_of(cache).get_or_build(SPEC)
        assert cache.get(SPEC)
    assert cache.locate(REDUCE[1]) == "will be compiled at first use"


def test_an_intact_artifact_that_does_not_load_is_left_alone_and_not_compiled_again(cache, caplog):
    store = store_of(cache)
    store.artifacts[SPEC] = there = SimpleNamespace(path=Path("/noexec"), spec=SPEC, broken=True)
    for _ in range(2):
        with pytest.raises(cgm.ArtifactUnreadableError, match="/noexec cannot be mapped"):
            cache.get(SPEC)
    assert store.artifacts[SPEC] is there
    assert store.built == []


def test_who_waited_for_another_process_did_not_compile(cache):
    """A kernel that appeared between the look and the lock came from the store."""
    store = store_of(cache)
    store.get = lambda spec: None
    store.obtain = lambda spec: (SimpleNamespace(path=Path("/by another"), spec=spec), False)
    cache.get(SPEC)
    assert cache.origin(SPEC).kind == "store"
    assert str(cache.origin(SPEC)).startswith("loaded from the on-disk store")


@pytest.mark.parametrize("jit", [True, False])
def test_l3_one_aot_folder_that_cannot_be_used_stops_nothing(cache, tmp_path, caplog, jit):
    """Missing, no manifest, other kinds of garbage: said once, and the kernel comes from the store."""
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    for name, text in (("list", "[]"), ("text", "x"), ("bytes", "\xff"), ("null", '{"variants": null}')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").write_text(text, encoding="latin-1")
    bad = [tmp_path / name for name in ("missing", "file", "empty", "list", "text", "bytes", "null")]
    store = store_of(cache)
    store.get_or_build(SPEC)
    folders._warned.clear()
    with cgm.settings.override(aot_dirs=tuple(bad), jit=jit), caplog.at_level(logging.WARNING, "cute_grouped_mlp"):
        cache.get(SPEC)
        assert cache.origin(SPEC).kind == "store"
        assert "on-disk store" in cache.locate(SPEC)
        if jit:
            cache.get(REDUCE[1])
        else:
            with pytest.raises(cgm.MissingArtifactError) as error:
                cache.get(REDUCE[1])
            for path in (*bad, store.root):
                assert str(path) in str(error.value)
    assert len(caplog.records) == len(bad)


def test_several_missing_kernels_are_built_side_by_side_and_once(cache):
    store_of(cache).seconds = 0.2
    device = torch.device("cpu")
    started = time.perf_counter()
    cache.prepare([*REDUCE, SPEC], device)
    assert time.perf_counter() - started < 0.2 * len(REDUCE)
    assert sorted(s.name for s in store_of(cache).built) == sorted(s.name for s in REDUCE)
    cache.prepare(REDUCE, device)
    assert len(store_of(cache).built) == len(REDUCE)


def test_j8_a_kernel_that_is_being_built_holds_up_no_other(cache):
    """While a thread compiles a kernel, or waits for another process that does, another kernel is found."""
    building, may_end = threading.Event(), threading.Event()
    store = store_of(cache)
    original = store.obtain

    def obtain(spec):
        if spec == REDUCE[0]:
            building.set()
            assert may_end.wait(30)
        return original(spec)

    store.obtain = obtain
    store.artifacts[REDUCE[1]] = SimpleNamespace(path=store.root / REDUCE[1].name, spec=REDUCE[1])
    cache.get(REDUCE[2])
    thread = threading.Thread(target=cache.get, args=(REDUCE[0],))
    thread.start()
    assert building.wait(30)
    try:
        assert cache.get(REDUCE[2]) is not None  # in the process
        assert cache.get(REDUCE[1]) is not None  # on disk
        assert REDUCE[0] not in store.built
    finally:
        may_end.set()
        thread.join()
    assert store.built[-1] == REDUCE[0]


def test_j5_threads_that_want_one_kernel_build_it_once(cache):
    store_of(cache).seconds = 0.1
    results, before = [], threading.active_count()
    threads = [threading.Thread(target=lambda: results.append(cache.get(SPEC))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 8
    assert len(set(map(id, results))) == 1
    assert store_of(cache).built == [SPEC]
    assert threading.active_count() == before


def test_a_build_that_fails_raises_and_can_be_tried_again(cache):
    store, build = store_of(cache), store_of(cache).obtain

    def fail(spec):
        if spec == REDUCE[1]:
            raise cgm.CompileError("no", spec=spec)
        return build(spec)

    store.obtain = fail
    with pytest.raises(cgm.CompileError):
        cache.prepare(REDUCE, torch.device("cpu"))
    store.obtain = build
    cache.prepare(REDUCE, torch.device("cpu"))
    assert cache.get(REDUCE[1])


def test_m3_a_cold_kernel_under_graph_capture_is_an_error_before_anything_runs(cache, monkeypatch):
    device = torch.device("cuda", 0)
    capturing = True
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.setattr(cache, "status", lambda device: None)
    with pytest.raises(cgm.UnsupportedError, match=r"graph.*sm90a_bf16_reduce_pfp32.*once before capturing"):
        cache.prepare(REDUCE, device)
    assert store_of(cache).built == []
    capturing = False
    cache.prepare(REDUCE, device)
    capturing = True
    with pytest.raises(cgm.UnsupportedError, match="the status word"):
        cache.prepare(REDUCE, device)  # its allocation would belong to the graph (M4)
    cache._status._words[device] = torch.zeros(1)
    cache.prepare(REDUCE, device)


def test_clear_forgets_the_process_and_not_the_disk(cache, loads):
    cache.get(SPEC)
    store = store_of(cache)
    generation = cgm.settings.generation
    cache.clear()
    assert cgm.settings.generation > generation
    assert cache.origin(SPEC) is None
    cache._stores[cgm.settings.cache_dir] = store
    cache.get(SPEC)
    assert loads == [SPEC, SPEC]
    assert store.built == [SPEC]


def test_status_word_is_one_per_device_and_cleared_when_read(cache):
    device = torch.device("cpu")
    word = cache.status(device)
    assert (word.shape, word.dtype, word.item()) == ((1,), torch.int32, 0)
    assert cache.status(device) is word
    cache.check_status(device)
    word.fill_(1)
    with pytest.raises(cgm.ShapeError, match="negative or the sizes summed to more"):
        cache.check_status(device)
    cache.check_status(device)
    cache.check_status(torch.device("meta"))  # never used: nothing to read


def test_which_devices_run_kernels(monkeypatch):
    cache = KernelCache()
    capability = {0: (9, 0), 1: (10, 0), 2: (8, 0)}
    monkeypatch.setattr(kernels, "_capability", capability.__getitem__)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability[device.index])
    assert cache.unsupported(torch.device("cuda", 0)) == ()
    assert cache.arch(torch.device("cuda", 0)) is Arch.SM90A
    assert "unverified" in cache.unsupported(torch.device("cuda", 1))[0]
    with cgm.settings.override(sm100="unverified"):
        assert "no SM100 kernels yet" in cache.unsupported(torch.device("cuda", 1))[0]
    assert "8.0" in cache.unsupported(torch.device("cuda", 2))[0]
    assert "CUDA device" in cache.unsupported(torch.device("cpu"))[0]
    with pytest.raises(cgm.UnsupportedError, match="CUDA device"):
        cache.arch(torch.device("cpu"))


def test_m5_size_buckets():
    for groups in (1, 3, 64):
        for power in range(20):
            rows = 1 << power
            bucket = kernels.rows_bucket(rows * groups, groups)
            assert kernels.rows_bucket(rows * groups + groups - 1, groups) == bucket
            assert kernels.rows_bucket(rows * groups - 1, groups) == bucket - 1
            assert kernels.rows_bucket((2 * rows - 1) * groups, groups) == bucket
            assert kernels.bucket_tokens(bucket, groups) == rows * groups
        assert kernels.bucket_tokens(kernels.rows_bucket(groups - 1, groups), groups) >= 1


def test_m5_the_bucket_decides_as_every_t_in_it_does():
    from cute_grouped_mlp.codegen.select import linear_specs

    def chosen(tokens, groups):
        return linear_specs(Arch.SM90A, "bf16", tokens=tokens, groups=groups, in_features=512, out_features=768)

    for groups in (1, 8):
        for tokens in (*range(1, 300, 7), *(p + d for p in (1 << 10, 1 << 13, 1 << 16) for d in (-1, 0, 1))):
            canonical = kernels.bucket_tokens(kernels.rows_bucket(tokens, groups), groups)
            assert chosen(tokens, groups) == chosen(canonical, groups)


def test_grid_is_whole_clusters():
    spec = KernelSpec(Arch.SM90A, Pass.FPROP, tile=TileConfig(128, 128, 2, 1))
    assert kernels.grid(spec, 133) == 132
    assert kernels.grid(spec, 1) == 2
    assert kernels.grid(SPEC, 133) == 133


def test_split_sizes_are_read_as_int32():
    sizes = torch.tensor([5, 0, 7])
    read = kernels.int32_sizes(sizes)
    assert read.dtype is torch.int32
    assert read.tolist() == [5, 0, 7]
    limits = [2**32 + 40, 2**31, 2**31 - 1, -(2**31), -(2**31) - 1, -(2**40), 2**63 - 1]
    cut = [2**31 - 1, 2**31 - 1, 2**31 - 1, -(2**31), -(2**31), -(2**31), 2**31 - 1]
    assert kernels.int32_sizes(torch.tensor(limits)).tolist() == cut
    assert kernels.int32_sizes(torch.stack([sizes, sizes + 1], 1)[:, 0]).tolist() == [5, 0, 7]
    assert kernels.int32_sizes(torch.tensor([-1])).tolist() == [-1]
    int32 = sizes.int()
    assert kernels.int32_sizes(int32) is int32


def test_what_kernels_cannot_read_is_copied():
    good = torch.zeros(8, 8)
    assert kernels.launchable(good) is good
    for t in (good.t(), torch.zeros(65)[1:].view(8, 8), torch.zeros(1, 8).expand(8, 8)):
        copy = kernels.launchable(t)
        assert copy.is_contiguous()
        assert copy.data_ptr() % 16 == 0
        assert torch.equal(copy, t)


@pytest.mark.timeout(300)
def test_real_kernels_are_compiled_stored_and_found_again(tmp_path, caplog):
    """The whole way without a GPU: JIT into a store, from the store, and from an AOT folder."""
    with cgm.settings.override(cache_dir=tmp_path / "store"):
        first = KernelCache()
        with caplog.at_level(logging.INFO, "cute_grouped_mlp"):
            assert callable(first.get(SPEC))
        lines = [r.getMessage() for r in caplog.records if SPEC.name in r.getMessage()]
        assert len(lines) == 1
        assert " s" in lines[0]
        assert first.origin(SPEC).kind == "jit"
        second = KernelCache()
        with cgm.settings.override(jit=False):
            second.get(SPEC)
        assert second.origin(SPEC).kind == "store"
        assert second.origin(SPEC).path == first.origin(SPEC).path
    aot.build_folder([SPEC], tmp_path / "aot", jobs=1)
    with cgm.settings.override(cache_dir=tmp_path / "empty", aot_dirs=(tmp_path / "aot",), jit=False):
        third = KernelCache()
        third.get(SPEC)
        assert third.origin(SPEC).kind == "aot"
        with pytest.raises(cgm.MissingArtifactError):
            third.get(REDUCE[1])
    assert not (tmp_path / "empty").exists()
