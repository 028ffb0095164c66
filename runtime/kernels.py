"""From a :class:`KernelSpec` to something that can be called.

:class:`KernelCache` looks in the process, then in AOT folders, then in the on-disk store, and compiles last.  The rest
of the runtime asks :func:`provider`, which tests and debugging replace with :func:`using`.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from .codegen import loading
from .codegen.spec import Arch, DType, KernelSpec
from .config import settings
from .errors import (
    ArtifactUnreadableError,
    GroupedMLPError,
    MissingArtifactError,
    ShapeError,
    UnsupportedError,
)

if TYPE_CHECKING:  # imported where they are needed: they bring Jinja and file locks
    from .codegen.artifacts import Artifact, ArtifactStore

logger = logging.getLogger("cute_grouped_mlp")

Launch = Callable[..., Any]

#: Names of torch's types in specs.
DTYPES = {torch.bfloat16: DType.BF16, torch.float16: DType.FP16, torch.float32: DType.FP32}
#: Key of ``codegen.spec.NUMERICS`` for unquantised operands of a torch type.
NUMERICS_OF = {torch.bfloat16: "bf16", torch.float16: "fp16"}


_PLACES = {"aot": "AOT folder", "store": "on-disk store", "jit": "on-disk store"}


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a kernel of this process came from.

    Attributes
    ----------
    kind
        ``"aot"``, ``"store"`` or ``"jit"``.
    path
        The artifact's folder.
    seconds
        Time to load it, or to compile and load it.
    """

    kind: str
    path: Path
    seconds: float

    def __str__(self) -> str:
        how = "compiled by this process into the" if self.kind == "jit" else "loaded from the"
        return f"{how} {_PLACES[self.kind]} {self.path} in {self.seconds:.2f} s"


class KernelProvider(Protocol):
    """What the runtime needs to run kernels.  :class:`KernelCache` is the real one."""

    def unsupported(self, device: torch.device) -> tuple[str, ...]:
        """Why no kernel can run on a device; empty if kernels can."""
        ...

    def arch(self, device: torch.device) -> Arch:
        """Architecture to choose specs for."""
        ...

    def sm_count(self, device: torch.device) -> int:
        """Multiprocessors of a device."""
        ...

    def prepare(self, specs: Sequence[KernelSpec], device: torch.device) -> None:
        """Make every kernel ready to launch, or raise before anything is launched."""
        ...

    def get(self, spec: KernelSpec) -> Launch:
        """Return the kernel of a spec."""
        ...

    def status(self, device: torch.device) -> torch.Tensor:
        """Return the device's status word, (1,) int32."""
        ...

    def check_status(self, device: torch.device) -> None:
        """Read the status word (synchronises) and raise if a kernel reported something, as :class:`StatusWords`."""
        ...

    def locate(self, spec: KernelSpec) -> str:
        """Where a kernel of this process came from, or would come from; builds nothing."""
        ...


#: Bits of a status word.
INVALID_SPLITS, OUT_OF_RANGE = 1, 2


class StatusWords:
    """One int32 word per device, into which kernels write what went wrong."""

    def __init__(self) -> None:
        self._words: dict[torch.device, torch.Tensor] = {}

    def __contains__(self, device: torch.device) -> bool:
        return device in self._words

    def get(self, device: torch.device) -> torch.Tensor:
        """Return the word, made at the first use."""
        word = self._words.get(device)
        if word is None:
            with torch.inference_mode(False):  # it outlives the mode of the call that happens to be the first
                word = self._words.setdefault(device, torch.zeros(1, dtype=torch.int32, device=device))
        return word

    def check(self, device: torch.device) -> None:
        """Read the word, clear it, and raise an error that names what was set.

        Raises
        ------
        ShapeError
            If split sizes were invalid, whatever else was set.
        GroupedMLPError
            If an operand was outside of the range of emulation.
        """
        word = self._words.get(device)
        bits = 0 if word is None else int(word.item())
        if word is None or not bits:
            return
        word.zero_()
        problems = [_STATUS[bit].format(device=device) for bit in _STATUS if bits & bit]
        raise (ShapeError if bits & INVALID_SPLITS else GroupedMLPError)("; ".join(problems))


