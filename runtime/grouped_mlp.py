"""The fused grouped MLP: GroupedLinear, activation, GroupedLinear in a few kernels.

Forward: ``fprop_act`` (x W1^T + b1, activation, probs) and ``fprop`` (a W2^T + b2).  Backward: ``dgrad_act`` (dy W2,
gradient of the activation, a once more), ``dgrad``, ``wgrad`` and ``bias_grad`` of both layers, ``reduce`` for the
gradients of probs and of the bias's scale; only those whose results are needed.  The split sizes stay on the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from . import checks, kernels
from .codegen.select import StepSpecs, step_specs
from .codegen.spec import DType, KernelSpec, Pass
from .errors import ShapeError
from .grouped_gemm import BIAS_GRAD_COLUMNS
from .kernels import Launch
from .op import FusedOperation, OperationContext, PlannedKernel, StalePlan, Tensors
from .ops.activation import ScaledActivation
from .ops.grouped_linear import GroupedLinear, cast_for_autocast, take_buffers
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
    NO_OUTPUTS,
    Like,
    Saved,
    StepKernels,
    Variant,
    given,
    launchable,
    like_of,
    row_dtype,
    rows_of,
)

NAME = "fused grouped MLP"


class FusedGroupedMLP(FusedOperation):
    """Forward and backward of GroupedLinear, activation, GroupedLinear through this project's kernels.

    Parameters
    ----------
    fc1, activation, fc2
        The operations that it stands for.
    dtype
        Type to compute in.
    """

    direct = True
    _fc1: GroupedLinear
    _activation: ScaledActivation
    _fc2: GroupedLinear

    def __init__(
        self, fc1: GroupedLinear, activation: ScaledActivation, fc2: GroupedLinear, dtype: torch.dtype
    ) -> None:
        super().__init__((fc1, activation, fc2))
        # Past nn.Module's attribute protocol: these are read at each call.
        self.__dict__.update(_fc1=fc1, _activation=activation, _fc2=fc2)
        self._dtype = dtype
        self._hidden, self._ffn, self._groups = fc1.in_features, fc2.in_features, fc1.num_groups
        self._device = fc1.fuser_parameters()[0].device
        self._index = fc1.fuser_parameters()[0].get_device()  # compares faster; -1 off CUDA, where no kernel runs
        self._guard = kernels.device_guard(self._device)
        self._provider = kernels.provider()
        self._arch = self._provider.arch(self._device)
        self._sizes_shape = torch.Size((self._groups,))
        self._tables: dict[tuple[Any, ...], StepKernels] = {}

    # Kernels ----------------------------------------------------------------------------------------------------------

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
            "fprop_act": replace(chosen.fprop_act, bias=self._fc1.bias is not None, store_z=bool(needs & NEED_Z)),
            "fprop": replace(chosen.fprop, bias=self._fc2.bias is not None, probs=scale),
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
        numerics = kernels.NUMERICS_OF[self._dtype]
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
            kernels.NUMERICS_OF[self._dtype],
            self._activation.activation,
            LAYOUTS[self._activation.glu_interleave_size],
            None if variant.probs is None else kernels.DTYPES[variant.probs],
            tokens=kernels.bucket_tokens(variant.bucket, self._groups),
            groups=self._groups,
            hidden=self._hidden,
            ffn=self._ffn,
            backward=backward,
        )

    def _wgrad_spec(self, spec: KernelSpec, main_grad: tuple[torch.dtype, bool] | None) -> KernelSpec:
        if main_grad is None:
            return spec
        dtype, accumulate = main_grad
        out: DType | None = None if dtype == self._dtype else kernels.DTYPES[dtype]
        return replace(spec, out=out, accumulate=accumulate)

    def _variant(self, tokens: int, probs: torch.Tensor | None, scale: torch.Tensor | None, needs: int) -> Variant:
        return Variant(
            kernels.rows_bucket(tokens, self._groups),
            None if probs is None else row_dtype(probs),
            None if scale is None else row_dtype(scale),
            needs,
            (_main_grad(self._fc1), _main_grad(self._fc2)),
        )

    def _kernels(self, tokens: int, probs: torch.Tensor | None, scale: torch.Tensor | None, needs: int) -> StepKernels:
        """Return the kernels of a step, all made ready before the first is launched."""
        key = (
            (tokens // self._groups).bit_length(),  # kernels.rows_bucket, without the call
            None if probs is None else probs.dtype,
            None if scale is None else scale.dtype,
            needs,
            _main_grad(self._fc1),
            _main_grad(self._fc2),
        )
        found = self._tables.get(key)
        if found is None:
            specs = self.step_specs(self._variant(tokens, probs, scale, needs))
            self._provider.prepare(tuple(specs.values()), self._device)
            sms = self._provider.sm_count(self._device)
            launches = {role: (self._provider.get(spec), kernels.grid(spec, sms)) for role, spec in specs.items()}
            tile = specs["dgrad_act"].tile if "dgrad_act" in specs else None
            columns = 0 if tile is None else tile.tile_n
            status = self._provider.status(self._device)
            found = self._tables.setdefault(key, StepKernels(launches, columns, key[-2:], status))
        return found

    def _wgrad_kernel(self, layer: int, tokens: int, main_grad: tuple[torch.dtype, bool] | None) -> tuple[Launch, int]:
        """Return the wgrad kernel of layer 1 or 2 alone."""
        role = f"wgrad{layer}"
        variant = Variant(kernels.rows_bucket(tokens, self._groups), None, None, 0, (main_grad, main_grad))
        key = (role, variant)
        found = self._tables.get(key)
        if found is None:
            spec = self._wgrad_spec(getattr(self._select(variant, backward=True), role), main_grad)
            self._provider.prepare([spec], self._device)
            launches = {role: (self._provider.get(spec), kernels.grid(spec, self._provider.sm_count(self._device)))}
            status = self._provider.status(self._device)
            found = self._tables.setdefault(key, StepKernels(launches, 0, variant.main_grads, status))
        return found.launches[role]

    def needs(
        self, contexts: Sequence[OperationContext], probs: torch.Tensor | None, scale: torch.Tensor | None
    ) -> int:
        """Return the NEED_* bits of what backward has to return; 0 if there will be none."""
        boundary = next((index for index, ctx in enumerate(contexts) if ctx.requires_grad), 3)
        return self._needs_of(boundary, contexts[0].input_requires_grad, probs, scale)

    def _needs_of(
        self, boundary: int, x_requires_grad: bool, probs: torch.Tensor | None, scale: torch.Tensor | None
    ) -> int:
        """:meth:`needs`, from the index of the first of the three operations that needs a backward."""
        if boundary > 2:
            return 0
        needs = NEED_X if x_requires_grad else 0
        if boundary == 0:
            needs |= _parameter_needs(self._fc1, NEED_W1, NEED_B1)
        if boundary <= 1 and probs is not None and probs.requires_grad:
            needs |= NEED_PROBS
        if scale is not None and scale.requires_grad:
            needs |= NEED_SCALE
        return needs | _parameter_needs(self._fc2, NEED_W2, NEED_B2)

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

    # Forward ----------------------------------------------------------------------------------------------------------

    def fuser_forward(
        self,
        basic_op_ctxs: list[OperationContext],
        input_: torch.Tensor,
        *,
        basic_op_extra_inputs: Sequence[Tensors],
        prev_op_grad_output_quantizer: Any,
        next_op_input_quantizer: Any,
        basic_op_kwargs: Sequence[dict[str, Any]],
    ) -> tuple[torch.Tensor, Sequence[Tensors]]:
        """Two launches; z is stored only if a backward will read it."""
        ctx = basic_op_ctxs[0]
        (sizes1,), (probs,), (sizes2, *scales) = basic_op_extra_inputs
        scale = scales[0] if scales else None
        needs = self.needs(basic_op_ctxs, probs, scale)
        buffers = self._caller_buffers(basic_op_kwargs)
        y, saved, tensors = self._forward(input_, sizes1, probs, sizes2, scale, needs, *buffers)
        if needs:
            ctx.saved = saved
            ctx.save_for_backward(*tensors)
        return y, NO_OUTPUTS

    def direct_forward(
        self, boundary: int, x_requires_grad: bool, x: torch.Tensor, tensors: Tensors
    ) -> tuple[torch.Tensor, Any, Tensors]:
        """As :meth:`FusedOperation.direct_forward`."""
        scale = None
        if self._fc2.scale_bias:
            sizes1, probs, sizes2, scale = tensors[-4:]
        else:
            sizes1, probs, sizes2 = tensors[-3:]
        needs = self._needs_of(boundary, x_requires_grad, probs, scale)
        return self._forward(x, sizes1, probs, sizes2, scale, needs, None, None)

    def _forward(
        self,
        input_: torch.Tensor,
        sizes1: torch.Tensor | None,
        probs: torch.Tensor | None,
        sizes2: torch.Tensor | None,
        scale: torch.Tensor | None,
        needs: int,
        output: torch.Tensor | None,
        grad_input: torch.Tensor | None,
    ) -> tuple[torch.Tensor, Saved | None, Tensors]:
        """Check, choose kernels, launch; returns y and what backward reads."""
        x = input_ if input_.dtype is self._dtype else cast_for_autocast(input_, self._dtype)[0]
        if not self._fits(x, sizes1, probs, sizes2, scale):
            self._check(x, ((sizes1,), (probs,), (sizes2, scale)))
        assert sizes1 is not None
        assert sizes2 is not None
        shape = input_.shape
        if len(shape) != 2:
            x = x.reshape(-1, self._hidden)
        tokens = x.shape[0]
        y = checks.buffer_or_empty(NAME, "output", output, shape, x)
        if not tokens:
            return y, Saved(None, needs, 0, shape, grad_input, like_of(probs), like_of(scale)), ()
        step = self._kernels(tokens, probs, scale, needs)
        w1, b1 = self._parameters_of(self._fc1)
        w2, b2 = self._parameters_of(self._fc2)
        with self._guard:
            tensors = self._launch_forward(step, x, w1, b1, probs, sizes1, w2, b2, scale, sizes2, y, needs)
        if not needs:
            return y, None, ()
        return y, Saved(step, needs, tokens, shape, grad_input, like_of(probs), like_of(scale)), tensors

    def _launch_forward(
        self,
        step: StepKernels,
        x: torch.Tensor,
        w1: torch.Tensor,
        b1: torch.Tensor | None,
        probs: torch.Tensor | None,
        sizes1: torch.Tensor,
        w2: torch.Tensor,
        b2: torch.Tensor | None,
        scale: torch.Tensor | None,
        sizes2: torch.Tensor,
        y: torch.Tensor,
        needs: int,
    ) -> Tensors:
        """Launch both kernels; returns what backward reads."""
        x = kernels.launchable(x)
        p, s = rows_of(probs), rows_of(scale)
        s1 = kernels.int32_sizes(sizes1)
        s2 = s1 if sizes2 is sizes1 else kernels.int32_sizes(sizes2)
        a = x.new_empty(x.shape[0], self._ffn)
        z = x.new_empty(x.shape[0], self._fc1.out_features) if needs & NEED_Z else None
        launch, ctas = step.launches["fprop_act"]
        launch(*given(x, w1, b1, p, s1, z, a), step.status, *self._activation.params, ctas)
        launch, ctas = step.launches["fprop"]
        launch(*given(a, w2, b2, s, s2), y if y.dim() == 2 else y.view(-1, self._hidden), step.status, ctas)
        return (
            x if needs & NEED_W1 else None,
            w1 if needs & NEED_X else None,
            w2 if needs & NEED_Z else None,
            b2 if needs & NEED_SCALE else None,
            z,
            a if needs & NEED_W2 and not needs & NEED_Z else None,
            p if needs & NEED_Z else None,
            s if needs & (NEED_B2 | NEED_SCALE) else None,
            s1,
            None if s2 is s1 else s2,  # taking a saved tensor back costs microseconds
        )

    def _parameters_of(self, fc: GroupedLinear) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return weight (G, out, in) and bias of a layer as kernels read them."""
        w, bias = fc.packed_weight(), fc._parameters["bias"]
        if w.dtype is not self._dtype:
            self._require_fresh()
            w = w.to(self._dtype)
        return kernels.launchable(w), None if bias is None else kernels.launchable(bias.to(self._dtype))

    def _fits(
        self,
        x: torch.Tensor,
        sizes1: torch.Tensor | None,
        probs: torch.Tensor | None,
        sizes2: torch.Tensor | None,
        scale: torch.Tensor | None,
    ) -> bool:
        """Whether the arguments are as usual; if not, :meth:`_check` says what is wrong, if anything is."""
        shape = x.shape
        return (
            len(shape) == 2
            and shape[1] == self._hidden
            and x.dtype is self._dtype
            and x.get_device() == self._index
            and self._fit_sizes(sizes1)
            and (sizes2 is sizes1 or self._fit_sizes(sizes2))
            and (probs is None or self._fit_rows(probs, shape[0]))
            and (not self._fc2.scale_bias or (scale is not None and self._fit_rows(scale, shape[0])))
        )

    def _fit_sizes(self, sizes: torch.Tensor | None) -> bool:
        return (
            isinstance(sizes, torch.Tensor)
            and sizes.shape == self._sizes_shape
            and sizes.dtype in checks.INTEGERS
            and sizes.get_device() == self._index
        )

    def _fit_rows(self, t: torch.Tensor, rows: int) -> bool:
        return (
            isinstance(t, torch.Tensor)
            and t.shape == (rows,)
            and t.dtype in checks.FLOATS
            and t.get_device() == self._index
        )

    def _require_fresh(self) -> None:
        """Raise StalePlan if somebody assigned to the ``data`` of a weight since this operation was made."""
        if kernels.autocast_dtype(self._device) is None:
            if any(fc.weights()[0].dtype is not self._dtype for fc in (self._fc1, self._fc2)):
                raise StalePlan

    def _check(self, x: torch.Tensor, extra: Sequence[Tensors]) -> None:
        """Raise ShapeError that names every argument that is wrong."""
        self._require_fresh()
        problems = self._fc1.input_problems(x, extra[0], self._dtype)
        problems += self._activation.probs_problems(extra[1][0], x)
        if extra[2][0] is not extra[0][0]:
            problems += [f"second {p}" for p in checks.splits_problems(extra[2][0], self._groups, self._device)]
        if self._fc2.scale_bias:
            problems += checks.rows_problems("scale", extra[2][1], x.shape[:-1], self._device)
        if problems:
            raise ShapeError(f"{NAME}: {'; '.join(problems)}")

    def _caller_buffers(self, kwargs: Sequence[dict[str, Any]]) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the caller's buffers: FC2's output and FC1's input gradient."""
        if not any(kwargs):
            return None, None
        first, last = take_buffers(self._fc1, kwargs[0]), take_buffers(self._fc2, kwargs[2])
        if first["output"] is not None or last["grad_input"] is not None or kwargs[1]:
            raise ShapeError(f"{NAME}: buffers between the fused operations would never be written")
        return last["output"], first["grad_input"]

    # Backward ---------------------------------------------------------------------------------------------------------

    def fuser_backward(
        self,
        basic_op_ctxs: list[OperationContext],
        grad_output: torch.Tensor,
        *,
        basic_op_grad_extra_outputs: Sequence[Tensors],
    ) -> tuple[torch.Tensor | None, Sequence[Iterable[torch.Tensor | None]], Sequence[Tensors]]:
        """Only the kernels whose results are needed."""
        ctx = basic_op_ctxs[0]
        dx, of_fc1, of_fc2, dprobs, dscale = self._gradients(ctx.saved, ctx.saved_tensors, grad_output)
        of_inputs = (None, dscale) if self._fc2.scale_bias else (None,)
        return dx, [of_fc1, [], of_fc2], [(None,), (dprobs,), of_inputs]

    def direct_backward(self, state: Any, saved: Tensors, grad_output: torch.Tensor) -> tuple[Any, ...]:
        """As :meth:`FusedOperation.direct_backward`."""
        dx, of_fc1, of_fc2, dprobs, dscale = self._gradients(state, saved, grad_output)
        if self._fc2.scale_bias:
            return (dx, *of_fc1, *of_fc2, None, dprobs, None, dscale)
        return (dx, *of_fc1, *of_fc2, None, dprobs, None)

    def _gradients(self, saved: Saved, tensors: Tensors, grad_output: torch.Tensor) -> tuple[Any, ...]:
        """Return dx, lists of the gradients of both layers' parameters, dprobs and dscale."""
        dy = grad_output if grad_output.dim() == 2 else grad_output.reshape(-1, self._hidden)
        if dy.dtype is not self._dtype:
            dy = dy.to(self._dtype)
        dx, dw1, db1, dprobs, dw2, db2, dscale = self._backward(saved, dy, tensors)
        return (
            dx,
            self._fc1.parameter_gradients(dw1, db1),
            self._fc2.parameter_gradients(dw2, db2),
            dprobs,
            dscale,
        )

    def _backward(self, saved: Saved, dy: torch.Tensor, tensors: Tensors) -> tuple[Any, ...]:
        """Return dx, dW1, db1, dprobs, dW2, db2 and dscale, None where not needed."""
        if saved.step is None:
            return self._backward_of_nothing(saved, dy)
        with self._guard:
            return self._launch_backward(saved, saved.step, kernels.launchable(dy), tensors)

    def _launch_backward(self, saved: Saved, step: StepKernels, dy: torch.Tensor, tensors: Tensors) -> tuple[Any, ...]:
        """Launch the kernels of :meth:`_backward`."""
        x, w1, w2, b2, z, a, p, s, s1, s2 = tensors
        s2 = s1 if s2 is None else s2
        needs, tokens, launches, status = saved.needs, saved.tokens, step.launches, step.status
        dx = dw1 = db1 = dprobs = dw2 = db2 = dscale = dz = partial = None
        if needs & NEED_Z:
            dz = dy.new_empty(tokens, self._fc1.out_features)
            a = dy.new_empty(tokens, self._ffn) if needs & NEED_W2 else None
            if needs & NEED_PROBS:
                partial = dy.new_empty(-(-self._ffn // step.columns), tokens, dtype=torch.float32)
            launch, ctas = launches["dgrad_act"]
            launch(*given(dy, w2, z, p, s2, dz, a, partial), status, *self._activation.params, ctas)
        if needs & NEED_W2:
            dw2 = self._wgrad(saved, step, 2, dy, a, s2)
        del a
        if needs & (NEED_B2 | NEED_SCALE):
            db2, dscale = self._bias_grad2(saved, step, dy, s, b2, s2)
        if needs & NEED_X:
            dx = checks.buffer_or_empty(NAME, "grad_input", saved.grad_input, saved.shape, dy)
            launch, ctas = launches["dgrad"]
            launch(dz, w1, s1, dx if dx.dim() == 2 else dx.view(-1, self._hidden), status, ctas)
        if needs & NEED_W1:
            dw1 = self._wgrad(saved, step, 1, dz, x, s1)
        if needs & NEED_B1:
            db1 = dy.new_empty(self._groups, self._fc1.out_features)
            launches["bias_grad1"][0](dz, s1, db1)
        if needs & NEED_PROBS:
            dprobs = self._reduce(launches["reduce_probs"], partial, saved.probs)
        return dx, dw1, db1, dprobs, dw2, db2, dscale

    def _backward_of_nothing(self, saved: Saved, dy: torch.Tensor) -> tuple[Any, ...]:
        """Gradients of a step without tokens: empty or 0, and no launch."""
        fc1, fc2, needs = self._fc1, self._fc2, saved.needs

        def dw(fc: GroupedLinear) -> Any:
            def compute(out: torch.Tensor | None, accumulate: bool) -> torch.Tensor:
                if out is None:
                    return dy.new_zeros(fc.num_groups, fc.out_features, fc.in_features)
                return out if accumulate else out.zero_()

            return fc.weight_gradient(compute)

        def rows(like: Like) -> Any:
            return None if like is None else dy.new_empty(like[0], dtype=like[1])

        return (
            checks.buffer_or_empty(NAME, "grad_input", saved.grad_input, saved.shape, dy) if needs & NEED_X else None,
            dw(fc1) if needs & NEED_W1 else None,
            dy.new_zeros(self._groups, fc1.out_features) if needs & NEED_B1 else None,
            rows(saved.probs) if needs & NEED_PROBS else None,
            dw(fc2) if needs & NEED_W2 else None,
            dy.new_zeros(self._groups, fc2.out_features) if needs & NEED_B2 else None,
            rows(saved.scale) if needs & NEED_SCALE else None,
        )

    def _wgrad(self, saved: Saved, step: StepKernels, layer: int, dy: Any, x: Any, sizes: Any) -> Any:
        """Compute dW of layer 1 or 2, now or later, into a new tensor or into main_grad."""
        fc = (self._fc1, self._fc2)[layer - 1]
        tokens = saved.tokens

        def compute(out: torch.Tensor | None, accumulate: bool) -> torch.Tensor:
            dw: torch.Tensor = dy.new_empty(fc.num_groups, fc.out_features, fc.in_features) if out is None else out
            launch, ctas = step.launches[f"wgrad{layer}"]
            main_grad = None if out is None else (out.dtype, accumulate)
            if step.main_grads[layer - 1] != main_grad:  # it changed since forward: say, it accumulates now
                launch, ctas = self._wgrad_kernel(layer, tokens, main_grad)
            with self._guard:  # delayed, it runs outside backward's
                launch(dy, x, sizes, dw, step.status, ctas)
            return dw

        return fc.weight_gradient(compute)

    def _bias_grad2(
        self, saved: Saved, step: StepKernels, dy: Any, scale: Any, bias: Any, sizes: Any
    ) -> tuple[Any, Any]:
        """Compute db2, and the gradient of its scale where that is needed."""
        db = dy.new_empty(self._groups, self._hidden)
        launch, _ = step.launches["bias_grad2"]
        dscale = None
        if saved.needs & NEED_SCALE:
            partial = dy.new_empty(-(-self._hidden // BIAS_GRAD_COLUMNS), saved.tokens, dtype=torch.float32)
            launch(dy, scale, bias, sizes, db, partial)
            dscale = self._reduce(step.launches["reduce_scale"], partial, saved.scale)
        else:
            launch(*given(dy, scale, sizes, db))
        return (db if saved.needs & NEED_B2 else None), dscale

    def _reduce(self, kernel: tuple[Launch, int], partial: Any, like: Like) -> torch.Tensor:
        """Sum partial sums over their first dimension into a tensor of a shape and type."""
        assert like is not None
        launch, ctas = kernel
        shape, dtype = like
        out: torch.Tensor = partial.new_empty(shape, dtype=dtype if dtype in kernels.DTYPES else torch.float32)
        launch(partial, out if out.dim() == 1 else out.view(-1), ctas)
        return out if out.dtype is dtype else out.to(dtype)

    # torch.compile ----------------------------------------------------------------------------------------------------

    def compilable(self) -> bool:
        """Whether a step is a function of its tensors alone, as the operators of :mod:`.compiled` must be."""
        linears = (self._fc1, self._fc2)
        return not any(
            fc.accumulate_into_main_grad or fc.delay_wgrad_compute or not fc.single_grouped_weight for fc in linears
        )

    def functional_forward(
        self,
        x: torch.Tensor,
        w1: torch.Tensor,
        b1: torch.Tensor | None,
        probs: torch.Tensor | None,
        sizes1: torch.Tensor,
        w2: torch.Tensor,
        b2: torch.Tensor | None,
        scale: torch.Tensor | None,
        sizes2: torch.Tensor,
        needs: int,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Forward from tensors alone.

        Parameters
        ----------
        x, w1, b1, probs, sizes1, w2, b2, scale, sizes2
            Inputs and parameters in the plan's type; x is (T, H).
        needs
            NEED_* bits.

        Returns
        -------
        y, z, a
            z and a where backward reads them from forward, else None.
        """
        if not self._fits(x, sizes1, probs, sizes2, scale):
            self._check(x, ((sizes1,), (probs,), (sizes2, scale)))
        y = torch.empty_like(x)
        if not len(x):
            return y, None, None
        step = self._kernels(len(x), probs, scale, needs)
        w1, w2 = kernels.launchable(w1), kernels.launchable(w2)
        b1, b2 = launchable(b1), launchable(b2)
        with self._guard:
            saved = self._launch_forward(step, x, w1, b1, probs, sizes1, w2, b2, scale, sizes2, y, needs)
        return y, saved[4], saved[5]

    def functional_backward(
        self,
        dy: torch.Tensor,
        x: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        b2: torch.Tensor | None,
        z: torch.Tensor | None,
        a: torch.Tensor | None,
        probs: torch.Tensor | None,
        scale: torch.Tensor | None,
        sizes1: torch.Tensor,
        sizes2: torch.Tensor,
        needs: int,
    ) -> tuple[torch.Tensor | None, ...]:
        """Backward from tensors alone.

        Parameters
        ----------
        dy, x, w1, w2, b2, z, a, probs, scale, sizes1, sizes2
            dy (T, H), and what :meth:`functional_forward` took and returned.
        needs
            NEED_* bits.

        Returns
        -------
        tuple
            dx, dW1, db1, dprobs, dW2, db2 and dscale, None where not needed.
        """
        tokens = len(x)
        step = self._kernels(tokens, probs, scale, needs) if tokens else None
        saved = Saved(step, needs, tokens, x.shape, None, like_of(probs), like_of(scale))
        s1 = kernels.int32_sizes(sizes1)
        s2 = s1 if sizes2 is sizes1 else kernels.int32_sizes(sizes2)
        x, w1, w2 = kernels.launchable(x), kernels.launchable(w1), kernels.launchable(w2)
        return self._backward(saved, dy, (x, w1, w2, launchable(b2), z, a, rows_of(probs), rows_of(scale), s1, s2))


def _main_grad(fc: GroupedLinear) -> tuple[torch.dtype, bool] | None:
    """Return the type and mode of the main_grad that wgrad writes to directly; None where it makes a new tensor."""
    target = fc.main_grad_target() if fc.accumulate_into_main_grad else None
    return None if target is None else (target[0].dtype, target[1])


def _parameter_needs(fc: GroupedLinear, weight: int, bias: int) -> int:
    """Return the NEED_* bits of a layer's parameters."""
    own = fc._parameters
    needs = bias if (b := own["bias"]) is not None and b.requires_grad else 0
    if fc.single_grouped_weight:
        return needs | weight if own["weight"].requires_grad else needs  # type: ignore[union-attr]
    return needs | weight if any(w.requires_grad for w in fc.weights()) else needs
