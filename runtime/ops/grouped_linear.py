"""The grouped linear layer: one weight matrix for each group of consecutive rows."""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from .. import checks, grouped_gemm, kernels
from ..caching import LRUCache
from ..context import OperationContext, PlannedKernel, Tensors
from ..errors import ConfigError, ShapeError, UnsupportedError
from ..grouped_gemm import GroupedGemm, LinearShape
from ..op import BasicOperation
from ..plain import PLAIN, like_parameter, local, require_memory
from ..recipe import Recipe
from ..recipe_state import QuantizedCall, Quantizers
from ..recipe_text import recipe_name

#: The shared dummy gradients of weights whose gradient goes to main_grad, by shape, type, device and whether zeroed.
dummy_gradients: LRUCache[torch.Tensor] = LRUCache(64)


class GroupedLinear(BasicOperation):
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

    def _register_list(self, name: str, packed: torch.Tensor) -> None:
        for group, view in enumerate(packed):
            self.register_parameter(f"{name}{group}", torch.nn.Parameter(view))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw weights and biases as :class:`torch.nn.Linear` does: uniform within 1 / sqrt(in_features)."""
        bound = 1.0 / math.sqrt(self.in_features)
        tracker = self._rng_state_tracker_function
        with contextlib.nullcontext() if tracker is None else tracker().fork():
            for parameter in self.fuser_parameters():
                parameter.uniform_(-bound, bound)

    def extra_repr(self) -> str:
        """Say what ``repr`` shows."""
        return (
            f"num_groups={self.num_groups}, in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.has_bias}"
        )

    # Parameters -------------------------------------------------------------------------------------------------------

    @property
    def num_groups(self) -> int:
        """G; of a weight that is sharded by experts (a ``DTensor``, ``Shard(0)``), the groups of this process."""
        weight = self._parameters.get("weight")
        return self._num_groups if type(weight) in PLAIN else len(local(weight, "GroupedLinear.weight"))

    @property
    def has_bias(self) -> bool:
        """Whether there is a bias, as one parameter or as a list."""
        return self._parameters.get("bias") is not None or not self.single_grouped_bias

    def plain_bias(self) -> torch.Tensor | None:
        """Return the bias, (G, out), or None; of one that is sharded by experts the part of this process."""
        if not self.single_grouped_bias:
            return _together("bias", self.biases())
        return local(self._parameters["bias"], "GroupedLinear.bias")  # type: ignore[no-any-return]

    def weights(self) -> list[torch.nn.Parameter]:
        """Return the weight parameter, or the G of them."""
        return [self.weight] if self.single_grouped_weight else self._list("weight")

    def biases(self) -> list[torch.nn.Parameter]:
        """Return the bias parameter, the G of them, or none."""
        if not self.single_grouped_bias:
            return self._list("bias")
        return [] if self.bias is None else [self.bias]

    def _list(self, name: str) -> list[torch.nn.Parameter]:
        found = self._parameters
        try:
            return [p for g in range(self.num_groups) if (p := found[f"{name}{g}"]) is not None]
        except KeyError as missing:
            raise _no_parameter(missing) from None

    def _lists(self) -> dict[str, list[torch.nn.Parameter]]:
        """Parameters that are a list, by their common name."""
        lists = {} if self.single_grouped_weight else {"weight": self._list("weight")}
        if not self.single_grouped_bias:
            lists["bias"] = self._list("bias")
        return lists

    def fuser_parameters(self) -> list[torch.nn.Parameter]:
        """Weights, then the bias if there is one.

        Raises
        ------
        ConfigError
            If one of them is no parameter any more.
        """
        own = self._parameters  # past nn.Module's attribute protocol: this runs at each call
        try:
            found = [own["weight"]] if self.single_grouped_weight else self.weights()
            bias = own["bias"]
        except KeyError as missing:
            raise _no_parameter(missing) from None
        if bias is not None:
            found.append(bias)
        elif not self.single_grouped_bias:
            found += self._list("bias")
        return found  # type: ignore[return-value]  # a weight is never None

    def is_packed(self) -> bool:
        """Whether the weights lie in one storage in order, so that they are one (G, out, in) tensor."""
        weights = self.weights()
        if self.single_grouped_weight:
            return bool(local(weights[0]).is_contiguous())
        return _are_packed(weights)

    def fuser_stamp(self) -> Any:
        """Packed or not, which plans depend on."""
        return None if self.single_grouped_weight else self.is_packed()

    def packed_weight(self) -> torch.Tensor:
        """Return the weights as one (G, out, in) tensor: a view where they are packed, else a copy."""
        if self.single_grouped_weight:
            return local(self._parameters["weight"], "GroupedLinear.weight")  # type: ignore[no-any-return]
        return _together("weight", self.weights())

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> GroupedLinear:
        super()._apply(fn, recurse)
        self._pack()  # each of a list was moved alone
        return self

    @torch.no_grad()
    def _pack(self) -> None:
        """Have parameters that are a list lie in one storage again, where they are plain and alike."""
        for parameters in self._lists().values():
            if _can_be_packed(parameters) and not _are_packed(parameters):
                for parameter, view in zip(parameters, torch.stack([*parameters]), strict=True):
                    parameter.data = view

    def require_memory(self) -> None:
        """Raise ShapeError if there is no memory behind a parameter."""
        require_memory((f"GroupedLinear.{name}", local(p)) for name, p in self._parameters.items())

    # State dicts ------------------------------------------------------------------------------------------------------

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if keep_vars:
            return
        for name, parameters in self._lists().items():
            for group, parameter in enumerate(parameters):
                # The same memory as a storage of its own: safetensors refuses parts of a larger one.
                if type(parameter) in PLAIN and not parameter.is_meta and parameter.numel():
                    capsule = torch._C._to_dlpack(parameter.detach())
                    destination[f"{prefix}{name}{group}"] = torch.utils.dlpack.from_dlpack(capsule)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        self._pack()  # those that were assigned have storages of their own

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._pack()  # each of a list was copied alone

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

    # Gradients of parameters ------------------------------------------------------------------------------------------

    def parameter_gradients(
        self, dw: torch.Tensor | Sequence[torch.Tensor | None] | None, dbias: torch.Tensor | None
    ) -> list[torch.Tensor | None]:
        """Gradients in the order of :meth:`fuser_parameters`."""
        grads: list[torch.Tensor | None]
        if self.single_grouped_weight:
            grads = [dw if dw is None or isinstance(dw, torch.Tensor) else dw[0]]
        else:
            grads = [None] * self.num_groups if dw is None else list(dw)
        if not self.has_bias:
            return grads
        if self.single_grouped_bias:
            return [*grads, dbias]
        return grads + ([None] * self.num_groups if dbias is None else list(dbias))

    def weight_gradient(
        self, compute: Callable[[torch.Tensor | None, bool], torch.Tensor]
    ) -> torch.Tensor | Sequence[torch.Tensor | None] | None:
        """Say what autograd gets for the weights: their gradient, a dummy, or nothing yet.

        Parameters
        ----------
        compute
            ``compute(out, accumulate)`` runs wgrad: into ``out`` (G, out, in), or into a new tensor that it returns.
        """
        if self.delay_wgrad_compute:
            self._delayed.append(lambda: self._finish_wgrad(compute))
            return self._dummies() if self.accumulate_into_main_grad else None
        if not self.accumulate_into_main_grad:
            return compute(None, False)
        self._into_main_grad(compute)
        return self._dummies()

    def need_backward_dw(self) -> bool:
        """Whether :meth:`backward_dw` has to be called."""
        return self.delay_wgrad_compute

    def backward_dw(self) -> None:
        """Compute the weight gradient of the oldest backward that still waits for it, on the current stream.

        Then call the hooks of :meth:`register_wgrad_accumulation_and_reduce_hooks`.
        """
        if self._delayed:
            self._delayed.popleft()()
            for hook in self._wgrad_hooks:
                hook()

    def register_wgrad_accumulation_and_reduce_hooks(self, wgrad_accumulation_and_reduce_hook: Any) -> None:
        """Have a function called after each :meth:`backward_dw`, when the weight gradients are there.

        Delayed weights carry ``skip_backward_post_hook``, by which Megatron's data parallelism leaves out its own hook
        of autograd; it registers one here instead, for each weight.

        Parameters
        ----------
        wgrad_accumulation_and_reduce_hook
            Called without arguments.
        """
        if not callable(wgrad_accumulation_and_reduce_hook):
            raise TypeError(
                f"wgrad_accumulation_and_reduce_hook is {wgrad_accumulation_and_reduce_hook!r}; allowed: a function"
            )
        self._wgrad_hooks.append(wgrad_accumulation_and_reduce_hook)

    @torch.no_grad()
    def _finish_wgrad(self, compute: Callable[[torch.Tensor | None, bool], torch.Tensor]) -> None:
        if self.accumulate_into_main_grad:
            self._into_main_grad(compute)
            return
        dw = compute(None, False)
        for weight, part in zip(self.weights(), self._parts(dw), strict=True):
            part = like_parameter(part.to(weight.dtype), weight)
            weight.grad = part if weight.grad is None else weight.grad + part

    @torch.no_grad()
    def _into_main_grad(self, compute: Callable[[torch.Tensor | None, bool], torch.Tensor]) -> None:
        direct = self.main_grad_target()
        if direct is not None:
            compute(*direct)
            return
        dw = compute(None, False)
        for weight, part in zip(self.weights(), self._parts(dw), strict=True):
            target = self._main_grad(weight).view(part.shape)
            if getattr(weight, "overwrite_main_grad", False):
                target.copy_(part)
            else:
                target.add_(part)

    def main_grad_target(self) -> tuple[torch.Tensor, bool] | None:
        """Return the ``main_grad`` that wgrad can write to directly, (G, out, in), and whether it accumulates."""
        if not (self.accumulate_into_main_grad and self.single_grouped_weight):
            return None
        main_grad = self._main_grad(self.weight)
        aligned = main_grad.is_contiguous() and main_grad.data_ptr() % 16 == 0
        if not aligned or main_grad.dtype not in (torch.float32, self.weight.dtype):
            return None
        shape = (self.num_groups, self.out_features, self.in_features)
        return main_grad.view(shape), not getattr(self.weight, "overwrite_main_grad", False)

    def _main_grad(self, weight: torch.Tensor) -> torch.Tensor:
        weight, main_grad = local(weight), local(getattr(weight, "main_grad", None))
        if isinstance(main_grad, torch.Tensor) and main_grad.numel() == weight.numel():
            return main_grad
        got = f"one of shape {tuple(main_grad.shape)}" if isinstance(main_grad, torch.Tensor) else repr(main_grad)
        raise ConfigError(
            "GroupedLinear(accumulate_into_main_grad=True) needs a tensor main_grad of shape "
            f"{tuple(weight.shape)} on each weight, got {got}"
        )

    def _parts(self, dw: torch.Tensor) -> list[torch.Tensor]:
        return [dw] if self.single_grouped_weight else list(dw)

    def _dummies(self) -> list[torch.Tensor | None]:
        """Return the shared dummy gradients that tell data-parallel hooks to leave ``main_grad`` alone."""
        grads: list[torch.Tensor | None] = []
        for weight in self.weights():
            if not hasattr(weight, "grad_added_to_main_grad"):
                grads.append(None)
                continue
            weight.grad_added_to_main_grad = True
            grads.append(_dummy(weight, zero=bool(getattr(weight, "zero_out_wgrad", False))))
        return grads

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_delayed": deque(), "_wgrad_hooks": []}


def pack(weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return one tensor (G, out, in): a view where the weights are packed, else a copy.

    Parameters
    ----------
    weights
        One of that shape, or G of shape (out, in).
    """
    return weights[0] if weights[0].dim() == 3 else _together("weight", weights)