_STATUS = {
    INVALID_SPLITS: "split_sizes on {device}: a size was negative or the sizes summed to more than the number of rows "
    "in some call since the last check; offsets were cut at the number of rows",
    OUT_OF_RANGE: "emulated operands on {device}: in some call since the last check an element times its block's scale "
    "was outside of bfloat16's normal numbers, where the emulation may differ from the recipe's own arithmetic "
    "(settings.check_range = False stops looking)",
}


class KernelCache:
    """The kernels of this process, found or built at their first use.

    A kernel that is in the process costs one dict lookup.  Otherwise it is looked for in ``settings.aot_dirs``, then in
    the on-disk store, and is compiled (and stored) last; ``settings.jit = False`` makes that an error.
    """

    def __init__(self) -> None:
        # By identity: hashing a spec costs about a microsecond, and codegen.select makes one object for equal specs.
        self._by_id: dict[int, tuple[KernelSpec, Launch]] = {}
        self._kernels: dict[KernelSpec, Launch] = {}
        self._origins: dict[KernelSpec, Origin] = {}
        self._locks: defaultdict[KernelSpec, threading.Lock] = defaultdict(threading.Lock)
        self._stores: dict[Path | None, ArtifactStore] = {}
        self._status = StatusWords()

    def unsupported(self, device: torch.device) -> tuple[str, ...]:
        """Why no kernel can run on a device; empty if kernels can."""
        if device.type != "cuda":
            return (f"kernels need a CUDA device, the tensors are on {device}",)
        major, minor = torch.cuda.get_device_capability(device)
        if (major, minor) == (9, 0):
            return ()
        if major == 10:
            if settings.sm100 != "unverified":
                return (
                    "SM100 kernels are compiled but never ran; settings.sm100 = 'unverified' "
                    "(or CUTE_GROUPED_MLP_SM100=unverified) allows them",
                )
            return ("there are no SM100 kernels yet",)
        return (f"compute capability is {major}.{minor}, kernels exist for 9.0",)

    def arch(self, device: torch.device) -> Arch:
        """Architecture to choose specs for.

        Raises
        ------
        UnsupportedError
            If no kernel can run on the device.
        """
        known = device.type == "cuda" and capability(device) == (9, 0)
        if not known and (reasons := self.unsupported(device)):
            raise UnsupportedError(f"a kernel on {device}", reasons)
        return Arch.SM90A

    def sm_count(self, device: torch.device) -> int:
        """Multiprocessors of a CUDA device."""
        return _sm_count(device.index or 0)

    def get(self, spec: KernelSpec) -> Launch:
        """Return the kernel of a spec, loaded or built if need be.

        Raises
        ------
        MissingArtifactError
            If it is not built and may not be built now.
        CompileError, RenderError
            If it cannot be built.
        """
        entry = self._by_id.get(id(spec))
        if entry is not None and entry[0] is spec:
            return entry[1]
        kernel = self._kernels.get(spec)
        if kernel is None:
            self._load([spec])
            kernel = self._kernels[spec]
        return kernel

    def prepare(self, specs: Sequence[KernelSpec], device: torch.device) -> None:
        """Make every kernel and the status word ready, building what is missing side by side.

        Raises
        ------
        MissingArtifactError
            If a kernel is missing and may not be built now, or while a CUDA graph is being captured.
        """
        missing = [spec for spec in dict.fromkeys(specs) if spec not in self._kernels]
        if (
            device.type == "cuda"
            and (missing or device not in self._status)
            and torch.cuda.is_current_stream_capturing()
        ):
            names = ", ".join(spec.name for spec in missing) or "the status word"
            raise UnsupportedError(
                "the first call of a kernel while a CUDA graph is captured",
                (f"not loaded yet: {names}", "run forward and backward once before capturing"),
            )
        self.status(device)
        if missing:
            self._load(missing)

    def _load(self, specs: Sequence[KernelSpec]) -> None:
        """Find kernels on disk; build those that are not there, side by side."""
        rest = [spec for spec in specs if not self._ensure(spec, build=False)]
        if not rest:
            return
        if not settings.jit:
            why = f"{self._searched(rest[0])}, and compiling is off (CUTE_GROUPED_MLP_JIT=off)"
            raise MissingArtifactError(rest[0], why)
        if len(rest) == 1:
            self._ensure(rest[0], build=True)
            return
        with ThreadPoolExecutor(min(len(rest), os.cpu_count() or 1), "cute-grouped-mlp-jit") as pool:
            for done in [pool.submit(self._ensure, spec, build=True) for spec in rest]:
                done.result()

    def _ensure(self, spec: KernelSpec, *, build: bool) -> bool:
        """Have a kernel in the process if it is on disk or may be built; returns whether it is."""
        with self._locks[spec]:  # of several threads that want a kernel one gets it; other kernels are not held up
            if spec not in self._kernels and not self._find(spec) and build:
                self._build(spec)
            return spec in self._kernels

    def _find(self, spec: KernelSpec) -> bool:
        """Load a kernel from an AOT folder or from the store, if it is there and can be loaded."""
        started = time.perf_counter()
        for kind, artifact in self._artifacts(spec):
            try:
                kernel = loading.load_callable(artifact)
            except ArtifactUnreadableError as error:  # its files are what its metadata says: it is left alone
                _say_once(str(error))
                continue
            self._put(spec, kernel, Origin(kind, artifact.path, time.perf_counter() - started))
            return True
        return False

    def _build(self, spec: KernelSpec) -> None:
        """Compile a kernel into the store and load it; the store logs which kernel and how long it took."""
        started = time.perf_counter()
        artifact, compiled = self._store().obtain(spec)
        kernel = loading.load_callable(artifact)
        self._put(spec, kernel, Origin("jit" if compiled else "store", artifact.path, time.perf_counter() - started))

    def _artifacts(self, spec: KernelSpec) -> Iterator[tuple[str, Artifact]]:
        """Look a kernel up in the AOT folders and in the store; a folder that cannot be used is said once."""
        from .codegen import aot

        for folder in settings.aot_dirs:
            try:
                artifact = aot.open_folder(folder).get(spec)
            except GroupedMLPError as error:
                _say_once(str(error))
                continue
            if artifact is not None:
                yield "aot", artifact
        artifact = self._store().get(spec)
        if artifact is not None:
            yield "store", artifact

    def _store(self) -> ArtifactStore:
        from .codegen.artifacts import ArtifactStore

        root = settings.cache_dir
        store = self._stores.get(root)
        return store if store is not None else self._stores.setdefault(root, ArtifactStore(root))

    def _searched(self, spec: KernelSpec) -> str:
        """Name every place that was looked at, and why it did not serve."""
        from .codegen import aot

        reasons: list[str] = []
        for folder in settings.aot_dirs:
            try:
                opened = aot.open_folder(folder)
                reasons.append(opened.lacks(spec) or opened.mismatch() or "")
                if not reasons[-1]:
                    reasons[-1] = f"{opened.read(spec.name).path} cannot be loaded"
            except GroupedMLPError as error:
                reasons.append(str(error))
        store = self._store()
        reasons.append(f"{store.root} is not used: {why}" if (why := store.refusal()) else f"it is not in {store.root}")
        return "; ".join(reasons)

    def _put(self, spec: KernelSpec, kernel: Launch, origin: Origin) -> None:
        self._origins[spec] = origin
        self._by_id[id(spec)] = (spec, kernel)
        self._kernels[spec] = kernel

    def origin(self, spec: KernelSpec) -> Origin | None:
        """Where a kernel of this process came from; None if it was not needed yet."""
        return self._origins.get(spec)

    def locate(self, spec: KernelSpec) -> str:
        """Where a kernel of this process came from, or would come from; builds nothing."""
        origin = self._origins.get(spec)
        if origin is not None:
            return str(origin)
        for kind, artifact in self._artifacts(spec):
            return f"not loaded yet, is in the {_PLACES[kind]} {artifact.path}"
        if settings.jit:
            return "will be compiled at first use"
        return f"missing: {self._searched(spec)}, and compiling is off"

    def status(self, device: torch.device) -> torch.Tensor:
        """Return the device's status word, (1,) int32."""
        return self._status.get(device)

    def check_status(self, device: torch.device) -> None:
        """Read the status word (synchronises) and raise if a kernel reported something, as :class:`StatusWords`."""
        self._status.check(device)

    def clear(self) -> None:
        """Forget every kernel of this process; files on disk stay."""
        self._kernels.clear()
        self._by_id.clear()
        self._origins.clear()
        self._stores.clear()
        settings.touch()


