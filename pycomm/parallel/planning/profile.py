"""Profiles: a model traced without memory, for the bytes and FLOPs of its layers.

The model runs forward and backward on tensors that have no memory. Layers are the model's children; a container, or a
module with more than half of the parameters, is replaced by its own children. Operations between two layers count for
the earlier one, and the loss for the last.

Between a module split by columns and the next one split by rows, outputs, saved tensors and work are divided over the
devices, too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from pycomm import checks
from pycomm.parallel.planning.candidates import Layer, Part, Profile
from pycomm.parallel.styles import WHOLE, layouts_of
from pycomm.torch_internals import attention_flops, fake_tensors, storage_identity

MakeModel = Callable[[], nn.Module]
MakeBatch = Callable[[int], Any]
Loss = Callable[[Any], torch.Tensor]

_SIZES = (2, 4)  # samples; norms over the batch refuse a single one
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def profile(
    make_model: MakeModel,
    make_batch: MakeBatch,
    loss: Loss | None = None,
    split: Mapping[str, str] | None = None,
) -> Profile:
    """Trace a model on the CPU without allocating its memory.

    Args:
        make_model: returns the model.
        make_batch: takes a number of samples and returns the model's arguments for them: a tensor, or a tuple.
        loss: takes the model's output and returns a scalar; by default the sum of all its elements.
        split: style of each module that is split over devices, by name.
    """
    first, second = (_trace(make_model, make_batch, loss, split or {}, size) for size in _SIZES)
    if [each.modules for each in first] != [each.modules for each in second]:
        raise ValueError(f"the model runs other layers for a batch of {_SIZES[1]} than for one of {_SIZES[0]}")
    return Profile(_SIZES, (first, second), dict(split or {}))


def make_without_memory(make_model: MakeModel) -> nn.Module:
    """Return the model with parameters that have no memory."""
    with fake_tensors():
        return _called("make_model()", make_model)


def units(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that stages are made of, by name; none is cut."""
    total = sum(p.numel() for p in model.parameters())

    def opened(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
        for name, child in module.named_children():
            large = 2 * sum(p.numel() for p in child.parameters()) > total and any(child.children())
            if isinstance(child, _CONTAINERS) or large:
                yield from opened(child, f"{prefix}{name}.")
            else:
                yield f"{prefix}{name}", child

    return dict(opened(model, "")) or {"": model}


def shared_parameter(model: nn.Module) -> tuple[str, str] | None:
    """Return two layers that share a parameter, so that they need the same stage; ``None`` if there are none."""
    owners: dict[int, str] = {}
    for name, module in units(model).items():
        for parameter in module.parameters():
            owner = owners.setdefault(id(parameter), name)
            if owner != name:
                return owner, name
    return None


@dataclass
class _Record:
    """Record of one traced layer; becomes a :class:`Layer`."""

    modules: list[str]
    kept: list[tuple[float, bool]] = field(default_factory=list)  # bytes, and whether in a divided region
    output: float = 0.0
    output_storage: int = 0
    forward: dict[bool, float] = field(default_factory=lambda: {False: 0.0, True: 0.0})
    inside: bool = False
    reduced_forward: list[float] = field(default_factory=list)
    reduced_backward: list[float] = field(default_factory=list)


class _Tracer:
    """Hooks of a model for a single run, and the records that they make."""

    def __init__(self, model: nn.Module, split: Mapping[str, str], counter: FlopCounterMode) -> None:
        self.records: list[_Record] = []
        self.known: dict[int, tuple[int, torch.Tensor]] = {}  # keeps the tensors, so that no identity is reused
        self._counter, self._flops = counter, 0.0
        self._parameters = {storage_identity(p.untyped_storage()) for p in model.parameters()}
        self._parameters |= {storage_identity(b.untyped_storage()) for b in model.buffers()}
        self._region = False
        self._names = units(model)
        self._hooks = []
        for name, module in self._names.items():
            self._hooks.append(module.register_forward_pre_hook(functools.partial(self._enter, name)))
            self._hooks.append(module.register_forward_hook(self._leave))
        layouts = layouts_of(model, split)
        for name, style in split.items():
            module = model.get_submodule(name)
            if style == "columns" and layouts[name] == WHOLE:
                style = "alone"  # what it returns is gathered
            self._hooks.append(module.register_forward_pre_hook(functools.partial(self._enter_split, style)))
            self._hooks.append(module.register_forward_hook(functools.partial(self._leave_split, style)))

    def close(self) -> None:
        """Remove the hooks."""
        self._count(self._region)
        for hook in self._hooks:
            hook.remove()

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """Record a tensor that is saved for the backward pass."""
        identity = storage_identity(tensor.untyped_storage())
        if identity in self._parameters or not self.records:
            return tensor
        number = len(self.records) - 1
        if identity not in self.known:
            self.known[identity] = number, tensor
            self.records[-1].kept.append((float(tensor.untyped_storage().nbytes()), self._region))
        return tensor

    def _count(self, divided: bool) -> None:
        total = float(self._counter.get_total_flops())
        if self.records:
            self.records[-1].forward[divided] += total - self._flops
        self._flops = total

    def _enter(self, name: str, *_: Any) -> None:
        self._count(self._region)
        if not any(name in record.modules for record in self.records):
            self.records.append(_Record([name], inside=self._region))

    def _leave(self, _: nn.Module, __: Any, output: Any) -> None:
        tensors = tensors_in(output)
        self.records[-1].output = float(sum(tensor.nbytes for tensor in tensors))
        self.records[-1].output_storage = storage_identity(tensors[0].untyped_storage()) if tensors else 0

    def _enter_split(self, style: str, _: nn.Module, inputs: Any) -> None:
        self._count(self._region)
        if style in ("columns", "alone") or (style == "vocabulary" and tensors_in(inputs)[0].is_floating_point()):
            self.records[-1].reduced_backward += [float(tensor.nbytes) for tensor in tensors_in(inputs)]

    def _leave_split(self, style: str, _: nn.Module, inputs: Any, output: Any) -> None:
        self._count(style != "sequence")
        self._region = style == "columns"
        sizes = [float(tensor.nbytes) for tensor in tensors_in(output)]
        if style == "rows" or (style == "vocabulary" and not tensors_in(inputs)[0].is_floating_point()):
            self.records[-1].reduced_forward += sizes
        elif style in ("alone", "vocabulary"):  # a gather sends half of what a sum does
            self.records[-1].reduced_forward += [size / 2 for size in sizes]


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors in nested tuples, lists and mappings."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = list(value.values())
    return [tensor for each in value for tensor in tensors_in(each)] if isinstance(value, tuple | list) else []


def _trace(
    make_model: MakeModel, make_batch: MakeBatch, loss: Loss | None, split: Mapping[str, str], samples: int
) -> tuple[Layer, ...]:
    with fake_tensors():
        model = _called("make_model()", make_model)
        inputs = make_inputs(make_batch, samples)
        counter = FlopCounterMode(display=False, custom_mapping=attention_flops())
        tracer = _Tracer(model, split, counter)
        try:
            with counter:
                with torch.autograd.graph.saved_tensors_hooks(tracer.pack, lambda tensor: tensor):
                    total = scalar(model(*inputs), loss)
                tracer.close()
                total.backward()  # type: ignore[no-untyped-call]
        except Exception as error:  # the model's own code may raise anything
            raise ValueError(
                f"the model cannot be traced without values, with a batch of {samples}: {in_a_line(error)}"
            ) from error
    return _layers(model, tracer, counter, split)


def _called(what: str, function: MakeModel) -> nn.Module:
    try:
        model = function()
    except Exception as error:  # the user's code may raise anything
        raise ValueError(f"{what} failed: {in_a_line(error)}") from error
    checks.instance(f"what {what} returns", model, nn.Module)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(f"what {what} returns has no parameters that are trained")
    return model


def in_a_line(error: BaseException) -> str:
    """Return an error's type and the first line of its message."""
    return f"{type(error).__name__}: {str(error).strip()}".partition("\n")[0]


def make_inputs(make_batch: MakeBatch, samples: int) -> tuple[Any, ...]:
    """Return the model's arguments for ``samples`` samples."""
    try:
        made = make_batch(samples)
    except Exception as error:  # the user's code may raise anything
        raise ValueError(f"make_batch({samples}) failed: {in_a_line(error)}") from error
    inputs = made if isinstance(made, tuple) else (made,)
    tensors = tensors_in(inputs)
    if not tensors:
        raise TypeError(f"make_batch({samples}) returns {checks.shown(made)}, wanted a tensor, or a tuple with some")
    if not any(tensor.dim() and tensor.shape[0] == samples for tensor in tensors):
        shapes = ", ".join(str(list(tensor.shape)) for tensor in tensors)
        raise ValueError(f"make_batch({samples}) returns {shapes}, wanted {samples} samples in the first dimension")
    return inputs


def scalar(output: Any, loss: Loss | None) -> torch.Tensor:
    """Return a scalar to run backward from: ``loss`` of the output, or the sum of its elements."""
    if loss is not None:
        total: Any = loss(output)
        if not isinstance(total, torch.Tensor) or total.numel() != 1:
            raise ValueError(f"loss returns {checks.shown(total)}, wanted a tensor with one element")
        return total
    tensors = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
    if not tensors:
        raise ValueError(f"the model returns {checks.shown(output)}, wanted tensors that have a gradient")
    return torch.stack([tensor.sum() for tensor in tensors]).sum()


def _layers(model: nn.Module, tracer: _Tracer, counter: FlopCounterMode, split: Mapping[str, str]) -> tuple[Layer, ...]:
    named = units(model)
    records = tracer.records
    if not records:
        raise ValueError("the model calls none of its layers")
    called = {name for record in records for name in record.modules}
    previous = records[0]
    for name in named:  # such as an embedding whose weight the model reads itself
        if name in called:
            previous = next(record for record in records if name in record.modules)
        else:
            previous.modules.append(name)
    counts = counter.get_flop_counts()
    taken: set[int] = set()
    layers = [_layer(record, model, named, counts, split, taken, tracer) for record in records]
    rest = [p for p in model.parameters() if id(p) not in taken]  # held by the model itself, not by a layer
    first = layers[0]
    layers[0] = Layer(
        **{
            **vars(first),
            "count": first.count + Part(float(sum(p.numel() for p in rest))),
            "parameters": first.parameters + Part(float(sum(p.nbytes for p in rest))),
            "trainable": first.trainable + Part(float(sum(p.nbytes for p in rest if p.requires_grad))),
        }
    )
    return tuple(layers)


def _layer(
    record: _Record,
    model: nn.Module,
    named: Mapping[str, nn.Module],
    counts: Mapping[str, Mapping[Any, int]],
    split: Mapping[str, str],
    taken: set[int],
    tracer: _Tracer,
) -> Layer:
    sums = {what: {False: 0.0, True: 0.0} for what in ("count", "parameters", "trainable")}
    backward = 0.0
    for name in record.modules:
        for inner, parameter in named[name].named_parameters():
            if id(parameter) in taken:
                continue
            taken.add(id(parameter))
            owner, _, leaf = f"{name}.{inner}".lstrip(".").rpartition(".")
            cut = owner in split and not (split[owner] == "rows" and leaf == "bias") and split[owner] != "sequence"
            sums["count"][cut] += parameter.numel()
            sums["parameters"][cut] += parameter.nbytes
            sums["trainable"][cut] += parameter.nbytes * parameter.requires_grad
        qualified = f"{type(model).__name__}.{name}" if name else type(model).__name__
        backward += sum(counts.get(qualified, {}).values())
    forward = Part(record.forward[False], record.forward[True])
    backward = max(0.0, backward - forward.total)
    divided = forward.split / forward.total if forward.total > 0 else float(record.inside)
    keeper = tracer.known.get(record.output_storage, (None,))[0]
    number = tracer.records.index(record)
    kept = [float(sum(nbytes for nbytes, inside in record.kept if inside is region)) for region in (False, True)]
    parts = {what: Part(float(both[False]), float(both[True])) for what, both in sums.items()}
    return Layer(
        modules=tuple(record.modules),
        **parts,
        activations=Part(*kept),
        output=record.output,
        keeps_output=keeper == number,
        output_kept=keeper is not None and keeper > number,
        forward=forward,
        backward=Part(backward * (1 - divided), backward * divided),
        inside=record.inside,
        reduced_forward=tuple(record.reduced_forward),
        reduced_backward=tuple(record.reduced_backward),
    )
