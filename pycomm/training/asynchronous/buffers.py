"""Buffers of ranks that average less often: sent when ranks meet, as parameters are, or compared until they differ."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Mapping, Sequence
from typing import cast

import torch

from pycomm.collectives.broadcasting import write
from pycomm.collectives.communicator import Communicator
from pycomm.collectives.tensor_memory import Memory, digests_of
from pycomm.training.asynchronous.arguments import name_of_not_finite
from pycomm.training.reducer import AVERAGED, BufferContent, BufferSync, Ignored, synced_by
from pycomm.untrusted import MapOf, parse

_LOG = logging.getLogger("pycomm")

Taken = tuple[list[BufferContent], list[str], str]
"""Result of :meth:`BufferSync.take`."""

Values = dict[str, torch.Tensor]
"""Contents of buffers as integers, by name."""


class MeetingBuffers:
    """Buffers of a module whose parameters ranks average less often, and nothing else averages.

    Args:
        mode: "local", "broadcast" or "average".
        communicator: the ranks; ``None`` if they meet at a server.
        own: names of buffers that are private to each rank.
        call: name of the public function.
    """

    def __init__(
        self, model: torch.nn.Module, mode: str, communicator: Communicator | None, own: Ignored, call: str
    ) -> None:
        for module in model.modules():  # an entry there is left from a call that failed
            synced_by.pop(module, None)
        self.mode, self._communicator, self._call = mode, cast(Communicator, communicator), call
        self._sync = BufferSync(model, mode, self._communicator, lambda name, _: own.matches(name))
        self.take, self._has_logged = self._sync.take, False

    def close(self) -> None:
        """Leave the buffers to another synchronization."""
        del self._sync, self.take

    @torch.no_grad()
    def apply(self, values: Values) -> None:
        """Write ``values`` to the buffers of these names."""
        for content in self.take(copies=False)[0] if values else []:
            if content.name in values:
                write(content.part, values[content.name])

    # Mode "local".

    def digests(self) -> dict[str, str]:
        """Return properties and a hash of each buffer, by name; nothing once a difference was logged."""
        contents, lines, _ = ([], [], "") if self._has_logged else self.take(copies=False)
        found = {line.partition(": ")[0]: line for line in lines}
        hashes = digests_of([Memory((content.value,), writable=True) for content in contents])
        return found | {c.name: found[c.name] + value.hex() for c, value in zip(contents, hashes, strict=True)}

    def compare(self, everyones: Sequence[Mapping[str, str]], between: str, *, logs: bool = True) -> None:
        """Log the first buffer whose digests differ, unless a rank has sent none, as it was logged there."""
        first, *others = everyones
        names = [name for name in first if any(other.get(name) != first[name] for other in others)]
        self._has_logged |= bool(names and all(others))
        if names and all(others) and logs:
            more = f", and {len(names) - 1} more," if len(names) > 1 else ""
            advice = f'{self._call}(..., buffers="average") or "broadcast" makes them equal when ranks meet'
            _LOG.warning("buffer %r%s differs between %s: each keeps its own. %s", names[0], more, between, advice)

    # Meetings of all ranks.

    def begin(self) -> Taken | dict[str, str]:
        """Return this rank's contribution to :meth:`exchange`: its buffers, or digests of them."""
        return self.digests() if self.mode == "local" else self.take(copies=True)

    @torch.no_grad()
    def exchange(self, begun: Taken | dict[str, str]) -> Values:
        """Return what to write to the buffers, nothing in mode "local". Collective.

        Raises:
            ValueError: on every rank: the ranks' buffers differ in names, shapes or dtypes.
            RuntimeError: on every rank: a buffer of some rank is not finite, and the mean would not be on another.
        """
        channel = self._communicator.channel
        if isinstance(begun, dict):
            texts = channel.all_gather_bytes(json.dumps(begun).encode())
            everyones = [parse(text, MapOf(str), "digests of buffers") for text in texts]
            self.compare(everyones, "the ranks", logs=self._communicator.rank == 0)
            return {}
        changes = self._sync.exchange(begun)
        means = [(c.name, c.value.view(c.dtype), mean.view(c.dtype)) for c, mean in changes if c.dtype in AVERAGED]
        means = [each for each in means if self.mode == "average" and not each[2].isfinite().all()]
        if means:  # the same on all ranks
            lost = [bool((own.isfinite() & ~mean.isfinite()).any()) for _, own, mean in means]
            if numbers := list(filter(None, channel.all_gather_number(1 + lost.index(True) if any(lost) else 0))):
                why = name_of_not_finite(self._communicator, [means[numbers[0] - 1][:2]])
                raise RuntimeError(f"the buffers of the ranks have no mean: {why}")
        return {content.name: value for content, value in changes}

    # Meetings at a server.

    def flat(self) -> torch.Tensor:
        """Return all buffers as bytes."""
        return _flat([content.value for content in self.take(copies=False)[0]])

    def write(self, flat: torch.Tensor) -> None:
        """Overwrite the buffers with another rank's, a result of :meth:`flat`."""
        self.apply(_combined(self.take(copies=False)[0], [flat], "broadcast"))


def _flat(values: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([torch.empty(0, dtype=torch.uint8), *(value.reshape(-1).view(torch.uint8) for value in values)])


def _combined(contents: Sequence[BufferContent], flats: Sequence[torch.Tensor], mode: str) -> Values:
    """Return means of floating-point buffers whose bits differ between ``flats``, and all others of the first one."""
    found, sizes = Values(), [content.value.nbytes for content in contents]
    for content, *pieces in zip(contents, *(torch.split(flat, sizes) for flat in flats), strict=True):
        # Cloned, as a piece may start at an address that is not aligned for its dtype.
        each = [piece.clone().view(content.value.dtype).view(content.value.shape) for piece in pieces]
        found[content.name] = each[0]
        if mode == "average" and content.dtype in AVERAGED and not all(torch.equal(x, each[0]) for x in each):
            mean = torch.stack([x.view(content.dtype).double() for x in each]).mean(0)
            found[content.name] = mean.to(content.dtype).view(content.value.dtype)
    return found


class ServerBuffers:
    """Buffers that a server hands out: initially its own, then the workers' last ones at an update.

    Attributes:
        by_worker: what each has pushed last, flat.
        num_bytes: size of each.
    """

    def __init__(self, buffers: MeetingBuffers) -> None:
        self._contents, self._mode = buffers.take(copies=True)[0], buffers.mode
        self.by_worker: dict[int, torch.Tensor] = {}
        self._now, self._version = buffers.flat(), -1
        self.num_bytes = len(self._now)

    def load(self, by_worker: Mapping[int, torch.Tensor]) -> None:
        if any(flat.numel() != self.num_bytes or flat.dtype != torch.uint8 for flat in by_worker.values()):
            raise ValueError("the checkpoint has buffers of another model")
        self.by_worker = dict(by_worker)

    def push(self, worker: int, flat: torch.Tensor, present: Collection[int], version: int) -> None:
        """Replace the buffers of ``worker``, and drop buffers of workers that are not ``present`` any more."""
        self.at(version)
        self.by_worker = {w: each for w, each in {**self.by_worker, worker: flat}.items() if w in present}

    def at(self, version: int) -> torch.Tensor:
        """Return the buffers for the present parameters, after ``version`` updates; the tensor does not change."""
        if version != self._version and self.by_worker:
            flats = [flat for _, flat in sorted(self.by_worker.items())]
            self._now = _flat(list(_combined(self._contents, flats, self._mode).values()))
        self._version = version
        return self._now
