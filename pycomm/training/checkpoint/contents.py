"""Contents of a checkpoint: sections, each a value that is stored as JSON and tensors."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import numpy as np
import torch
from torch import nn

from pycomm import kernels
from pycomm.checks import shown
from pycomm.optim.master_state import KEY
from pycomm.optim.parameters import optimizer_parameters
from pycomm.optim.step_override import stepper_of
from pycomm.torch_internals import by_plain_names, is_dtensor, renamed
from pycomm.training.checkpoint.files import DamagedError, checked
from pycomm.training.checkpoint.folder import PLAIN, STATEFUL
from pycomm.training.checkpoint.values import Node, encode, lines_of
from pycomm.training.reducer import Reducer
from pycomm.untrusted import ANYTHING, MapOf


class Kind(Enum):
    """How a section may differ between ranks."""

    EQUAL = auto()  # the same on all ranks, as in data parallelism: each rank saves a share
    COMPARED = auto()  # perhaps the same on all ranks: compared before saving
    OWN = auto()  # different on each rank


@dataclass
class Section:
    """Part of the training state.

    Attributes:
        node: the value, see :func:`pycomm.training.checkpoint.values.encode`.
        tensors: the value's tensors; copies in CPU memory unless the kind is EQUAL.
    """

    name: str
    kind: Kind
    node: Node
    tensors: list[torch.Tensor]

    def lines(self) -> list[str]:
        """Return one line of text per value, with everything but the contents of tensors."""
        return list(lines_of(self.node, self.tensors, self.name))

    def digest(self) -> str:
        """Return a digest of the section, whose tensors must be in CPU memory."""
        found = hashlib.blake2b("\n".join(self.lines()).encode(), digest_size=16)
        flat = [t.contiguous().reshape(-1).view(torch.uint8) for t in self.tensors if t.numel() > 0]
        if flat:
            found.update(kernels.hashes(flat).numpy().tobytes())
        return found.hexdigest()


def collect(reducer: Reducer, more: Mapping[str, Any]) -> list[Section]:
    """Return the sections of a checkpoint of ``reducer`` and ``more``."""
    parameters, buffers = parameters_of(reducer), buffers_of(reducer)
    refuse_parts(parameters | buffers)
    sections = [
        _section("model", _kind_of_model(reducer), parameters),
        _section("optimizer", _kind_of_model(reducer), optimizer_state(reducer)),
        _section("buffers", Kind.COMPARED, buffers),
        _section("aliases", Kind.COMPARED, _aliases_of(reducer, parameters | buffers)),
        _section("extra", Kind.COMPARED, {name: m.get_extra_state() for name, m in extra_states(reducer).items()}),
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
    if kind is Kind.COMPARED:  # tensors of kind OWN are copies already
        tensors = [copy_of(tensor) for tensor in tensors]
    return Section(name, kind, node, tensors)


def _kind_of_model(reducer: Reducer) -> Kind:
    """Return whether parameters and optimizer state may differ between ranks."""
    return Kind.COMPARED if reducer.attached.has_own_values else Kind.EQUAL


def copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of ``tensor`` in CPU memory, with the same memory order."""
    return tensor.detach().to("cpu", copy=True)


def parameters_of(reducer: Reducer) -> dict[str, torch.Tensor]:
    """Return the module's parameters by name, or those that ``attach`` was given."""
    own = reducer.named_parameters()  # waits for parameters that other ranks have stepped
    return own if reducer.module is None else by_plain_names(reducer.module, dict(reducer.module.named_parameters()))


def buffers_of(reducer: Reducer) -> dict[str, torch.Tensor]:
    """Return the buffers of the module that are part of its ``state_dict``, by name."""
    if reducer.module is None:
        return {}
    kept = {id(value) for value in reducer.module.state_dict(keep_vars=True).values()}
    found = {name: buffer for name, buffer in reducer.module.named_buffers() if id(buffer) in kept}
    return by_plain_names(reducer.module, found)


