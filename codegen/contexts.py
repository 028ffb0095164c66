"""What the templates see: every decision about a kernel's shape, as properties of a frozen context.

A template asks ``k`` and decides nothing itself beyond which text to keep.
"""

from __future__ import annotations

from dataclasses import dataclass

from .activations import ACTIVATIONS, Activation
from .signature import FEATURES, gemm_tensors
from .spec import GluLayout, KernelSpec, Pass, Schedule, TileConfig
from .tiles import SmemPlan, math_warpgroups, output_columns, smem_plan

_SWIZZLE = {32: "K_SW32", 64: "K_SW64", 128: "K_SW128"}  # by bytes of a row
_TITLES = {
    Pass.FPROP_ACT: "FC1's forward with its activation",
    Pass.FPROP: "a grouped linear layer's forward",
    Pass.DGRAD_ACT: "FC2's data gradient through the activation",
    Pass.DGRAD: "a grouped linear layer's data gradient",
    Pass.WGRAD: "a grouped linear layer's weight gradient",
}


@dataclass(frozen=True, slots=True)
class GemmContext:
    """Context of the SM90 grouped GEMMs."""

    spec: KernelSpec

    # ------------------------------------------------------------------ what is computed

    @property
    def title(self) -> str:
        """First line of the module's docstring."""
        what = _TITLES[self.spec.kernel]
        return f"{what[0].upper()}{what[1:]}: SM90, {self.spec.numerics}, tile {self.tile}."

    @property
    def activation(self) -> Activation | None:
        """Entry of the activations table; None for a plain GEMM."""
        return None if self.spec.activation is None else ACTIVATIONS[self.spec.activation]

    @property
    def probs(self) -> str | None:
        """cutlass type of the router's probabilities."""
        return None if self.spec.probs is None else self.spec.probs.cutlass

    @property
    def bias(self) -> bool:
        """Whether a bias is added."""
        return self.spec.bias

    @property
    def alpha(self) -> bool:
        """Whether the product of each group has a factor."""
        return self.spec.alpha

    @property
    def store_act(self) -> bool:
        """Whether ``dgrad_act`` recomputes and writes a."""
        return self.spec.store_act

    @property
    def sum_probs(self) -> bool:
        """Whether ``dgrad_act`` writes partial sums of dprobs."""
        return self.spec.sum_probs and self.spec.probs is not None

    @property
    def accumulate(self) -> bool:
        """Whether the output is added to what is there."""
        return self.spec.accumulate

    @property
    def out(self) -> str:
        """cutlass type of a plain GEMM's output."""
        return (self.spec.out or self.spec.types.storage).cutlass

    @property
    def matrix_store(self) -> bool:
        """Whether the output's elements are 2 bytes wide, as matrix stores need."""
        return (self.spec.out or self.spec.types.storage).bits == 16

    @property
    def store_z(self) -> bool:
        """Whether ``fprop_act`` writes z."""
        return self.spec.store_z

    @property
    def varlen_k(self) -> bool:
        """Whether the contraction runs over a group's tokens."""
        return self.spec.kernel.contracts_tokens

    @property
    def operand(self) -> str:
        """cutlass type of both operands."""
        return self.spec.types.operand.cutlass

    @property
    def storage(self) -> str:
        """cutlass type of what is stored."""
        return self.spec.types.storage.cutlass

    @property
    def alignment(self) -> int:
        """Features are a multiple of this."""
        return self.spec.types.alignment

    @property
    def scalar_types(self) -> str:
        """Names that the kernel imports from cutlass."""
        names = {"Boolean", "Float32", "Int32", "Int64", self.operand, self.out}
        if self.probs:
            names.add(self.probs)
        return ", ".join(sorted(names))

    # ------------------------------------------------------------------ tile and threads

    @property
    def tile(self) -> TileConfig:
        """The tile config."""
        assert self.spec.tile is not None  # check() has seen to it
        return self.spec.tile

    @property
    def tile_m(self) -> int:
        """Rows of a CTA's tile."""
        return self.tile.tile_m

    @property
    def tile_n(self) -> int:
        """Accumulator columns of a CTA's tile."""
        return self.tile.tile_n

    @property
    def tile_k(self) -> int:
        """Depth of a mainloop stage."""
        return self.spec.types.tile_k

    @property
    def tile_columns(self) -> str:
        """Columns of the output that a tile covers, as an expression."""
        return "TILE_N" if output_columns(self.spec) == self.tile_n else "TILE_N // 2"

    @property
    def cluster_m(self) -> int:
        """CTAs of a cluster along M: they share B."""
        return self.tile.cluster_m

    @property
    def cluster_n(self) -> int:
        """CTAs of a cluster along N: they share A."""
        return self.tile.cluster_n

    @property
    def cluster_size(self) -> int:
        """CTAs of a cluster."""
        return self.cluster_m * self.cluster_n

    @property
    def pingpong(self) -> bool:
        """Whether two math warpgroups take turns, each with a tile of its own."""
        return self.tile.schedule is Schedule.PINGPONG

    @property
    def warpgroups(self) -> int:
        """Math warpgroups that share a tile."""
        return math_warpgroups(self.tile)

    @property
    def math_warpgroups(self) -> int:
        """Math warpgroups of a CTA."""
        return 2 if self.pingpong else self.warpgroups

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return 128 * (1 + self.math_warpgroups)

    @property
    def _registers(self) -> tuple[int, int]:
        """Registers a thread of the producer and of the math warpgroups: 65,536 for all of them."""
        if self.math_warpgroups == 3:
            return 32, 160
        accumulators = self.tile_m * self.tile_n // (128 * self.warpgroups)
        return (24, 240) if accumulators >= 192 else (40, 232)

    @property
    def producer_registers(self) -> int:
        """Registers of a producer thread."""
        return self._registers[0]

    @property
    def math_registers(self) -> int:
        """Registers of a math thread."""
        return self._registers[1]

    @property
    def band(self) -> int:
        """Cluster tile rows that a wave of CTAs works on together."""
        return 16 // self.cluster_m

    # ------------------------------------------------------------------ shared memory

    @property
    def _smem(self) -> SmemPlan:
        return smem_plan(self.spec)

    @property
    def stages(self) -> int:
        """Mainloop stages."""
        return self._smem.stages

    @property
    def epi_n(self) -> int:
        """Columns of an epilogue sub-tile."""
        return self._smem.epi_n

    @property
    def epi_stages(self) -> int:
        """Staging buffers."""
        return self._smem.epi_stages

    @property
    def z_stages(self) -> int:
        """Buffers of z that ``dgrad_act`` loads ahead; 0 elsewhere."""
        return self._smem.z_stages

    @property
    def subtiles(self) -> int:
        """Epilogue sub-tiles of a tile."""
        return output_columns(self.spec) // self.epi_n

    @property
    def staging_swizzle(self) -> str:
        """Swizzle of the staging buffers: as wide as a row of a sub-tile."""
        return _SWIZZLE[self.epi_n * (self.spec.out or self.spec.types.storage).bits // 8]

    # ------------------------------------------------------------------ operands

    @property
    def a_name(self) -> str:
        """The tensor that is the GEMM's A."""
        return "x" if self.spec.kernel in (Pass.FPROP_ACT, Pass.FPROP) else "dy"

    @property
    def out_name(self) -> str:
        """The output of a plain GEMM."""
        return {Pass.FPROP: "y", Pass.DGRAD: "dx", Pass.WGRAD: "dw"}[self.spec.kernel]

    @property
    def a_major(self) -> str:
        """Dimension along which A is contiguous."""
        return "MN" if self.varlen_k else "K"

    @property
    def b_major(self) -> str:
        """Dimension along which B is contiguous."""
        return "K" if self.spec.kernel in (Pass.FPROP_ACT, Pass.FPROP) else "MN"

    @property
    def glu_box(self) -> bool:
        """Whether B's tile is a box of gate rows and up rows."""
        return self.spec.kernel is Pass.FPROP_ACT and self.halves == 2 and self.spec.glu_layout is GluLayout.CONTIGUOUS

    @property
    def interleaved(self) -> bool:
        """Whether gate and up alternate in blocks of 32 columns."""
        return self.halves == 2 and self.spec.glu_layout is GluLayout.INTERLEAVED32

    @property
    def z_columns_shape(self) -> str:
        """Shape of z's columns as (F, halves)."""
        return "(32, columns // 32), 2" if self.interleaved else f"columns, {self.halves}"

    @property
    def z_columns_stride(self) -> str:
        """Strides of z's columns as (F, halves)."""
        return "(1, 64), 32" if self.interleaved else "1, columns"

    @property
    def gate_register(self) -> str:
        """First accumulator register of the gate in a 16-column step, after those of the atoms before."""
        return "(s * 2 * EPI_STEPS + e) * 8" if self.interleaved else "(s * EPI_STEPS + e) * 8"

    @property
    def up_register(self) -> str:
        """How many registers further the up half lies."""
        return "EPI_STEPS * 8" if self.interleaved else "TILE_N // 4"

    @property
    def b_modes(self) -> int:
        """Modes of one tile of B."""
        return 3 if self.glu_box else 2

    @property
    def a_load(self) -> str:
        """Copy operation that loads A: along N the CTAs of a cluster need the same rows."""
        return _load_op(self.cluster_n)

    @property
    def b_load(self) -> str:
        """Copy operation that loads B: along M the CTAs of a cluster need the same columns."""
        return _load_op(self.cluster_m)

    @property
    def a_place(self) -> str:
        """This CTA's place among those that A is multicast to."""
        return "rank, cute.make_layout(CLUSTER_N)" if self.cluster_n > 1 else "0, cute.make_layout(1)"

    @property
    def b_place(self) -> str:
        """This CTA's place among those that B is multicast to."""
        return "rank, cute.make_layout(CLUSTER_M)" if self.cluster_m > 1 else "0, cute.make_layout(1)"

    @property
    def a_mask(self) -> str:
        """Multicast argument of A's copy."""
        return ", mcast_mask=peers" if self.cluster_n > 1 else ""

    @property
    def b_mask(self) -> str:
        """Multicast argument of B's copy."""
        return ", mcast_mask=peers" if self.cluster_m > 1 else ""

    # ------------------------------------------------------------------ activation

    @property
    def halves(self) -> int:
        """Halves of z: gate and up, or gate alone."""
        return 2 if self.activation is not None and self.activation.glu else 1

    @property
    def half_names(self) -> tuple[str, ...]:
        """Names of the halves in the activations table."""
        return ("gate", "up")[: self.halves]

    @property
    def gradients(self) -> str:
        """Names that receive the gradients of the halves."""
        return ", ".join(f"d{name}" for name in self.half_names)

    @property
    def z_width(self) -> str:
        """Columns of z in terms of F."""
        return "2F" if self.halves == 2 else "F"

    @property
    def _param_names(self) -> tuple[str, ...]:
        return () if self.activation is None else tuple(name for name, _ in self.activation.params)

    def activation_parameters(self, *extra: str) -> str:
        """Parameters of the activation's device function."""
        names = self.half_names + self._param_names + extra
        return _arguments([f"{name}: Float32" for name in names], 0, expand=bool(self._param_names))

    def activation_call(self, indent: int, *extra: str) -> str:
        """Arguments of a call of the activation's device function in a statement indented by ``indent``."""
        halves = [f"{name}[r]" for name in self.half_names]
        params = [f"epilogue.{name}" for name in self._param_names]
        return _arguments([*halves, *params, *extra], indent, expand=bool(params))

    @property
    def act_stores(self) -> list[str]:
        """Copies that store a sub-tile in ``fprop_act``."""
        names = ["z", "act"] if self.store_z else ["act"]
        return [
            f"cute.copy(epilogue.{n}.copy, from_{n}[(None, buffer)], into_{n}[(None, tile.n * SUBTILES + s)])"
            for n in names
        ]

    @property
    def bulk_outputs(self) -> tuple[str, ...]:
        """Fields of the epilogue whose descriptors are prefetched."""
        if self.spec.kernel is Pass.FPROP_ACT:
            return ("z", "act") if self.store_z else ("act",)
        if self.spec.kernel is Pass.DGRAD_ACT:
            return ("z", "dz", "act") if self.store_act else ("z", "dz")
        return ("out",)

    # ------------------------------------------------------------------ launch

    @property
    def parameters(self) -> list[tuple[str, str]]:
        """Names and annotations of ``launch``'s parameters before ``num_ctas``."""
        tensors = [(argument.name, "cute.Tensor") for argument in gemm_tensors(self.spec)]
        return tensors + [(name, "Float32") for name in self._param_names]

    @property
    def parameter_docs(self) -> list[str]:
        """The numpy-style documentation of them."""
        columns = "F" if self.activation else "N"
        lines = [line for argument in gemm_tensors(self.spec) for line in argument.doc(columns)]
        for name in self._param_names:
            lines += [name, "    Parameter of the activation."]
        return lines

    @property
    def fake_extents(self) -> list[str]:
        """Statements that define the symbolic extents."""
        names = {extent for argument in gemm_tensors(self.spec) for extent in argument.shape}
        lines = [f"{name} = cute.sym_int(divisibility={self.alignment})" for name in FEATURES if name in names]
        return lines + (["n_tiles = cute.sym_int()"] if "n_tiles" in names else [])

    @property
    def fake_tensors(self) -> list[str]:
        """Expressions of the fake arguments before ``num_ctas``."""
        return [argument.fake for argument in gemm_tensors(self.spec)] + ["Float32(1.0)" for _ in self._param_names]


@dataclass(frozen=True, slots=True)
class ReduceContext:
    """Context of the reduction over partial sums."""

    spec: KernelSpec

    @property
    def title(self) -> str:
        """First line of the module's docstring."""
        return "Deterministic sum of partial sums: dp over the tile columns of dgrad_act."

    @property
    def out(self) -> str:
        """cutlass type of the sum."""
        assert self.spec.probs is not None  # render() has seen to it
        return self.spec.probs.cutlass

    @property
    def scalar_types(self) -> str:
        """Names that the kernel imports from cutlass."""
        return ", ".join(sorted({"Float32", "Int32", "Int64", self.out}))


@dataclass(frozen=True, slots=True)
class BiasGradContext:
    """Context of the column sums that give a bias's gradient."""

    spec: KernelSpec

    @property
    def title(self) -> str:
        """First line of the module's docstring."""
        return f"A bias's gradient: {self.spec.numerics}."

    @property
    def storage(self) -> str:
        """cutlass type of dy and of the bias."""
        return self.spec.types.storage.cutlass

    @property
    def out(self) -> str:
        """cutlass type of db."""
        return (self.spec.out or self.spec.types.storage).cutlass

    @property
    def accumulate(self) -> bool:
        """Whether db is added to what is there."""
        return self.spec.accumulate

    @property
    def scale(self) -> str | None:
        """cutlass type of the bias's scale."""
        return None if self.spec.probs is None else self.spec.probs.cutlass

    @property
    def sum_scale(self) -> bool:
        """Whether the gradient of the scale is summed as well."""
        return self.spec.sum_probs and self.scale is not None

    @property
    def scalar_types(self) -> str:
        """Names that the kernel imports from cutlass."""
        names = {"Float32", "Int32", "Int64", self.storage, self.out}
        if self.scale is not None:
            names.add(self.scale)
        return ", ".join(sorted(names))

    @property
    def parameters(self) -> list[tuple[str, str]]:
        """Names and annotations of the kernel's parameters."""
        names = ["dy", "scale" if self.scale else "", "bias" if self.sum_scale else "", "sizes", "db"]
        names.append("ds_partial" if self.sum_scale else "")
        return [(name, "cute.Tensor") for name in names if name]


def _arguments(arguments: list[str], indent: int, *, expand: bool) -> str:
    """Arguments between parentheses, on one line or expanded to a line each."""
    if not expand:
        return ", ".join(arguments)
    inner = " " * (indent + 4)
    return "\n" + "".join(f"{inner}{argument},\n" for argument in arguments) + " " * indent


def _load_op(peers: int) -> str:
    return "CopyBulkTensorTileG2SMulticastOp" if peers > 1 else "CopyBulkTensorTileG2SOp"
