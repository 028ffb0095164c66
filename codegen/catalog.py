"""Named sets of specs: what ``build`` compiles ahead of time and ``generate`` writes to ``generated/``."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from .activations import ACTIVATIONS
from .select import Alphas, LinearSpecs, StepSpecs, amax_spec, linear_specs, on_quantized, quantize_spec, step_specs
from .spec import (
    NUMERICS,
    Arch,
    DType,
    Element,
    GluLayout,
    KernelSpec,
    Pass,
    Quantization,
    Scaling,
    check_quantization,
)

#: What the default catalog holds beyond the shapes: every combination of these.
DEFAULT_NUMERICS = ("bf16",)
DEFAULT_ACTIVATIONS = ("swiglu",)
DEFAULT_LAYOUTS = (GluLayout.CONTIGUOUS,)
DEFAULT_PROBS = (DType.FP32, DType.BF16, None)
#: Operands of GEMMs: not quantised; those of MXFP8, without factors of groups; those of NVFP4, with them.
DEFAULT_OPERANDS: tuple[Alphas | None, ...] = (None, (False, False, False), (True, True, True))

#: Directions of operands: both where a weight gradient will be needed.
_DIRECTIONS: tuple[dict[str, bool], ...] = ({"columnwise": False}, {"rowwise": False}, {})
#: Emulated operands of MXFP8 and NVFP4 as their recipes are by default: activations and gradients, then weights.
DEFAULT_QUANTIZATIONS = (
    *(Quantization(Scaling.MXFP8, Element.E4M3, batched=b, **d) for b in (False, True) for d in _DIRECTIONS),
    *(
        Quantization(Scaling.NVFP4, Element.E2M1, rht=d.get("columnwise", True), stochastic=sr, **d)
        for sr in (False, True)
        for d in _DIRECTIONS
    ),
    *(Quantization(Scaling.NVFP4, Element.E2M1, batched=True, two_dimensional=True, **d) for d in _DIRECTIONS),
)

_USES = {
    Pass.FPROP_ACT: "FC1 forward, activation",
    Pass.FPROP: "FC2 or lone linear, forward",
    Pass.DGRAD_ACT: "FC2 data gradient through the activation",
    Pass.DGRAD: "FC1 or lone linear, data gradient",
    Pass.WGRAD: "weight gradient",
    Pass.BIAS_GRAD: "bias gradient",
    Pass.REDUCE: "gradient of the probabilities: sum of partials",
    Pass.AMAX: "largest magnitudes, for scales of whole groups",
    Pass.QUANTIZE: "quantised operand",
}


@functools.cache
def default_catalog(arch: Arch, activations: tuple[str, ...] = DEFAULT_ACTIVATIONS) -> tuple[KernelSpec, ...]:
    """Every kernel that the runtime may choose for the common settings, whatever the shapes.

    The settings are no recipe, MXFP8 and NVFP4 as their recipes are by default.  Not written down but derived: the
    functions that the runtime asks are asked for a sweep of shapes.

    Parameters
    ----------
    arch
        Target; empty for one that has no kernels.
    activations
        Keys of :data:`codegen.activations.ACTIVATIONS` to have in place of the default.

    Returns
    -------
    tuple of KernelSpec
        Without duplicates, sorted by pass and name.
    """
    plain = _collect(arch, DEFAULT_NUMERICS, activations, DEFAULT_LAYOUTS, DEFAULT_PROBS)
    gemms = [
        spec if alphas is None else on_quantized(spec, alphas)
        for spec, alphas in itertools.product(plain, DEFAULT_OPERANDS)
    ]
    return in_order(gemms) + _quantizing(arch, DEFAULT_QUANTIZATIONS) if gemms else ()


@functools.cache
def full_catalog(arch: Arch) -> tuple[KernelSpec, ...]:
    """Every kernel that the runtime may choose, for all settings: too many to build; each can be asked for by name."""
    chosen = _collect(arch, tuple(NUMERICS), tuple(ACTIVATIONS), tuple(GluLayout), (*DType, None))
    if not chosen:
        return ()
    specs = [variant for spec in chosen for variant in _variants(spec)]
    for numerics, probs in itertools.product(NUMERICS, (*DType, None)):
        sums = (True,) if probs is None else (True, False)
        specs += [KernelSpec(arch, Pass.BIAS_GRAD, numerics, probs=probs, sum_probs=sum_probs) for sum_probs in sums]
    return in_order(specs) + _quantizing(arch, _every_quantization())


def _variants(spec: KernelSpec) -> Iterator[KernelSpec]:
    """What the runtime may make of a kernel of a plain step.

    FC2's or a layer's bias may have scales of any type; weight gradients may go to another tensor of any type; what no
    gradient needs is not written; operands of emulated recipes are bf16 numbers with or without factors of groups.
    """
    options: dict[str, tuple[Any, ...]] = {}
    if spec.kernel is Pass.FPROP_ACT:
        options["bias"] = (False, True)
    elif spec.kernel is Pass.DGRAD_ACT:
        options["store_act"] = (True, False)
        options["sum_probs"] = (True,) if spec.probs is None else (True, False)
    elif spec.kernel is Pass.WGRAD:
        options["out"] = (None, *(dtype for dtype in DType if dtype is not spec.types.storage))
        options["accumulate"] = (False, True)
    if spec.kernel.is_gemm and spec.types.operand is DType.BF16:
        options["alpha"] = (False, True)
    for values in itertools.product(*options.values()):
        variant = replace(spec, **dict(zip(options, values, strict=True)))
        yield variant
        if spec.kernel is Pass.FPROP:
            yield from (replace(variant, bias=True, probs=scale) for scale in (None, *DType))


def _quantizing(arch: Arch, quantizations: Iterable[Quantization]) -> tuple[KernelSpec, ...]:
    """Kernels that quantise, and those that measure for them."""
    specs = {quantize_spec(arch, q): None for q in quantizations}
    specs = dict.fromkeys(spec for spec in specs if not check_quantization(spec))
    measured = {(q.batched, q.rht) for spec in specs if (q := spec.quantization) is not None and _is_measured(q)}
    amaxes = [amax_spec(arch, batched=batched, rht=rht) for batched, rht in measured]
    return tuple(sorted(amaxes, key=lambda s: s.name) + sorted(specs, key=lambda s: s.name))


def _is_measured(q: Quantization) -> bool:
    """Whether scales follow from amaxes of whole groups."""
    return q.scaling in (Scaling.NVFP4, Scaling.PER_TENSOR)


def _every_quantization() -> Iterator[Quantization]:
    """Every combination of fields, valid or not."""
    names = (
        "rowwise",
        "columnwise",
        "emulate",
        "batched",
        "two_dimensional",
        "power_of_two",
        "rht",
        "stochastic",
        "amax",
    )
    for scaling, element in itertools.product(Scaling, Element):
        for flags in itertools.product((False, True), repeat=len(names)):
            yield Quantization(scaling, element, **dict(zip(names, flags, strict=True)))


def _collect(
    arch: Arch,
    numerics: tuple[str, ...],
    activations: tuple[str, ...],
    layouts: tuple[GluLayout, ...],
    probs: tuple[DType | None, ...],
) -> tuple[KernelSpec, ...]:
    """Every kernel that the selection returns for combinations of settings."""
    specs: dict[KernelSpec, None] = {}
    for tokens, groups, hidden, ffn in shapes(arch):
        for name in numerics:
            linear = linear_specs(arch, name, tokens=tokens, groups=groups, in_features=hidden, out_features=ffn)
            specs.update(dict.fromkeys((linear.fprop, linear.dgrad, linear.wgrad)))
        for name, activation, layout, prob, backward in itertools.product(
            numerics, activations, layouts, probs, (True, False)
        ):
            if layout is not GluLayout.CONTIGUOUS and not ACTIVATIONS[activation].glu:
                continue
            step = step_specs(
                arch, name, activation, layout, prob,
                tokens=tokens, groups=groups, hidden=hidden, ffn=ffn, backward=backward,
            )  # fmt: skip
            specs.update(dict.fromkeys(step.all))
    return in_order(specs)


def in_order(specs: Iterable[KernelSpec]) -> tuple[KernelSpec, ...]:
    """Return specs without duplicates, sorted by pass and name."""
    order = list(Pass)
    return tuple(sorted(dict.fromkeys(specs), key=lambda s: (order.index(s.kernel), s.name)))


def use(spec: KernelSpec) -> str:
    """What a kernel is for, in a few words."""
    parts = [_USES[spec.kernel]]
    if spec.kernel is Pass.FPROP_ACT:
        parts.append("training" if spec.store_z else "inference")
    if spec.probs is not None and spec.kernel.has_activation:
        parts.append(f"{spec.probs.value} probs")
    if spec.alpha:
        parts.append("group factors")
    if not spec.store_act:
        parts.append("without a")
    if spec.kernel is Pass.QUANTIZE and spec.quantization is not None:
        q = spec.quantization
        directions = [name for name, on in (("rowwise", q.rowwise), ("columnwise", q.columnwise)) if on]
        parts.append(f"{' and '.join(directions)}, {'as bf16 numbers' if q.emulate else 'packed'}")
    return ", ".join(parts)


@functools.cache
def shapes(arch: Arch, divisor: int = 8) -> tuple[tuple[int, int, int, int], ...]:
    """Representatives (T, G, H, F) of every combination of tiles that the selection can return.

    Shapes are swept densely where a tile's tail matters and by powers of two beyond; of those that get the same kernels
    one is kept.

    Parameters
    ----------
    arch
        Target; no shapes for one that has no kernels.
    divisor
        What H and F are multiples of: a multiple of 8, and a power of two.
    """
    if arch is not Arch.SM90A:
        return ()
    dense = range(divisor, 2049, divisor)
    sparse = [1 << power for power in range(3, 16) if not (1 << power) % divisor]
    rows = [(1, 1)] + [((1 << power) * groups, groups) for power in range(2, 16, 2) for groups in (1, 64)]
    found: dict[tuple[StepSpecs, LinearSpecs], tuple[int, int, int, int]] = {}
    for one, other in itertools.product(dense, sparse):
        # T and G matter through few thresholds, if at all: all of them at round features, two at the others.
        for tokens, groups in rows if one & (one - 1) == 0 else (rows[0], rows[-1]):
            for hidden, ffn in ((one, other), (other, one)):
                step = step_specs(
                    arch, "bf16", "swiglu", GluLayout.CONTIGUOUS, None,
                    tokens=tokens, groups=groups, hidden=hidden, ffn=ffn, backward=True,
                )  # fmt: skip
                linear = linear_specs(arch, "bf16", tokens=tokens, groups=groups, in_features=hidden, out_features=ffn)
                found.setdefault((step, linear), (tokens, groups, hidden, ffn))
    return tuple(found.values())
