"""Parameters sorted into buckets, the progress of each bucket through a pass, and the lanes that buckets share."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from pycomm.collectives.bucket import Bucket, HasGradient
from pycomm.collectives.communicator import Communicator, communicator_beside
from pycomm.collectives.gradients import GradientCounter, GradientCounts
from pycomm.collectives.layout import Kinds, on_gpu, strides_of
from pycomm.compression.base import Compression, Exchange, Flag, State
from pycomm.compression.dense import NoCompression
from pycomm.optim.shards import dimensions_of, is_split_in, matched
from pycomm.optim.step_override import HALF
from pycomm.torch_internals import Sharded, dtensor_around, is_dtensor, local_of, version_of
from pycomm.training.reducer.autograd_hooks import GradientHook
from pycomm.training.reducer.settings import Options
from pycomm.worker import Work

if TYPE_CHECKING:
    from pycomm.collectives.transport.gpu import GpuWork

PACKET_BYTES = 16
"""Number of bytes that a GPU moves at a time."""


@dataclass(eq=False)
class Slot:
    """Parameter, its place in a bucket, and the progress of its gradient in the current pass."""

    name: str
    param: torch.Tensor
    sent: SentBucket | None = None
    index: int = 0
    """Index of the parameter in its bucket."""
    hook: GradientHook | None = None
    kept: torch.Tensor | None = None
    """This step's gradient as backward made it, until the next one is sent; only where ranks may be lost."""
    spare: torch.Tensor | None = None
    """Memory for ``kept``, allocated when first needed."""
    sharded: LocalGradient | None = None
    """Access to this rank's part of the gradient, if the parameter is a DTensor."""
    wide: torch.Tensor | None = None
    """Memory for the sum of a window's half-precision gradients, in float32; kept from window to window."""
    has_wide: bool = False
    """Whether ``wide`` has gradients of this window."""
    in_optimizer: bool = False
    """Whether the optimizer had the parameter when it was found."""

    owner: HasGradient = field(init=False)
    """Object whose ``grad`` is the gradient, or this rank's part of it: the parameter, or ``sharded``."""

    def __post_init__(self) -> None:
        self.sharded = LocalGradient(self.param) if is_dtensor(self.param) else None
        self.owner = self.param if self.sharded is None else self.sharded

    @property
    def fired(self) -> int:
        """Number of times its gradient has been accumulated in this pass."""
        return 0 if self.sent is None else self.sent.counts.fired(self.index)

    @property
    def expected(self) -> int:
        """Number of times its gradient is accumulated in one pass; 0 before the first pass has ended."""
        return 0 if self.sent is None else self.sent.counts.expected(self.index)

    @property
    def version(self) -> int:
        """Version counter of the averaged gradient when it was handed out."""
        return -1 if self.sent is None else self.sent.versions[self.index]

    @property
    def local(self) -> torch.Tensor:
        """The parameter, or this rank's part of it."""
        return self.param if self.sharded is None else local_of(self.param)

    @cached_property
    def strides(self) -> tuple[int, ...]:
        """Memory order in which its gradients are sent: the parameter's order when it first got a bucket."""
        return strides_of(self.local)

    def grad_version(self) -> int:
        """Return the number of writes to the gradient, which must exist."""
        if self.sharded is not None:
            return self.sharded.version
        assert self.param.grad is not None
        return version_of(self.param.grad)

    def is_undefined(self) -> bool:
        """Return whether backward made no gradient, as an ``autograd.Function`` returned ``None``. Called in its hook.

        Torch then calls the hooks all the same. A hook that comes before this one might have removed the gradient.
        """
        return self.param.grad is None and (self.hook is None or self.hook.is_first(self.param))

    def count_in(self, counter: GradientCounter) -> None:
        """Let ``counter`` count its gradients, unless each must be handled."""
        is_plain = self.sent is not None and self.sharded is None
        counter.count_in(self.sent.counts if self.sent is not None and is_plain else None, self.index)

    def fire(self) -> None:
        """Count an accumulation of its gradient; give a DTensor gradient the parameter's placements."""
        assert self.sent is not None
        self.sent.counts.note(self.index)
        if self.sharded is not None:
            self.sharded.match(self.name)

    def adopt(self) -> None:
        """Move ``.grad`` into the bucket, so that later passes of this window accumulate there."""
        grad, sent = self.owner.grad, self.sent
        assert grad is not None
        assert sent is not None
        view = sent.bucket.views[self.index]
        if grad is not view and not sent.bucket.holds(self.index, grad):
            view.copy_(grad)
            self.owner.grad = view

    def accumulate(self) -> None:
        """Take the gradient of a pass that is not the last of its window.

        Half-precision gradients are added up in float32, since a long sum in half precision loses small terms;
        ``.grad`` is ``None`` until the window ends. Others stay in the bucket, where autograd adds to them.
        """
        grad = self.owner.grad
        if grad is None or grad.dtype not in HALF:
            self.adopt()
            return
        if self.wide is None:
            self.wide = torch.empty_like(grad, dtype=torch.float32)
        if self.has_wide:
            self.wide.add_(grad)
        else:
            self.wide.copy_(grad)
        self.has_wide, self.owner.grad = True, None

    def round(self) -> None:
        """Make ``.grad`` the sum of all passes of the window, rounded once."""
        if self.wide is None or not self.has_wide:
            return
        grad, self.has_wide = self.owner.grad, False
        if grad is not None:
            self.wide.add_(grad)
        self.owner.grad = self.wide.to(self.local.dtype)

    def show_bucket(self) -> None:
        """Make ``.grad``, if there is one, the view into the bucket."""
        if self.param.grad is not None and self.sent is not None:
            self.owner.grad = self.sent.bucket.views[self.index]

    def leave_bucket(self) -> None:
        """Copy ``.grad`` to memory of its own if it is a view into the bucket."""
        self.round()
        if (grad := self.owner.grad) is not None and self.holds_average():
            self.owner.grad = grad.clone(memory_format=torch.preserve_format)

    def holds_average(self) -> bool:
        """Return whether ``.grad`` is the view into the bucket, even if it was written to."""
        grad = self.owner.grad
        return self.sent is not None and grad is not None and grad is self.sent.bucket.views[self.index]

    def move_to_bucket(self, num_writes: int) -> None:
        """Copy the average from an earlier bucket; ``num_writes`` is the number of writes since it was handed out."""
        grad = self.owner.grad
        assert grad is not None
        assert self.sent is not None
        self.owner.grad = self.sent.bucket.views[self.index].copy_(grad)
        self.sent.versions[self.index] = self.grad_version() - num_writes

    def untouched(self) -> bool:
        """Return whether ``.grad`` is still the last average, unchanged."""
        grad = self.owner.grad
        if grad is None or self.sent is None:
            return grad is None
        same = self.holds_average() and self.grad_version() == self.version
        return same and self.sent.bucket.holds(self.index, grad)  # .grad.data may have been replaced


