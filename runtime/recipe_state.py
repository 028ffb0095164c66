"""Quantisers of an operation, and what they need of earlier steps.

Quantisers hold the settings of the recipe of a call: they belong to its plan.  State belongs to the operation: amax
histories, scales, the random series.  When it is made anew is the fuser's business, and has nothing to do with which
plan runs.  A :class:`QuantizedCall` brings both together.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import torch

from .errors import UnsupportedError
from .recipe import Recipe, recipe_kind
from .recipe_text import recipe_name
from .snapshot import require_supported, snapshot

if TYPE_CHECKING:  # imported where they are needed: without a quantising recipe nothing needs them
    from .quantizers.base import Quantizer
    from .quantizers.emulation import EmulatedOperand

FP32_MAX = torch.finfo(torch.float32).max
MODES = ("forward", "backward")


class QuantizedOperation(Protocol):
    """What recipe state asks of an operation."""

    def num_quantizers(self, mode: str) -> int:
        """Return the number of quantised tensors in ``"forward"`` or ``"backward"``."""
        ...

    def num_scales(self) -> int:
        """Return the number of matrices or groups in each of them, which have scales of their own."""
        ...

    def make_quantizers(self, recipe: Recipe) -> Quantizers | None:
        """Return the quantisers under a recipe, or None where nothing is quantised."""
        ...


class Quantizers:
    """The quantisers of one operation under one recipe.

    Parameters
    ----------
    recipe
        The recipe; nobody changes it any more.
    op
        The operation.

    Attributes
    ----------
    recipe : Recipe
    by_mode : dict of str to list of (Quantizer or None)
        ``"forward"``: of input and weight (and input, weight, ...); ``"backward"``: of gradients of outputs.
    backward_override : str or None
        That of the recipe.
    """

    def __init__(self, recipe: Recipe, op: QuantizedOperation) -> None:
        require_supported(recipe)
        self.recipe = recipe
        self.backward_override = recipe.backward_override
        self.by_mode = {
            mode: [_made(recipe, op, mode, index) for index in range(op.num_quantizers(mode))] for mode in MODES
        }

    def __iter__(self) -> Iterator[Quantizer | None]:
        """All of them."""
        return itertools.chain.from_iterable(self.by_mode.values())


#: Held while plans are made, and while states are replaced or taken by a call, so that it gets those of its own recipe.
#: One for all: an operation may be in several pipelines.  Never held while operations run.
states_lock = threading.RLock()


class RecipeState:
    """Quantisation state of one operation under the recipes of one type.

    Parameters
    ----------
    quantizers
        Those of the first call, which say what the recipe is.
    op
        The operation.

    Attributes
    ----------
    kind : str
        Of the recipe.
    quantizers : Quantizers
        Those of the latest call, to look at.
    num_scales : int
    updates : int
        Steps whose end was reported with :meth:`update`.
    amax_reduction_group
        Process group of the last forward, over which :meth:`update` reduces amaxes; None: the default one.
    rng : Tensor (2,), int64, or None
        Seed and offset of stochastic rounding; the offset grows with each update.
    kept
        What the operation keeps from one micro-batch to the next.
    """

    def __init__(self, quantizers: Quantizers, op: QuantizedOperation) -> None:
        self.kind = recipe_kind(quantizers.recipe)
        self.quantizers = quantizers
        self.num_scales = op.num_scales()
        self._device = _device(op)
        self.updates = 0
        self.amax_reduction_group: Any = None
        self.kept: Any = None
        self.rng: torch.Tensor | None = None
        self.prepare(quantizers)

    def prepare(self, quantizers: Quantizers) -> None:
        """Have what the quantisers of a call need.

        Parameters
        ----------
        quantizers
            Of the call that is about to run.
        """
        self.quantizers = quantizers
        if self.rng is None and any(_is_stochastic(q) for q in quantizers):
            # From torch's generator, so that torch.manual_seed makes training reproducible; once, not at each step.
            seed = torch.randint(1 << 62, (), dtype=torch.int64, device="cpu")
            self.rng = torch.stack((seed, torch.zeros_like(seed))).to(self._device)

    def scale_of(self, mode: str, index: int) -> torch.Tensor | None:
        """Scales that come from earlier steps."""
        return None

    def amax_row(self, mode: str, index: int) -> torch.Tensor | None:
        """Where amaxes of this step go."""
        return None

    def take_over(self, previous: RecipeState) -> None:
        """Keep what stays valid of the state before a reset."""
        if self.rng is not None and previous.rng is not None:
            self.rng.copy_(previous.rng)

    def to(self, device: torch.device) -> None:
        """Move tensors to a device."""
        self.kept = None
        self._device = device
        self.rng = None if self.rng is None else self.rng.to(device)

    @torch.no_grad()
    def update(self, recipe: Recipe | None = None) -> None:
        """End of a backward pass.

        Parameters
        ----------
        recipe
            That of the call; that of the latest one by default.
        """
        self.updates += 1
        if self.rng is not None:
            self.rng[1].add_(1)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Tensors that a checkpoint must hold."""
        return {} if self.rng is None else {"rng": self.rng}

    def load_state_dict(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Inverse of :meth:`state_dict`."""
        if self.rng is not None and "rng" in tensors:
            self.rng.copy_(tensors["rng"])


class DelayedScalingState(RecipeState):
    """Amax history and scales of delayed scaling, for each quantiser and each of its groups or matrices.

    Row 0 of a history is the amax of the step that runs now; :meth:`update` turns it into a scale and moves on.  All of
    a step, recomputation under activation checkpointing too, is quantised with the scales from before it.  Columns of
    one quantiser are neighbours: column ``i * num_scales + g`` belongs to group g of quantiser i.

    Attributes
    ----------
    amax_history : dict of str to Tensor (amax_history_len, num_quantizers * num_scales), fp32
    scale : dict of str to Tensor (num_quantizers * num_scales,), fp32
    """

    def __init__(self, quantizers: Quantizers, op: QuantizedOperation) -> None:
        super().__init__(quantizers, op)
        recipe: Any = quantizers.recipe
        rows, device = recipe.amax_history_len, self._device
        columns = {mode: len(made) * self.num_scales for mode, made in quantizers.by_mode.items()}
        like: Any = {"dtype": torch.float32, "device": device}
        self.amax_history = {mode: torch.zeros(rows, n, **like) for mode, n in columns.items()}
        self.scale = {mode: torch.ones(n, **like) for mode, n in columns.items()}

    def _columns(self, index: int) -> slice:
        return slice(index * self.num_scales, (index + 1) * self.num_scales)

    def scale_of(self, mode: str, index: int) -> torch.Tensor:
        """Scales of a quantiser's groups, (num_scales,)."""
        return self.scale[mode][self._columns(index)]

    def amax_row(self, mode: str, index: int) -> torch.Tensor:
        """Amaxes of a quantiser's groups in the step that runs now, (num_scales,)."""
        return self.amax_history[mode][0, self._columns(index)]

    def take_over(self, previous: RecipeState) -> None:
        """Keep scales and as much history as fits."""
        if not isinstance(previous, DelayedScalingState):
            return
        self.load_state_dict(previous.state_dict())

    def to(self, device: torch.device) -> None:
        """Move tensors to a device."""
        super().to(device)
        self.amax_history = {mode: t.to(device) for mode, t in self.amax_history.items()}
        self.scale = {mode: t.to(device) for mode, t in self.scale.items()}

    @torch.no_grad()
    def update(self, recipe: Recipe | None = None) -> None:
        """Compute scales from the history: format maximum / 2^margin / amax; then open a new row.

        As Transformer Engine has it: an amax of 0, infinity or NaN leaves the scale as it was, a scale that is infinite
        in fp32 becomes the largest fp32 number, and where this step's amax is 0 (a group without tokens, a pass that
        did not run) the history does not move.
        """
        super().update(recipe)
        settings: Any = self.quantizers.recipe if recipe is None else recipe
        if settings.reduce_amax:
            self._reduce_over_processes()
        for mode, history in self.amax_history.items():
            amax = _amax(settings.amax_compute_algo, history)
            limit = getattr(settings.fp8_format.value, "max_fwd" if mode == "forward" else "max_bwd")
            scale = self.scale[mode]
            if settings.scaling_factor_compute_algo is not None:
                scale.copy_(settings.scaling_factor_compute_algo(amax, scale, limit, settings))
            else:
                usable = (amax > 0) & torch.isfinite(amax)
                largest = torch.full_like(amax, limit * 2.0**-settings.margin)  # a number would multiply by 1 / amax
                scale.copy_(torch.where(usable, (largest / amax).clamp(max=FP32_MAX), scale))
            moved = history.roll(1, 0)
            moved[0] = 0
            history.copy_(torch.where(history[0] != 0, moved, history))

    def _reduce_over_processes(self) -> None:
        """Take the largest amaxes of this step over the processes of the group, in one collective."""
        group = self.amax_reduction_group
        if not torch.distributed.is_available() or not torch.distributed.is_initialized():
            return
        if torch.distributed.get_world_size(group) == 1:
            return
        rows = [history[0] for history in self.amax_history.values()]
        together = torch.cat(rows)
        torch.distributed.all_reduce(together, op=torch.distributed.ReduceOp.MAX, group=group)
        for row, reduced in zip(rows, torch.split(together, [len(row) for row in rows]), strict=True):
            row.copy_(reduced)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Histories and scales of both modes."""
        tensors = {f"amax_history_{m}": t for m, t in self.amax_history.items()}
        return tensors | {f"scale_{m}": t for m, t in self.scale.items()}

    def load_state_dict(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take histories and scales that fit; a history of another length is cut or filled with zeros."""
        for mode, history in self.amax_history.items():
            saved, scale = tensors.get(f"amax_history_{mode}"), tensors.get(f"scale_{mode}")
            if saved is None or scale is None or saved.shape[1:] != history.shape[1:]:
                continue
            rows = min(len(history), len(saved))
            history.zero_()
            history[:rows] = saved[:rows]
            self.scale[mode].copy_(scale)


def _amax(algorithm: Any, history: torch.Tensor) -> torch.Tensor:
    """Return the amaxes that scales are computed from, of a history (amax_history_len, columns)."""
    if callable(algorithm):
        amax: torch.Tensor = algorithm(history)
        return amax
    return history.amax(0) if algorithm == "max" else history[0]


class QuantizedCall:
    """Quantisation of one operation in one call: the plan's quantisers on the operation's state.

    Parameters
    ----------
    quantizers
        Of the plan.
    state
        Of the operation, when the call began.
    scales
        Scales of forward's tensors that a checkpointed forward ran with, for its recomputation; None outside of
        checkpoints.

    Attributes
    ----------
    quantizers, state
        As the parameters.
    """

    __slots__ = ("_scales", "quantizers", "state")

    def __init__(
        self, quantizers: Quantizers, state: RecipeState, scales: dict[int, torch.Tensor] | None = None
    ) -> None:
        self.quantizers = quantizers
        self.state = state
        self._scales = scales

    def operands(
        self,
        mode: str,
        index: int,
        x: torch.Tensor,
        split_sizes: torch.Tensor | None = None,
        *,
        batched: bool = False,
        rowwise: bool = False,
        columnwise: bool = False,
        record: bool = True,
        status: torch.Tensor | None = None,
    ) -> tuple[EmulatedOperand | None, EmulatedOperand | None]:
        """Quantise a tensor with one of the quantisers.

        Parameters
        ----------
        mode, index
            Which one; it must not be None.
        x, split_sizes, batched, rowwise, columnwise, status
            As :func:`.quantizers.emulation.emulated_operands` takes them.
        record
            Whether amaxes count for the scales of later steps.
        """
        from .quantizers.emulation import emulated_operands

        quantizer = self.quantizers.by_mode[mode][index]
        assert quantizer is not None
        return emulated_operands(
            quantizer,
            x,
            split_sizes,
            batched=batched,
            rowwise=rowwise,
            columnwise=columnwise,
            scale=self._scale(mode, index),
            amax=self.state.amax_row(mode, index) if record else None,
            rng=self.state.rng if _is_stochastic(quantizer) else None,
            status=status,
        )

    def _scale(self, mode: str, index: int) -> torch.Tensor | None:
        now = self.state.scale_of(mode, index)
        if now is None or self._scales is None or mode != "forward":
            return now
        if index not in self._scales:
            self._scales[index] = now.clone()
        return self._scales[index]

    def update(self) -> None:
        """End of the backward pass."""
        self.state.update(self.quantizers.recipe)


def make_quantizers(recipe: Recipe, op: QuantizedOperation) -> Quantizers | None:
    """Return the quantisers of an operation under a recipe, or None where nothing is quantised.

    Parameters
    ----------
    recipe
        Of a snapshot.
    op
        The operation.

    Raises
    ------
    UnsupportedError
        If the recipe asks for quantisers that there are not.
    """
    if recipe_kind(recipe) == "high_precision" or not any(op.num_quantizers(mode) for mode in MODES):
        return None
    made = Quantizers(recipe, op)
    return made if any(q is not None for q in made) else None


def make_recipe_state(recipe: Any, op: QuantizedOperation, previous: RecipeState | None) -> RecipeState | None:
    """Return the state of an operation under a recipe, or None where nothing is quantised.

    Parameters
    ----------
    recipe
        None, one of ours, or a foreign one.
    op
        The operation.
    previous
        The state until now, of which the new one keeps what stays valid.

    Raises
    ------
    UnsupportedError
        If the recipe asks for quantisers that there are not.
    """
    quantizers = op.make_quantizers(snapshot(recipe).recipe)
    if quantizers is None:
        return None
    kind = recipe_kind(quantizers.recipe)
    with torch.inference_mode(False):  # training goes on with what inference made
        state = (DelayedScalingState if kind == "delayed" else RecipeState)(quantizers, op)
        if previous is not None and previous.kind == kind:
            state.take_over(previous)
    return state


def state_key(recipe: Recipe) -> tuple[Any, ...]:
    """Say what a reset of recipe state depends on: the recipe's type, backward override and amax history length.

    Parameters
    ----------
    recipe
        Of a snapshot.
    """
    kind = recipe_kind(recipe)
    if kind == "high_precision":
        return (kind, recipe.backward_override, None)
    length = getattr(recipe, "amax_history_len", None) if kind == "delayed" else None
    return (type(recipe), recipe.backward_override, length)


def _made(recipe: Recipe, op: Any, mode: str, index: int) -> Quantizer | None:
    """Make the quantiser of a tensor; that of a factory may be anything, and is checked."""
    from .quantizers.base import Quantizer
    from .quantizers.select import QuantizerRole, quantizer_for

    role = QuantizerRole(
        "grad_output" if mode == "backward" else "weight" if index % 2 else "input",
        module_type=getattr(op, "module_type", ""),
        name=getattr(op, "name", ""),
    )
    quantizer = quantizer_for(recipe, role)
    if quantizer is not None and not isinstance(quantizer, Quantizer):
        raise UnsupportedError(
            f"quantising under {recipe_name(recipe)}",
            [f"qfactory({role!r}) returned {quantizer!r}; allowed: a cute_grouped_mlp.quantization.Quantizer or None"],
        )
    return quantizer


def _is_stochastic(quantizer: Quantizer | None) -> bool:
    return getattr(quantizer, "stochastic_rounding", False)


def _device(op: Any) -> torch.device:
    return next((p.device for p in op.parameters()), torch.device("cpu"))
