"""A container that runs neighbouring operations as one pipeline."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from . import extra_state
from .errors import FusionError, ShapeError
from .fuser import OperationFuser
from .op import BasicOperation, FusibleOperation, expand
from .ops.activation import ScaledActivation

_tracing = torch.compiler.is_dynamo_compiling
_grouping = threading.RLock()


def hooks_of(module: torch.nn.Module) -> str:
    """Name the kinds of hooks that a call of a module runs; empty if there are none."""
    kinds = {
        "forward": module._forward_hooks,
        "forward pre-": module._forward_pre_hooks,
        "backward": module._backward_hooks,
        "backward pre-": module._backward_pre_hooks,
    }
    return " and ".join(kind for kind, hooks in kinds.items() if hooks)


def _hooked(modules: Iterable[torch.nn.Module | None]) -> tuple[bool, ...]:
    """Whether each module has hooks."""
    return tuple(
        m is not None and bool(m._forward_pre_hooks or m._forward_hooks or m._backward_hooks or m._backward_pre_hooks)
        for m in modules
    )


def _is_sequence(other: object) -> bool:
    return isinstance(other, (Sequential, torch.nn.Sequential))


class Apart:
    """An operation with hooks, which is run through its own call: a pipeline of its own, outside of any fusion.

    Attributes
    ----------
    op : BasicOperation or FusedOperation
    num_extra_inputs : int
    basic_ops : tuple of BasicOperation
    """

    def __init__(self, op: FusibleOperation) -> None:
        self.op = op
        self.basic_ops = expand([op])
        self.num_extra_inputs = sum(
            channel is None for basic in self.basic_ops for channel in basic._extra_input_channels
        )
        if len(self.basic_ops) == 1:
            self.basic_ops[0].fuser.apart = f"{type(op).__name__} has {hooks_of(op)} hooks, which a fusion would skip"

    def __call__(
        self, input: torch.Tensor, *extra: torch.Tensor | None, basic_op_kwargs: list[dict[str, Any]] | None = None
    ) -> Any:
        """Call the operation, with its hooks."""
        if isinstance(self.op, BasicOperation):
            return self.op(input, *extra, **(basic_op_kwargs[0] if basic_op_kwargs else {}))
        return self.op(input, *extra, basic_op_kwargs=basic_op_kwargs)


class Sequential(torch.nn.Module):
    """Modules one after the other, as in :class:`torch.nn.Sequential`, with neighbouring operations planned together.

    Extra inputs are passed after the input, in operation order; extra outputs come after the output.

    Parameters
    ----------
    *modules
        Operations or any other modules, or one mapping from names to them.
    """

    def __init__(self, *modules: torch.nn.Module | Mapping[str, torch.nn.Module]) -> None:
        super().__init__()
        self._groups: list[OperationFuser | Apart | torch.nn.Module] = []
        self._grouped: tuple[Any, ...] | None = None
        self._hooked: tuple[bool, ...] = ()
        self._num_extra_inputs = 0
        for module in modules:
            if isinstance(module, torch.nn.Module):
                self.append(module)
            elif len(modules) == 1:
                for name, named in module.items():
                    self.add_module(name, named)
            else:
                raise TypeError(f"Sequential takes modules, or one mapping; got {type(module).__name__}")

    # Container --------------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[torch.nn.Module]:
        return iter([m for m in self._modules.values() if m is not None])

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return Sequential(*list(self)[index])
        return list(self)[index]

    def __setitem__(self, index: int, module: torch.nn.Module) -> None:
        self._modules[list(self._modules)[index]] = module
        self._ungroup()

    def __delitem__(self, index: int | slice) -> None:
        names = list(self._modules)[index]
        for name in [names] if isinstance(names, str) else names:
            del self._modules[name]
        self._ungroup()

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if isinstance(value, torch.nn.Module):
            self._ungroup()

    def add_module(self, name: str, module: torch.nn.Module | None) -> None:
        """Add a module under a name, as :meth:`torch.nn.Module.add_module`."""
        super().add_module(name, module)
        self._ungroup()

    def append(self, module: torch.nn.Module) -> Sequential:
        """Add a module at the end."""
        numbers = [int(name) for name in self._modules if name.isdigit()]
        self.add_module(str(max(numbers, default=-1) + 1), module)
        return self

    def extend(self, modules: Iterable[torch.nn.Module]) -> Sequential:
        """Add modules at the end."""
        for module in modules:
            self.append(module)
        return self

    def __add__(self, other: Sequential | torch.nn.Sequential) -> Sequential:
        return Sequential(*self, *other) if _is_sequence(other) else NotImplemented

    def __radd__(self, other: torch.nn.Sequential) -> Sequential:
        return Sequential(*other, *self) if _is_sequence(other) else NotImplemented

    def __iadd__(self, other: Sequential | torch.nn.Sequential) -> Sequential:
        return self.extend(list(other)) if _is_sequence(other) else NotImplemented

    def insert(self, index: int, module: torch.nn.Module) -> Sequential:
        """Put a module before the one at ``index``; the modules behind it move on by one name."""
        modules = list(self)
        modules.insert(index, module)
        self.append(module)
        for name, moved in zip(list(self._modules), modules, strict=True):
            self._modules[name] = moved
        self._ungroup()
        return self

    def pop(self, index: int) -> torch.nn.Module:
        """Remove a module and return it."""
        module: torch.nn.Module = self[index]
        del self[index]
        return module

    # Pipelines --------------------------------------------------------------------------------------------------------

    def _ungroup(self) -> None:
        """Have the next call group the modules anew."""
        self.__dict__.update(_groups=[], _grouped=None)

    def module_groups(self) -> list[OperationFuser | Apart | torch.nn.Module]:
        """Return the modules with neighbouring operations grouped; made anew after any change of modules or hooks."""
        with _grouping:  # of several threads that call a module first one makes its fusers
            modules = tuple(self._modules.values())
            hooked = _hooked(modules)
            if modules == self._grouped and hooked == self._hooked:
                return self._groups
            groups: list[OperationFuser | Apart | torch.nn.Module] = []
            run: list[FusibleOperation] = []
            for module, apart in zip((*modules, None), (*hooked, False), strict=True):
                if isinstance(module, FusibleOperation) and not apart:
                    run.append(module)
                    continue
                if run:
                    groups.append(OperationFuser(run))
                    run = []
                if module is not None:
                    groups.append(Apart(module) if isinstance(module, FusibleOperation) else module)
            self._num_extra_inputs = sum(g.num_extra_inputs for g in groups if isinstance(g, OperationFuser | Apart))
            self._groups = groups
            self._grouped = modules
            self._hooked = hooked
            return groups

    @property
    def fusers(self) -> tuple[OperationFuser, ...]:
        """The fusers of the runs of operations, in order; an operation with hooks has one of its own."""
        found: list[OperationFuser] = []
        for group in self.module_groups():
            if isinstance(group, Apart):
                found += [op.fuser for op in group.basic_ops]
            elif isinstance(group, OperationFuser):
                found.append(group)
        return tuple(found)

    @property
    def fuser(self) -> OperationFuser:
        """The only fuser.

        Raises
        ------
        FusionError
            If there is none, or more than one.
        """
        fusers = self.fusers
        if len(fusers) != 1:
            raise FusionError(f"there are {len(fusers)} fusers in this Sequential; use .fusers")
        return fusers[0]

    def reset_recipe_state(self) -> None:
        """Forget the quantisation state of every operation; the next call makes it anew."""
        for fuser in self.fusers:
            fuser.reset_recipe_state()

    def forward(
        self,
        input: torch.Tensor,
        *extra_inputs: torch.Tensor | None,
        op_kwargs: Mapping[BasicOperation | int, dict[str, Any]] | None = None,
    ) -> Any:
        """Run the modules.

        Parameters
        ----------
        input
            Input of the first module.
        *extra_inputs
            Extra inputs of the operations, in operation order.
        op_kwargs
            Keyword arguments for operations, by operation or by index in this container.

        Returns
        -------
        Tensor or tuple
            The output, followed by the public extra outputs if there are any.

        Raises
        ------
        ShapeError
            If the number of extra inputs is wrong.
        """
        if _tracing():
            from . import compiled

            return compiled.forward(self, input, extra_inputs, op_kwargs)
        modules = tuple(self._modules.values())
        same = modules == self._grouped and _hooked(modules) == self._hooked
        groups = self._groups if same else self.module_groups()
        if len(extra_inputs) != self._num_extra_inputs:
            takers = [f"{type(op).__name__}: {op.num_extra_inputs}" for f in self.fusers for op in f.basic_ops]
            raise ShapeError(
                f"got {len(extra_inputs)} extra inputs, expected {self._num_extra_inputs} ({', '.join(takers)})"
            )
        if len(groups) == 1 and not op_kwargs and isinstance(groups[0], OperationFuser):
            return groups[0].run(input, extra_inputs, None)
        x: Any = input
        outputs: list[Any] = []
        at = 0
        for group in groups:
            if not isinstance(group, OperationFuser | Apart):
                x = group(x)
                continue
            extra = extra_inputs[at : at + group.num_extra_inputs]
            at += group.num_extra_inputs
            x = group(x, *extra, basic_op_kwargs=self.kwargs_of(group, op_kwargs))
            if isinstance(x, tuple):
                outputs.extend(x[1:])
                x = x[0]
        return (x, *outputs) if outputs else x

    def kwargs_of(
        self, group: OperationFuser | Apart, op_kwargs: Mapping[BasicOperation | int, dict[str, Any]] | None
    ) -> list[dict[str, Any]] | None:
        """Return the keyword arguments of each basic operation of a group; None where there are none at all.

        Parameters
        ----------
        group, op_kwargs
            One of :meth:`module_groups`, and what :meth:`forward` takes.

        Raises
        ------
        FusionError
            If they name something that is no basic operation of this container.
        """
        if not op_kwargs:
            return None
        by_op = self._kwargs_by_op(op_kwargs)
        return [by_op.get(id(op), {}) for op in group.basic_ops]

    def _kwargs_by_op(self, op_kwargs: Mapping[BasicOperation | int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
        members = {id(op) for module in self if isinstance(module, FusibleOperation) for op in expand([module])}
        by_op: dict[int, dict[str, Any]] = {}
        for key, kwargs in op_kwargs.items():
            op = self[key] if isinstance(key, int) else key
            if id(op) not in members:
                name = f"{type(op).__name__} ({key})" if isinstance(key, int) else type(op).__name__
                raise FusionError(f"op_kwargs names {name}, which is not a basic operation of this Sequential")
            by_op[id(op)] = kwargs
        return by_op

    # State dicts ------------------------------------------------------------------------------------------------------

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As :meth:`torch.nn.Module.load_state_dict`; nothing is written if the layout of GLU weights is not right.

        Parameters
        ----------
        state_dict, strict, assign
            As torch takes them.

        Raises
        ------
        RuntimeError
            If the state dict does not fit.
        """
        if strict:
            lacking = [
                extra_state.MissingKey.of(key, module.missing_layout())
                for name, module in self._modules.items()
                if isinstance(module, ScaledActivation) and module.glu
                if not extra_state.is_given(state_dict.get(key := f"{name}.{extra_state.KEY}"))
            ]
            extra_state.require_loadable(self, [f'Missing key(s) in state_dict: "{key}".' for key in lacking])
        return super().load_state_dict(state_dict, strict=strict, assign=assign)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Check what the operations' extra state says before any of them writes."""
        problems = []
        for name, module in self._modules.items():
            if isinstance(module, BasicOperation):
                found = module.extra_state_problems(state_dict.get(f"{prefix}{name}.{extra_state.KEY}"))
                problems += [f"{prefix}{name}.{problem}" for problem in found]
        extra_state.require_loadable(self, problems)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_groups": [], "_grouped": None}