def scale_gradients(slots: Iterable[Slot], factor: float) -> None:
    """Multiply accumulated gradients; a factor of zero clears NaN, too, which a gradient of no samples may be."""
    for slot in slots:
        sums = (slot.owner.grad, slot.wide if slot.has_wide else None)
        for grad in (grad for grad in sums if grad is not None):
            grad.zero_() if factor == 0.0 else grad.mul_(factor)


def forget_wide(slots: Iterable[Slot]) -> None:
    """Forget what half-precision parameters have added up in this window: the user has cleared the gradients."""
    for slot in slots:
        slot.has_wide = False


def round_gradients(slots: Iterable[Slot]) -> None:
    """Make ``.grad`` of half-precision parameters the rounded sum of all passes of the window."""
    for slot in slots:
        slot.round()


@dataclass(eq=False)
class SentBucket:
    """Bucket to be sent: its parameters, its exchange, and the progress of this pass."""

    slots: list[Slot]
    bucket: Bucket
    exchange: Exchange
    communicator: Communicator
    """Communicator that sends it."""
    work: Work | GpuWork | None = None
    unused: Sequence[Slot] = ()
    """Slots without an average in the last step."""
    versions: list[int] = field(init=False)
    """Version counters of the averages when they were handed out."""
    counts: GradientCounts = field(init=False)
    """How often each gradient has been accumulated in this pass, and on which streams of a GPU."""
    kinds: Kinds = field(init=False)
    """Kinds of the parameters when the bucket was created."""

    def __post_init__(self) -> None:
        self.counts, self.versions = GradientCounts(len(self.slots)), [-1] * len(self.slots)
        self.kinds = Kinds(self.bucket.names, [slot.param for slot in self.slots])

    def expect(self, numbers: Sequence[int]) -> None:
        """Expect each gradient as often per pass as these ``numbers`` say; 0: not known."""
        for index, number in enumerate(numbers):
            for _ in range(number):
                self.counts.note(index)
        self.counts.end_pass()
        self.counts.begin_pass()

    def begin_pass(self) -> None:
        """Expect the gradients of another pass."""
        self.counts.begin_pass()
        self.bucket.repair()
        self.bucket.leave_to_users()

    def abandon(self) -> None:
        """Wait for the exchange that is under way, and discard it."""
        if self.work is not None:
            self.work.wait()
            self.work = None

    def ready(self) -> bool:
        """Return whether all gradients have arrived; never in the first pass, which only counts them."""
        return self.counts.is_complete()

    def hand_out(self, finite: Flag, factor: float = 1.0) -> list[Slot]:
        """Commit the exchange's state if ``finite``; make the averages ``.grad``, and return slots that have none.

        ``factor``: factor of the averages; NaN makes all of them NaN.
        """
        self.exchange.finish(finite)
        if factor != 1.0:
            self.bucket.flat.mul_(factor)
        self.bucket.repair()
        self.bucket.fill_copies()
        used_here = self.exchange.used()
        self.versions = self.bucket.hand_out(used_here)
        self.unused = [] if all(used_here) else [self.slots[i] for i, used in enumerate(used_here) if not used]
        return self.unused


