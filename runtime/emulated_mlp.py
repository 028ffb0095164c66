"""The fused grouped MLP under quantising recipes, emulated: the same kernels on quantised operands in bf16.

Between the launches of :class:`FusedGroupedMLP` stand quantising steps: x and W1 before ``fprop_act``, a and W2 before
``fprop``, dy before ``dgrad_act``, dz before ``dgrad``.  a and dz are quantised from what the kernels stored in bf16.
Forward keeps x, a and the weights as backward will read them, so ``dgrad_act`` does not compute a once more.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from . import kernels
from .codegen.select import on_quantized
from .codegen.spec import KernelSpec
from .context import OperationContext, PlannedKernel, Tensors
from .errors import UnsupportedError
from .grouped_mlp import NAME, FusedGroupedMLP
from .ops import quantized_linear as quantized
from .ops.activation import ScaledActivation
from .ops.grouped_linear import GroupedLinear, cast_for_autocast
from .ops.quantized_linear import LinearQuantizers, gradient_operands, groups_alpha, rows_alpha, saved_operands
from .quantizers.prequantized import quantized_of
from .recipe_state import QuantizedCall, Quantizers
from .step import (
    NEED_B1,
    NEED_B2,
    NEED_PROBS,
    NEED_SCALE,
    NEED_W1,
    NEED_W2,
    NEED_X,
    NEED_Z,
    NO_OUTPUTS,
    MainGrad,
    Saved,
    StepKernels,
    Variant,
    given,
    like_of,
)

#: Tensors that a layer's operands are saved as.
_OPERANDS = 6


class EmulatedSaved(NamedTuple):
    """What forward hands to backward besides tensors.

    Attributes
    ----------
    base
        As the unquantised operation has it.
    calls
        Quantisation of both layers in this call.
    """

    base: Saved
    calls: tuple[QuantizedCall, QuantizedCall]


class EmulatedGroupedMLP(FusedGroupedMLP):
    """Forward and backward of GroupedLinear, activation, GroupedLinear on quantised operands.

    Parameters
    ----------
    fc1, activation, fc2, dtype
        As :class:`FusedGroupedMLP` takes them.
    quantizers
        Those of both layers in the plan.
    """

    direct = False

    def __init__(
        self,
        fc1: GroupedLinear,
        activation: ScaledActivation,
        fc2: GroupedLinear,
        dtype: torch.dtype,
        quantizers: tuple[Quantizers, Quantizers],
    ) -> None:
        super().__init__(fc1, activation, fc2, dtype)
        self._quantizers = quantizers
        self._alphas = quantized.planned_alphas(quantized.of_linear(quantizers[0]))

    # Kernels ----------------------------------------------------------------------------------------------------------

    def step_specs(self, variant: Variant) -> dict[str, KernelSpec]:
        """Choose the GEMMs with group factors; forward keeps a, so ``dgrad_act`` does not store it.

        Parameters
        ----------
        variant
            What they depend on.
        """
        return {role: on_quantized(spec, self._alphas) for role, spec in super().step_specs(variant).items()}

    def _wgrad_spec(self, spec: KernelSpec, main_grad: MainGrad) -> KernelSpec:
        return on_quantized(super()._wgrad_spec(spec, main_grad), self._alphas)

    def planned_kernels(
        self, basic_op_ctxs: Sequence[OperationContext], tokens: int, basic_op_extra_inputs: Sequence[Tensors]
    ) -> list[PlannedKernel]:
        """List the kernels of the step, quantising steps where they run."""
        probs = basic_op_extra_inputs[1][0]
        scale = basic_op_extra_inputs[2][1] if self._fc2.scale_bias else None
        needs = self.needs(basic_op_ctxs, probs, scale)
        gemms = super().planned_kernels(basic_op_ctxs, tokens, basic_op_extra_inputs)
        if not tokens:
            return gemms
        native = "high_precision" if self._quantizers[0].backward_override == "high_precision" else None
        steps = []
        for gemm in gemms:
            gemm_reads = gemm.role.startswith(("fprop", "dgrad", "wgrad"))
            steps.append(replace(gemm, emulated=gemm_reads and not (native and gemm.backward)))
        first, second = (quantized.of_linear(made) for made in self._quantizers)
        layers = (
            (first, {"x": "x", "w": "w1", "dy": "dz"}, needs & NEED_W1, needs & NEED_X, self._fc1),
            (second, {"x": "a", "w": "w2", "dy": "dy"}, needs & NEED_W2, needs & NEED_Z, self._fc2),
        )
        for q, names, wgrad, dgrad, fc in layers:
            steps += quantized.planned(
                q, wgrad=bool(wgrad), dgrad=bool(dgrad), record=needs != 0, names=names, layer=fc
            )
        return sorted(steps, key=lambda step: _ORDER.index(step.role.replace("amax_", "quantize_")))

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
        """Two launches, and before each the quantising of its operands."""
        ctx = basic_op_ctxs[0]
        given = quantized_of(input_)
        # Quantised to another format than the recipe's: with a factor that these kernels do not take.
        ctx.one_by_one = given is not None and given.quantizer.has_alpha and not self._alphas[0]
        if ctx.one_by_one:
            return self._forward_one_by_one(basic_op_ctxs, input_, basic_op_extra_inputs, basic_op_kwargs), NO_OUTPUTS
        (sizes1,), (probs,), (sizes2, *scales) = basic_op_extra_inputs
        scale = scales[0] if scales else None
        first, second = basic_op_ctxs[0].quantized, basic_op_ctxs[2].quantized
        assert first is not None
        assert second is not None
        calls = (first, second)
        needs = self.needs(basic_op_ctxs, probs, scale)
        output, grad_input = self._caller_buffers(basic_op_kwargs)
        kept = [kwargs.get("is_first_microbatch") for kwargs in basic_op_kwargs]
        x = cast_for_autocast(input_, self._fixed.dtype)[0]
        if not self._fixed.fits(x, sizes1, probs, sizes2, scale):
            self._check(x, ((sizes1,), (probs,), (sizes2, scale)))
        self._require_memory(x, sizes1, probs, sizes2, scale)
        x = x.reshape(-1, self._fixed.hidden)
        if output is not None or grad_input is not None:
            self._check_buffers(output, grad_input if needs & NEED_X else None, input_.shape, x.dtype)
        y = x.new_empty(*input_.shape) if output is None else output
        step = self._kernels(len(x), probs, scale, needs) if len(x) else None
        if needs:
            saved = Saved(step, needs, len(x), input_.shape, grad_input, like_of(probs), like_of(scale))
            ctx.saved = EmulatedSaved(saved, calls)
        if step is not None:
            with kernels.device_guard(self._fixed.device):
                tensors = self._launch(
                    step,
                    calls,
                    kernels.launchable(x),
                    (sizes1, sizes2),
                    (probs, scale),
                    y.view(-1, self._fixed.hidden),
                    needs,
                    record=ctx.records_amax,
                    prequantized=given,
                    kept=kept,
                )
            if needs:
                ctx.save_for_backward(*tensors)
        return y, NO_OUTPUTS

    def _launch(
        self,
        step: StepKernels,
        calls: tuple[QuantizedCall, QuantizedCall],
        x: torch.Tensor,
        sizes: tuple[Any, Any],
        rows: tuple[torch.Tensor | None, torch.Tensor | None],
        y: torch.Tensor,
        needs: int,
        *,
        record: bool,
        prequantized: Any,
        kept: Sequence[bool | None],
    ) -> Tensors:
        """Quantise and launch; returns what backward reads."""
        p, s = (kernels.rows_of(t) for t in rows)
        s1, s2 = (kernels.int32_sizes(t) for t in sizes)
        (w1, b1), (w2, b2) = (self._unquantized_parameters(fc) for fc in (self._fc1, self._fc2))
        first = quantized.forward_operands(
            calls[0],
            x,
            w1,
            sizes[0],
            wgrad=bool(needs & NEED_W1),
            dgrad=bool(needs & NEED_X),
            record=record,
            prequantized=prequantized,
            is_first_microbatch=kept[0],
        )
        a = x.new_empty(len(x), self._fixed.ffn)
        z = x.new_empty(len(x), self._fc1.out_features) if needs & NEED_Z else None
        launch, ctas = step.launches["fprop_act"]
        alpha = self._alpha(0, rows_alpha(first.x, first.w, s1))
        operands = given(first.x.values, first.w.values, alpha, b1, p, s1, z, a)
        launch(*operands, step.status, *self._activation.params, ctas)
        second = quantized.forward_operands(
            calls[1],
            a,
            w2,
            sizes[1],
            wgrad=bool(needs & NEED_W2),
            dgrad=bool(needs & NEED_Z),
            record=record,
            is_first_microbatch=kept[2],
        )
        launch, ctas = step.launches["fprop"]
        launch(
            *given(second.x.values, second.w.values, rows_alpha(second.x, second.w, s2), b2, s, s2),
            y,
            step.status,
            ctas,
        )
        return (
            *first.to_save(),
            *second.to_save(),
            b2 if needs & NEED_SCALE else None,
            z,
            p if needs & NEED_Z else None,
            s if needs & (NEED_B2 | NEED_SCALE) else None,
            *sizes,
        )

    def _alpha(self, which: int, alpha: torch.Tensor | None) -> torch.Tensor | None:
        """Return factors for the kernels of fprop, dgrad or wgrad (0, 1, 2), which take some or none.

        A prequantised tensor may be of another format than the recipe's, with factors where the recipe has none.
        """
        if (alpha is not None) == self._alphas[which]:
            return alpha
        if alpha is None:
            return torch.ones(self._fixed.groups, dtype=torch.float32, device=self._fixed.device)
        raise UnsupportedError(
            f"{NAME} on a gradient of prequantized()",
            ["its format has a factor for each group, the recipe's has none; allowed: the recipe's own format"],
        )

    def _unquantized_parameters(self, fc: GroupedLinear) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return weight (G, out, in) as it is, for its quantiser, and the bias as kernels read it."""
        fc.require_memory()
        w, bias = fc.packed_weight(), fc.plain_bias()
        if w.dtype is not self._fixed.dtype:
            self._require_fresh()
        return kernels.launchable(w), None if bias is None else kernels.launchable(bias.to(self._fixed.dtype))

    # Backward ---------------------------------------------------------------------------------------------------------

    def fuser_backward(
        self,
        basic_op_ctxs: list[OperationContext],
        grad_output: torch.Tensor,
        *,
        basic_op_grad_extra_outputs: Sequence[Tensors],
    ) -> tuple[torch.Tensor | None, Sequence[Iterable[torch.Tensor | None]], Sequence[Tensors]]:
        """Only the kernels whose results are needed, and the quantising of what they read."""
        ctx = basic_op_ctxs[0]
        if ctx.one_by_one:
            return self._backward_one_by_one(basic_op_ctxs, grad_output)
        saved: EmulatedSaved = ctx.saved
        dy = grad_output.reshape(-1, self._fixed.hidden).to(self._fixed.dtype)
        if saved.base.step is None:
            grads = self._backward_of_nothing(saved.base, dy)
        else:
            with kernels.device_guard(self._fixed.device):
                grads = self._launch_emulated_backward(
                    saved, saved.base.step, kernels.launchable(dy), quantized_of(grad_output), ctx.saved_tensors
                )
        dx, dw1, db1, dprobs, dw2, db2, dscale = grads
        params = [self._fc1.parameter_gradients(dw1, db1), [], self._fc2.parameter_gradients(dw2, db2)]
        of_fc2 = (None, dscale) if self._fc2.scale_bias else (None,)
        return dx, params, [(None,), (dprobs,), of_fc2]

    def _launch_emulated_backward(
        self, saved: EmulatedSaved, step: StepKernels, dy: torch.Tensor, prequantized: Any, tensors: Tensors
    ) -> tuple[Any, ...]:
        """Quantise and launch; returns dx, dW1, db1, dprobs, dW2, db2 and dscale, None where not needed."""
        x, w1 = saved_operands(tensors[:_OPERANDS])
        a, w2 = saved_operands(tensors[_OPERANDS : 2 * _OPERANDS])
        b2, z, p, s, sizes1, sizes2 = tensors[2 * _OPERANDS :]
        assert sizes1 is not None
        assert sizes2 is not None
        s1, s2 = kernels.int32_sizes(sizes1), kernels.int32_sizes(sizes2)
        base = saved.base
        needs, tokens, launches, status = base.needs, base.tokens, step.launches, step.status
        dx = dw1 = db1 = dprobs = dw2 = db2 = dscale = partial = None
        row, column = gradient_operands(
            saved.calls[1], dy, sizes2, wgrad=a is not None, dgrad=w2 is not None, prequantized=prequantized
        )
        dz = dy.new_empty(tokens if needs & NEED_Z else 0, self._fc1.out_features)
        if w2 is not None and row is not None:
            if needs & NEED_PROBS:
                partial = dy.new_empty(-(-self._fixed.ffn // step.columns), tokens, dtype=torch.float32)
            launch, ctas = launches["dgrad_act"]
            alpha = self._alpha(1, rows_alpha(row, w2, s2))
            operands = given(row.values, w2.values, alpha, z, p, s2, dz, partial)
            launch(*operands, status, *self._activation.params, ctas)
        if a is not None and column is not None:
            dw2 = self._emulated_wgrad(base, step, 2, column, a, s2)
        if needs & (NEED_B2 | NEED_SCALE):
            db2, dscale = self._bias_grad2(base, step, dy, s, b2, s2)
        if needs & NEED_PROBS:
            dprobs = self._reduce(launches["reduce_probs"], partial, base.probs)
        if needs & (NEED_X | NEED_W1):
            row, column = gradient_operands(saved.calls[0], dz, sizes1, wgrad=x is not None, dgrad=w1 is not None)
        if w1 is not None and row is not None:
            dx = dy.new_empty(*base.shape) if base.grad_input is None else base.grad_input
            launch, ctas = launches["dgrad"]
            operands = given(row.values, w1.values, rows_alpha(row, w1, s1), s1, dx.view(-1, self._fixed.hidden))
            launch(*operands, status, ctas)
        if x is not None and column is not None:
            dw1 = self._emulated_wgrad(base, step, 1, column, x, s1)
        if needs & NEED_B1:
            db1 = dy.new_empty(self._fixed.groups, self._fc1.out_features)
            launches["bias_grad1"][0](dz, s1, db1)
        return dx, dw1, db1, dprobs, dw2, db2, dscale

    def _emulated_wgrad(self, saved: Saved, step: StepKernels, layer: int, dy: Any, x: Any, sizes: torch.Tensor) -> Any:
        """As the unquantised operation's, on operands."""
        alpha = self._alpha(2, groups_alpha(dy, x))
        operands = given(dy.values, x.values, alpha, sizes if dy.sizes is None else dy.sizes)
        fc = (self._fc1, self._fc2)[layer - 1]

        def compute(out: torch.Tensor | None, accumulate: bool) -> torch.Tensor:
            shape = (fc.num_groups, fc.out_features, fc.in_features)
            dw: torch.Tensor = x.values.new_empty(shape) if out is None else out
            launch, ctas = step.launches[f"wgrad{layer}"]
            main_grad = None if out is None else (out.dtype, accumulate)
            if step.main_grads[layer - 1] != main_grad:
                launch, ctas = self._wgrad_kernel(layer, saved.tokens, main_grad)
            with kernels.device_guard(self._fixed.device):
                launch(*operands, dw, step.status, ctas)
            return dw

        return fc.weight_gradient(compute)

    # One by one -------------------------------------------------------------------------------------------------------

    def _forward_one_by_one(
        self,
        contexts: list[OperationContext],
        x: torch.Tensor,
        extra: Sequence[Tensors],
        kwargs: Sequence[dict[str, Any]],
    ) -> torch.Tensor:
        """Run the three operations, each by itself."""
        ops = (self._fc1, self._activation, self._fc2)
        for op, ctx, of_op, of_call in zip(ops, contexts, extra, kwargs, strict=True):
            x, _ = op.fuser_forward(
                [ctx],
                x,
                basic_op_extra_inputs=[of_op],
                prev_op_grad_output_quantizer=None,
                next_op_input_quantizer=None,
                basic_op_kwargs=[of_call],
            )
        return x

    def _backward_one_by_one(
        self, contexts: list[OperationContext], grad: torch.Tensor
    ) -> tuple[torch.Tensor | None, list[Any], list[Any]]:
        """Backward of :meth:`_forward_one_by_one`."""
        params: list[Any] = [self._fc1.parameter_gradients(None, None), [], self._fc2.parameter_gradients(None, None)]
        inputs: list[Any] = [(None,), (None,), (None, None) if self._fc2.scale_bias else (None,)]
        ops = (self._fc1, self._activation, self._fc2)
        current: torch.Tensor | None = grad
        for index in (2, 1, 0):
            if current is None or not contexts[index].requires_grad:
                return None, params, inputs
            current, (params[index],), (inputs[index],) = ops[index].fuser_backward(
                [contexts[index]], current, basic_op_grad_extra_outputs=[()]
            )
        return current, params, inputs


def quantizer_problems(q: LinearQuantizers) -> list[str]:
    """Say why the fused operation cannot take what a layer's quantisers make."""
    problems = []
    if q.factors_of_rows:
        problems.append("row_scaled_activation gives the input a scale for each row, kernels take one for each group")
    if any(made is None for made in q[:3]):
        problems.append("qfactory leaves an operand unquantised, the fused path quantises all")
    return problems


_ORDER = (
    "quantize_x quantize_w1 fprop_act quantize_a quantize_w2 fprop quantize_dy dgrad_act wgrad2 bias_grad2 "
    "reduce_scale reduce_probs quantize_dz dgrad wgrad1 bias_grad1"
).split()
