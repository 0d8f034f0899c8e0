"""Parameters that take part in averaging: their names, the checks on them, and their buckets."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from pycomm.communicator import Communicator
from pycomm.layout import on_gpu
from pycomm.optim.parameters import optimizer_parameters
from pycomm.optim.shards import Shards
from pycomm.optim.step_override import Stepper, stepper_of
from pycomm.reducer.broadcast import broadcast_tensors, check_same_lines, signature
from pycomm.reducer.buckets import BucketInFlight, Slot, make_buckets
from pycomm.reducer.lanes import first_bytes
from pycomm.reducer.partition import StepPartition
from pycomm.reducer.parts import labels_of
from pycomm.reducer.settings import Settings
from pycomm.reducer.sharded import check_sharding
from pycomm.torch_internals import is_dtensor, is_flat_parameter, local_of, steps_in_backward

_GRADIENT_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


class ParameterTable:
    """Table of an optimizer's parameters: the trainable ones, sorted into buckets, and the frozen ones.

    Args:
        optimizer: watched for parameters that are added later.
        names: the parameters by name.
        module: the module, if ``attach`` was given one; source of names for parameters added later.

    Attributes:
        flights: the buckets.
        device: device of all parameters.
        ranks: global ranks that gradients are averaged over; ``attach`` sets it.
        shards: the trainable parameters that are DTensors, with the ranks that their parts are on.
        on_gpu: whether that is a GPU.
        partition: the ranks that step together; ``None``: each steps by itself.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        names: dict[str, torch.Tensor],
        module: torch.nn.Module | None,
    ) -> None:
        self.optimizer, self.module = optimizer, module
        self._slots: dict[int, Slot] = {}
        self._frozen = {id(param): Slot(name, param) for name, param in names.items()}
        self.flights: list[BucketInFlight] = []
        self.ranks: tuple[int, ...] = ()
        self.shards = Shards([])
        self.partition: StepPartition | None = None
        self.device = next((p.device for p in names.values()), torch.device("cpu"))
        self.on_gpu = any(on_gpu(p) for p in names.values())

    @property
    def stepper(self) -> Stepper:
        """Description of how the optimizer steps now."""
        return stepper_of(self.optimizer)

    @property
    def partial(self) -> StepPartition | None:
        """The ranks that step together, if each has only its own part of the averaged gradients."""
        return None if self.partition is None or self.partition.full_grad else self.partition

    def await_parameters(self) -> None:
        """Return when all parameters are there, those too that no forward has used since a step of several hosts."""
        if self.partition is not None:
            self.partition.await_parameters()

    def slots(self) -> list[Slot]:
        """Return the slots of all trainable parameters."""
        return list(self._slots.values())

    def named(self) -> list[tuple[str, torch.Tensor]]:
        """Return all parameters with their names, trainable ones first."""
        return [(slot.name, slot.param) for slot in (*self._slots.values(), *self._frozen.values())]

    def locals(self) -> list[tuple[str, torch.Tensor]]:
        """Return the same as :meth:`named`, with this rank's part of each DTensor."""
        return [(slot.name, slot.local) for slot in (*self._slots.values(), *self._frozen.values())]

    def named_buffers(self) -> list[tuple[str, torch.Tensor]]:
        """Return the module's buffers with their names, and this rank's part of those that are DTensors."""
        return [] if self.module is None else [(name, local_of(b)) for name, b in self.module.named_buffers()]

    def labels(self) -> dict[str, str]:
        """Return the keys of trainable parameters in saved state, by name."""
        return labels_of((slot.name, slot.param) for slot in self._slots.values())

    def gradients(self) -> dict[str, torch.Tensor]:
        """Return the existing gradients by name, and this rank's part of those that are DTensors."""
        return {slot.name: grad for slot in self._slots.values() if (grad := slot.owner.grad) is not None}

    def drop_gradients(self) -> None:
        """Set ``.grad`` of all trainable parameters to ``None``."""
        for slot in self._slots.values():
            slot.param.grad = None

    def knows(self, param: torch.Tensor) -> bool:
        """Return whether the gradient of ``param`` is averaged here, or will be once it is unfrozen."""
        return id(param) in self._slots or id(param) in self._frozen

    def unfrozen(self) -> list[Slot]:
        """Return the slots of parameters that have become trainable and have not been admitted yet."""
        return [slot for slot in self._frozen.values() if slot.param.requires_grad]

    def admit(self) -> list[Slot]:
        """Move unfrozen parameters to the trainable ones, and return their slots; they have no buckets yet."""
        slots = self.unfrozen()
        for slot in slots:
            del self._frozen[id(slot.param)]
            self._slots[id(slot.param)] = slot
        self.shards = Shards(param for _, param in self.named())  # those of frozen ones take part in sums all the same
        return slots

    def make_buckets(self, slots: list[Slot], lanes: Sequence[Communicator], settings: Settings) -> None:
        """Sort ``slots`` into new buckets, which travel by ``lanes`` in turns."""
        made = make_buckets(
            slots,
            settings.compression,
            lanes,
            settings.bucket_bytes,
            settings.algorithm,
            num_earlier=len(self.flights),
            first_bytes=first_bytes(lanes, settings, self.on_gpu),
        )
        if self.partition is not None and made:
            self.partition.adopt(made)
        self.flights += made

    def has_new(self) -> bool:
        """Return whether parameters were added by ``add_param_group`` or unfrozen, which :meth:`find_new` finds."""
        if self.unfrozen():
            return True
        return not (self._slots.keys() | self._frozen.keys()).issuperset(map(id, optimizer_parameters(self.optimizer)))

    def _added(self) -> list[torch.Tensor]:
        return [p for p in optimizer_parameters(self.optimizer) if not self.knows(p)]

    def find_new(self, communicator: Communicator) -> None:
        """Find parameters that are new, which :meth:`admit` then returns. Collective, where all ranks find some."""
        added = self._added()
        names = {} if self.module is None else {id(p): name for name, p in self.module.named_parameters()}
        number = len(self._slots) + len(self._frozen)
        new = {names.get(id(p), f"added.{number + i}"): p for i, p in enumerate(added)}
        check_parameters(new, self.device)
        check_sharding(new, self.ranks)
        self._frozen.update({id(p): Slot(name, p) for name, p in new.items()})
        lines = [f"{s.name}: {signature(s.param)}" for s in self.unfrozen()] + list(new)
        check_same_lines(communicator, lines, "new parameter")
        broadcast_tensors(communicator, new.values(), src=0)

    def require_no_unknown_gradients(self) -> None:
        """Raise RuntimeError if a parameter got a gradient before it was admitted."""
        for slot in self.unfrozen():
            if slot.param.grad is not None:
                raise RuntimeError(
                    f"the gradient of {slot.name!r} has not been averaged: the parameter was unfrozen after attach, "
                    "and no parameter that pycomm already knew took part in this backward; attach the module itself, "
                    "not its named_parameters()"
                )

    def require_as_attached(self) -> None:
        """Raise RuntimeError if a parameter no longer has the dtype or device of its bucket."""
        for flight in self.flights:
            dtype, device = flight.bucket.dtype, flight.bucket.device
            for slot in flight.slots:
                param = slot.param
                if param.dtype is not dtype or param.device != device:
                    raise RuntimeError(
                        f"parameter {slot.name!r} was {dtype} on {device} when it was attached, and is {param.dtype} "
                        f"on {param.device} now: detach() before the module is converted or moved, attach() afterwards"
                    )

    def clear(self) -> None:
        """Forget all parameters, and release the memory of the buckets."""
        self.flights.clear()
        self._slots.clear()
        self._frozen.clear()


