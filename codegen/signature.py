"""The tensors that a GEMM kernel takes: its parameters, their documentation, and the fake ones to compile with."""

from __future__ import annotations

from dataclasses import dataclass

from .activations import ACTIVATIONS
from .spec import DType, KernelSpec, Pass

#: Symbolic extents of features; their divisibility is the numerics' alignment.
FEATURES = ("rows", "columns", "z_columns", "contraction")
_LETTERS = {
    "tokens": "T",
    "groups": "G",
    "contraction": "K",
    "z_columns": "2F",
    "rows": "M",
    "n_tiles": "N tiles",
    "1": "1",
}


@dataclass(frozen=True, slots=True)
class TensorArgument:
    """One tensor argument.

    Attributes
    ----------
    name
        The parameter.
    dtype
        Type of its elements in the ``cutlass`` namespace.
    shape
        Names of its extents.
    meaning
        What it is, for the docstring.
    strided
        Whether any stride is allowed; else it is contiguous.
    vectors
        Whether it is read or written in vectors of 16 bytes, and must be aligned so.
    """

    name: str
    dtype: str
    shape: tuple[str, ...]
    meaning: str
    strided: bool = False
    vectors: bool = True

    @property
    def fake(self) -> str:
        """Expression of the fake tensor."""
        extents = ", ".join(self.shape)
        if self.strided:
            return f"make_fake_tensor({self.dtype}, ({extents},), (cute.sym_int(),), assumed_align=4)"
        align = "" if self.vectors else f", align={self.dtype}.width // 8"
        return f"tensor({self.dtype}, {extents}{align})"

    def doc(self, columns: str) -> list[str]:
        """Entry of a numpy-style docstring.

        Parameters
        ----------
        columns
            Letter of the output's columns.
        """
        letters = [_LETTERS.get(extent, columns) for extent in self.shape]
        shape = f"({letters[0]},)" if len(letters) == 1 else f"({', '.join(letters)})"
        layout = "any stride" if self.strided else "contiguous"
        return [self.name, f"    {shape} {self.dtype}, {layout}: {self.meaning}."]


def gemm_tensors(spec: KernelSpec) -> tuple[TensorArgument, ...]:
    """Return the tensor arguments of a GEMM kernel, in order."""
    operand, storage = spec.types.operand.cutlass, spec.types.storage.cutlass
    glu = spec.activation is not None and ACTIVATIONS[spec.activation].glu
    z_columns = "z_columns" if glu else "columns"

    def tensor(name: str, dtype: str, *shape: str, meaning: str) -> TensorArgument:
        return TensorArgument(name, dtype, shape, meaning)

    def vector(name: str, dtype: DType, *shape: str, meaning: str) -> TensorArgument:
        return TensorArgument(name, dtype.cutlass, shape, meaning, vectors=False)

    sizes = TensorArgument("sizes", "Int32", ("groups",), "tokens of each group", strided=True)
    status = TensorArgument(
        "status", "Int32", ("1",), "set to 1 if a size is negative or the sizes exceed T", vectors=False
    )
    scale = "router's probability of each token" if spec.activation else "scale of the bias for each token"
    probs = [] if spec.probs is None else [vector("probs", spec.probs, "tokens", meaning=scale)]
    factor = vector("group_alpha", DType.FP32, "groups", meaning="factor of each group's product")
    alpha = [factor] if spec.alpha else []  # an activation may have a parameter alpha
    bias = [tensor("bias", storage, "groups", z_columns, meaning="bias")] if spec.bias else []
    found: list[TensorArgument]
    if spec.kernel is Pass.FPROP_ACT:
        z = [tensor("z", storage, "tokens", z_columns, meaning="pre-activation")] if spec.store_z else []
        found = [
            tensor("x", operand, "tokens", "contraction", meaning="input, sorted by group"),
            tensor("w", operand, "groups", z_columns, "contraction", meaning="weights"),
            *alpha,
            *bias,
            *probs,
            sizes,
            *z,
            tensor("act", storage, "tokens", "columns", meaning="activation"),
        ]
    elif spec.kernel is Pass.FPROP:
        found = [
            tensor("x", operand, "tokens", "contraction", meaning="input, sorted by group"),
            tensor("w", operand, "groups", "columns", "contraction", meaning="weights"),
            *alpha,
            *bias,
            *probs,
            sizes,
            tensor("y", storage, "tokens", "columns", meaning="output"),
        ]
    elif spec.kernel is Pass.DGRAD_ACT:
        act = [tensor("act", storage, "tokens", "columns", meaning="activation, recomputed")] if spec.store_act else []
        sums = spec.sum_probs and spec.probs is not None
        partial = vector("dp_partial", DType.FP32, "n_tiles", "tokens", meaning="dp of each tile column")
        found = [
            tensor("dy", operand, "tokens", "contraction", meaning="gradient of the output"),
            tensor("w", operand, "groups", "contraction", "columns", meaning="weights"),
            *alpha,
            tensor("z", storage, "tokens", z_columns, meaning="pre-activation"),
            *probs,
            sizes,
            tensor("dz", storage, "tokens", z_columns, meaning="gradient of z"),
            *act,
            *([partial] if sums else []),
        ]
    elif spec.kernel is Pass.DGRAD:
        found = [
            tensor("dy", operand, "tokens", "contraction", meaning="gradient of the output"),
            tensor("w", operand, "groups", "contraction", "columns", meaning="weights"),
            *alpha,
            sizes,
            tensor("dx", storage, "tokens", "columns", meaning="gradient of the input"),
        ]
    else:
        out = (spec.out or spec.types.storage).cutlass
        found = [
            tensor("dy", operand, "tokens", "rows", meaning="gradient of the output"),
            tensor("x", operand, "tokens", "columns", meaning="input"),
            *alpha,
            sizes,
            tensor("dw", out, "groups", "rows", "columns", meaning="gradient of the weights"),
        ]
    return (*found, status)