_GROWTH = 4
"""Largest ratio of a bucket's size to the size of the previous bucket."""
_TINY = 8
"""A bucket filled to less than 1/8, such as by a bias before a large matrix, takes the next parameter: sent alone it
would cost more than it gains. The first bucket does not, as nothing else is under way.
"""
_MOST_TIMES_DENSE = 8
"""Largest size of a compressed bucket's gradients in units of ``bucket_bytes``: larger ones would come too late to be
hidden behind backward."""


def make_buckets(
    slots: Sequence[Slot],
    compression: Compression,
    lanes: Sequence[Communicator],
    bucket_bytes: int,
    algorithm: str = "auto",
    *,
    earlier: Sequence[SentBucket] = (),
    first_bytes: int | None = None,
    place: Callable[[Slot], int] = lambda _: 0,
    divide: Callable[[Bucket, Sequence[Slot]], None] = lambda *_: None,
) -> list[SentBucket]:
    """Sort ``slots`` into buckets in reverse order, which is roughly the order in which gradients arrive.

    The result depends on the parameters and settings alone, so all ranks make the same buckets. Each
    bucket holds parameters of one dtype and one method, up to ``bucket_bytes`` (or one larger parameter and a few
    small ones before it). On a GPU, where launches are expensive, this limits the bytes that the method sends; on the
    CPU the bytes of the gradients, since the work on one bucket is hidden behind that on the next.

    Args:
        earlier: buckets that are there already.
        first_bytes: size of the very first bucket, from which the next ones grow; ``bucket_bytes`` if ``None``.
        place: sort key of a parameter in its bucket, before any other.
        divide: gives each rank its share of a bucket of parameters, if ranks are to have shares.
    """
    buckets: list[SentBucket] = []
    first = bucket_bytes if first_bytes is None or earlier else first_bytes
    groups = _groups(reversed(slots), compression, bucket_bytes, first)
    loads = [sum(sent.bucket.memory.nbytes for sent in earlier if sent.communicator is lane) for lane in lanes]
    numbers = numbers_of_lanes([sum(slot.local.nbytes for slot in group) for group, _ in groups], loads)
    for (group, compressed), number in zip(groups, numbers, strict=True):
        communicator = lanes[number]
        members = sorted(group, key=lambda slot: (place(slot), *_place(slot)))
        owners = [s.owner for s in members] if any(s.sharded is not None for s in members) else None
        names, params, strides = zip(*((s.name, s.local, s.strides) for s in members), strict=True)
        bucket = Bucket(names, params, communicator, algorithm, owners, strides)
        divide(bucket, members)
        method = compression if compressed else compression.otherwise or NoCompression()
        sent = SentBucket(members, bucket, method.make(bucket, communicator), communicator)
        for index, slot in enumerate(members):
            slot.sent, slot.index = sent, index
        buckets.append(sent)
    return buckets


def are_sorted(
    buckets: Sequence[SentBucket],
    slots: Sequence[Slot],
    compression: Compression,
    bucket_bytes: int,
    first_bytes: int,
) -> bool:
    """Return whether :func:`make_buckets` would sort ``slots`` into buckets such as ``buckets``."""
    groups = [set(group) for group, _ in _groups(reversed(slots), compression, bucket_bytes, first_bytes)]
    return groups == [set(sent.slots) for sent in buckets]


