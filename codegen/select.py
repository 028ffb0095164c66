"""Which kernels a training step runs: pure functions of shapes, used by the runtime and by the catalog alike."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

from .activations import ACTIVATIONS
from .spec import Arch, DType, GluLayout, KernelSpec, Pass, Quantization, TileConfig
from .tiles import default_tile

#: Whether the products of fprop, dgrad and wgrad are multiplied by factors of groups.
Alphas = tuple[bool, bool, bool]


@dataclass(frozen=True, slots=True)
class StepSpecs:
    """The kernels of a grouped MLP's forward and backward, by role; those that are not needed are None."""

    fprop_act: KernelSpec
    fprop: KernelSpec
    dgrad_act: KernelSpec | None = None
    dgrad: KernelSpec | None = None
    wgrad1: KernelSpec | None = None
    wgrad2: KernelSpec | None = None
    reduce: KernelSpec | None = None

    @property
    def all(self) -> tuple[KernelSpec, ...]:
        """The distinct kernels, in the order of their first launch."""
        step = (self.fprop_act, self.fprop, self.dgrad_act, self.wgrad2, self.dgrad, self.wgrad1, self.reduce)
        return tuple(dict.fromkeys(spec for spec in step if spec is not None))


@dataclass(frozen=True, slots=True)
class LinearSpecs:
    """The kernels of a lone grouped linear layer."""

    fprop: KernelSpec
    dgrad: KernelSpec
    wgrad: KernelSpec


def step_specs(
    arch: Arch,
    numerics: str,
    activation: str,
    glu_layout: GluLayout,
    probs: DType | None,
    *,
    tokens: int,
    groups: int,
    hidden: int,
    ffn: int,
    backward: bool,
) -> StepSpecs:
    """Choose the kernels of a step of the fused grouped MLP.

    Parameters
    ----------
    arch, numerics
        Target, and key of :data:`codegen.spec.NUMERICS`.
    activation, glu_layout
        Key of :data:`codegen.activations.ACTIVATIONS`, and the order of FC1's rows.
    probs
        Type of the router's probabilities; None without.
    tokens, groups, hidden, ffn
        T (capacity), G, H and F.
    backward
        Whether a backward will read z: else the forward does not store it and there are no backward kernels.
    """
    halves = 2 if ACTIVATIONS[activation].glu else 1

    def gemm(kernel: Pass, n: int, k: int, **fields: Any) -> KernelSpec:
        return _spec(arch, kernel, numerics, default_tile(kernel, tokens=tokens, groups=groups, n=n, k=k), **fields)

    acts = {"activation": activation, "glu_layout": glu_layout, "probs": probs}
    forward = {
        "fprop_act": gemm(Pass.FPROP_ACT, halves * ffn, hidden, store_z=backward, **acts),
        "fprop": gemm(Pass.FPROP, hidden, ffn),
    }
    if not backward:
        return StepSpecs(**forward)
    return StepSpecs(
        **forward,
        dgrad_act=gemm(Pass.DGRAD_ACT, ffn, hidden, **acts),
        dgrad=gemm(Pass.DGRAD, hidden, halves * ffn),
        wgrad1=gemm(Pass.WGRAD, hidden, tokens),
        wgrad2=gemm(Pass.WGRAD, ffn, tokens),
        reduce=None if probs is None else _spec(arch, Pass.REDUCE, numerics, None, probs=probs),
    )


def linear_specs(
    arch: Arch, numerics: str, *, tokens: int, groups: int, in_features: int, out_features: int
) -> LinearSpecs:
    """Choose the kernels of a lone grouped linear layer of weight (G, out_features, in_features)."""

    def gemm(kernel: Pass, n: int, k: int) -> KernelSpec:
        return _spec(arch, kernel, numerics, default_tile(kernel, tokens=tokens, groups=groups, n=n, k=k))

    return LinearSpecs(
        fprop=gemm(Pass.FPROP, out_features, in_features),
        dgrad=gemm(Pass.DGRAD, in_features, out_features),
        wgrad=gemm(Pass.WGRAD, in_features, tokens),
    )


@functools.cache
def on_quantized(spec: KernelSpec, alphas: Alphas) -> KernelSpec:
    """Return the variant of a kernel of a fused step that reads quantised operands as bf16 numbers.

    Forward keeps a as wgrad reads it, so ``dgrad_act`` does not store it once more.

    Parameters
    ----------
    spec
        The kernel of an unquantised step; one that is no GEMM is returned as it is.
    alphas
        Which products have factors.
    """
    if not spec.kernel.is_gemm:
        return spec
    fprop, dgrad, wgrad = alphas
    if spec.kernel is Pass.WGRAD:
        return replace(spec, alpha=wgrad)
    if spec.kernel is Pass.DGRAD_ACT:
        return replace(spec, alpha=dgrad, store_act=False)
    return replace(spec, alpha=dgrad if spec.kernel is Pass.DGRAD else fprop)


def quantize_spec(arch: Arch, quantization: Quantization) -> KernelSpec:
    """Return the kernel that quantises a bf16 tensor."""
    return _spec(arch, Pass.QUANTIZE, "bf16", None, quantization=quantization)


def amax_spec(arch: Arch, *, batched: bool, rht: bool) -> KernelSpec:
    """Return the kernel that measures the groups of a bf16 tensor, with ``rht`` also after the transform."""
    quantization = Quantization(batched=batched, columnwise=rht, rht=rht)
    return _spec(arch, Pass.AMAX, "bf16", None, quantization=quantization)


@functools.cache
def _spec(arch: Arch, kernel: Pass, numerics: str, tile: TileConfig | None, **fields: Any) -> KernelSpec:
    """Make a spec, one object for equal arguments: tables may then look it up by identity."""
    return KernelSpec(arch, kernel, numerics, tile, **fields)
