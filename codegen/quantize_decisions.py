"""What is decided for kernels that quantise: what they compute, how it is divided, and the tensors that they take."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

from .signature import TensorArgument
from .spec import Element, KernelSpec, Pass, Quantization, Scaling

#: Signs of the Hadamard transform as bits, a 1 for each row that is negated: ``quantizers.nvfp4.HADAMARD_SIGNS``.
_HADAMARD_SIGNS = 0xD7E8


def shared_bytes(spec: KernelSpec) -> int:
    """Bytes of shared memory that a kernel asks for: two of pieces, of what warps tell one another, and of tiles."""
    k = QuantizeDecisions(spec)
    words = 8 * 16 * (1 if k.two_dimensional else 4)
    runs = k.piece_rows * (4 * 128 // k.block + 4) if k.runs else 0
    return 2 * (8 * 256 * 16 + (4 * words if k.exchanges else 0) + (k.tile_bytes if k.tiles else 0) + runs)


def quantize_tensors(spec: KernelSpec) -> tuple[TensorArgument, ...]:
    """Return the tensor arguments of ``quantize`` and ``amax``, in order."""
    k = QuantizeDecisions(spec)
    rows = ("groups", "rows") if k.batched else ("tokens",)
    block = k.block

    def of_groups(name: str, meaning: str) -> TensorArgument:
        return TensorArgument(name, "Float32", ("groups",), meaning, vectors=False)

    found = [TensorArgument("x", "BFloat16", (*rows, "columns"), "what is read")]
    if not k.batched:
        found.append(TensorArgument("sizes", "Int32", ("groups",), "rows of each group", strided=True))
    if k._reads_amax or k.raises_amax:
        meaning = (
            "raised to the largest magnitude of each group" if k.raises_amax else "largest magnitude of each group"
        )
        found.append(of_groups("amax", meaning))
    if k.rht:
        meaning = "raised to the same after the transform" if k.raises_amax else "the same after the transform"
        found.append(of_groups("column_amax", meaning))
    if k.scaling == "per_tensor":
        found.append(of_groups("scale", "factor of each group"))
    if k.stochastic:
        found.append(TensorArgument("rng", "Int64", ("2",), "seed and offset of the random bits", vectors=False))
    matrix = rows[:-1]
    slots = (*matrix, f"slots / {block}" if not k.emulate else "slots")
    if k.rowwise:
        found.append(_data("rowwise", k, (*rows, "columns")))
        if k.stores_scales:
            scales = slots if k.row_scales == "square" else rows
            shape = (*scales, f"columns / {block}")
            if k.row_scales == "outer":
                shape = (*matrix, shape[-1], shape[-2])
            found.append(_scales("rowwise", k, shape))
    if k.columnwise:
        transposed = k.transposed
        found.append(
            _data("columnwise", k, (*matrix, "columns", "slots") if transposed else (*matrix, "slots", "columns"))
        )
        if k.stores_scales:
            across = f"columns / {block}" if k.column_scales == "square" else "columns"
            first = transposed and k.column_scales != "outer"
            shape = (across, f"slots / {block}") if first else (f"slots / {block}", across)
            found.append(
                _scales("columnwise", k, (*matrix, *shape), vectors=k.column_scales == "outer" or not transposed)
            )
    if k.slot_sizes:
        found.append(TensorArgument("slot_sizes", "Int32", ("groups",), "gets the slots of each group", vectors=False))
    if not k.batched or k.ranged:
        bits = ["bit 1 if sizes are not valid"] if not k.batched else []
        bits += ["bit 2 if a product is no normal bf16 number"] if k.ranged else []
        found.append(TensorArgument("status", "Int32", ("1",), f"gets {', '.join(bits)}", vectors=False))
    return tuple(found)


def _data(name: str, k: QuantizeDecisions, shape: tuple[str, ...]) -> TensorArgument:
    if k.emulate:
        return TensorArgument(name, "BFloat16", shape, "elements times the scales of their blocks")
    if k.bits == 4:
        return TensorArgument(name, "Uint8", (*shape[:-1], f"{shape[-1]} / 2"), "elements, two to a byte")
    return TensorArgument(name, "Uint8", shape, f"elements, {k.element}")


def _scales(name: str, k: QuantizeDecisions, shape: tuple[str, ...], vectors: bool = False) -> TensorArgument:
    dtype = "Float32" if k.scaling == "block_fp8" else "Uint8"
    return TensorArgument(f"{name}_scale", dtype, shape, "scales of the blocks", vectors=vectors)


@dataclass(frozen=True, slots=True)
class QuantizeDecisions:
    """Decisions for ``quantize`` and ``amax``."""

    spec: KernelSpec

    @property
    def _q(self) -> Quantization:
        assert self.spec.quantization is not None  # spec.check_quantization() has seen to it
        return self.spec.quantization

    @property
    def _measures(self) -> bool:
        return self.spec.kernel is Pass.AMAX

    # ------------------------------------------------------------------ what is computed

    @property
    def scaling(self) -> str | None:
        """Which elements share a scale."""
        return None if self._q.scaling is None else self._q.scaling.value

    @property
    def element(self) -> str | None:
        """Format of elements."""
        return None if self._q.element is None else self._q.element.value

    @property
    def batched(self) -> bool:
        """Whether groups are matrices of equal size."""
        return self._q.batched

    @property
    def rowwise(self) -> bool:
        """Whether rows are quantised."""
        return self._q.rowwise and not self._measures

    @property
    def columnwise(self) -> bool:
        """Whether columns are quantised."""
        return self._q.columnwise and not self._measures

    @property
    def emulate(self) -> bool:
        """Whether results are bf16 numbers."""
        return self._q.emulate

    @property
    def rht(self) -> bool:
        """Whether columns are transformed first."""
        return self._q.rht

    @property
    def stochastic(self) -> bool:
        """Whether elements are rounded by chance."""
        return self._q.stochastic

    @property
    def two_dimensional(self) -> bool:
        """Whether blocks are square."""
        return self._q.two_dimensional

    @property
    def power_of_two(self) -> bool:
        """Whether scales of blocks of 128 are powers of two."""
        return self._q.power_of_two

    @property
    def block(self) -> int:
        """Elements along one side of a block."""
        return 1 if self._q.scaling is None else self._q.scaling.block

    @property
    def largest(self) -> float:
        """Largest number of the format."""
        assert self._q.element is not None  # spec.check_quantization() has seen to it
        return self._q.element.largest

    @property
    def largest_exponent(self) -> int:
        """Exponent of the largest number, whose mantissa is 1.75 in E4M3 and E5M2."""
        return math.frexp(self.largest)[1] - 1

    @property
    def bits(self) -> int:
        """Width of what is stored for an element."""
        return 16 if self.emulate else 4 if self._q.element is Element.E2M1 else 8

    def bytes(self, elements: str) -> str:
        """Expression of the bytes that a number of elements take."""
        return {16: f"({elements}) * 2", 8: f"({elements})", 4: f"(({elements}) >> 1)"}[self.bits]

    @property
    def uniform(self) -> bool:
        """Whether a lane's elements share a scale."""
        return self.two_dimensional or self._q.scaling is Scaling.PER_TENSOR

    @property
    def _reads_amax(self) -> bool:
        """Whether scales follow from the amax of a group's rows."""
        return self._q.scaling is Scaling.NVFP4 and (self.rowwise or not self.rht)

    @property
    def raises_amax(self) -> bool:
        """Whether amaxes of groups are raised."""
        return self._measures or self._q.amax

    @property
    def ranged(self) -> bool:
        """Whether products may leave bf16's normal numbers: NVFP4's and elements alone cannot."""
        return self.emulate and self._q.scaling in (Scaling.MXFP8, Scaling.BLOCK_FP8)

    @property
    def slot_sizes(self) -> bool:
        """Whether the slots of groups are told."""
        return self.columnwise and not self.batched

    @property
    def transposed(self) -> bool:
        """Whether columnwise data has the columns first."""
        return not self.emulate and self._q.scaling is not Scaling.MXFP8

    # ------------------------------------------------------------------ how it is divided

    @property
    def exchanges(self) -> bool:
        """Whether warps tell one another amaxes, because a block has more rows than the 16 of a warp."""
        return self.block > 16 and (self.columnwise or self.two_dimensional)

    @property
    def team(self) -> int:
        """Warps below one another in a piece: those that share blocks, or whose bytes of a column are neighbours."""
        if self.exchanges:
            return self.block // 16
        return 8 if self.columnwise and self.transposed else 1

    @property
    def tiles(self) -> bool:
        """Whether a piece is turned in shared memory."""
        return self.columnwise and self.transposed

    @property
    def tile_scales(self) -> bool:
        """Whether the scales of its columns are too: bytes of neighbouring blocks."""
        return self.tiles and self.code

    @property
    def runs(self) -> bool:
        """Whether the row scales of neighbouring pieces are written together: a piece has 8 bytes of a row."""
        return self.tile_scales and self.rowwise

    @property
    def stores_rows(self) -> bool:
        """Whether lanes write pieces of rows."""
        return self.rowwise or not self.tiles

    @property
    def scale_stores(self) -> bool:
        """Whether scales are written one by one."""
        return (self._scales == "each" and (self.rowwise or self.tiles)) or (self._scales == "outer" and self.rowwise)

    @property
    def piece_rows(self) -> int:
        """Rows of a piece."""
        return 16 * self.team

    @property
    def line_bytes(self) -> int:
        """A column of a piece in shared memory; 8 bytes more than its data, an odd multiple of what a lane writes."""
        return self.piece_rows * self.bits // 8 + 8

    @property
    def tile_bytes(self) -> int:
        """A piece in shared memory, columns first, and its scales."""
        return 128 * (self.line_bytes + (self.team if self.tile_scales else 0))

    @property
    def meets(self) -> bool:
        """Whether warps of a team wait for one another."""
        return self.exchanges or self.tiles

    @property
    def outers(self) -> bool:
        """Whether there are scales of a second level."""
        return self._q.scaling is Scaling.NVFP4

    @property
    def cleans(self) -> bool:
        """Whether signs are copied from what was read, where NaN may have one."""
        return self._q.scaling is Scaling.NVFP4 and (self.rowwise or not self.rht)

    @property
    def ctas_per_sm(self) -> int:
        """CTAs of a multiprocessor, which bounds the registers of a thread."""
        if self._measures:
            return 2 if self.rht else 3
        return 2

    @property
    def row_steps(self) -> int:
        """Exchanges between the lanes that share a block of a row."""
        return (self.block // 8).bit_length() - 1

    @property
    def row_amaxes(self) -> bool:
        """Whether blocks are pieces of rows."""
        return self.rowwise and not self.uniform

    @property
    def column_block_amaxes(self) -> bool:
        """Whether blocks are pieces of columns."""
        return self.columnwise and not self.uniform

    @property
    def lane_amaxes(self) -> bool:
        """Whether the largest magnitude of all of a lane's elements is wanted."""
        return self.two_dimensional or self.raises_amax

    @property
    def column_amaxes(self) -> bool:
        """Whether the largest magnitudes of a lane's columns are wanted."""
        return self.column_block_amaxes or self.lane_amaxes

    @property
    def packs(self) -> bool:
        """Whether numbers are rounded to bf16."""
        nearest = self._q.element is Element.E2M1 and not self.stochastic
        return self.rht or (not self._measures and (self.emulate or nearest))

    @property
    def frees_registers(self) -> bool:
        """Whether random words, or without a transform elements, leave their registers between the directions."""
        packed = self._q.scaling is Scaling.NVFP4 and self.shares and not self.rht
        return (self.stochastic or packed) and self.rowwise and self.columnwise

    @property
    def deep(self) -> bool:
        """Whether two pieces are fetched ahead, one into the buffer of the piece that is in registers.

        Others would spill: NVFP4's kernels, and those that look at each product's range in groups of rows.
        """
        return self._q.scaling is not Scaling.NVFP4 and not (self.ranged and not self.batched)

    @property
    def saves_words(self) -> bool:
        """Whether lanes write words to shared memory, four at a time."""
        return (self.frees_registers and self.rht) or (self.exchanges and not self.two_dimensional)

    @property
    def permutes(self) -> bool:
        """Whether bytes of words are put in another order."""
        return self.row_amaxes or self.stochastic or self.bits == 4

    @property
    def amaxes(self) -> bool:
        """Whether any are."""
        return self.row_amaxes or self.column_amaxes

    # ------------------------------------------------------------------ scales

    @property
    def shares(self) -> bool:
        """Whether lanes that share blocks compute a part of their scales each, and tell one another the factors."""
        return self.stores_scales and not self.uniform

    @property
    def sharers(self) -> int:
        """Lanes that do so for blocks of rows."""
        return min(8, self.block // 8)

    @property
    def column_words(self) -> int:
        """Words of two columns whose scales a lane computes."""
        return 2 if self.shares else 4

    @property
    def value(self) -> bool:
        """Whether a scale's value is needed."""
        return self._q.scaling is not Scaling.PER_TENSOR and (self.emulate or self._q.scaling is Scaling.BLOCK_FP8)

    @property
    def code(self) -> bool:
        """Whether scales are stored as bytes."""
        return self.stores_scales and self._q.scaling is not Scaling.BLOCK_FP8

    @property
    def stores_scales(self) -> bool:
        """Whether scales of blocks are stored."""
        return not self.emulate and self._q.scaling is not Scaling.PER_TENSOR

    @property
    def _scales(self) -> str:
        if not self.stores_scales:
            return "none"
        if self._q.scaling is not Scaling.BLOCK_FP8:
            return "each"
        return "square" if self.two_dimensional else "outer"

    @property
    def row_scales(self) -> str:
        """How scales of rows are stored.

        "each": one a block and row, those of a row side by side.  "outer": those of a block of columns side by side.
        "square": one a square block.  "none": not at all.
        """
        return self._scales

    @property
    def column_scales(self) -> str:
        """The same of columns."""
        return self._scales

    def scale_of(self, factor: str, value: str, code: str) -> str:
        """Arguments of a scale."""
        fields = [factor]
        fields += [value] if self.value else []
        fields += [code] if self.code else []
        fields += ["risky"] if self.ranged else []
        return ", ".join(fields)

    @property
    def constants(self) -> list[str]:
        """Statements that define constants of the recipe."""
        q = self._q
        smallest = {Element.E4M3: -9, Element.E5M2: -16, Element.E2M1: -1}
        assert q.element is not None  # spec.check_quantization() has seen to it
        widest = math.frexp(self.largest)[1]
        found = []
        if q.scaling is Scaling.MXFP8:
            inverse = struct.unpack("f", struct.pack("f", 2.0**q.margin / self.largest))[0]
            headroom = f"2^{q.margin} / " if q.margin else "1 / "
            found.append(f"INVERSE_LARGEST = {inverse!r}  # {headroom}{self.largest}, as fp32 has it")
            if self.ranged:
                codes = (127 - 126 - smallest[q.element], 254 + 1 - widest)
                found.append(f"SAFE_CODES = {codes}  # between these no product leaves bf16's normal numbers")
        if q.scaling is Scaling.NVFP4:
            found.append("LARGEST = 6.0 * 448.0")
            found.append("FP32_MAX = 3.4028234663852886e38")
        if q.scaling is Scaling.BLOCK_FP8:
            if not q.power_of_two:
                found.append(f"LARGEST = {self.largest}")
                found.append("BF16_MAX = 3.3895313892515355e38")
            if self.ranged:
                scales = f"(2.0**{-126 - smallest[q.element]}, 2.0**{128 - widest})"
                found.append(f"SAFE_SCALES = {scales}  # between these no product leaves bf16's normal numbers")
        if self.ranged:
            found.append("OUT_OF_RANGE = 2")
        return found

    @property
    def hadamard_signs(self) -> str:
        """Rows that the transform negates, as bits."""
        return f"0x{_HADAMARD_SIGNS:X}"
