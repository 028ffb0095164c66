"""What the templates of kernels that quantise see: decisions, and the text of their arguments."""

from __future__ import annotations

import dataclasses
import textwrap
from dataclasses import dataclass

from .quantize_decisions import QuantizeDecisions, quantize_tensors
from .signature import TensorArgument
from .spec import Scaling

_TITLES = {
    Scaling.MXFP8: "MXFP8",
    Scaling.NVFP4: "NVFP4",
    Scaling.BLOCK_FP8: "block FP8",
    Scaling.PER_TENSOR: "per-tensor FP8",
}


@dataclass(frozen=True, slots=True)
class QuantizeContext(QuantizeDecisions):
    """Context of ``quantize`` and ``amax``."""

    @property
    def title(self) -> str:
        """First line of the module's docstring."""
        if self._measures:
            return f"Largest magnitudes of {'matrices' if self.batched else 'groups'} of rows: SM90."
        assert self._q.scaling is not None  # spec.check_quantization() has seen to it
        how = "quantised and written as bf16 numbers" if self.emulate else "quantised"
        return f"A tensor {how}: SM90, {_TITLES[self._q.scaling]}, {self.element}."

    @property
    def summary(self) -> str:
        """What is computed, for the module's docstring."""
        tensors = ", ".join(
            f"{t.name} {_shape(t)}".replace(" ", "\u00a0")
            for t in quantize_tensors(self.spec)
            if t.name not in ("slot_sizes", "status")
        )
        if self._measures:
            text = (
                "For each group g:  amax[g] = max(amax[g], |x|) over the group's rows, in which NaN counts for nothing"
            )
            if self.rht:
                text += "\n                   column_amax[g] the same of the group's rows transformed, 16 at a time"
        elif self.two_dimensional:
            text = f"Each {self.block}x{self.block} block of a group has a scale, the same in both directions."
        elif self.scaling == "per_tensor":
            text = "Each group has a scale, which is given."
        else:
            sides = ["rowwise of 1"] * self.rowwise + ["columnwise of 1"] * self.columnwise
            text = f"Each {self.block} neighbours have a scale, {' and '.join(s.removesuffix(' of 1') for s in sides)}."
        if self.columnwise:
            text += "\nColumnwise each group is filled up with zeros to its slots; slots past the last group are zero."
        if self.rowwise and not self.batched:
            text += "\nRows past sum(S) come out 0."
        lines = textwrap.wrap(f"{tensors}.", 112, break_long_words=False)
        return f"{text}\n\n" + "\n".join(f"    {line}" for line in lines).replace("\u00a0", " ")

    @property
    def scalar_types(self) -> str:
        """Names that the kernel imports from cutlass."""
        names = {"BFloat16", "Boolean", "Float32", "Int32", "Int64", "Uint32", "Uint8"}
        names |= {"Uint64"} if self.stochastic else set()
        return ", ".join(sorted(names))

    @property
    def fake_functions(self) -> str:
        """Names that the kernel imports from the DSL's runtime."""
        names = ["make_fake_compact_tensor", "make_fake_stream"]
        return ", ".join(names if self.batched else [*names, "make_fake_tensor"])

    @property
    def work(self) -> str:
        """Function that works on a piece."""
        return "measure" if self._measures else "quantize"

    @property
    def work_parameters(self) -> list[str]:
        """Parameters of the function that works on a piece."""
        names = ["t: Tensors", "piece: Piece", "shape: Shape", "words: cute.Tensor"]
        names += ["outers"] if self.outers else []
        names += ["seed: Seed"] if self.stochastic else []
        names += [f"shared: {'cute.Tensor' if self.two_dimensional else 'Int32'}"] if self.exchanges else []
        names += ["tile: Int32"] if self.tiles else []
        names += ["buffer: Int32"] if self.frees_registers else []
        names += ["run: Run"] if self.runs else []
        return names

    @property
    def work_arguments(self) -> str:
        """Arguments of the function that works on a piece."""
        given = {
            "t": "tensors",
            "shared": "shared[(turn, None, None)]" if self.two_dimensional else "shared + turn * SHARED_BYTES",
            "tile": "tiles + turn * TILE_BYTES",
            "buffer": "mine + turn * BUFFER_BYTES",
        }
        names = [name.split(":")[0] for name in self.work_parameters]
        return ", ".join(given.get(name, name) for name in names)

    def writer_parameters(self, direction: str) -> list[str]:
        """Parameters of the functions that write a direction."""
        names = ["t: Tensors", "words: cute.Tensor", "piece: Piece", "place: Place", "shape: Shape"]
        names += ["scale: Scale"] if self.uniform else []
        names += ["outer: Outer"] if self.outers and not self.uniform else []
        names += ["noise: cute.Tensor"] if self.stochastic else []
        names += ["outside: cute.Tensor"] if self.ranged else []
        names += ["shared: Int32"] if self.exchanges and not self.uniform and direction == "columns" else []
        names += ["tile: Int32"] if self.tiles and direction == "columns" else []
        names += ["run: Run"] if self.runs else []
        return names

    def writer_arguments(self, direction: str) -> str:
        """Arguments of the functions that write a direction."""
        given = {"outer": f"outers[{('rows', 'columns').index(direction)}]"}
        names = [name.split(":")[0] for name in self.writer_parameters(direction)]
        return ", ".join(given.get(name, name) for name in names)

    @property
    def tensor_parameters(self) -> list[tuple[str, str]]:
        """Names and annotations of the tensors that work on a piece needs."""
        schedule = {"x", "sizes", "slot_sizes"} if self.ranged else {"x", "sizes", "slot_sizes", "status"}
        schedule |= {"rng"}
        return [(t.name, "cute.Tensor") for t in quantize_tensors(self.spec) if t.name not in schedule]

    @property
    def _slotted(self) -> bool:
        """Whether slots matter."""
        return self.columnwise or self.row_scales == "square"

    @property
    def parameters(self) -> list[tuple[str, str]]:
        """Names and annotations of the kernel's parameters."""
        found = [(t.name, "cute.Tensor") for t in quantize_tensors(self.spec)]
        if self._slotted:
            found.append(("slots", "Int32"))
            if not self.batched:
                found.append(("alignment", "Int32"))
        return found

    @property
    def kernel_call(self) -> str:
        """Call of the kernel, on one line where it fits."""
        names = [name for name, _ in self.parameters]
        arguments = ", ".join(names)
        if len(f"    kernel({arguments}).launch(") <= 120:
            return f"kernel({arguments})"
        if len(f"        {arguments}") <= 120:
            return f"kernel(\n        {arguments}\n    )"
        return "kernel(\n" + "".join(f"        {name},\n" for name in names) + "    )"

    @property
    def parameter_docs(self) -> list[str]:
        """The numpy-style documentation of them."""
        lines = []
        for t in quantize_tensors(self.spec):
            layout = "any stride" if t.strided else "contiguous"
            lines += [t.name, f"    {_shape(t)} {t.dtype}, {layout}: {t.meaning}."]
        if self._slotted:
            lines += [
                "slots",
                f"    Rows of {'a matrix' if self.batched else 'the tensor'} in the columnwise direction.",
            ]
            if not self.batched:
                lines += ["alignment", "    Slots of a group are a multiple of this."]
        return lines

    @property
    def columns_mode(self) -> int:
        """Mode of x that is its columns."""
        return 2 if self.batched else 1

    @property
    def extents(self) -> str:
        """Extents of the problem."""
        if self.batched:
            return f"x.shape[0], x.shape[1], x.shape[2], {'slots' if self._slotted else 'x.shape[1]'}"
        slots = "slots, alignment" if self._slotted else "x.shape[0], Int32(1)"
        return f"sizes.shape[0], x.shape[0], x.shape[1], {slots}"

    @property
    def slots_extent(self) -> str:
        """Slots of all groups or matrices."""
        return "slots * x.shape[0]" if self.batched else "slots"

    @property
    def locate_arguments(self) -> str:
        """Arguments of the function that finds a piece."""
        names = ["index", "step"] if self.runs else ["index"]
        names += [] if self.batched else ["window", "sizes"]
        return ", ".join([*names, "shape"] if self.batched else [*names, "shape", "status"])

    @property
    def divisor(self) -> int:
        """What the columns are a multiple of: 16 bytes, and for MXFP8 and NVFP4 a block."""
        return max(8, self.block if self.block < 128 else 8)

    @property
    def fake_extents(self) -> list[str]:
        """Statements that define symbolic extents beyond rows and columns."""
        names = {extent for t in quantize_tensors(self.spec) for extent in t.shape}
        return [f"{name} = cute.sym_int()" for name in ("groups", "slots") if name in names]

    @property
    def fake_tensors(self) -> list[str]:
        """Expressions of the fake arguments."""
        names = {"tokens": "rows", **{name: name for name in ("groups", "rows", "slots", "columns", "1", "2")}}
        found = []
        for t in quantize_tensors(self.spec):
            extents = tuple(names.get(extent, "cute.sym_int()") for extent in t.shape)
            found.append(dataclasses.replace(t, shape=extents).fake)
        return found + ["Int32(1)"] * (len(self.parameters) - len(found)) + ["Int32(1)"]


def _shape(t: TensorArgument) -> str:
    letters = {"tokens": "T", "groups": "G", "rows": "R", "columns": "C", "slots": "P"}
    extents = []
    for extent in t.shape:
        name, _, divisor = extent.partition(" / ")
        extents.append(letters.get(name, name) + (f" / {divisor}" if divisor else ""))
    return f"({extents[0]},)" if len(extents) == 1 else f"({', '.join(extents)})"