def _say_once(message: str) -> None:
    from .codegen.folders import warn_once

    warn_once(message)


@functools.lru_cache(maxsize=64)
def _sm_count(index: int) -> int:
    return int(torch.cuda.get_device_properties(index).multi_processor_count)


@functools.lru_cache(maxsize=64)
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(torch.device("cuda", index))


def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of a CUDA device, cached by its index."""
    return _capability(torch.cuda.current_device() if device.index is None else device.index)


def rows_bucket(tokens: int, groups: int) -> int:
    """Return the bits of the average rows per group: the only thing about T that a choice of kernels depends on."""
    return (tokens // groups).bit_length()


def bucket_tokens(bucket: int, groups: int) -> int:
    """Return the smallest T of a bucket (at least 1)."""
    return max(1, (1 << bucket >> 1) * groups)


def grid(spec: KernelSpec, sms: int) -> int:
    """CTAs to launch: every multiprocessor, in whole clusters."""
    cluster = 1 if spec.tile is None else spec.tile.cluster_m * spec.tile.cluster_n
    return max(1, sms // cluster) * cluster


def int32_sizes(sizes: torch.Tensor) -> torch.Tensor:
    """Split sizes as kernels read them, int32; of int64 those beyond int32 become its limits, which kernels report.

    One operation, which clamps and converts: the low words alone would take 2^32 + 40 for 40.
    """
    if sizes.dtype is torch.int32:
        return sizes
    limits = _int32_limits.get(sizes.device)
    if limits is None:
        if sizes.is_cuda and torch.cuda.is_current_stream_capturing():  # made now they would belong to the graph
            return sizes.clamp(*_INT32).to(torch.int32)
        with torch.inference_mode(False):
            made = [torch.tensor(limit, dtype=torch.int64, device=sizes.device) for limit in _INT32]
        limits = _int32_limits.setdefault(sizes.device, (made[0], made[1]))
    out = torch.empty(sizes.shape, dtype=torch.int32, device=sizes.device)
    return torch.clamp(sizes, *limits, out=out)


_INT32 = -(2**31), 2**31 - 1
#: The limits of int32 on each device, as tensors: with numbers ``clamp`` does not convert.
_int32_limits: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}


def rows_of(t: torch.Tensor | None) -> torch.Tensor | None:
    """Return probs or scales as kernels read them: (T,), contiguous, in a type that kernels have."""
    if t is None:
        return None
    if t.dim() != 1 or t.dtype not in DTYPES:
        t = t.reshape(-1).to(row_dtype(t))
    return t if t.is_contiguous() else t.contiguous()


def row_dtype(t: torch.Tensor) -> torch.dtype:
    """Return the type in which kernels read probs or scales: their own, or float32 for one that kernels do not have."""
    return t.dtype if t.dtype in DTYPES else torch.float32


def launchable(t: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or a copy where a kernel could not read it: not contiguous, or not aligned to 16 bytes."""
    if t.is_contiguous() and t.data_ptr() % 16 == 0:
        return t
    return t.clone(memory_format=torch.contiguous_format)


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Type of ``torch.autocast`` on a device, or None where it is off."""
    if torch._C._is_any_autocast_enabled() and torch.is_autocast_enabled(device.type):
        return torch.get_autocast_dtype(device.type)
    return None


_NO_GUARD: AbstractContextManager[None] = contextlib.nullcontext()


def device_guard(device: torch.device) -> AbstractContextManager[Any]:
    """Make a CUDA device current while kernels are launched; does nothing where there is only one.

    Make one for each use: threads that share one would give each other's device back.
    """
    return torch.cuda.device(device) if needs_guard(device) else _NO_GUARD


def needs_guard(device: torch.device) -> bool:
    """Whether a device may not be the current one."""
    return device.type == "cuda" and _device_count() > 1


@functools.lru_cache(maxsize=1)
def _device_count() -> int:
    return torch.cuda.device_count()


_provider: KernelProvider = KernelCache()
_watchers: list[Callable[[], None]] = []


def on_new_provider(function: Callable[[], None]) -> None:
    """Call a function whenever the runtime begins to use other kernels.

    Parameters
    ----------
    function
        Called after the change.
    """
    _watchers.append(function)


def _use(provider: KernelProvider) -> None:
    global _provider
    _provider = provider
    settings.touch()
    for function in _watchers:
        function()


def provider() -> KernelProvider:
    """Return the kernels that the runtime uses."""
    return _provider


@contextlib.contextmanager
def using(replacement: KernelProvider) -> Iterator[KernelProvider]:
    """Use other kernels inside a ``with`` block, process-wide; plans made before are not used in it."""
    before = _provider
    _use(replacement)
    try:
        yield replacement
    finally:
        _use(before)
