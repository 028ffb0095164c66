"""What describes one step of the fused grouped MLP: gradients wanted, its kernels, what forward leaves for backward."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from . import checks, kernels
from .codegen.spec import GluLayout, KernelSpec
from .context import Tensors
from .kernels import Launch
from .ops.activation import ScaledActivation
from .ops.grouped_linear import GroupedLinear
from .plain import PLAIN, local

# What a backward has to return, as bits: one small integer is part of the key of the kernels to launch.
NEED_X, NEED_W1, NEED_B1, NEED_PROBS, NEED_W2, NEED_B2, NEED_SCALE = (1 << bit for bit in range(7))
#: Any of these needs dz, hence dgrad_act, hence z from forward.
NEED_Z = NEED_X | NEED_W1 | NEED_B1 | NEED_PROBS

#: GLU layouts that kernels have, by glu_interleave_size.
LAYOUTS = {None: GluLayout.CONTIGUOUS, 32: GluLayout.INTERLEAVED32}


#: Type of the main_grad that a wgrad writes to, and whether it accumulates; None: a new tensor.
MainGrad = tuple[torch.dtype, bool] | None
#: Of FC1 and of FC2.
MainGrads = tuple[MainGrad, MainGrad]
NO_MAIN_GRADS: MainGrads = (None, None)


@dataclass(frozen=True, slots=True)
class Variant:
    """All that the kernels of a step depend on, besides what a plan fixes.

    Attributes
    ----------
    bucket
        Of rows per group: see :func:`kernels.rows_bucket`.
    probs, scale
        Types of probs and of the scale of FC2's bias; None without.
    needs
        NEED_* bits.
    main_grads
        Where the weight gradients of FC1 and of FC2 go.
    """

    bucket: int
    probs: torch.dtype | None
    scale: torch.dtype | None
    needs: int
    main_grads: MainGrads


#: A layer, the role of its wgrad, and the shape of its weight, (G, out, in).
Weight = tuple[GroupedLinear, str, int, int, int]


@dataclass(frozen=True, slots=True, eq=False)
class Fixed:
    """What a plan fixes of its steps.  Read at each call: attributes of a module take several times as long.

    Attributes
    ----------
    fc1, activation, fc2
        The operations.
    dtype
        Type to compute in.
    groups, hidden, ffn, width
        G, H, F, and the output features of FC1.
    device, index
        The device, and the number that ``get_device`` has for it, which compares faster; -1 off CUDA.
    guarded
        Whether the device may not be the current one.
    weights
        Layers 1 and 2 as wgrad needs them: the operation, the kernel's role, and the shape of the weight.
    weights_only
        Whether these two are all parameters there are, each a single one.
    """

    fc1: GroupedLinear
    activation: ScaledActivation
    fc2: GroupedLinear
    dtype: torch.dtype
    groups: int
    hidden: int
    ffn: int
    width: int
    device: torch.device
    index: int
    guarded: bool
    weights: tuple[Weight, Weight]
    weights_only: bool

    @classmethod
    def of(cls, fc1: GroupedLinear, activation: ScaledActivation, fc2: GroupedLinear, dtype: torch.dtype) -> Fixed:
        """Read it from the operations.

        Parameters
        ----------
        fc1, activation, fc2, dtype
            As the attributes.
        """
        all_params = [p for op in (fc1, activation, fc2) for p in op.fuser_parameters()]
        params = [local(p) for p in all_params]
        device = params[0].device
        return cls(
            fc1,
            activation,
            fc2,
            dtype,
            fc1.num_groups,
            fc1.in_features,
            fc2.in_features,
            fc1.out_features,
            device,
            params[0].get_device(),
            kernels.needs_guard(device),
            (
                (fc1, "wgrad1", fc1.num_groups, fc1.out_features, fc1.in_features),
                (fc2, "wgrad2", fc2.num_groups, fc2.out_features, fc2.in_features),
            ),
            len(params) == 2
            and PLAIN.issuperset(map(type, all_params))
            and fc1.single_grouped_weight
            and fc2.single_grouped_weight,
        )

    def fits(self, x: torch.Tensor, sizes1: Any, probs: Any, sizes2: Any, scale: Any) -> bool:
        """Whether the arguments of a call are as usual.

        Parameters
        ----------
        x, sizes1, probs, sizes2, scale
            Input, and extra inputs in order; ``scale`` counts where FC2 takes one.
        """
        shape, device = x.shape, self.index
        if len(shape) != 2:
            return False
        tokens, features = shape
        return (
            features == self.hidden
            and x.dtype is self.dtype
            and x.get_device() == device
            and isinstance(sizes1, torch.Tensor)
            and sizes1.shape == (self.groups,)
            and sizes1.dtype in checks.INTEGERS
            and sizes1.get_device() == device
            and (sizes2 is sizes1 or _fit(sizes2, (self.groups,), checks.INTEGERS, device))
            and (
                probs is None
                or (
                    isinstance(probs, torch.Tensor)
                    and probs.shape == (tokens,)
                    and probs.dtype in checks.FLOATS
                    and probs.get_device() == device
                )
            )
            and (not self.fc2.scale_bias or _fit(scale, (tokens,), checks.FLOATS, device))
        )


def _fit(t: Any, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...], device: int) -> bool:
    """Whether something is a tensor of a shape, of one of the types, on a device."""
    return isinstance(t, torch.Tensor) and t.shape == shape and t.dtype in dtypes and t.get_device() == device


#: Leaves out of a tuple of tensors what a kernel's spec leaves out.
Given = Callable[[tuple["torch.Tensor | None", ...]], tuple[Any, ...]]


def _taking(*takes: object) -> Given:
    picked = [index for index, taken in enumerate(takes) if taken]
    given: Any = operator.itemgetter(*picked) if picked else tuple
    return given  # type: ignore[no-any-return]


def _masking(*keeps: object) -> Given:
    """As :func:`_taking`, but what is left out becomes the item behind the last."""
    kept: Any = operator.itemgetter(*[index if keep else len(keeps) for index, keep in enumerate(keeps)])
    return kept  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class StepKernels:
    """The kernels of a step, ready to launch.

    Attributes
    ----------
    launches
        By role, each with the number of CTAs.
    columns
        Columns of z that one partial sum of dprobs covers.
    main_grads
        As :class:`Variant` has them.
    status
        The device's status word.
    given_fprop_act, given_fprop, given_dgrad_act
        Of all tensors that such a kernel may take, those that these kernels take.
    kept
        Of (x, W1, W2, b2, z, a, probs, scale, sizes1, sizes2, None) the first ten, None for what backward never reads.
    """

    launches: dict[str, tuple[Launch, int]]
    columns: int
    main_grads: MainGrads
    status: torch.Tensor
    given_fprop_act: Given
    given_fprop: Given
    given_dgrad_act: Given
    kept: Given

    @classmethod
    def of(
        cls,
        needs: int,
        specs: dict[str, KernelSpec],
        launches: dict[str, tuple[Launch, int]],
        main_grads: MainGrads,
        status: torch.Tensor,
    ) -> StepKernels:
        """Describe a step.

        Parameters
        ----------
        needs
            NEED_* bits.
        specs
            The kernels by role.
        launches, main_grads, status
            As the attributes.
        """
        fprop_act, fprop, dgrad_act = specs["fprop_act"], specs["fprop"], specs.get("dgrad_act")
        columns, given_dgrad_act = 0, _taking()
        if dgrad_act is not None and dgrad_act.tile is not None:
            columns, probs = dgrad_act.tile.tile_n, dgrad_act.probs
            # dy, W2, z, probs, sizes, dz, a, partial sums of dprobs
            given_dgrad_act = _taking(
                True, True, True, probs, True, True, dgrad_act.store_act, probs and dgrad_act.sum_probs
            )
        return cls(
            launches,
            columns,
            main_grads,
            status,
            # x, W1, b1, probs, sizes, z, a
            _taking(True, True, fprop_act.bias, fprop_act.probs, True, fprop_act.store_z, True),
            # a, W2, b2, scale, sizes, y
            _taking(True, True, fprop.bias, fprop.probs, True, True),
            given_dgrad_act,
            _masking(
                needs & NEED_W1,  # x
                needs & NEED_X,  # W1
                needs & NEED_Z,  # W2
                needs & NEED_SCALE,  # b2
                needs & NEED_Z,  # z
                needs & NEED_W2 and not needs & NEED_Z,  # a
                needs & NEED_Z,  # probs
                needs & (NEED_B2 | NEED_SCALE),  # scale
                True,
                True,
            ),
        )


#: Shape and type of a gradient that backward returns.
Like = tuple[torch.Size, torch.dtype] | None


@dataclass(slots=True, eq=False)
class Saved:
    """What forward hands to backward besides tensors.

    Attributes
    ----------
    step
        The kernels; None where there were no tokens.
    needs, tokens, shape
        NEED_* bits, T, and the input's shape.
    grad_input
        The caller's buffer for dx.
    probs, scale
        Shapes and types of dprobs and dscale.
    """

    step: StepKernels | None
    needs: int
    tokens: int
    shape: torch.Size
    grad_input: torch.Tensor | None
    probs: Like
    scale: Like


#: Extra outputs of the three operations.
NO_OUTPUTS: list[Tensors] = [(), (), ()]


def launchable(t: torch.Tensor | None) -> torch.Tensor | None:
    """:func:`kernels.launchable` of a tensor that may be missing."""
    return None if t is None else kernels.launchable(t)


def given(*tensors: torch.Tensor | None) -> list[torch.Tensor]:
    """Leave out what a kernel's spec leaves out."""
    return [t for t in tensors if t is not None]


def like_of(t: torch.Tensor | None) -> Like:
    """Shape and type of the gradient of a tensor."""
    return None if t is None else (t.shape, t.dtype)
