"""What is in a checkpoint: sections, each a value as JSON and tensors."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import torch
from torch import nn

from pycomm import kernels
from pycomm.checkpoint.generators import generators_state
from pycomm.checkpoint.optimizers import optimizer_state
from pycomm.checkpoint.values import Node, encode, lines_of
from pycomm.reducer import Reducer
from pycomm.torch_internals import is_dtensor

STATEFUL, PLAIN = "stateful/", "plain/"
"""What the names of sections begin with that the user has given."""


class Kind(Enum):
    """Who has what of a section."""

    EQUAL = auto()  # all ranks have the same, as data parallelism has it: each saves a share
    COMPARED = auto()  # all ranks may have the same, which is found out
    OWN = auto()  # each rank has its own


@dataclass
class Section:
    """Part of the state of training.

    Attributes:
        node: the value, see :func:`pycomm.checkpoint.values.encode`.
        tensors: those of the value; copies in CPU memory unless the kind is EQUAL.
    """

    name: str
    kind: Kind
    node: Node
    tensors: list[torch.Tensor]

    def lines(self) -> list[str]:
        """Return everything but the contents of tensors as text, a line for each value."""
        return list(lines_of(self.node, self.tensors, self.name))

    def digest(self) -> str:
        """Return a digest of the whole section, which is in CPU memory."""
        found = hashlib.blake2b("\n".join(self.lines()).encode(), digest_size=16)
        flat = [t.contiguous().reshape(-1).view(torch.uint8) for t in self.tensors if t.numel() > 0]
        if flat:
            found.update(kernels.hashes(flat).numpy().tobytes())
        return found.hexdigest()


def collect(reducer: Reducer, more: Mapping[str, Any]) -> list[Section]:
    """Return the sections of a checkpoint of ``reducer`` and ``more``.

    Raises:
        TypeError: something cannot be saved; it is named.
    """
    parameters, buffers = parameters_of(reducer), buffers_of(reducer)
    refuse_parts(parameters | buffers)
    sections = [
        _section("model", _kind_of_model(reducer), parameters),
        _section("optimizer", _kind_of_model(reducer), optimizer_state(reducer)),
        _section("buffers", Kind.COMPARED, buffers),
        _section("extra", Kind.COMPARED, {name: m.get_extra_state() for name, m in extra_states(reducer)}),
        _section("compression", Kind.OWN, reducer.state_dict()),
        _section("generators", Kind.OWN, generators_state(device_of(reducer))),
    ]
    scaler = loss_scaler_of(reducer)
    if scaler is not None:
        sections.append(_section("loss_scaler", Kind.COMPARED, scaler.state_dict()))
    for name, value in more.items():
        prefix, state = (STATEFUL, state_of(value)) if is_stateful(value) else (PLAIN, value)
        sections.append(_section(prefix + name, Kind.COMPARED, state, name))
    return sections


def _section(name: str, kind: Kind, value: Any, where: str = "") -> Section:
    tensors: list[torch.Tensor] = []
    node = encode(value, tensors, where or name, lenient=name == "optimizer")
    if kind is Kind.COMPARED:  # what is a rank's own has been copied already
        tensors = [copy_of(tensor) for tensor in tensors]
    return Section(name, kind, node, tensors)


def _kind_of_model(reducer: Reducer) -> Kind:
    """Return who has what of the parameters and of the optimizer's state."""
    return Kind.COMPARED if reducer.attached.has_own_values else Kind.EQUAL


def copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of ``tensor`` in CPU memory, in the same order of elements."""
    return tensor.detach().to("cpu", copy=True)


def parameters_of(reducer: Reducer) -> dict[str, torch.Tensor]:
    """Return the parameters of the module, or those that ``attach`` was given, by name."""
    own = reducer.named_parameters()  # all of which are here then, even after a step that others take part in
    return own if reducer.module is None else dict(reducer.module.named_parameters())


def buffers_of(reducer: Reducer) -> dict[str, torch.Tensor]:
    """Return the buffers of the module that are part of its ``state_dict``, by name."""
    if reducer.module is None:
        return {}
    kept = {id(value) for value in reducer.module.state_dict(keep_vars=True).values()}
    return {name: buffer for name, buffer in reducer.module.named_buffers() if id(buffer) in kept}


def extra_states(reducer: Reducer) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules inside the module, with their names, that have a state besides tensors."""
    if reducer.module is not None:
        for name, module in reducer.module.named_modules():
            if type(module).get_extra_state is not nn.Module.get_extra_state:
                yield name, module


def refuse_parts(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise TypeError if one of ``tensors`` is only partly on this rank."""
    for name, tensor in tensors.items():
        if is_dtensor(tensor):
            raise TypeError(
                f"{name!r} is a DTensor, of which each rank has a part: pycomm.save and pycomm.load take models that "
                "are whole on every rank; use torch.distributed.checkpoint, with Reducer.state_dict()"
            )


def device_of(reducer: Reducer) -> torch.device:
    """Return the device of the parameters."""
    return next((p.device for p in reducer.named_parameters().values()), torch.device("cpu"))


def loss_scaler_of(reducer: Reducer) -> Any:
    """Return the loss scaler that ``attach`` was given, if it has state."""
    scaler = reducer.attached.loss_scaler
    return scaler if is_stateful(scaler) else None


def is_stateful(value: Any) -> bool:
    """Return whether ``value`` has a state of its own, into which it can be put again."""
    if isinstance(value, torch.Generator):
        return True
    return all(callable(getattr(value, method, None)) for method in ("state_dict", "load_state_dict"))


def state_of(value: Any) -> Any:
    """Return the state of ``value``, which is stateful."""
    return value.get_state() if isinstance(value, torch.Generator) else value.state_dict()


def restore(value: Any, state: Any) -> None:
    """Put ``value``, which is stateful, into ``state``."""
    if isinstance(value, torch.Generator):
        value.set_state(state)
    else:
        value.load_state_dict(state)