def _place(slot: Slot) -> tuple[bool, int]:
    """Return the sort key of a bucket's slots, by which most gradients are aligned to 16 bytes without gaps.

    GPUs copy 16 bytes at a time between aligned addresses. A gradient whose size is not a multiple of 16 misaligns all
    after it, so these come last, the largest first.
    """
    num_bytes = slot.local.nbytes
    uneven = num_bytes % PACKET_BYTES != 0
    return uneven, -num_bytes if uneven else 0


def _groups(
    slots: Iterable[Slot], compression: Compression, bucket_bytes: int, first_bytes: int
) -> list[tuple[list[Slot], bool]]:
    """Return the parameters of each bucket and whether they are compressed, in the order in which gradients arrive."""
    closed: list[tuple[list[Slot], bool]] = []
    open_: dict[tuple[torch.dtype, bool], list[Slot]] = {}
    sizes: dict[tuple[torch.dtype, bool], int] = {}
    for slot in slots:
        param = slot.local
        key = (param.dtype, compression.applies_to(param))
        num_bytes = param.nbytes
        if key[1] and on_gpu(param):
            num_bytes = int(num_bytes * max(compression.sent_fraction, 1.0 / _MOST_TIMES_DENSE))
        limit = min(bucket_bytes, first_bytes * _GROWTH ** len(closed))
        is_tiny = bool(closed) and sizes.get(key, 0) * _TINY < limit
        if key in open_ and sizes[key] + num_bytes > limit and not is_tiny:
            closed.append((open_.pop(key), key[1]))
        if key not in open_:
            open_[key], sizes[key] = [], 0
        open_[key].append(slot)
        sizes[key] += num_bytes
    return closed + [(members, compressed) for (_, compressed), members in open_.items()]


def state_of(buckets: Iterable[SentBucket]) -> State:
    """Return the state of all parameters, by name (not copied)."""
    return {name: entry for sent in buckets for name, entry in sent.exchange.state().items()}


_INSTEAD = (
    "FSDP2 averages gradients itself, leave pycomm.attach out; between replicas of a sharded model, "
    "pycomm.ddp.register_hsdp does, with any compression"
)


class LocalGradient:
    """Gradient of this rank's part of a DTensor, in the place of ``param.grad``.

    Args:
        param: the parameter, whose ``.grad`` is a DTensor around the local gradient.
    """

    def __init__(self, param: Sharded) -> None:
        self._param = param

    @property
    def grad(self) -> torch.Tensor | None:
        """Local gradient; assigning one makes it the part of a new DTensor, with the parameter's placements."""
        grad = self._param.grad
        return None if grad is None else local_of(grad)

    @grad.setter
    def grad(self, local: torch.Tensor | None) -> None:
        self._param.grad = None if local is None else dtensor_around(local, self._param)

    @property
    def version(self) -> int:
        """Number of writes to the gradient, through the DTensor and to the local gradient."""
        grad = self._param.grad
        assert grad is not None
        return version_of(grad) + version_of(local_of(grad))

    def match(self, name: str) -> None:
        """Give ``.grad`` the placements of the parameter; see :func:`pycomm.optim.shards.matched`."""
        param = self._param
        grad = param.grad
        if grad is None or not is_dtensor(grad):
            return
        if grad.placements != param.placements:
            param.grad = matched(grad, param)
        local = self.grad
        assert local is not None
        if local.shape != local_of(param).shape:
            raise RuntimeError(
                f"the gradient of {name!r} has shape {list(local.shape)} on this rank, its part of the parameter "
                f"{list(local_of(param).shape)}"
            )


def check_sharding(names: Mapping[str, torch.Tensor], ranks: Sequence[int], module: torch.nn.Module | None) -> None:
    """Raise TypeError if a DTensor is distributed over the process group's ``ranks``, or ``module`` is FSDP2's."""
    for name, param in names.items():
        if is_dtensor(param):
            _check_placements(name, param, set(ranks))
    _refuse_fully_sharded(names, module)


