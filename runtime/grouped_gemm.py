"""The passes of a lone GroupedLinear: this project's kernels where they run, plain torch elsewhere."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import torch

from . import kernels, reference, support
from .caching import LRUCache, get_or_make
from .codegen.select import linear_specs
from .codegen.spec import NUMERICS, DType, KernelSpec, Pass
from .config import settings

logger = logging.getLogger("cute_grouped_mlp")

#: Columns that a block of the bias_grad kernel sums: partial sums of the scale's gradient come one for each.
BIAS_GRAD_COLUMNS = 256


@dataclass(frozen=True, slots=True)
class LinearShape:
    """The shape and type of a grouped linear layer.

    Attributes
    ----------
    groups, in_features, out_features
        G, K and N of the weight (G, N, K).
    dtype, device
        Type to compute in, and where.
    """

    groups: int
    in_features: int
    out_features: int
    dtype: torch.dtype
    device: torch.device


class GroupedGemm:
    """The passes of a grouped linear layer.  Subclasses give the three GEMMs; the rest is plain torch on the device.

    Each pass takes ``alpha``, factors of the product that quantised operands bring: fp32 of shape (G,).  In plain torch
    any shape that broadcasts against the product will do, too: of rows (T, 1), or in wgrad of columns (G, 1, K).

    Parameters
    ----------
    dtype
        Type of results; that of the operands by default.
    """

    name = "plain torch"

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        self._dtype = dtype

    def fprop(
        self,
        x: torch.Tensor,
        w: torch.Tensor,
        sizes: torch.Tensor,
        bias: torch.Tensor | None = None,
        scale: torch.Tensor | None = None,
        alpha: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute y = x W^T + bias (times the scale of each row); rows past the last group are 0.

        Parameters
        ----------
        x : Tensor (T, K)
        w : Tensor (G, N, K)
        sizes : Tensor (G,)
        bias : Tensor (G, N) or None
        scale : Tensor (T,) or None
        alpha : Tensor (G,) or None
        """
        y = self._product(x, w, sizes, alpha)
        if bias is None:
            return y
        groups = rows_to_groups(sizes, x.shape[0])
        rows = bias_of_rows(bias, groups)
        if scale is not None:  # past the last group the scale may be anything
            rows = torch.where(groups.unsqueeze(1) < len(sizes), rows * scale.unsqueeze(1), 0.0).to(y.dtype)
        return y + rows

    def dgrad(
        self, dy: torch.Tensor, w: torch.Tensor, sizes: torch.Tensor, alpha: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Compute dx = dy W; rows past the last group are 0."""
        return self._product(dy, w.transpose(1, 2), sizes, alpha)

    def wgrad(
        self,
        dy: torch.Tensor,
        x: torch.Tensor,
        sizes: torch.Tensor,
        out: torch.Tensor | None = None,
        accumulate: bool = False,
        alpha: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute dW = dy^T x over each group's tokens; an empty group's is 0.

        Parameters
        ----------
        dy, x, sizes
            (T, N), (T, K) and (G,).
        out
            Tensor (G, N, K) to write to; a new one by default.
        accumulate
            Add to ``out`` instead of overwriting it.
        alpha : Tensor (G,) or None
        """
        dw = self._outer(dy, x, sizes, alpha)
        if out is None:
            return dw
        return out.add_(dw) if accumulate else out.copy_(dw)

    def bias_grad(
        self, dy: torch.Tensor, sizes: torch.Tensor, scale: torch.Tensor | None, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Sum the rows of each group, each times its scale.

        Parameters
        ----------
        dy, sizes
            (T, N) and (G,).
        scale : Tensor (T,) or None
        bias : Tensor (G, N) or None
            Given where the gradient of the scale is wanted.

        Returns
        -------
        db : Tensor (G, N)
        ds : Tensor (T,) in the type of the scale, or None
        """
        column = dy.new_zeros(dy.shape[0], 8)  # wgrad with one column that matters: deterministic
        column[:, 0] = 1 if scale is None else scale
        db = self._outer(dy, column, sizes)[..., 0]
        if scale is None or bias is None:
            return db, None
        groups = rows_to_groups(sizes, dy.shape[0])
        products = dy.to(torch.promote_types(dy.dtype, torch.float32)) * bias_of_rows(bias, groups)
        return db, torch.where(groups < len(sizes), products.sum(-1), 0.0).to(scale.dtype)

    def spec_of(self, role: str, tokens: int, *variant: object) -> KernelSpec | None:
        """Return the kernel of a role; None in plain torch.

        Parameters
        ----------
        role
            ``"fprop"``, ``"dgrad"``, ``"wgrad"``, ``"bias_grad"`` or ``"reduce"``.
        tokens
            T.
        *variant
            fprop: whether there is a bias, the scale's type or None, and whether there is alpha.  dgrad: whether there
            is alpha.  wgrad: the gradient's type, whether it accumulates, and whether there is alpha.  bias_grad: the
            scale's type or None, and whether its gradient is wanted.  reduce: type.
        """
        return None

    def _product(
        self, x: torch.Tensor, w: torch.Tensor, sizes: torch.Tensor, alpha: torch.Tensor | None
    ) -> torch.Tensor:
        raise NotImplementedError

    def _outer(
        self, dy: torch.Tensor, x: torch.Tensor, sizes: torch.Tensor, alpha: torch.Tensor | None = None
    ) -> torch.Tensor:
        raise NotImplementedError


class LoopGemm(GroupedGemm):
    """One matmul per group; reads the split sizes on the host."""

    name = "torch matmul per group"

    def _product(
        self, x: torch.Tensor, w: torch.Tensor, sizes: torch.Tensor, alpha: torch.Tensor | None
    ) -> torch.Tensor:
        x, w, dtype = self._widened(x, w, alpha)
        y = reference.fprop(x, w, self._ends(sizes, x))
        return y if dtype is None else scaled_rows(y, alpha, sizes).to(dtype)

    def _outer(
        self, dy: torch.Tensor, x: torch.Tensor, sizes: torch.Tensor, alpha: torch.Tensor | None = None
    ) -> torch.Tensor:
        dy, x, dtype = self._widened(dy, x, alpha)
        dw = reference.wgrad(dy, x, self._ends(sizes, x))
        return dw if dtype is None else scaled_groups(dw, alpha).to(dtype)

    def _widened(
        self, a: torch.Tensor, b: torch.Tensor, alpha: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.dtype | None]:
        """Return operands in fp32, and the type of the result, where anything is done to it before it is rounded."""
        dtype = a.dtype if self._dtype is None else self._dtype
        if alpha is None and a.dtype == b.dtype == dtype:
            return a, b, None
        return a.float(), b.float(), dtype

    def _ends(self, sizes: torch.Tensor, x: torch.Tensor) -> list[int]:
        ends, valid = reference.offsets(sizes, x.shape[0])
        if not valid:
            kernels.provider().status(x.device).bitwise_or_(kernels.INVALID_SPLITS)
        return ends


class TorchGroupedGemm(GroupedGemm):
    """``torch._grouped_mm`` (BF16): split sizes stay on the device, and results are rounded before alpha and after."""

    name = "torch._grouped_mm"

    def _product(
        self, x: torch.Tensor, w: torch.Tensor, sizes: torch.Tensor, alpha: torch.Tensor | None
    ) -> torch.Tensor:
        ends = self._ends(sizes, x)
        y = torch._grouped_mm(x, w.transpose(1, 2), offs=ends)
        y = scaled_rows(y, alpha, sizes).to(y.dtype)
        valid = torch.arange(x.shape[0], dtype=torch.int64, device=x.device) < ends[-1]
        return torch.where(valid.unsqueeze(1), y, 0.0)

    def _outer(
        self, dy: torch.Tensor, x: torch.Tensor, sizes: torch.Tensor, alpha: torch.Tensor | None = None
    ) -> torch.Tensor:
        ends = self._ends(sizes, x)
        dw = torch._grouped_mm(dy.t(), x, offs=ends)
        dw = scaled_groups(dw, alpha).to(dw.dtype)
        filled = torch.diff(ends, prepend=ends.new_zeros(1)) > 0
        return torch.where(filled.view(-1, 1, 1), dw, 0.0)

    def _ends(self, sizes: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return sizes.clamp(min=0, max=x.shape[0]).cumsum(0).clamp(max=x.shape[0]).to(torch.int32)


class KernelGemm(GroupedGemm):
    """Kernels of this project."""

    name = "cute_grouped_mlp kernels"

    def __init__(self, shape: LinearShape) -> None:
        super().__init__(shape.dtype)
        self._provider = kernels.provider()
        self._shape = shape
        self._arch = self._provider.arch(shape.device)
        self._sms = self._provider.sm_count(shape.device)
        self._base: dict[int, dict[str, KernelSpec]] = {}
        self._ready: dict[tuple[object, ...], tuple[kernels.Launch, int]] = {}

    def fprop(
        self,
        x: torch.Tensor,
        w: torch.Tensor,
        sizes: torch.Tensor,
        bias: torch.Tensor | None = None,
        scale: torch.Tensor | None = None,
        alpha: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As :class:`GroupedGemm`; the bias is added before the only rounding."""
        y = x.new_empty(x.shape[0], self._shape.out_features)
        if not x.shape[0]:
            return y
        scale = kernels.rows_of(scale)
        variant = (bias is not None, None if scale is None else scale.dtype, alpha is not None)
        launch, ctas = self._kernel("fprop", x.shape[0], variant)
        extra = [kernels.launchable(t) for t in (alpha, bias, scale) if t is not None]
        with kernels.device_guard(x.device):
            launch(
                kernels.launchable(x),
                kernels.launchable(w),
                *extra,
                kernels.int32_sizes(sizes),
                y,
                self._provider.status(x.device),
                ctas,
            )
        return y

    def dgrad(
        self, dy: torch.Tensor, w: torch.Tensor, sizes: torch.Tensor, alpha: torch.Tensor | None = None
    ) -> torch.Tensor:
        """As :class:`GroupedGemm`."""
        dx = dy.new_empty(dy.shape[0], self._shape.in_features)
        if not dy.shape[0]:
            return dx
        launch, ctas = self._kernel("dgrad", dy.shape[0], (alpha is not None,))
        dy, w = kernels.launchable(dy), kernels.launchable(w)
        extra = [] if alpha is None else [kernels.launchable(alpha)]
        with kernels.device_guard(dy.device):
            launch(dy, w, *extra, kernels.int32_sizes(sizes), dx, self._provider.status(dy.device), ctas)
        return dx

    def wgrad(
        self,
        dy: torch.Tensor,
        x: torch.Tensor,
        sizes: torch.Tensor,
        out: torch.Tensor | None = None,
        accumulate: bool = False,
        alpha: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As :class:`GroupedGemm`; ``out`` may also be float32."""
        dw = x.new_empty(self._shape.groups, dy.shape[1], x.shape[1]) if out is None else out
        if not x.shape[0]:
            return dw if accumulate else dw.zero_()
        launch, ctas = self._kernel("wgrad", x.shape[0], (dw.dtype, accumulate, alpha is not None))
        dy, x = kernels.launchable(dy), kernels.launchable(x)
        extra = [] if alpha is None else [kernels.launchable(alpha)]
        with kernels.device_guard(x.device):
            launch(dy, x, *extra, kernels.int32_sizes(sizes), dw, self._provider.status(x.device), ctas)
        return dw

    def bias_grad(
        self, dy: torch.Tensor, sizes: torch.Tensor, scale: torch.Tensor | None, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As :class:`GroupedGemm`."""
        db = dy.new_empty(self._shape.groups, dy.shape[1])
        of_scale, scale = scale, kernels.rows_of(scale)
        ds = None if scale is None or bias is None else scale.new_empty(scale.shape)
        if not dy.shape[0]:
            return db.zero_(), ds
        launch, _ = self._kernel("bias_grad", dy.shape[0], (None if scale is None else scale.dtype, ds is not None))
        inputs = [kernels.launchable(t) for t in (scale, None if ds is None else bias) if t is not None]
        dy = kernels.launchable(dy)
        with kernels.device_guard(dy.device):
            if ds is None:
                launch(dy, *inputs, kernels.int32_sizes(sizes), db)
                return db, None
            blocks = -(-dy.shape[1] // BIAS_GRAD_COLUMNS)
            partial = dy.new_empty(blocks, dy.shape[0], dtype=torch.float32)
            launch(dy, *inputs, kernels.int32_sizes(sizes), db, partial)
            launch, ctas = self._kernel("reduce", dy.shape[0], (ds.dtype,))
            launch(partial, ds, ctas)
        return db, ds.to(of_scale.dtype) if of_scale is not None else ds

    def _specs(self, tokens: int) -> dict[str, KernelSpec]:
        """Return the kernels with the tiles for T, each in its plain variant."""
        shape = self._shape
        bucket = kernels.rows_bucket(tokens, shape.groups)
        found = self._base.get(bucket)
        if found is None:
            chosen = linear_specs(
                self._arch,
                kernels.NUMERICS_OF[shape.dtype],
                tokens=kernels.bucket_tokens(bucket, shape.groups),
                groups=shape.groups,
                in_features=shape.in_features,
                out_features=shape.out_features,
            )
            found = self._base[bucket] = {"fprop": chosen.fprop, "dgrad": chosen.dgrad, "wgrad": chosen.wgrad}
        return found

    def _kernel(self, role: str, tokens: int, variant: tuple[object, ...]) -> tuple[kernels.Launch, int]:
        """Return a kernel and its grid; ``variant`` is all that it depends on besides shape and bucket."""
        key = (role, kernels.rows_bucket(tokens, self._shape.groups), *variant)
        found = self._ready.get(key)
        if found is None:
            spec = self.spec_of(role, tokens, *variant)
            self._provider.prepare([spec], self._shape.device)
            found = self._ready[key] = (self._provider.get(spec), kernels.grid(spec, self._sms))
        return found

    def spec_of(self, role: str, tokens: int, *variant: object) -> KernelSpec:
        """As :class:`GroupedGemm`."""
        numerics = kernels.NUMERICS_OF[self._shape.dtype]
        types = [kernels.DTYPES.get(v, DType.FP32) if isinstance(v, torch.dtype) else None for v in variant]
        if role == "bias_grad":
            return KernelSpec(
                self._arch, Pass.BIAS_GRAD, numerics, probs=types[0], sum_probs=types[0] is None or bool(variant[1])
            )
        if role == "reduce":
            return KernelSpec(self._arch, Pass.REDUCE, numerics, probs=types[0])
        spec = self._specs(tokens)[role]
        alpha = bool(variant[-1])
        if role == "fprop":
            return replace(spec, bias=bool(variant[0]), probs=types[1], alpha=alpha)
        if role == "wgrad":
            out = None if variant[0] == self._shape.dtype else types[0]
            return replace(spec, out=out, accumulate=bool(variant[1]), alpha=alpha)
        return replace(spec, alpha=alpha) if alpha else spec


_chosen: LRUCache[GroupedGemm] = LRUCache(256)


def choose(shape: LinearShape) -> GroupedGemm:
    """Decide how to run a grouped linear layer of a shape."""
    key = (shape, settings.generation)
    found = _chosen.peek(key)
    return found if found is not None else get_or_make(_chosen, key, lambda: _choose(shape))


def choose_quantized(shape: LinearShape, *, factors_of_rows: bool = False) -> GroupedGemm:
    """Decide how to run a grouped linear layer on quantised operands, which are bf16 with factors.

    Parameters
    ----------
    shape
        Its ``dtype`` is the type of unquantised inputs and of results.
    factors_of_rows
        Whether alpha holds factors of rows or columns, not only of groups.
    """
    key = (shape, factors_of_rows, settings.generation)
    found = _chosen.peek(key)
    return found if found is not None else get_or_make(_chosen, key, lambda: _choose_quantized(shape, factors_of_rows))


def quantized_problems(shape: LinearShape, factors_of_rows: bool) -> tuple[str, ...]:
    """List every reason why this project's kernels cannot run a shape on quantised operands.

    Parameters
    ----------
    shape, factors_of_rows
        As :func:`choose_quantized` takes them.
    """
    problems = list(kernel_problems(shape, quantized=True))
    if factors_of_rows:
        problems.append("the input has a scale for each row, kernels take one for each group")
    return tuple(problems)


def kernel_problems(shape: LinearShape, *, quantized: bool = False) -> tuple[str, ...]:
    """List every reason why this project's kernels cannot run a shape.

    Parameters
    ----------
    shape
        The shape.
    quantized
        Whether operands are quantised.
    """
    device, dtype = shape.device, shape.dtype
    native = support.module_grouped_tensor_supported
    found = support.emulation_reasons(dtype, device) if quantized else native(None, dtype, device=device).reasons
    problems = list(found)
    numerics = kernels.NUMERICS_OF.get(shape.dtype)
    if numerics is None:
        return tuple(problems)
    alignment = NUMERICS[numerics].alignment
    for name, size in (("in_features", shape.in_features), ("out_features", shape.out_features)):
        if size % alignment:
            problems.append(f"{name} is {size}, kernels need a multiple of {alignment}")
    return tuple(problems)


def _choose(shape: LinearShape) -> GroupedGemm:
    problems = kernel_problems(shape)
    return _in_torch(shape, problems) if problems else KernelGemm(shape)


def _choose_quantized(shape: LinearShape, factors_of_rows: bool) -> GroupedGemm:
    problems = quantized_problems(shape, factors_of_rows)
    return _in_torch(shape, problems) if problems else KernelGemm(shape)


def _in_torch(shape: LinearShape, problems: tuple[str, ...]) -> GroupedGemm:
    if shape.device.type != "cuda":
        return LoopGemm(shape.dtype)
    aligned = shape.in_features % 8 == 0 and shape.out_features % 8 == 0
    if shape.dtype is torch.bfloat16 and aligned and kernels.capability(shape.device) >= (8, 0):
        return TorchGroupedGemm(shape.dtype)
    logger.warning("grouped linear runs as one matmul per group and synchronises: %s", "; ".join(problems))
    return LoopGemm(shape.dtype)


def scaled_rows(y: torch.Tensor, alpha: torch.Tensor | None, sizes: torch.Tensor) -> torch.Tensor:
    """Return a product (T, N) times alpha, (G,) or (T, 1), in fp32; as it is without alpha."""
    if alpha is None:
        return y
    if alpha.dim() == 1:
        alpha = torch.cat((alpha, alpha.new_zeros(1)))[rows_to_groups(sizes, y.shape[0])].unsqueeze(1)
    return y.float() * alpha


def scaled_groups(dw: torch.Tensor, alpha: torch.Tensor | None) -> torch.Tensor:
    """Return a product (G, N, K) times alpha, (G,) or (G, 1, K), in fp32; as it is without alpha."""
    if alpha is None:
        return dw
    return dw.float() * (alpha.view(-1, 1, 1) if alpha.dim() == 1 else alpha)


def rows_to_groups(sizes: torch.Tensor, tokens: int) -> torch.Tensor:
    """Return the group of each row, (T,) int64, on the device; rows past the last group get G."""
    ends = sizes.clamp(min=0, max=tokens).cumsum(0).clamp(max=tokens)
    return torch.searchsorted(ends, torch.arange(tokens, device=sizes.device, dtype=ends.dtype), right=True)


def bias_of_rows(bias: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """Return the bias of each row, (T, N), from the group of each; 0 for group G."""
    return torch.cat((bias, bias.new_zeros(1, bias.shape[1])))[groups]
