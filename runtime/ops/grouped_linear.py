"""The grouped linear layer: one weight matrix for each group of consecutive rows."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from .. import checks, grouped_gemm, kernels
from ..context import OperationContext, PlannedKernel, Tensors
from ..errors import ConfigError, UnsupportedError
from ..grouped_gemm import GroupedGemm, LinearShape
from ..op import BasicOperation
from ..plain import require_memory
from ..recipe import Recipe
from ..recipe_state import QuantizedCall, Quantizers
from ..recipe_text import recipe_name
from .grouped_parameters import GroupedParameters


class GroupedLinear(GroupedParameters):
    """y = x W_g^T + b_g for the rows of each group g.

    Takes ``split_sizes`` as its extra input, (G,) int32 or int64 on the weight's device: rows of each group in order.
    They are never read on the host where kernels run.  With ``scale_bias`` a second extra input, (T,), scales the bias
    of each row.  Rows past the sum of the splits come out 0.

    Parameters
    ----------
    num_groups
        G.
    in_features, out_features
        Features of x and y.
    bias
        Whether there is a bias.
    device, dtype
        Of the parameters; dtype is bfloat16, float16 or float32 (float64 in plain torch).
    single_grouped_weight
        One parameter ``weight`` (G, out, in).  False: ``weight0`` .. ``weight{G-1}``, views of one packed storage.
    single_grouped_bias
        One parameter ``bias`` (G, out).  False: ``bias0`` .. ``bias{G-1}``, views of one packed storage.
    scale_bias
        Multiply each row's bias by the second extra input.
    accumulate_into_main_grad
        Write weight gradients to the parameter's ``main_grad`` (overwriting if it has ``overwrite_main_grad``), and
        give autograd a shared dummy.
    delay_wgrad_compute
        Compute weight gradients in :meth:`backward_dw` instead of in backward.
    rng_state_tracker_function
        Called without arguments it returns a tracker of random number generators, such as Megatron's: parameters are
        drawn inside of its ``fork()``.
    recipe
        Recipe of this layer, whatever recipe is in force: ``HighPrecision()`` leaves it unquantised among quantised
        layers.  None: the one in force.

    Attributes
    ----------
    weight : Parameter (G, out, in)
    bias : Parameter (G, out) or None
        None, too, where biases are a list.
    """

    num_extra_inputs = 1
    #: What a factory of quantisers is told about the layer.
    module_type = "grouped_linear"
    name = ""

    def __init__(
        self,
        num_groups: int,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        single_grouped_weight: bool = True,
        single_grouped_bias: bool = True,
        scale_bias: bool = False,
        accumulate_into_main_grad: bool = False,
        delay_wgrad_compute: bool = False,
        rng_state_tracker_function: Callable[[], Any] | None = None,
        recipe: Any = None,
    ) -> None:
        self.__dict__["_recipe"] = recipe
        self.__dict__["num_extra_inputs"] = 2 if scale_bias and bias else 1
        super().__init__()
        dtype = torch.get_default_dtype() if dtype is None else dtype
        sizes = {"num_groups": num_groups, "in_features": in_features, "out_features": out_features}
        problems = [f"{name} is {v!r}, allowed: a positive integer" for name, v in sizes.items() if not _positive(v)]
        if dtype not in checks.FLOATS:
            problems.append(f"dtype is {dtype}, allowed: a floating-point type")
        if rng_state_tracker_function is not None and not callable(rng_state_tracker_function):
            problems.append(
                f"rng_state_tracker_function is {rng_state_tracker_function!r}, allowed: a function or None"
            )
        if problems:
            raise ConfigError(f"GroupedLinear: {'; '.join(problems)}")
        self._num_groups = num_groups
        self.in_features = in_features
        self.out_features = out_features
        self.scale_bias = scale_bias and bias
        self.single_grouped_weight = single_grouped_weight
        self.accumulate_into_main_grad = accumulate_into_main_grad
        self.delay_wgrad_compute = delay_wgrad_compute
        self.single_grouped_bias = single_grouped_bias or not bias
        self._rng_state_tracker_function = rng_state_tracker_function
        self._delayed: deque[Callable[[], None]] = deque()
        self._wgrad_hooks: list[Callable[[], object]] = []
        packed = torch.empty(num_groups, out_features, in_features, device=device, dtype=dtype)
        if single_grouped_weight:
            self.weight = torch.nn.Parameter(packed)
        else:
            self._register_list("weight", packed)
        self.bias: torch.nn.Parameter | None
        biases = torch.empty(num_groups, out_features, device=device, dtype=dtype) if bias else None
        self.register_parameter(
            "bias", torch.nn.Parameter(biases) if biases is not None and single_grouped_bias else None
        )
        if biases is not None and not single_grouped_bias:
            self._register_list("bias", biases)
        if delay_wgrad_compute:
            for parameter in self.weights():
                parameter.skip_backward_post_hook = True  # type: ignore[attr-defined]
        if not packed.is_meta:
            self.reset_parameters()

    def extra_repr(self) -> str:
        """Say what ``repr`` shows."""
        return (
            f"num_groups={self.num_groups}, in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.has_bias}"
        )

    # Quantisers -------------------------------------------------------------------------------------------------------

    def num_quantizers(self, mode: str) -> int:
        """Return 2 in forward, input and weight, and 1 in backward, the gradient of the output."""
        return 2 if mode == "forward" else 1

    def num_scales(self) -> int:
        """Return G."""
        return self.num_groups

    def make_quantizers(self, recipe: Recipe) -> Quantizers | None:
        """Return new quantisers under a recipe, or None where nothing is quantised.

        Parameters
        ----------
        recipe
            As :meth:`BasicOperation.make_quantizers` takes it.

        Raises
        ------
        UnsupportedError
            If the layer's features do not fit the blocks, or quantisers do not fit each other.
        """
        made = super().make_quantizers(recipe)
        if made is None:
            return None
        from . import quantized_linear as quantized

        problems = quantized.feature_problems(quantized.of_linear(made), self.in_features, self.out_features)
        if problems:
            raise UnsupportedError(f"GroupedLinear under {recipe_name(made.recipe)}", problems)
        return made

    # Forward ----------------------------------------------------------------------------------------------------------

    def shape(self, dtype: torch.dtype) -> LinearShape:
        """Shape of the layer, to compute in a type."""
        return LinearShape(
            self.num_groups, self.in_features, self.out_features, dtype, self.fuser_parameters()[0].device
        )

    def input_problems(self, x: torch.Tensor, extra: Tensors, dtype: torch.dtype) -> list[str]:
        """Say what is wrong with the operation's inputs."""
        device = self.fuser_parameters()[0].device
        problems = checks.input_problems(x, self.in_features, dtype, device)
        problems += checks.splits_problems(extra[0], self.num_groups, device)
        if self.scale_bias:
            problems += checks.rows_problems("scale", extra[1], x.shape[:-1], device)
        return problems

    def planned_kernels(
        self, basic_op_ctxs: Sequence[OperationContext], tokens: int, basic_op_extra_inputs: Sequence[Tensors]
    ) -> list[PlannedKernel]:
        """List the grouped GEMMs that the operation would run."""
        ctx = basic_op_ctxs[0]
        dtype = kernels.autocast_dtype(self.fuser_parameters()[0].device) or self.weights()[0].dtype
        shape, made = self.shape(dtype), ctx.quantizers
        plain = grouped_gemm.choose(shape)
        gemm = backward = plain
        alphas = (False, False, False)
        steps: list[PlannedKernel] = []
        if made is not None:
            from . import quantized_linear as quantized

            gemm = quantized.gemm_of(shape, made)
            q = quantized.of_linear(made)
            backward = plain if q.backward_override == "high_precision" else gemm
            alphas = quantized.planned_alphas(q)
            wgrad_wanted = ctx.requires_grad and any(w.requires_grad for w in self.weights())
            steps = quantized.planned(
                q, wgrad=wgrad_wanted, dgrad=ctx.input_requires_grad, record=ctx.records_amax, layer=self
            )
        scale = basic_op_extra_inputs[0][1] if self.scale_bias else None
        scale_dtype = None if scale is None else scale.dtype
        scale_grad = scale is not None and scale.requires_grad
        target = self.main_grad_target()
        wgrad = (dtype, False) if target is None else (target[0].dtype, target[1])
        wanted: dict[str, tuple[bool, GroupedGemm, tuple[object, ...]]] = {
            "fprop": (True, gemm, (self.has_bias, scale_dtype, alphas[0])),
            "dgrad": (ctx.input_requires_grad, backward, (alphas[1],)),
            "wgrad": (any(w.requires_grad for w in self.weights()), backward, (*wgrad, alphas[2])),
            "bias_grad": (
                scale_grad or any(b.requires_grad for b in self.biases()),
                plain,
                (scale_dtype, scale_grad),
            ),
            "reduce": (scale_grad, plain, (scale_dtype,)),
        }
        return steps + [
            PlannedKernel(
                role, role != "fprop", runs.spec_of(role, tokens, *variant), runs.name, emulated=runs is not plain
            )
            for role, (wants, runs, variant) in wanted.items()
            if wants and (ctx.requires_grad or role == "fprop")
        ]

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
        """One grouped GEMM; ``output=`` and ``grad_input=`` name buffers of the caller.

        ``is_first_microbatch=True`` keeps a quantised weight, ``False`` uses the one that was kept.
        """
        ctx, extra = basic_op_ctxs[0], basic_op_extra_inputs[0]
        buffers = take_buffers(self, basic_op_kwargs[0])
        self.require_memory()
        w, bias = self.packed_weight(), self.plain_bias()
        x, dtype = cast_for_autocast(input_, w.dtype)
        checks.require(type(self).__name__, self.input_problems(x, extra, dtype))
        require_memory(zip(("the input", "split_sizes", "scale"), (input_, *extra), strict=False))
        sizes, scale = extra[0], (extra[1] if self.scale_bias else None)
        assert sizes is not None
        x = x.reshape(-1, self.in_features)
        b, rows = None if bias is None else bias.to(dtype), None if scale is None else scale.reshape(-1)
        shape, call = self.shape(dtype), ctx.quantized
        of_weight = any(p.requires_grad for p in self.weights())
        of_scale = scale is not None and scale.requires_grad
        saved: Tensors
        if call is None:
            w = w.to(dtype)
            gemm = ctx.gemm = grouped_gemm.choose(shape)
            y = gemm.fprop(x, w, sizes, b, rows)
            saved = (x if of_weight else None, w if ctx.input_requires_grad else None)
        else:
            from . import quantized_linear as quantized

            first = basic_op_kwargs[0].get("is_first_microbatch")
            ctx.gemm, y, saved = quantized.forward(
                ctx, call, shape, x, w, sizes, b, rows, wgrad=of_weight, input_=input_, is_first_microbatch=first
            )
        if input_.dim() != 2:  # FSDP2 warns about outputs that are views
            y = y.view(*input_.shape[:-1], self.out_features)
        y = checks.into_buffer(buffers["output"], y)
        if ctx.requires_grad:
            ctx.call, ctx.grad_input, ctx.input_shape = call, buffers["grad_input"], input_.shape
            ctx.weight_requires_grad, ctx.scale_requires_grad = of_weight, of_scale
            ctx.bias_requires_grad = any(p.requires_grad for p in self.biases())
            ctx.save_for_backward(bias if of_scale else None, sizes, scale, *saved)
        return y, [()]

    def buffer_problems(self, kwargs: dict[str, Any], rows: torch.Size, *, backward: bool) -> list[str]:
        """Say what is wrong with ``output=`` and ``grad_input=`` of a call.

        Parameters
        ----------
        kwargs, rows, backward
            As :meth:`BasicOperation.buffer_problems` takes them.
        """
        device = self.fuser_parameters()[0].device
        dtype = kernels.autocast_dtype(device) or self.weights()[0].dtype
        problems = []
        for name, features in (
            ("output", self.out_features),
            *((("grad_input", self.in_features),) if backward else ()),
        ):
            if kwargs.get(name) is not None:
                problems += checks.buffer_problems(name, kwargs[name], (*rows, features), dtype, device)
        return problems

    def fuser_backward(
        self,
        basic_op_ctxs: list[OperationContext],
        grad_output: torch.Tensor,
        *,
        basic_op_grad_extra_outputs: Sequence[Tensors],
    ) -> tuple[torch.Tensor | None, Sequence[Iterable[torch.Tensor | None]], Sequence[Tensors]]:
        """Only the passes whose results are needed."""
        ctx = basic_op_ctxs[0]
        bias, sizes, scale, *saved = ctx.saved_tensors
        assert sizes is not None
        gemm: GroupedGemm = ctx.gemm
        dy = grad_output.reshape(-1, self.out_features)
        dx = dw = dbias = dscale = None
        for_dgrad, for_wgrad = self._backward_operands(ctx, dy, grad_output, sizes, saved)
        if for_dgrad is not None:
            dx = gemm.dgrad(*for_dgrad).view(ctx.input_shape)
            dx = checks.into_buffer(ctx.grad_input, dx)
        if for_wgrad is not None:
            dy_w, x_w, slots, alpha = for_wgrad
            dw = self.weight_gradient(lambda out, accumulate: gemm.wgrad(dy_w, x_w, slots, out, accumulate, alpha))
        if ctx.bias_requires_grad or ctx.scale_requires_grad:
            rows = None if scale is None else scale.reshape(-1)
            unquantized = gemm if ctx.call is None else grouped_gemm.choose(self.shape(dy.dtype))
            dbias, dscale = unquantized.bias_grad(dy, sizes, rows, None if bias is None else bias.to(dy.dtype))
            if dscale is not None and scale is not None:
                dscale = dscale.view(scale.shape)
        grads = self.parameter_gradients(dw, dbias if ctx.bias_requires_grad else None)
        return dx, [grads], [(None, dscale) if self.scale_bias else (None,)]

    def _backward_operands(
        self, ctx: OperationContext, dy: torch.Tensor, grad_output: torch.Tensor, sizes: torch.Tensor, saved: Tensors
    ) -> tuple[Any, Any]:
        """Return the arguments of dgrad and of wgrad: operands, sizes and alpha; None where not needed."""
        call: QuantizedCall | None = ctx.call
        if call is None:
            x, w = saved
            return (
                (dy.to(w.dtype), w, sizes, None) if w is not None and ctx.input_requires_grad else None,
                (dy.to(x.dtype), x, sizes, None) if x is not None and ctx.weight_requires_grad else None,
            )
        from . import quantized_linear as quantized

        return quantized.backward_arguments(call, dy, grad_output, sizes, saved)


def _positive(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def take_buffers(op: BasicOperation, kwargs: dict[str, Any]) -> dict[str, torch.Tensor | None]:
    """Return the caller's ``output`` and ``grad_input`` buffers, after checking that there is no unknown keyword.

    Raises
    ------
    TypeError
        If there is another keyword, or ``is_first_microbatch`` is no bool and not None.
    """
    unknown = sorted(set(kwargs) - {"output", "grad_input", "is_first_microbatch"})
    if unknown:
        raise TypeError(
            f"{type(op).__name__} takes the keywords output, grad_input and is_first_microbatch, "
            f"got {', '.join(unknown)}"
        )
    checks.first_microbatch(kwargs.get("is_first_microbatch"))
    return {"output": kwargs.get("output"), "grad_input": kwargs.get("grad_input")}


def cast_for_autocast(x: torch.Tensor, weight_dtype: torch.dtype) -> tuple[torch.Tensor, torch.dtype]:
    """Return the input and the type to compute in: that of ``torch.autocast`` where it is on, else the weight's."""
    dtype = kernels.autocast_dtype(x.device)
    return (x, weight_dtype) if dtype is None else (x.to(dtype), dtype)