def _check_placements(name: str, param: Sharded, ranks: set[int]) -> None:
    kind = type(param).__name__
    for dimension, group in dimensions_of(param):
        placement = param.placements[dimension]
        if placement.is_partial():
            raise TypeError(f"parameter {name!r} is a {kind} with the placement {placement}, wanted Shard or Replicate")
        if len(ranks & set(dist.get_process_group_ranks(group))) <= 1:
            continue
        if is_split_in(param, dimension):
            raise TypeError(
                f"parameter {name!r} is a {kind}, sharded over ranks of process_group ({placement}), each of which "
                "has a different part: averages over them would mix parts. Under tensor parallelism pass "
                f'process_group=mesh["dp"], the dimension that holds replicas; {_INSTEAD}'
            )
        raise TypeError(
            f"parameter {name!r} is a {kind} whose mesh contains ranks of process_group, as replicas: DTensor itself "
            "combines gradients over its mesh, by rules that depend on the inputs' placements. Distribute the model "
            'over the other dimensions only (mesh["tp"]), and leave process_group to attach'
        )


def _refuse_fully_sharded(names: Mapping[str, torch.Tensor], module: torch.nn.Module | None) -> None:
    """Raise TypeError if a part of ``module`` was passed to ``fully_shard``.

    Autograd does not see the gradients of their shards, so hooks would not be called.
    """
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None and module is not None and any(isinstance(part, fsdp.FSDPModule) for part in module.modules()):
        name = next((name for name, param in names.items() if is_dtensor(param)), "?")
        raise TypeError(f"parameter {name!r} is a DTensor, sharded by fully_shard: {_INSTEAD}")


# Lanes: several communicators over the same ranks, so that several buckets travel at once. Between hosts an all-reduce
# leaves the link idle while ranks add up, wake up, or wait for a slower one. A second all-reduce fills these gaps. Each
# lane has its own thread and connections. All ranks divide the buckets equally among lanes, by bytes, so that a lane's
# operations have the same order everywhere. Ranks of one host have one lane, which keeps their memory busy.

_NUM_LANES = 2
_USUAL_BYTES = 25 << 20
_FIRST_BYTES = 1 << 20
"""Size of the first bucket between hosts and on GPUs, small so that the link has work as soon as possible."""
_NUM_BUCKETS = 4
"""Number of buckets of a small model on one host: all but the last can be hidden behind backward."""
_LEAST_BYTES = 1 << 20
"""Size of a bucket on one host below which waking a thread costs more than it hides."""


def open_lanes(communicator: Communicator, settings: Options, on_gpu: bool) -> list[Communicator]:
    """Return the lanes. The first is ``communicator``, which closes the others with itself. Collective.

    A method that measures uses one lane, as nothing else may use the link meanwhile.

    Args:
        on_gpu: whether the gradients are on a GPU, and so do not use the transport.
    """
    lanes = [communicator]
    if on_gpu or not is_remote(communicator) or settings.compression.measures:
        return lanes
    while len(lanes) < _NUM_LANES:
        lane = communicator_beside(communicator)
        communicator.channel.companions.append(lane.channel)
        lanes.append(lane)
    return lanes


def numbers_of_lanes(sizes: Sequence[int], loads: Sequence[int]) -> list[int]:
    """Return the number of the lane for each bucket of ``sizes`` bytes, where the lanes carry ``loads`` bytes already.

    Each bucket gets the lane with the fewest bytes; of several, the last one, on which ranks compare nothing first. If
    a step has only one bucket, it uses the first lane.
    """
    if len(sizes) == 1 and not any(loads):
        return [0]
    loads, numbers = list(loads), []
    for size in sizes:
        number = min(reversed(range(len(loads))), key=loads.__getitem__)
        loads[number] += max(size, 1)
        numbers.append(number)
    return numbers


def is_remote(communicator: Communicator) -> bool:
    """Return whether the ranks are on several hosts."""
    return communicator.transport != "shared_memory"


def bucket_sizes(lanes: Sequence[Communicator], settings: Options, num_bytes: int, on_gpu: bool) -> tuple[int, int]:
    """Return the sizes of a bucket and of the first bucket, for ``num_bytes`` of gradients; equal on all ranks.

    Between hosts and on GPUs the first bucket is small, as the link would otherwise wait for it. In CPU memory of one
    host, where ranks compute what they send on the same cores, small models get four equal buckets, unless
    ``bucket_mb`` is set. Neither holds for methods with much work per bucket and little to send.
    """
    most = _USUAL_BYTES if settings.tuning.bucket_bytes is None else settings.tuning.bucket_bytes
    if settings.compression.transactional:
        return most, most
    if on_gpu or is_remote(lanes[0]):
        return most, min(most, int(_FIRST_BYTES / settings.compression.sent_fraction))
    if settings.tuning.bucket_bytes is None:
        most = min(most, max(-(-num_bytes // _NUM_BUCKETS), _LEAST_BYTES))
    return most, most