def _aliases_of(reducer: Reducer, saved: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return the further names that ``state_dict`` has for tensors that are ``saved`` under their first one."""
    if reducer.module is None:
        return {}
    first = {id(tensor): name for name, tensor in saved.items()}
    every = by_plain_names(reducer.module, reducer.module.state_dict(keep_vars=True))
    return {name: first[id(value)] for name, value in every.items() if first.get(id(value), name) != name}


def extra_states(reducer: Reducer) -> dict[str, nn.Module]:
    """Return the submodules that define ``get_extra_state``, by name."""
    named = () if reducer.module is None else reducer.module.named_modules()
    own = {name: part for name, part in named if type(part).get_extra_state is not nn.Module.get_extra_state}
    return by_plain_names(reducer.module, own)


def refuse_parts(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise TypeError if one of ``tensors`` is only partly on this rank."""
    for name, tensor in tensors.items():
        if is_dtensor(tensor):
            raise TypeError(
                f"{name!r} is a DTensor, of which each rank has a part: pycomm.save and pycomm.load take models that "
                "are whole on every rank; use torch.distributed.checkpoint, with Reducer.state_dict()"
            )


def device_of(reducer: Reducer) -> torch.device:
    return next((p.device for p in reducer.named_parameters().values()), torch.device("cpu"))


def loss_scaler_of(reducer: Reducer) -> Any:
    """Return the loss scaler that ``attach`` was given, if it has state."""
    scaler = reducer.attached.loss_scaler
    return scaler if is_stateful(scaler) else None


def is_stateful(value: Any) -> bool:
    """Return whether the state of ``value`` can be saved and restored."""
    if isinstance(value, torch.Generator):
        return True
    return all(callable(getattr(value, method, None)) for method in ("state_dict", "load_state_dict"))


def state_of(value: Any) -> Any:
    return value.get_state() if isinstance(value, torch.Generator) else value.state_dict()


def restore(value: Any, state: Any) -> None:
    if isinstance(value, torch.Generator):
        value.set_state(state)
    else:
        value.load_state_dict(state)


def optimizer_state(reducer: Reducer) -> dict[str, Any]:
    """Return the optimizer's class, the names of its parameters, and its state by positions in that list."""
    optimizer = reducer.optimizer
    averaged = {id(param): name for name, param in reducer.named_parameters().items()}
    names = [averaged.get(id(p)) or reducer.attached.name_of_ignored(p) for p in optimizer_parameters(optimizer)]
    if None in names:
        raise RuntimeError("a parameter was added to the optimizer, and no backward() has used it yet")
    state = dict(optimizer.state_dict())
    state["state"] = dict(sorted(state["state"].items()))  # ranks may have created it in any order
    return {
        "class": f"{type(optimizer).__module__}.{type(optimizer).__qualname__}",
        "names": names,
        "state_dict": state,
    }


def check_optimizer(saved: dict[str, Any], here: dict[str, Any], has_masters: bool) -> None:
    """Compare two results of :func:`optimizer_state`."""
    if saved["class"] != here["class"]:
        raise ValueError(f"it was saved with a {saved['class']}, and the optimizer here is a {here['class']}")
    groups, now = ([g["params"] for g in each["state_dict"]["param_groups"]] for each in (saved, here))
    if groups != now:
        sizes, found = [len(group) for group in groups], [len(group) for group in now]
        raise ValueError(f"the optimizer had parameter groups of {sizes} parameters, and has {found} here")
    for group, now_ in zip(saved["state_dict"]["param_groups"], here["state_dict"]["param_groups"], strict=True):
        for key in group.keys() & now_.keys():
            if _kind(group[key]) != _kind(now_[key]) and None not in (_kind(group[key]), _kind(now_[key])):
                raise DamagedError(f"the optimizer's {key} was {shown(group[key])}, and is {shown(now_[key])} here")
    places = renamed({str(name): i for i, name in enumerate(saved["names"])}, map(str, here["names"]))
    for i, (name, wanted) in enumerate(zip(saved["names"], here["names"], strict=True)):
        if places.get(str(wanted)) != i:
            raise ValueError(f"parameter {i} of the optimizer was {name!r}, and is {wanted!r} here")
    had_masters = any(KEY in entry for entry in saved["state_dict"]["state"].values())
    has_masters = has_masters and any(KEY in entry for entry in here["state_dict"]["state"].values())
    if had_masters != has_masters:
        there, at_present = ("with", "without") if had_masters else ("without", "with")
        raise ValueError(f"it was saved {there} pycomm.master_weights, and the optimizer here is {at_present}")


def _kind(option: Any) -> str | None:
    """Return the kind of value that an option of an optimizer is; ``None`` for ``None`` and foreign objects."""
    kinds = ((bool, "flag"), ((int, float, torch.Tensor), "number"), (str, "text"), ((list, tuple), "list"))
    return next((name for kind, name in kinds if isinstance(option, kind)), None)


def restore_optimizer(
    optimizer: torch.optim.Optimizer, state: dict[str, Any], old: dict[str, Any]
) -> Callable[[], Any] | None:
    """Load ``state``; return a function that loads ``old``, or ``None`` with master weights, which are overwritten."""
    has_masters = stepper_of(optimizer).has_masters
    optimizer.load_state_dict(state)
    if has_masters:
        return None
    # torch casts state to its parameter's dtype: float32 state of a half-precision parameter must stay float32.
    for number, param in enumerate(optimizer_parameters(optimizer)):
        for key, value in state["state"].get(number, {}).items():
            loaded = optimizer.state[param].get(key)
            if isinstance(value, torch.Tensor) and isinstance(loaded, torch.Tensor) and loaded.dtype != value.dtype:
                optimizer.state[param][key] = value.to(loaded.device, copy=True)
    return lambda: optimizer.load_state_dict(old)


_SHAPE = {
    "python": tuple,
    "numpy": {"bit_generator": str, "state": MapOf(ANYTHING)},
    "torch": torch.Tensor,
    "cuda?": torch.Tensor,
}
_LAST_POSITION = 624  # of MT19937; numpy does not check it


def generators_state(device: torch.device) -> dict[str, Any]:
    """Return the states of Python's, numpy's and torch's generators, and of the GPU's if ``device`` is one."""
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def check_generators(state: dict[str, Any]) -> None:
    """Raise ValueError if :func:`restore_generators` would fail; DamagedError if ``state`` is malformed."""
    checked(state, _SHAPE, "the state of generators")
    saved, here = state["numpy"]["bit_generator"], np.random.get_state(legacy=False)["bit_generator"]
    if saved != here:
        raise ValueError(f"numpy's generator was a {saved} when it was saved, and is a {here} now")
    try:
        random.Random().setstate(state["python"])
        torch.Generator().set_state(state["torch"])
        _check_numpy(state["numpy"])
    except Exception as error:  # a malformed state may make them raise anything
        raise DamagedError(f"the state of generators is malformed: {type(error).__name__}: {error}") from None


def _check_numpy(state: dict[str, Any]) -> None:
    """Raise an error if numpy's generator does not accept ``state``, or would read beyond its memory with it."""
    position = state["state"].get("pos", 0), state.get("buffer_pos", 0)
    if not all(type(number) is int and 0 <= number <= _LAST_POSITION for number in position):
        raise ValueError(f"numpy's generator is at {position}")
    kind: Any = getattr(np.random, state["bit_generator"])
    np.random.RandomState(kind()).set_state(state)


def restore_generators(state: dict[str, Any], device: torch.device) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
