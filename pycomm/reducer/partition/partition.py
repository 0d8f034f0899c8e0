"""StepPartition: ranks step together, each its own part of every bucket."""

from __future__ import annotations

import contextlib
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from pycomm.agreement import check_same_lines
from pycomm.communicator import Communicator
from pycomm.errors import CommError
from pycomm.optim.fused import KernelStep
from pycomm.optim.module_hooks import BeforeForward
from pycomm.optim.partition import Span
from pycomm.reducer.buckets import BucketInFlight
from pycomm.reducer.partition.on_host import Segment
from pycomm.torch_internals import version_of

_TEXT = (
    "a rank was lost in the middle of optimizer.step(), while the ranks wrote to each other's parameters: those here "
    "may be a mixture of old and new ones. Load a checkpoint (model.load_state_dict) before they are used. The cause: "
)


class Aftermath:
    """Guard that makes every forward of ``module`` and every step of ``optimizer`` raise, until the module is loaded.

    It stays when the Reducer is detached.
    """

    def __init__(self, module: torch.nn.Module | None, optimizer: torch.optim.Optimizer, cause: BaseException) -> None:
        self._text = _TEXT + str(cause)
        self._handles: list[Any] = [optimizer.register_step_pre_hook(lambda *_: self._raise())]
        if module is not None:
            self._handles.append(module.register_forward_pre_hook(BeforeForward(self._raise)))
            register: Any = module.register_load_state_dict_post_hook
            self._handles.append(register(lambda *_: self._loaded()))

    def _raise(self) -> None:
        raise RuntimeError(self._text)

    def _loaded(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


@dataclass(frozen=True)
class Terms:
    """What ranks that step together have agreed on, and what steps them.

    Attributes:
        communicator: the ranks.
        stepper: what steps the optimizer by kernels.
        module: the attached module, if there is one.
        full_grad: whether every rank gets all of the reduced gradients, or its own part only (``False``), or none of
            them, as they are reduced in the step (``None``).
        average: whether gradients are averaged over the ranks, or summed.
        most_writes: how often a gradient may be written to after it was handed out.
        was_fused_here: whether ``stepper`` is to be detached with the partition.
    """

    communicator: Communicator
    stepper: KernelStep
    module: torch.nn.Module | None
    grads: str
    average: bool
    most_writes: int
    was_fused_here: bool


class _Plain:
    """Partition with gradients that were reduced before the step, and parameters that are there when it ends."""

    def await_parameters(self) -> None:
        """Return when parameters can be used by what torch does not see; raise CommError if they do not come."""

    def release(self) -> None:
        """Let go of the memory, once the communicator is closed."""

    @property
    def terms_version(self) -> int:
        return 0

    def terms_of(self, param: torch.Tensor) -> list[torch.Tensor]:
        raise AssertionError("gradients have been reduced")

    def require_reduced(self) -> None:
        """Reduce the gradients now, if that was left to the step. Collective."""

    def reduce_early(self) -> None:
        """Reduce gradients now, and from now on while backward runs, as they are needed before the step. Collective."""

    def _has_moved(self) -> bool:
        """Return whether gradients that the step reduces are in other memory than in the last one."""
        return False

    def _open_terms(self) -> None:
        """Find the gradients of all ranks, some of which are in other memory than before. Collective."""


class StepPartition(_Plain, ABC):
    """Partition of the parameters of an attached optimizer; see :class:`pycomm.optim.partition.Partition`."""

    def __init__(self, terms: Terms) -> None:
        self.full_grad = terms.grads == "full"
        self.reduction = "mean" if terms.average else "sum"
        self._communicator, self._stepper, self._module = terms.communicator, terms.stepper, terms.module
        self._most_writes, self._was_fused_here = terms.most_writes, terms.was_fused_here
        self._flights: list[BucketInFlight] = []
        self._places: dict[torch.Tensor, tuple[Segment, int]] = {}
        self._addresses: list[tuple[torch.Tensor, int]] = []
        self._num_steps = 0
        terms.stepper.share(self)

    # Parameters.

    @abstractmethod
    def adopt(self, flights: Iterable[BucketInFlight]) -> None:
        """Take over the parameters of ``flights``, and move them to memory for it. Collective."""

    def _settle_in(self, flight: BucketInFlight, segment: Segment) -> None:
        """Move the parameters of ``flight`` to ``segment``."""
        for index, slot in enumerate(flight.slots):
            param, place = slot.param, segment.places[index]
            self._places[param] = segment, index
            with torch.no_grad():
                self._fill(place, param, segment.spans[index])
            param.data = place
            self._addresses.append((param, place.data_ptr()))
        self._flights.append(flight)

    def _fill(self, place: torch.Tensor, param: torch.Tensor, span: Span) -> None:
        """Copy ``param`` to its place."""
        place.copy_(param.detach())

    def span_of(self, param: torch.Tensor) -> Span:
        segment, index = self._places[param]
        return segment.spans[index]

    def mirrors_of(self, param: torch.Tensor) -> list[torch.Tensor]:
        segment, index = self._places[param]
        return segment.mirrors_of(index)

    def home(self, param: torch.Tensor, key: str, dtype: torch.dtype) -> torch.Tensor:
        segment, index = self._places[param]
        return segment.home(index, param, key, dtype)

    def own_part(self, param: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        """Return this rank's own elements of ``grad``, which is laid out as ``param`` is, flat."""
        return self.span_of(param).of(grad)

    def move_out(self) -> None:
        """Move parameters and state to memory of this rank's own, and have it step alone."""
        for param in self._places:
            param.data = param.detach().clone(memory_format=torch.preserve_format)
        self._stepper.step_alone()
        if self._was_fused_here:
            self._stepper.detach()
        self._places.clear()
        self._addresses.clear()
        self._flights.clear()

    # Sums over ranks.

    def add_up(self, values: torch.Tensor) -> torch.Tensor:
        everyone = torch.empty(self._communicator.size * values.numel(), dtype=torch.float64)
        self._communicator.all_gather(everyone, values)
        return everyone.view(self._communicator.size, -1).sum(0)

    def first_of(self, number: int) -> int:
        """Return the smallest ``number`` of all ranks. Collective."""
        first = torch.tensor([number], dtype=torch.int64)
        self._communicator.all_reduce(first, "min")
        return int(first)

    # Steps.

    @contextlib.contextmanager
    def step(self, optimizer: torch.optim.Optimizer, *, is_skipped: bool, needs_gradients: bool) -> Iterator[bool]:
        self.await_parameters()
        try:
            self._prepare()
        except (RuntimeError, ValueError) as error:
            self._communicator.refuse(str(error))  # the others are about to ask whether all are there
            raise
        try:
            is_taken = self._agree(optimizer, is_skipped)
            if is_taken and needs_gradients:
                self.require_reduced()
        except CommError as error:
            self._lost(optimizer, error)  # others may have seen that all are here
            raise
        if not is_taken:
            yield False
            return
        self._num_steps += 1
        try:
            yield True
            self._hand_out()
        except BaseException as error:
            if not isinstance(error, CommError):
                self._communicator.close(f"its optimizer.step() failed: {error}")
            if not self._is_complete():
                self._lost(optimizer, error)
            raise

    @abstractmethod
    def _hand_out(self) -> None:
        """Let all ranks have what this one has written. Collective."""

    @abstractmethod
    def _is_complete(self) -> bool:
        """Return whether all of the last step is here, though it ended with an error."""

    def _lost(self, optimizer: torch.optim.Optimizer, error: BaseException) -> None:
        Aftermath(self._module, optimizer, error)

    def _prepare(self) -> None:
        """Raise RuntimeError or ValueError if parameters or gradients are not what the ranks step together."""
        for param, address in self._addresses:
            if param.data_ptr() != address and param.numel() > 0:
                raise RuntimeError(
                    f"the memory of a parameter of shape {list(param.shape)} has been replaced (param.data = ..., or a "
                    "conversion), and the other ranks write to the old one: use param.copy_(), or detach() first"
                )
        if self.full_grad:
            return
        for flight in self._flights:
            for slot, view in zip(flight.slots, flight.bucket.views, strict=True):
                if slot.param.grad is view and version_of(view) - slot.version > self._most_writes:
                    raise ValueError(
                        f"the gradient of {slot.name!r} was written to after backward(), and each rank has only its "
                        'own part of the average: clip by reducer.clip_grad_norm(), or pass Sharding(grads="full"); '
                        "a torch.amp.GradScaler is given to attach as loss_scaler"
                    )

    def _agree(self, optimizer: torch.optim.Optimizer, is_skipped: bool) -> bool:
        """Return whether no rank skips the step. Raise ValueError if the ranks' hyperparameters differ. Collective."""
        settings = settings_of(optimizer)
        digest = zlib.crc32(settings)
        votes = torch.tensor([digest, -digest, is_skipped, self._has_moved()], dtype=torch.int64)
        self._communicator.all_reduce(votes, "max")
        most, least, skips, moved = votes.tolist()
        if most != -least:
            lines = settings.decode().splitlines()
            check_same_lines(self._communicator.channel.all_gather_bytes, lines, "parameter group")
            raise AssertionError("lines of equal text have equal digests")
        if moved and not skips:
            self._open_terms()
        return not skips


_PLAIN = (bool, int, float, str, tuple, type(None))
_NAMES = ("params", "param_names")


def settings_of(optimizer: torch.optim.Optimizer) -> bytes:
    """Return the hyperparameters of all groups, as text that is the same for equal ones."""
    lines = []
    for group in optimizer.param_groups:
        plain = {key: value.tolist() if isinstance(value, torch.Tensor) else value for key, value in group.items()}
        values = {key: value for key, value in plain.items() if isinstance(value, _PLAIN) and key not in _NAMES}
        lines.append(f"{len(group['params'])} parameters, {values!r}")
    return "\n".join(lines).encode()
