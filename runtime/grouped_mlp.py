"""The fused grouped MLP: GroupedLinear, activation, GroupedLinear in a few kernels.

Forward: ``fprop_act`` (x W1^T + b1, activation, probs) and ``fprop`` (a W2^T + b2).  Backward: ``dgrad_act`` (dy W2,
gradient of the activation, a once more), ``dgrad``, ``wgrad`` and ``bias_grad`` of both layers, ``reduce`` for the
gradients of probs and of the bias's scale; only those whose results are needed.  The split sizes stay on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch

from . import checks, kernels
from .context import OperationContext, StalePlan, Tensors
from .errors import ShapeError
from .grouped_gemm import BIAS_GRAD_COLUMNS
from .kernels import Launch
from .mlp_kernels import MLPKernels
from .ops.grouped_linear import GroupedLinear, cast_for_autocast, take_buffers
from .plain import PLAIN, require_memory
from .step import (
    NEED_B1,
    NEED_B2,
    NEED_PROBS,
    NEED_SCALE,
    NEED_W1,
    NEED_W2,
    NEED_X,
    NEED_Z,
    NO_MAIN_GRADS,
    NO_OUTPUTS,
    Like,
    Saved,
    StepKernels,
    Weight,
    given,
    launchable,
    like_of,
)

NAME = "fused grouped MLP"
_T = TypeVar("_T")


class FusedGroupedMLP(MLPKernels):
    """Forward and backward of GroupedLinear, activation, GroupedLinear through this project's kernels.

    Parameters
    ----------
    fc1, activation, fc2
        The operations that it stands for.
    dtype
        Type to compute in.
    """

    direct = True

    def _on_device(self, method: Callable[..., _T], *arguments: Any) -> _T:
        """Call a method with its device being current; where there is only one, without a context, which takes time."""
        fixed = self._fixed
        if not fixed.guarded:
            return method(*arguments)
        with kernels.device_guard(fixed.device):
            return method(*arguments)

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
        w1, b1, w2, b2 = self._weights_and_biases()
        y, saved, tensors = self._on_device(
            self._forward, input_, w1, b1, probs, sizes1, w2, b2, scale, sizes2, needs, *buffers
        )
        if needs:
            ctx.saved = saved
            ctx.save_for_backward(*tensors)
        return y, NO_OUTPUTS

    def direct_forward(
        self, wanted: tuple[bool, ...], x: torch.Tensor, tensors: Tensors
    ) -> tuple[torch.Tensor, Any, Tensors]:
        """As :meth:`FusedOperation.direct_forward`."""
        fixed = self._fixed
        scale = None
        if fixed.fc2.scale_bias:
            sizes1, probs, sizes2, scale = tensors[-4:]
        else:
            sizes1, probs, sizes2 = tensors[-3:]
        try:
            needs = self._needs[wanted]
        except KeyError:
            needs = self._needs[wanted] = self._needs_of(wanted)
        w1, b1, w2, b2 = self._weights_and_biases()
        return self._on_device(self._forward, x, w1, b1, probs, sizes1, w2, b2, scale, sizes2, needs)

    def _forward(
        self,
        input_: torch.Tensor,
        w1: torch.Tensor,
        b1: torch.Tensor | None,
        probs: torch.Tensor | None,
        sizes1: Any,
        w2: torch.Tensor,
        b2: torch.Tensor | None,
        scale: torch.Tensor | None,
        sizes2: Any,
        needs: int,
        output: torch.Tensor | None = None,
        grad_input: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, Saved | None, Tensors]:
        """Check, choose kernels, launch; returns y and what backward reads.  Parameters are as kernels read them."""
        fixed = self._fixed
        x = input_ if input_.dtype is fixed.dtype else cast_for_autocast(input_, fixed.dtype)[0]
        if not fixed.fits(x, sizes1, probs, sizes2, scale):
            self._check(x, ((sizes1,), (probs,), (sizes2, scale)))
        shape = input_.shape
        matrix = len(shape) == 2
        if not matrix:
            x = x.reshape(-1, fixed.hidden)
        tokens = shape[0] if matrix else len(x)
        # Sizes as numbers: a torch.Size takes new_empty more than twice as long.
        if output is not None or grad_input is not None:
            self._check_buffers(output, grad_input if needs & NEED_X else None, shape, x.dtype)
        y = x.new_empty(*shape) if output is None else output
        like = None if probs is None else (probs.shape, probs.dtype)
        if not tokens:
            return y, Saved(None, needs, 0, shape, grad_input, like, like_of(scale)), ()
        at = x.data_ptr()
        if not (at and sizes1.data_ptr() and (probs is None or probs.data_ptr())) or not (
            (sizes2 is sizes1 or sizes2.data_ptr()) and (scale is None or scale.data_ptr())
        ):
            self._require_memory(x, sizes1, probs, sizes2, scale)
        step = self._kernels(tokens, probs, scale, needs)
        # Most tensors are as kernels read them; a call to find that out would take longer than the look.
        if at % 16 or not x.is_contiguous():
            x = kernels.launchable(x)
        p = probs
        if probs is not None and not (matrix and probs.dtype is torch.float32 and probs.is_contiguous()):
            p = kernels.rows_of(probs)
        s = None if scale is None else kernels.rows_of(scale)
        s1 = sizes1 if sizes1.dtype is torch.int32 else kernels.int32_sizes(sizes1)
        s2 = None if sizes2 is sizes1 else kernels.int32_sizes(sizes2)
        a = x.new_empty(tokens, fixed.ffn)
        z = x.new_empty(tokens, fixed.width) if needs & NEED_Z else None
        launches, status = step.launches, step.status
        launch, ctas = launches["fprop_act"]
        launch(*step.given_fprop_act((x, w1, b1, p, s1, z, a)), status, *fixed.activation.params, ctas)
        launch, ctas = launches["fprop"]
        rows = y if matrix else y.view(-1, fixed.hidden)
        launch(*step.given_fprop((a, w2, b2, s, s1 if s2 is None else s2, rows)), status, ctas)
        if not needs:
            return y, None, ()
        saved = Saved(step, needs, tokens, shape, grad_input, like, None if scale is None else like_of(scale))
        return y, saved, step.kept((x, w1, w2, b2, z, a, p, s, s1, s2, None))

    def _weights_and_biases(self) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor | None]:
        """Return W1 (G, out, in), b1, W2 and b2 as kernels read them."""
        fixed = self._fixed
        if fixed.weights_only:  # as they are, unless autocast is on or somebody assigned to their data
            w1: Any = fixed.fc1._parameters["weight"]
            w2: Any = fixed.fc2._parameters["weight"]
            if (
                w1.dtype is w2.dtype is fixed.dtype
                and type(w1) in PLAIN
                and type(w2) in PLAIN
                and (at1 := w1.data_ptr())
                and (at2 := w2.data_ptr())
                and not (at1 | at2) % 16
                and w1.is_contiguous()
                and w2.is_contiguous()
            ):
                return w1, None, w2, None
        return *self._parameters_of(fixed.fc1), *self._parameters_of(fixed.fc2)

    def _parameters_of(self, fc: GroupedLinear) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return weight and bias of a layer as kernels read them."""
        fc.require_memory()
        w = fc.packed_weight()
        if not w.is_contiguous():  # somebody assigned to its data
            raise StalePlan
        if w.dtype is not self._fixed.dtype:
            self._require_fresh()
            w = w.to(self._fixed.dtype)
        bias = fc.plain_bias()
        return kernels.launchable(w), None if bias is None else kernels.launchable(bias.to(self._fixed.dtype))

    def _require_fresh(self) -> None:
        """Raise StalePlan if somebody assigned to the ``data`` of a weight since this operation was made."""
        if kernels.autocast_dtype(self._fixed.device) is None:
            if any(fc.weights()[0].dtype is not self._fixed.dtype for fc in (self._fc1, self._fc2)):
                raise StalePlan

    @staticmethod
    def _require_memory(*tensors: Any) -> None:
        """Raise ShapeError if there is no memory behind some of the arguments."""
        names = ("the input", "split_sizes", "probs", "second split_sizes", "scale")
        require_memory(zip(names, tensors, strict=True))

    def _check(self, x: torch.Tensor, extra: Sequence[Tensors]) -> None:
        """Raise ShapeError that names every argument that is wrong."""
        self._require_fresh()
        problems = self._fc1.input_problems(x, extra[0], self._fixed.dtype)
        problems += self._activation.probs_problems(extra[1][0], x)
        if extra[2][0] is not extra[0][0]:
            problems += [
                f"second {p}" for p in checks.splits_problems(extra[2][0], self._fixed.groups, self._fixed.device)
            ]
        if self._fc2.scale_bias:
            problems += checks.rows_problems("scale", extra[2][1], x.shape[:-1], self._fixed.device)
        if problems:
            raise ShapeError(f"{NAME}: {'; '.join(problems)}")

    def _check_buffers(
        self, output: torch.Tensor | None, grad_input: torch.Tensor | None, shape: torch.Size, dtype: torch.dtype
    ) -> None:
        """Raise ShapeError that names what kernels cannot write to; what is wrong anyway the fuser has found."""
        problems = []
        for name, buffer in (("output", output), ("grad_input", grad_input)):
            if buffer is not None:
                problems += checks.buffer_problems(name, buffer, shape, dtype, self._fixed.device, aligned=True)
        checks.require(NAME, problems)

    def _caller_buffers(self, kwargs: Sequence[dict[str, Any]]) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the caller's buffers: FC2's output and FC1's input gradient."""
        if not any(kwargs):
            return None, None
        first, last = take_buffers(self._fc1, kwargs[0]), take_buffers(self._fc2, kwargs[2])
        checks.no_keywords(type(self._activation).__name__, kwargs[1])
        if first["output"] is not None or last["grad_input"] is not None:
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
        grads = self._on_device(self._gradients, ctx.saved, ctx.saved_tensors, grad_output)
        dx, dw1, db1, dprobs, dw2, db2, dscale = grads
        of_params = [self._fc1.parameter_gradients(dw1, db1), [], self._fc2.parameter_gradients(dw2, db2)]
        return dx, of_params, [(None,), (dprobs,), (None, dscale) if self._fc2.scale_bias else (None,)]

    def direct_backward(self, state: Any, saved: Tensors, grad_output: torch.Tensor) -> tuple[Any, ...]:
        """As :meth:`FusedOperation.direct_backward`."""
        fixed = self._fixed
        dx, dw1, db1, dprobs, dw2, db2, dscale = self._on_device(self._gradients, state, saved, grad_output)
        of_fc1, of_fc2 = fixed.fc1.parameter_gradients(dw1, db1), fixed.fc2.parameter_gradients(dw2, db2)
        if fixed.fc2.scale_bias:
            return (dx, *of_fc1, *of_fc2, None, dprobs, None, dscale)
        return (dx, *of_fc1, *of_fc2, None, dprobs, None)

    def _gradients(self, saved: Saved, tensors: Tensors, grad_output: torch.Tensor) -> tuple[Any, ...]:
        """Return dx, dW1, db1, dprobs, dW2, db2 and dscale, None where not needed."""
        fixed = self._fixed
        dy = grad_output if grad_output.dim() == 2 else grad_output.reshape(-1, fixed.hidden)
        if dy.dtype is not fixed.dtype:
            dy = dy.to(fixed.dtype)
        step, needs, tokens = saved.step, saved.needs, saved.tokens
        if step is None:
            return self._backward_of_nothing(saved, dy)
        if dy.data_ptr() % 16 or not dy.is_contiguous():
            dy = kernels.launchable(dy)
        x, w1, w2, b2, z, a, p, s, s1, s2 = tensors
        if s2 is None:
            s2 = s1
        launches, status = step.launches, step.status
        dx = dw1 = db1 = dprobs = dw2 = db2 = dscale = dz = partial = None
        if needs & NEED_Z:
            dz = dy.new_empty(tokens, fixed.width)
            a = dy.new_empty(tokens, fixed.ffn) if needs & NEED_W2 else None
            if needs & NEED_PROBS:
                partial = dy.new_empty(-(-fixed.ffn // step.columns), tokens, dtype=torch.float32)
            launch, ctas = launches["dgrad_act"]
            launch(*step.given_dgrad_act((dy, w2, z, p, s2, dz, a, partial)), status, *fixed.activation.params, ctas)
        if needs & NEED_W2:
            dw2 = self._wgrad(fixed.weights[1], saved, step, dy, a, s2)
        del a
        if needs & (NEED_B2 | NEED_SCALE):
            db2, dscale = self._bias_grad2(saved, step, dy, s, b2, s2)
        if needs & NEED_X:
            shape = saved.shape
            dx = dy.new_empty(*shape) if saved.grad_input is None else saved.grad_input
            rows = dx if len(shape) == 2 else dx.view(-1, fixed.hidden)
            launch, ctas = launches["dgrad"]
            launch(dz, w1, s1, rows, status, ctas)
        if needs & NEED_W1:
            dw1 = self._wgrad(fixed.weights[0], saved, step, dz, x, s1)
        if needs & NEED_B1:
            db1 = dy.new_empty(fixed.groups, fixed.width)
            launches["bias_grad1"][0](dz, s1, db1)
        if needs & NEED_PROBS:
            dprobs = self._reduce(launches["reduce_probs"], partial, saved.probs)
        return dx, dw1, db1, dprobs, dw2, db2, dscale

    def _backward_of_nothing(self, saved: Saved, dy: torch.Tensor) -> tuple[Any, ...]:
        """Gradients of a step without tokens: empty or 0, and no launch."""
        fixed = self._fixed
        fc1, fc2, needs = fixed.fc1, fixed.fc2, saved.needs

        def dw(fc: GroupedLinear) -> Any:
            def compute(out: torch.Tensor | None, accumulate: bool) -> torch.Tensor:
                if out is None:
                    return dy.new_zeros(fc.num_groups, fc.out_features, fc.in_features)
                return out if accumulate else out.zero_()

            return fc.weight_gradient(compute)

        def rows(like: Like) -> Any:
            return None if like is None else dy.new_empty(like[0], dtype=like[1])

        return (
            (dy.new_empty(*saved.shape) if saved.grad_input is None else saved.grad_input) if needs & NEED_X else None,
            dw(fc1) if needs & NEED_W1 else None,
            dy.new_zeros(fixed.groups, fc1.out_features) if needs & NEED_B1 else None,
            rows(saved.probs) if needs & NEED_PROBS else None,
            dw(fc2) if needs & NEED_W2 else None,
            dy.new_zeros(fixed.groups, fc2.out_features) if needs & NEED_B2 else None,
            rows(saved.scale) if needs & NEED_SCALE else None,
        )

    def _wgrad(self, weight: Weight, saved: Saved, step: StepKernels, dy: Any, x: Any, sizes: Any) -> Any:
        """Compute dW: as a rule at once, into a new tensor."""
        fc, role, groups, rows, columns = weight
        if step.main_grads is NO_MAIN_GRADS and not (fc.accumulate_into_main_grad or fc.delay_wgrad_compute):
            dw: torch.Tensor = dy.new_empty(groups, rows, columns)
            launch, ctas = step.launches[role]
            launch(dy, x, sizes, dw, step.status, ctas)
            return dw
        return self._wgrad_elsewhere(weight, saved.tokens, step, dy, x, sizes)

    def _wgrad_elsewhere(self, weight: Weight, tokens: int, step: StepKernels, dy: Any, x: Any, sizes: Any) -> Any:
        """Compute dW now or later, into a new tensor or into main_grad, as the layer says."""
        fc, role, *shape = weight
        layer = 1 if role == "wgrad1" else 2

        def compute(out: torch.Tensor | None, accumulate: bool) -> torch.Tensor:
            dw: torch.Tensor = dy.new_empty(*shape) if out is None else out
            launch, ctas = step.launches[role]
            main_grad = None if out is None else (out.dtype, accumulate)
            if step.main_grads[layer - 1] != main_grad:  # it changed since forward: say, it accumulates now
                launch, ctas = self._wgrad_kernel(layer, tokens, main_grad)
            with kernels.device_guard(self._fixed.device):  # delayed, it runs outside backward's
                launch(dy, x, sizes, dw, step.status, ctas)
            return dw

        return fc.weight_gradient(compute)

    def _bias_grad2(
        self, saved: Saved, step: StepKernels, dy: Any, scale: Any, bias: Any, sizes: Any
    ) -> tuple[Any, Any]:
        """Compute db2, and the gradient of its scale where that is needed."""
        db = dy.new_empty(self._fixed.groups, self._fixed.hidden)
        launch, _ = step.launches["bias_grad2"]
        dscale = None
        if saved.needs & NEED_SCALE:
            partial = dy.new_empty(-(-self._fixed.hidden // BIAS_GRAD_COLUMNS), saved.tokens, dtype=torch.float32)
            launch(dy, scale, bias, sizes, db, partial)
            dscale = self._reduce(step.launches["reduce_scale"], partial, saved.scale)
        else:
            launch(*given(dy, scale, sizes, db))
        return (db if saved.needs & NEED_B2 else None), dscale

    def _reduce(self, kernel: tuple[Launch, int], partial: Any, like: Like) -> torch.Tensor:
        """Sum partial sums over their first dimension into a tensor of a shape and type."""
        assert like is not None
        shape, dtype = like
        if dtype not in kernels.DTYPES:
            return self._reduce(kernel, partial, (shape, torch.float32)).to(dtype)
        out: torch.Tensor = partial.new_empty(*shape, dtype=dtype)
        launch, ctas = kernel
        launch(partial, out if len(shape) == 1 else out.view(-1), ctas)
        return out

    # torch.compile ----------------------------------------------------------------------------------------------------

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
        w1, w2 = kernels.launchable(w1), kernels.launchable(w2)
        b1, b2 = launchable(b1), launchable(b2)
        y, _, saved = self._on_device(self._forward, x, w1, b1, probs, sizes1, w2, b2, scale, sizes2, needs)
        return (y, saved[4], saved[5]) if saved else (y, None, None)

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
        tensors = (x, w1, w2, launchable(b2), z, a, kernels.rows_of(probs), kernels.rows_of(scale), s1, s2)
        return self._on_device(self._gradients, saved, tensors, dy)
