"""The grouped MLP as one module."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from .codegen.activations import ACTIVATIONS
from .errors import ConfigError
from .op import BasicOperation
from .ops.activation import ScaledActivation
from .ops.grouped_linear import GroupedLinear
from .sequential import Sequential


class GroupedMLP(Sequential):
    """GroupedLinear, activation times router probability, GroupedLinear: the experts of a Mixture-of-Experts layer.

    The same as a :class:`Sequential` of these three operations, whose names in the state dict are ``fc1``,
    ``activation`` and ``fc2``.

    Parameters
    ----------
    num_groups
        G, the number of experts.
    hidden_size, ffn_hidden_size
        H and F.
    activation
        Entry of the activations table.
    bias
        Whether both layers have one.
    glu_interleave_size
        Layout of FC1's gate and up rows: None for ``[gate | up]``, 32 for blocks of 32 rows in turn.
    device, dtype, single_grouped_weight, single_grouped_bias, scale_bias
    accumulate_into_main_grad, delay_wgrad_compute, rng_state_tracker_function
        As :class:`GroupedLinear` takes them; ``scale_bias`` is for FC2's bias, and probs are its scale.
    **activation_params
        Parameters of the activation.
    """

    def __init__(
        self,
        num_groups: int,
        hidden_size: int,
        ffn_hidden_size: int,
        *,
        activation: str = "swiglu",
        bias: bool = False,
        glu_interleave_size: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        single_grouped_weight: bool = True,
        single_grouped_bias: bool = True,
        scale_bias: bool = False,
        accumulate_into_main_grad: bool = False,
        delay_wgrad_compute: bool = False,
        rng_state_tracker_function: Callable[[], Any] | None = None,
        **activation_params: float,
    ) -> None:
        if activation not in ACTIVATIONS:
            raise ConfigError(f"activation is {activation!r}; allowed: {', '.join(sorted(ACTIVATIONS))}")
        if glu_interleave_size and ffn_hidden_size % glu_interleave_size:
            raise ConfigError(
                f"ffn_hidden_size is {ffn_hidden_size}, not a multiple of glu_interleave_size {glu_interleave_size}"
            )
        common: dict[str, Any] = {
            "bias": bias,
            "device": device,
            "dtype": dtype,
            "single_grouped_weight": single_grouped_weight,
            "single_grouped_bias": single_grouped_bias,
            "accumulate_into_main_grad": accumulate_into_main_grad,
            "delay_wgrad_compute": delay_wgrad_compute,
            "rng_state_tracker_function": rng_state_tracker_function,
        }
        width = (2 if ACTIVATIONS[activation].glu else 1) * ffn_hidden_size
        super().__init__(
            {
                "fc1": GroupedLinear(num_groups, hidden_size, width, **common),
                "activation": ScaledActivation(
                    activation, glu_interleave_size=glu_interleave_size, **activation_params
                ),
                "fc2": GroupedLinear(num_groups, ffn_hidden_size, hidden_size, scale_bias=scale_bias, **common),
            }
        )
        self[0].name, self[2].name = "fc1", "fc2"
        self._scale_bias = scale_bias and bias

    def forward(  # type: ignore[override]
        self,
        x: torch.Tensor,
        split_sizes: torch.Tensor,
        probs: torch.Tensor | None = None,
        *,
        is_first_microbatch: bool | None = None,
        op_kwargs: Mapping[BasicOperation | int, dict[str, Any]] | None = None,
    ) -> torch.Tensor:
        """Run the experts.

        Parameters
        ----------
        x : Tensor (T, H)
            Tokens, sorted by expert.
        split_sizes : Tensor (G,) int32 or int64
            Tokens of each expert, on the same device; never read by the host where kernels run.
        probs : Tensor (T,) or None
            Router probability of each token; None for 1.
        is_first_microbatch
            Under a quantising recipe: True keeps the quantised weights, False uses those that were kept, None neither.
        op_kwargs
            As :meth:`Sequential.forward` takes it.

        Returns
        -------
        Tensor (T, H)
        """
        extra = self.pipeline_inputs(x, split_sizes, probs)
        if is_first_microbatch is not None:
            given = {self[key] if isinstance(key, int) else key: value for key, value in (op_kwargs or {}).items()}
            kept = {"is_first_microbatch": is_first_microbatch}
            op_kwargs = {**given, **{self[index]: {**given.get(self[index], {}), **kept} for index in (0, 2)}}
        y: torch.Tensor = super().forward(x, *extra, op_kwargs=op_kwargs)
        return y

    def pipeline_inputs(
        self, x: torch.Tensor, split_sizes: torch.Tensor, probs: torch.Tensor | None = None
    ) -> tuple[torch.Tensor | None, ...]:
        """Return the extra inputs of the pipeline, in operation order.

        Parameters
        ----------
        x, split_sizes, probs
            Arguments of :meth:`forward`.
        """
        extra = (split_sizes, probs, split_sizes)
        if not self._scale_bias:
            return extra
        return (*extra, x.new_ones(x.shape[:-1]) if probs is None else probs)

    def reset_parameters(self) -> None:
        """Draw the parameters of both layers anew, as after ``to_empty`` of a module on the meta device."""
        for module in self:
            if isinstance(module, GroupedLinear):
                module.reset_parameters()

    def backward_dw(self) -> None:
        """Compute delayed weight gradients of both layers."""
        for module in self:
            if isinstance(module, GroupedLinear):
                module.backward_dw()
