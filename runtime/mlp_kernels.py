"""Which kernels a step of the fused grouped MLP launches: chosen and made ready before the first of them runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from . import kernels
from .codegen.select import StepSpecs, step_specs
from .codegen.spec import DType, KernelSpec, Pass
from .context import OperationContext, PlannedKernel, Tensors
from .kernels import Launch
from .op import FusedOperation
from .ops.activation import ScaledActivation
from .ops.grouped_linear import GroupedLinear
from .step import (
    LAYOUTS,
    NEED_B1,
    NEED_B2,
    NEED_PROBS,
    NEED_SCALE,
    NEED_W1,
    NEED_W2,
    NEED_X,
    NEED_Z,
    NO_MAIN_GRADS,
    Fixed,
    MainGrad,
    StepKernels,
    Variant,
)


class MLPKernels(FusedOperation):
    """Chooses the kernels of GroupedLinear, activation, GroupedLinear; what launches them derives from it.

    Parameters
    ----------
    fc1, activation, fc2
        The operations that it stands for.
    dtype
        Type to compute in.
    """

    def __init__(
        self, fc1: GroupedLinear, activation: ScaledActivation, fc2: GroupedLinear, dtype: torch.dtype
    ) -> None:
        super().__init__((fc1, activation, fc2))
        self._fixed = Fixed.of(fc1, activation, fc2, dtype)
        self._provider = kernels.provider()
        self._arch = self._provider.arch(self._fixed.device)
        self._tables: dict[tuple[Any, ...], StepKernels] = {}
        self._wgrads: dict[tuple[int, Variant], tuple[Launch, int]] = {}
        self._needs: dict[tuple[bool, ...], int] = {}

    @property
    def _fc1(self) -> GroupedLinear:
        return self._fixed.fc1

    @property
    def _activation(self) -> ScaledActivation:
        return self._fixed.activation

    @property
    def _fc2(self) -> GroupedLinear:
        return self._fixed.fc2

    def step_specs(self, variant: Variant) -> dict[str, KernelSpec]:
        """Choose the kernels that a step launches, in order, by role.

        Parameters
        ----------
        variant
            What they depend on.
        """
        needs = variant.needs
        chosen = self._select(variant, backward=needs != 0)
        scale = None if variant.scale is None else kernels.DTYPES[variant.scale]
        specs = {
            "fprop_act": replace(chosen.fprop_act, bias=self._fc1.has_bias, store_z=bool(needs & NEED_Z)),
            "fprop": replace(chosen.fprop, bias=self._fc2.has_bias, probs=scale),
        }
        if needs & NEED_Z and chosen.dgrad_act is not None:
            sums = not chosen.dgrad_act.probs or bool(needs & NEED_PROBS)
            specs["dgrad_act"] = replace(chosen.dgrad_act, store_act=bool(needs & NEED_W2), sum_probs=sums)
        if needs & NEED_W2 and chosen.wgrad2 is not None:
            specs["wgrad2"] = self._wgrad_spec(chosen.wgrad2, variant.main_grads[1])
        if needs & NEED_X and chosen.dgrad is not None:
            specs["dgrad"] = chosen.dgrad
        if needs & NEED_W1 and chosen.wgrad1 is not None:
            specs["wgrad1"] = self._wgrad_spec(chosen.wgrad1, variant.main_grads[0])
        if needs & NEED_PROBS and chosen.reduce is not None:
            specs["reduce_probs"] = chosen.reduce
        numerics = kernels.NUMERICS_OF[self._fixed.dtype]
        if needs & NEED_B1:
            specs["bias_grad1"] = KernelSpec(self._arch, Pass.BIAS_GRAD, numerics)
        if needs & (NEED_B2 | NEED_SCALE):
            sums = scale is None or bool(needs & NEED_SCALE)
            specs["bias_grad2"] = KernelSpec(self._arch, Pass.BIAS_GRAD, numerics, probs=scale, sum_probs=sums)
        if needs & NEED_SCALE:
            specs["reduce_scale"] = KernelSpec(self._arch, Pass.REDUCE, numerics, probs=scale)
        return specs

    def _select(self, variant: Variant, *, backward: bool) -> StepSpecs:
        return step_specs(
            self._arch,
            kernels.NUMERICS_OF[self._fixed.dtype],
            self._activation.activation,
            LAYOUTS[self._activation.glu_interleave_size],
            None if variant.probs is None else kernels.DTYPES[variant.probs],
            tokens=kernels.bucket_tokens(variant.bucket, self._fixed.groups),
            groups=self._fixed.groups,
            hidden=self._fixed.hidden,
            ffn=self._fixed.ffn,
            backward=backward,
        )

    def _wgrad_spec(self, spec: KernelSpec, main_grad: MainGrad) -> KernelSpec:
        if main_grad is None:
            return spec
        dtype, accumulate = main_grad
        out: DType | None = None if dtype == self._fixed.dtype else kernels.DTYPES[dtype]
        return replace(spec, out=out, accumulate=accumulate)

    def _variant(self, tokens: int, probs: torch.Tensor | None, scale: torch.Tensor | None, needs: int) -> Variant:
        return Variant(
            kernels.rows_bucket(tokens, self._fixed.groups),
            None if probs is None else kernels.row_dtype(probs),
            None if scale is None else kernels.row_dtype(scale),
            needs,
            (_main_grad(self._fc1), _main_grad(self._fc2)),
        )

    def _kernels(self, tokens: int, probs: torch.Tensor | None, scale: torch.Tensor | None, needs: int) -> StepKernels:
        """Return the kernels of a step, all made ready before the first is launched."""
        fixed, main_grads = self._fixed, NO_MAIN_GRADS
        if fixed.fc1.accumulate_into_main_grad or fixed.fc2.accumulate_into_main_grad:
            main_grads = (_main_grad(fixed.fc1), _main_grad(fixed.fc2))
        key = (
            (tokens // fixed.groups).bit_length(),  # kernels.rows_bucket, without the call
            None if probs is None else probs.dtype,
            None if scale is None else scale.dtype,
            needs,
            main_grads,
        )
        found = self._tables.get(key)
        if found is None:
            specs = self.step_specs(self._variant(tokens, probs, scale, needs))
            self._provider.prepare(tuple(specs.values()), self._fixed.device)
            sms = self._provider.sm_count(self._fixed.device)
            launches = {role: (self._provider.get(spec), kernels.grid(spec, sms)) for role, spec in specs.items()}
            status = self._provider.status(self._fixed.device)
            found = self._tables.setdefault(key, StepKernels.of(needs, specs, launches, main_grads, status))
        return found

    def _wgrad_kernel(self, layer: int, tokens: int, main_grad: MainGrad) -> tuple[Launch, int]:
        """Return the wgrad kernel of layer 1 or 2 alone."""
        variant = Variant(kernels.rows_bucket(tokens, self._fixed.groups), None, None, 0, (main_grad, main_grad))
        found = self._wgrads.get((layer, variant))
        if found is None:
            spec = self._wgrad_spec(getattr(self._select(variant, backward=True), f"wgrad{layer}"), main_grad)
            self._provider.prepare([spec], self._fixed.device)
            launch = self._provider.get(spec), kernels.grid(spec, self._provider.sm_count(self._fixed.device))
            found = self._wgrads.setdefault((layer, variant), launch)
        return found

    def needs(
        self, contexts: Sequence[OperationContext], probs: torch.Tensor | None, scale: torch.Tensor | None
    ) -> int:
        """Return the NEED_* bits of what backward has to return; 0 if there will be none."""
        if not any(ctx.requires_grad for ctx in contexts):
            return 0
        params = [p for op in (self._fc1, self._activation, self._fc2) for p in op.fuser_parameters()]
        tensors = (*params, None, probs, None, *((scale,) if self._fc2.scale_bias else ()))
        flags = (bool(t is not None and t.requires_grad) for t in tensors)
        return self._needs_of((contexts[0].input_requires_grad, *flags))

    def _needs_of(self, wanted: tuple[bool, ...]) -> int:
        """:meth:`needs`, from whether each tensor of :meth:`direct_forward` needs a gradient."""
        if not wanted:
            return 0
        x, *rest = wanted
        flags = iter(rest)
        needs = NEED_X if x else 0
        for op, of_weight, of_bias in (
            (self._fc1, NEED_W1, NEED_B1),
            (self._activation, 0, 0),
            (self._fc2, NEED_W2, NEED_B2),
        ):
            of_op = [next(flags) for _ in op.fuser_parameters()]
            weights = len(op.weights()) if isinstance(op, GroupedLinear) else 0
            if any(of_op[:weights]):
                needs |= of_weight
            if any(of_op[weights:]):
                needs |= of_bias
        _, of_probs, _, *of_scale = flags
        return needs | (NEED_PROBS if of_probs else 0) | (NEED_SCALE if any(of_scale) else 0)

    def planned_kernels(
        self, basic_op_ctxs: Sequence[OperationContext], tokens: int, basic_op_extra_inputs: Sequence[Tensors]
    ) -> list[PlannedKernel]:
        """List the kernels of the step."""
        probs = basic_op_extra_inputs[1][0]
        scale = basic_op_extra_inputs[2][1] if self._fc2.scale_bias else None
        specs = self.step_specs(self._variant(tokens, probs, scale, self.needs(basic_op_ctxs, probs, scale)))
        if not tokens:
            return [PlannedKernel(role, not role.startswith("fprop"), None, "no tokens, no launch") for role in specs]
        return [PlannedKernel(role, not role.startswith("fprop"), spec) for role, spec in specs.items()]


def _main_grad(fc: GroupedLinear) -> MainGrad:
    """Return the type and mode of the main_grad that wgrad writes to directly; None where it makes a new tensor."""
    target = fc.main_grad_target() if fc.accumulate_into_main_grad else None
    return None if target is None else (target[0].dtype, target[1])
