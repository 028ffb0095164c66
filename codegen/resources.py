"""What a compiled kernel uses: registers, spills, shared memory, tensor core instructions.

Read from what the compiler leaves behind: ptxas' remarks, the PTX and the host code's IR.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import Any

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_REGISTERS = re.compile(r"Used (\d+) registers")
_STATIC_SMEM = re.compile(r"(\d+) bytes smem")
_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_MMA = re.compile(r"^\s*(?:@\S+\s+)?((?:wgmma\.mma_async|tcgen05\.mma|mma\.sync)[.\w:]*)", re.MULTILINE)
# The host code fills a cudaLaunchConfig_t; its field 2 is the dynamic shared memory.
_LAUNCH_SMEM = re.compile(
    r"(%\w+) = llvm\.getelementptr %\w+\[0, 2\] : \(!llvm\.ptr\) -> !llvm\.ptr, "
    r"!llvm\.struct<\(array<3 x i32>, array<3 x i32>, i64, ptr, ptr, i32\)>\s*\n"
    r"\s*llvm\.store (%\w+), \1 : i64"
)


@dataclass(frozen=True, slots=True)
class ResourceReport:
    """Resources of a compiled kernel.

    Attributes
    ----------
    registers
        Registers a thread starts with (``setmaxregister`` moves them between warps later).
    spill_stores, spill_loads, stack
        Bytes a thread spills to, and reserves in, local memory.
    smem
        Bytes of shared memory of a CTA, dynamic and static; None if the host code computes it at run time.
    c7512
        Count of ptxas' warning C7512: wgmma instructions were serialised.  Should be 0.
    c7519
        Count of ptxas' warning C7519: wgmma instructions were serialised behind an injected ``warpgroup.arrive``.
        Should be 0: it cost a BF16 wgrad 40 % on an H200.
    mma
        The distinct tensor core instructions in the PTX, sorted.
    tensormap_replaces
        Count of descriptor rewrites in the PTX.  Should be 0.
    seconds
        Time to compile.
    """

    registers: int
    spill_stores: int
    spill_loads: int
    stack: int
    smem: int | None
    c7512: int
    c7519: int
    mma: tuple[str, ...]
    tensormap_replaces: int
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {**dataclasses.asdict(self), "mma": list(self.mma)}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> ResourceReport:
        """Inverse of :meth:`to_dict`; raises TypeError or KeyError if a field is missing or unknown."""
        return cls(**{**data, "mma": tuple(data["mma"])})


def read_report(*, log: str, ptx: str, ir: str, seconds: float) -> ResourceReport:
    """Collect the report from the compiler's outputs.

    Parameters
    ----------
    log
        Standard error of a compilation with ``remarks{ptx}``.
    ptx, ir
        PTX, and MLIR text of the lowered module.
    seconds
        Time to compile.

    Raises
    ------
    ValueError
        If the log has no remarks: a report that says 0 must mean 0.
    """
    log = _COLOUR.sub("", log)
    registers = [int(n) for n in _REGISTERS.findall(log)]
    spills = [tuple(map(int, groups)) for groups in _SPILLS.findall(log)]
    if not registers or not spills:
        raise ValueError("the compiler's output has no ptxas remarks (registers and spills)")
    return ResourceReport(
        registers=max(registers),
        spill_stores=sum(stores for _, stores, _ in spills),
        spill_loads=sum(loads for _, _, loads in spills),
        stack=max(stack for stack, _, _ in spills),
        smem=_shared_memory(log, ir),
        c7512=log.count("C7512"),
        c7519=log.count("C7519"),
        mma=tuple(sorted(set(_MMA.findall(ptx)))),
        tensormap_replaces=ptx.count("tensormap.replace"),
        seconds=round(seconds, 3),
    )


def _shared_memory(log: str, ir: str) -> int | None:
    static = max((int(n) for n in _STATIC_SMEM.findall(log)), default=0)
    dynamic = []
    for match in _LAUNCH_SMEM.finditer(ir):
        # SSA names start anew in each function: the definition is the last one before the use.
        definition = re.compile(rf"{match[2]} = llvm\.mlir\.constant\((\d+) : i64\)")
        found = [int(n) for n in definition.findall(ir, 0, match.start())]
        if not found:
            return None
        dynamic.append(found[-1])
    return static + max(dynamic) if dynamic else None
