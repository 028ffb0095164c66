"""The parameters of a grouped linear layer, one tensor or a list of them, and what becomes of their gradients."""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..caching import LRUCache
from ..errors import ConfigError, ShapeError
from ..op import BasicOperation
from ..plain import PLAIN, like_parameter, local, require_memory

#: The shared dummy gradients of weights whose gradient goes to main_grad, by shape, type, device and whether zeroed.
dummy_gradients: LRUCache[torch.Tensor] = LRUCache(64)


class GroupedParameters(BasicOperation):
    """What :class:`GroupedLinear` is besides its forward and backward; its constructor says what the attributes are."""

    in_features: int
    out_features: int
    single_grouped_weight: bool
    single_grouped_bias: bool
    accumulate_into_main_grad: bool
    delay_wgrad_compute: bool
    weight: torch.nn.Parameter
    bias: torch.nn.Parameter | None
    _num_groups: int
    _rng_state_tracker_function: Callable[[], Any] | None
    _delayed: deque[Callable[[], None]]
    _wgrad_hooks: list[Callable[[], object]]

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

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> GroupedParameters:
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


def pack(weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return one tensor (G, out, in): a view where the weights are packed, else a copy.

    Parameters
    ----------
    weights
        One of that shape, or G of shape (out, in).
    """
    return weights[0] if weights[0].dim() == 3 else _together("weight", weights)


def _no_parameter(missing: KeyError) -> ConfigError:
    return ConfigError(
        f"GroupedLinear has no parameter {missing}: it was removed, or replaced by something that is computed from "
        "other parameters (torch.nn.utils.parametrize, or FSDP1), which is not supported"
    )
