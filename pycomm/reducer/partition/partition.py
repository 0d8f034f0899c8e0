"""StepPartition: the ranks of a host step together, each its own part of every bucket, in all ranks' memory.

One step of Adam by P ranks that average gradients of n parameters, each by itself, moves 36 P n bytes: 8 P in the
all-reduce, 28 P in the steps. Here the ranks' parts of the gradients are reduced once, each by its rank, which then
reads weights and moments of its part once and writes the new weights to all ranks: 8 P + 28; or to the one copy that
they share: 4 P + 28. With the sums made inside the step, which saves writing and reading them, 8 P + 20 and 4 P + 24.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterable, Iterator

import numpy as np
import torch

from pycomm.communicator import Communicator
from pycomm.compression.dense import reduce_part
from pycomm.errors import CommError
from pycomm.optim.fused import KernelStep
from pycomm.optim.partition import Span
from pycomm.reducer.broadcast import check_same_lines
from pycomm.reducer.buckets import BucketInFlight
from pycomm.reducer.partition.aftermath import Aftermath
from pycomm.reducer.partition.common_memory import CommonMemory, Memory
from pycomm.reducer.partition.segment import Segment
from pycomm.torch_internals import version_of


class StepPartition:
    """Partition of the parameters of an attached optimizer; see :class:`pycomm.optim.partition.Partition`.

    Args:
        communicator: the ranks, which all reach one memory.
        stepper: what steps the optimizer by kernels.
        module: the attached module, if there is one.
        shares_parameters: whether the ranks have one copy of the parameters among them.
        full_grad: whether every rank gets all of the reduced gradients, or its own part only (``False``), or none of
            them, as they are reduced in the step (``None``).
        average: whether gradients are averaged over the ranks, or summed.
        most_writes: how often a gradient may be written to after it was handed out.
        was_fused_here: whether ``stepper`` is to be detached with this object.
    """

    def __init__(
        self,
        communicator: Communicator,
        stepper: KernelStep,
        module: torch.nn.Module | None,
        *,
        shares_parameters: bool,
        full_grad: bool | None,
        average: bool,
        most_writes: int,
        was_fused_here: bool,
    ) -> None:
        self.full_grad = full_grad is True
        self.reduction = "mean" if average else "sum"
        self._defers = full_grad is None
        self._terms: dict[BucketInFlight, tuple[int, list[Memory]]] = {}
        self._terms_version = 0
        self._communicator, self._stepper, self._module = communicator, stepper, module
        self._shares_parameters, self._most_writes = shares_parameters, most_writes
        self._was_fused_here = was_fused_here
        self._memory = CommonMemory(communicator)
        self._flights: list[BucketInFlight] = []
        self._places: dict[torch.Tensor, tuple[Segment, int]] = {}
        self._flight_of: dict[torch.Tensor, BucketInFlight] = {}
        self._addresses: list[tuple[torch.Tensor, int]] = []
        # How many steps each rank has taken, to the end of its own part.
        self._num_taken = np.frombuffer(self._memory.of_one(8 * communicator.size), np.int64)
        self._num_steps = 0
        stepper.share(self)

    # Parameters.

    def adopt(self, flights: Iterable[BucketInFlight]) -> None:
        """Move the parameters of ``flights`` to memory that all ranks reach. Collective."""
        rank, size = self._communicator.rank, self._communicator.size
        for flight in flights:
            params = [slot.param for slot in flight.slots]
            segment = Segment(flight.bucket, params, self._memory, rank, size, self._shares_parameters)
            if not self.full_grad:
                flight.bucket.reduce_part_only(segment.bounds, rank, later=self._defers)
            for index, param in enumerate(params):
                self._places[param] = segment, index
                self._flight_of[param] = flight
                self._move_in(param)
            self._flights.append(flight)
            self._stepper.move_home(params)
        self._communicator.barrier()  # what is shared has been written by all

    def _move_in(self, param: torch.Tensor) -> None:
        segment, index = self._places[param]
        place = segment.places[index]
        span = segment.spans[index]
        with torch.no_grad():
            if self._shares_parameters:
                span.of(place).copy_(span.of(param))
            else:
                place.copy_(param.detach())
        param.data = place
        self._addresses.append((param, place.data_ptr()))

    def span_of(self, param: torch.Tensor) -> Span:
        segment, index = self._places[param]
        return segment.spans[index]

    def mirrors_of(self, param: torch.Tensor) -> list[torch.Tensor]:
        segment, index = self._places[param]
        return segment.mirrors_of(index)

    @property
    def terms_version(self) -> int:
        return self._terms_version if self._is_deferred() else 0

    def terms_of(self, param: torch.Tensor) -> list[torch.Tensor]:
        segment, index = self._places[param]
        flight = self._flight_of[param]
        return [segment.part_in(memory, index) for memory in self._terms[flight][1]]

    def _is_deferred(self) -> bool:
        return any(flight.bucket.is_deferred for flight in self._flights)

    def require_reduced(self) -> None:
        for flight in self._flights:
            if flight.bucket.is_deferred:
                reduce_part(flight.communicator, flight.bucket, flight.bucket.memory, self.reduction)

    def reduce_early(self) -> None:
        """Reduce gradients now, and from now on while backward runs, as they are needed before the step. Collective."""
        self.require_reduced()
        self._defers = False
        for flight in self._flights:
            flight.bucket.defers = False

    def _open_terms(self) -> None:
        """Find the gradients of all ranks, some of which are in other memory than before. Collective."""
        for flight in self._flights:
            flat = flight.bucket.flat
            self._terms[flight] = flat.data_ptr(), self._memory.of_all(flat)
        self._terms_version += 1

    def _has_moved(self) -> bool:
        return any(self._terms.get(f, (0,))[0] != f.bucket.flat.data_ptr() for f in self._flights)

    def home(self, param: torch.Tensor, key: str, dtype: torch.dtype) -> torch.Tensor:
        segment, index = self._places[param]
        return segment.home(index, param, key, dtype)

    def add_up(self, values: torch.Tensor) -> torch.Tensor:
        everyone = torch.empty(self._communicator.size * values.numel(), dtype=torch.float64)
        self._communicator.all_gather(everyone, values)
        return everyone.view(self._communicator.size, -1).sum(0)

    def first_of(self, number: int) -> int:
        """Return the smallest ``number`` of all ranks. Collective."""
        first = torch.tensor([number], dtype=torch.int64)
        self._communicator.all_reduce(first, "min")
        return int(first)

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
        self._flight_of.clear()
        self._addresses.clear()
        self._terms.clear()
        self._flights.clear()

    def release(self) -> None:
        """Let go of the memory, once the communicator is closed."""
        self._memory.release()

    # Steps.

    @contextlib.contextmanager
    def step(self, optimizer: torch.optim.Optimizer, *, is_skipped: bool, needs_gradients: bool) -> Iterator[bool]:
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
            Aftermath(self._module, optimizer, error)  # others may have seen that all are here
            raise
        if not is_taken:
            yield False
            return
        self._num_steps += 1
        try:
            yield True
            self._num_taken[self._communicator.rank] = self._num_steps
            self._communicator.barrier()
        except BaseException as error:
            if not isinstance(error, CommError):
                self._communicator.close(f"its optimizer.step() failed: {error}")
            if not (self._num_taken >= self._num_steps).all():
                Aftermath(self._module, optimizer, error)
            raise

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
                        "own part of the average: clip by reducer.clip_grad_norm(), or attach(..., full_grad=True); a "
                        "torch.amp.GradScaler is given to attach as loss_scaler"
                    )

    def _agree(self, optimizer: torch.optim.Optimizer, is_skipped: bool) -> bool:
        """Return whether no rank skips the step. Raise ValueError if the ranks' hyperparameters differ. Collective."""
        settings = settings_of(optimizer)
        digest = zlib.crc32(settings)
        is_deferred = self._is_deferred()
        votes = torch.tensor([digest, -digest, is_skipped, is_deferred and self._has_moved()], dtype=torch.int64)
        self._communicator.all_reduce(votes, "max")
        most, least, skips, moved = votes.tolist()
        if most != -least:
            check_same_lines(self._communicator, settings.decode().splitlines(), "parameter group")
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
