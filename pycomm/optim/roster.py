"""Which parameters take part, and in which buckets."""

from __future__ import annotations

import torch

from pycomm.communicator import Communicator
from pycomm.optim.assembly import Lane, Slot, make_lanes
from pycomm.optim.broadcast import broadcast_tensors, check_same_lines
from pycomm.optim.parameters import check_parameters, optimizer_parameters
from pycomm.optim.settings import Settings


class Roster:
    """The parameters of ``optimizer``: ``slots`` of those that learn, in ``lanes``; and those that are frozen.

    Args:
        names: the parameters by name. module: where names of later ones come from, if given.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        names: dict[str, torch.Tensor],
        module: torch.nn.Module | None,
        communicator: Communicator,
        settings: Settings,
    ) -> None:
        self._optimizer, self._module = optimizer, module
        self._communicator, self._settings = communicator, settings
        self._slots: dict[int, Slot] = {}
        self._frozen = {id(param): Slot(name, param) for name, param in names.items()}
        self.lanes: list[Lane] = []
        self.device = next((p.device for p in names.values()), torch.device("cpu"))

    def slots(self) -> list[Slot]:
        return list(self._slots.values())

    def named(self) -> list[tuple[str, torch.Tensor]]:
        """All parameters, those that learn first."""
        return [(slot.name, slot.param) for slot in (*self._slots.values(), *self._frozen.values())]

    def require_no_unknown_gradients(self) -> None:
        """RuntimeError for a gradient that came before its parameter was admitted."""
        for slot in self.unfrozen():
            if slot.param.grad is not None:
                raise RuntimeError(
                    f"the gradient of {slot.name!r} has not been averaged: it was unfrozen after attach, and no "
                    "parameter that pycomm already knew took part in this backward; attach the module itself, not its "
                    "named_parameters()"
                )

    def require_as_attached(self) -> None:
        """RuntimeError for a parameter that has become one of another dtype or device, for which its bucket is none."""
        for lane in self.lanes:
            dtype, device = lane.bucket.dtype, lane.bucket.device
            for slot in lane.slots:
                param = slot.param
                if param.dtype is not dtype or param.device != device:
                    raise RuntimeError(
                        f"parameter {slot.name!r} was {dtype} on {device} when it was attached, and is {param.dtype} "
                        f"on {param.device} now: detach() before the module is converted or moved, attach() afterwards"
                    )

    def knows(self, param: torch.Tensor) -> bool:
        """Whether ``param``'s gradient is averaged here, or will be once it is unfrozen."""
        return id(param) in self._slots or id(param) in self._frozen

    def unfrozen(self) -> list[Slot]:
        """Those that learn by now, and have not been admitted."""
        return [slot for slot in self._frozen.values() if slot.param.requires_grad]

    def admit(self) -> list[Slot]:
        """Let the unfrozen take part, and return them; they have no lanes yet."""
        slots = self.unfrozen()
        for slot in slots:
            del self._frozen[id(slot.param)]
            self._slots[id(slot.param)] = slot
        return slots

    def make_lanes(self, slots: list[Slot]) -> None:
        how = self._settings
        self.lanes += make_lanes(slots, how.compression, self._communicator, how.bucket_bytes, how.algorithm)

    def find_new(self) -> bool:
        """Notice ``add_param_group`` and unfreezing; whether there is someone to admit.

        Runs at the same points of the program on all ranks.
        """
        added = [p for p in optimizer_parameters(self._optimizer) if not self.knows(p)]
        if not added and not self.unfrozen():
            return False
        names = {} if self._module is None else {id(p): name for name, p in self._module.named_parameters()}
        number = len(self._slots) + len(self._frozen)
        new = {names.get(id(p), f"added.{number + i}"): p for i, p in enumerate(added)}
        check_parameters(new, self.device)
        self._frozen.update({id(p): Slot(name, p) for name, p in new.items()})
        lines = [f"{s.name}: {list(s.param.shape)} {s.param.dtype}" for s in self.unfrozen()] + list(new)
        check_same_lines(self._communicator, lines, "new parameter")
        broadcast_tensors(self._communicator, new.values(), src=0)
        return True

    def gradients(self) -> dict[str, torch.Tensor]:
        """By name, those that there are."""
        return {slot.name: slot.param.grad for slot in self._slots.values() if slot.param.grad is not None}

    def clear(self) -> None:
        self.lanes.clear()
        self._slots.clear()
        self._frozen.clear()