def table_of(optimizer: Any, model_or_named_parameters: Any, all_parameters: bool) -> ParameterTable:
    """Return the parameters of ``optimizer``, checked, with the names that the model gives them.

    Raises:
        TypeError, ValueError: it is no optimizer, or a parameter has no name, or cannot be averaged.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer is a {type(optimizer).__name__}, wanted a torch.optim.Optimizer")
    names = _names_of(optimizer, model_or_named_parameters, all_parameters)
    check_parameters(names)
    module = model_or_named_parameters if isinstance(model_or_named_parameters, torch.nn.Module) else None
    return ParameterTable(optimizer, names, module)


def _names_of(
    optimizer: torch.optim.Optimizer,
    model_or_named_parameters: torch.nn.Module | Iterable[tuple[str, torch.Tensor]],
    all_parameters: bool,
) -> dict[str, torch.Tensor]:
    """Return the optimizer's parameters by name in the model's order, or with ``all_parameters`` all named ones.

    Raises:
        TypeError, ValueError: the names are missing or ambiguous, or a parameter of the optimizer has none.
    """
    if isinstance(model_or_named_parameters, torch.nn.Module):
        pairs: list[tuple[str, torch.Tensor]] = list(model_or_named_parameters.named_parameters())
    else:
        pairs = [_pair(item) for item in model_or_named_parameters]
    wanted = {id(p) for p in optimizer_parameters(optimizer)}
    names: dict[str, torch.Tensor] = {}
    taken: set[int] = set()
    for name, param in pairs:
        if name in names and names[name] is not param:
            raise ValueError(f"two parameters are called {name!r}")
        if id(param) in wanted or (all_parameters and id(param) not in taken):
            names[name] = param
            taken.add(id(param))
            wanted.discard(id(param))
    if wanted:
        raise ValueError(
            f"{len(wanted)} parameter(s) of the optimizer are not among model_or_named_parameters, "
            f"the first of shape {_shape_of(optimizer, wanted)}: was it given a different model?"
        )
    return names


def _pair(item: object) -> tuple[str, torch.Tensor]:
    if isinstance(item, tuple) and len(item) == 2:
        name, param = item
        if isinstance(name, str) and isinstance(param, torch.Tensor):
            return name, param
    raise TypeError(
        f"model_or_named_parameters yields {type(item).__name__}, wanted a torch.nn.Module or (name, tensor) pairs "
        "as from named_parameters()"
    )


def _shape_of(optimizer: torch.optim.Optimizer, wanted: set[int]) -> list[int]:
    return next(list(p.shape) for p in optimizer_parameters(optimizer) if id(p) in wanted)


def check_parameters(names: dict[str, torch.Tensor], device: torch.device | None = None) -> None:
    """Raise TypeError or ValueError if the gradient of a parameter cannot be sent, or it is not on ``device``."""
    for name, param in names.items():
        _check_memory(name, param)
        has_gradients = param.is_floating_point() or param.is_complex()  # integers never have any: they are only copied
        if has_gradients and param.dtype not in _GRADIENT_DTYPES:
            wanted = ", ".join(str(dtype).removeprefix("torch.") for dtype in _GRADIENT_DTYPES)
            raise TypeError(f"parameter {name!r} has dtype {param.dtype}, wanted one of {wanted}")
        if param.device.type not in ("cpu", "cuda"):
            raise ValueError(f"parameter {name!r} is on device {param.device}, wanted CPU or CUDA memory")
        device = device or param.device
        if param.device != device:
            raise ValueError(
                f"parameter {name!r} is on device {param.device}, others on {device}; wanted all parameters of a "
                "process on one device"
            )


def _check_memory(name: str, param: torch.Tensor) -> None:
    """Raise TypeError if ``param`` is not backed by ordinary memory of this process, ValueError if torch steps it."""
    kind = type(param).__name__
    if is_flat_parameter(param):
        raise TypeError(
            f"parameter {name!r} is a flat parameter of FullyShardedDataParallel, of which each rank has a "
            "different shard: FSDP averages gradients itself; leave pycomm.attach out, or shard with FSDP2's "
            "fully_shard, whose replicas pycomm.ddp.register_hsdp averages"
        )
    local = local_of(param) if is_dtensor(param) else param
    if hasattr(local, "__tensor_flatten__"):
        raise TypeError(
            f"parameter {name!r} is a {kind}, wrapped around other tensors: wanted ordinary parameters, or DTensors of "
            "ordinary tensors"
        )
    if param.device.type == "meta" or (local.numel() > 0 and _has_no_memory(local)):
        raise TypeError(
            f"parameter {name!r}, a {kind} on device {param.device}, has no memory: wanted parameters that are "
            "materialised (module.to_empty(device=...), then initialised) and not freed"
        )
    if steps_in_backward(param):
        raise ValueError(
            f"parameter {name!r} is stepped in backward (_apply_optimizer_in_backward), before its gradient could be "
            "averaged: use an ordinary optimizer.step()"
        )


def _has_no_memory(param: torch.Tensor) -> bool:
    try:
        return param.data_ptr() == 0
    except RuntimeError:  # a tensor subclass without storage
        return True