def _dummy(weight: torch.Tensor, *, zero: bool) -> torch.Tensor:
    key = (weight.shape, weight.dtype, weight.device, zero)
    found = dummy_gradients.peek(key)
    if found is not None:
        return found
    made = torch.zeros_like(weight.detach()) if zero else torch.empty_like(weight.detach())
    if weight.is_cuda and torch.cuda.is_current_stream_capturing():
        return made  # it lives in the graph's memory: nobody outside may get it
    return dummy_gradients.put(key, made)


def _are_packed(parameters: Sequence[torch.Tensor]) -> bool:
    """Whether the parameters of a list lie in one storage in order."""
    if not PLAIN.issuperset(map(type, parameters)):
        return False
    first, step = parameters[0], parameters[0].numel() * parameters[0].element_size()
    storage = first.untyped_storage().data_ptr()
    return all(
        p.is_contiguous()
        and p.dtype == first.dtype
        and p.untyped_storage().data_ptr() == storage
        and p.data_ptr() == first.data_ptr() + group * step
        for group, p in enumerate(parameters)
    )


def _can_be_packed(parameters: Sequence[torch.Tensor]) -> bool:
    """Whether the parameters of a list are plain, have data, and are alike; FSDP2's are packed once it gathers them."""
    first = parameters[0]
    return PLAIN.issuperset(map(type, parameters)) and all(
        (p.shape, p.dtype, p.device) == (first.shape, first.dtype, first.device)
        and not p.is_meta
        and p.untyped_storage().size()
        for p in parameters
    )


def _together(name: str, parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the parameters of a list as one tensor (G, ...): a view where they are packed, else a copy."""
    if not PLAIN.issuperset(map(type, parameters)):
        kinds = sorted({type(p).__name__ for p in parameters})
        plural = "weights" if name == "weight" else "biases"
        raise ShapeError(
            f"GroupedLinear: {plural} as a list are {' and '.join(kinds)}, allowed: plain tensors. Apply "
            f"fully_shard to the GroupedMLP, not to fc1 or fc2; to shard by experts use single_grouped_{name}=True"
        )
    first = parameters[0]
    if not _are_packed(parameters):
        return torch.stack([p.detach() for p in parameters])
    return first.detach().as_strided((len(parameters), *first.shape), (first.numel(), *first.stride()))


def _no_parameter(missing: KeyError) -> ConfigError:
    return ConfigError(
        f"GroupedLinear has no parameter {missing}: it was removed, or replaced by something that is computed from "
        "other parameters (torch.nn.utils.parametrize, or FSDP1), which is not supported"
    )


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
