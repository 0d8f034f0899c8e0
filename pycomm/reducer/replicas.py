"""Check that the ranks are at the same step with the same parameters, by fingerprints that travel with gradients.

Each reduction carries the number of steps that the optimizer has taken, modulo 16: if a rank ran a
backward pass on its own, all ranks learn it in the next reduction. Now and then a reduction also carries
hashes of all parameters and of the module's buffers (which read them once). If a bit differs, all ranks
see that; they then exchange the data behind the bits, and name the difference and its ranks. What differs
on fewer than half of the ranks is theirs alone: the error accuses them, and the others may go on without them.

That is enough for averaged gradients, too, which all ranks have alike: a bit that is flipped in one, while it
travels or where it lies, leads to another parameter, or to none, and then to no harm. The state of
compression, which differs between ranks by nature, has hashes of its own (:mod:`pycomm.reducer.state_hashes`);
a rank that finds it changed tells the others by a bit of the fingerprint.
"""

from __future__ import annotations

import json
import logging
import warnings
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import numpy as np
import torch

from pycomm import kernels
from pycomm.communicator import Communicator
from pycomm.compression.base import Flag
from pycomm.fingerprint import FINGERPRINT_BITS
from pycomm.reducer.buckets import BucketInFlight
from pycomm.reducer.damage import DamageError, alike, name_ranks, outvoted
from pycomm.reducer.progress import HostCopy
from pycomm.reducer.state_hashes import StateHashes, Taken, hashable

_STEP_BITS = 4
_BUFFER_BITS = 5
_STEP = slice(0, _STEP_BITS)
_STATE = _STEP_BITS
_PARAMETERS = slice(_STATE + 1, FINGERPRINT_BITS - _BUFFER_BITS)
_BUFFERS = slice(FINGERPRINT_BITS - _BUFFER_BITS, FINGERPRINT_BITS)
_LAST_BITS = 1e-3
"""Largest difference, relative to the largest magnitude, that processors which round differently may explain."""

_FEW = 64
"""Most elements that differ where it is memory that did it: whoever writes to a parameter writes to more of it."""

_DRIFT = (
    "updates them differently: a learning rate, data that decides whether a step is taken, code that writes to "
    "parameters, gradients that were never averaged. pycomm.broadcast_parameters(model) makes them equal again; "
    "attach(..., check_replicas=0) turns this check off"
)

_logger = logging.getLogger("pycomm")

Named = Sequence[tuple[str, torch.Tensor]]


class _Hashes:
    """Hashes of a changing list of tensors, combined into a few bits."""

    def __init__(self, device: torch.device, num_bits: int) -> None:
        self._device = device
        self._shifts = torch.arange(64 - num_bits, 64, device=device, dtype=torch.int64)
        self._scratch = kernels.Scratch()
        self._weights = self._each = torch.empty(0, dtype=torch.int64, device=device)
        self._names: list[str] = []

    def bits(self, named: Named) -> torch.Tensor:
        """Return bools that almost certainly differ if a tensor does. Does not wait for a GPU."""
        named = [(name, tensor) for name, tensor in named if tensor.device == self._device]
        names = [name for name, _ in named]
        if names != self._names:
            weights = [zlib.crc32(name.encode()) << 20 | 2 * i + 1 for i, name in enumerate(names)]
            on_host = torch.tensor(weights, dtype=torch.int64, pin_memory=self._device.type == "cuda")
            self._weights = on_host.to(self._device, non_blocking=True)
            self._each = torch.empty_like(self._weights)
            self._names = names
        if named:
            kernels.hashes([hashable(tensor) for _, tensor in named], out=self._each, scratch=self._scratch)
        total = (self._each * self._weights).sum()
        return ((total >> self._shifts) & 1).bool()

    def by_name(self) -> tuple[list[str], np.ndarray]:
        """Return the names and hashes of the tensors in the last call of :meth:`bits`."""
        return self._names, self._each.cpu().numpy()


class ReplicaCheck:
    """Maker of this rank's fingerprints, which reports differences between the ranks.

    Args:
        communicator: the ranks to compare.
        device: device of the parameters.
        interval: number of reductions from one comparison of parameters to the next; 0 for none.
        waits: whether the host may wait for results of ``device``.
        parameters: returns the tensors to compare by name, which must be equal on all ranks; called for
            each comparison.
        buffers: likewise, for the module's buffers.
        world: returns the numbers by which the ranks are called.

    Attributes:
        absent: whether this rank takes part without data, and steps no more: its parameters and steps do not count.
    """

    absent = False

    def __init__(
        self,
        communicator: Communicator,
        device: torch.device,
        interval: int,
        waits: bool,
        parameters: Callable[[], Named],
        buffers: Callable[[], Named],
        world: Callable[[], Sequence[int]],
    ) -> None:
        self._communicator, self._interval, self._world = communicator, interval, world
        self._parameters, self._buffers = parameters, buffers
        steps = torch.arange(1 << _STEP_BITS).unsqueeze(1) >> torch.arange(_STEP_BITS)
        table = torch.zeros(1 << _STEP_BITS, FINGERPRINT_BITS, dtype=torch.bool)
        table[:, _STEP] = (steps & 1).bool()
        self._by_step = table.to(device)
        self._parameter_hashes = _Hashes(device, _PARAMETERS.stop - _PARAMETERS.start)
        self._buffer_hashes = _Hashes(device, _BUFFER_BITS)
        self.state_hashes = StateHashes()
        self._state_changed: Flag = False
        self._seen = [] if waits else [HostCopy(FINGERPRINT_BITS, device) for _ in range(2)]
        self._num_seen = 0
        self._logged = self._warned = False

    def is_due(self, num_reductions: int) -> bool:
        """Return whether parameters are compared in the reduction that follows ``num_reductions`` others."""
        # Always in the second reduction: differences in setup show after the first step.
        return (
            self._interval > 0 and num_reductions > 0 and (num_reductions == 1 or num_reductions % self._interval == 0)
        )

    def fingerprint(self, num_steps: int, num_reductions: int) -> Callable[[], torch.Tensor]:
        """Return the function that computes the fingerprint, to be called on the communication thread or stream.

        The parameters must not be written to until then. The lists of tensors are read now, as they may
        grow before that thread calls the function.
        """
        by_step = self._by_step[num_steps % (1 << _STEP_BITS)]
        taken = self.state_hashes.comparing()
        if not self.is_due(num_reductions):
            return lambda: by_step
        parameters, buffers = self._parameters(), self._buffers()

        def make() -> torch.Tensor:
            bits = by_step.clone()
            self._state_changed = self.state_hashes.changed(taken)
            bits[_STATE] = self._state_changed
            bits[_PARAMETERS] = self._parameter_hashes.bits(parameters)
            bits[_BUFFERS] = self._buffer_hashes.bits(buffers)
            return bits

        return make

    def taking(self, flights: list[BucketInFlight], num_reductions: int) -> Taken | None:
        """Return what takes hashes of the state of ``flights``, if they are compared in the next reduction.

        To be called by the thread that has just committed the state; what it returns is to be run where buckets are
        sent, before the next ones.
        """
        return self.state_hashes.taking(flights) if self.is_due(num_reductions) else None

    def check(self, differing: torch.Tensor, num_steps: int, num_reductions: int) -> int:
        """Report differences between the ranks, at once or, to avoid waiting for a GPU, in :meth:`check_previous`.

        In a CUDA graph nothing is reported: the host is not there when it is launched. Returns the number of steps
        with which this rank goes on: see :meth:`report`.
        """
        if self._seen and HostCopy.impossible():
            return num_steps
        if self.is_due(num_reductions):  # the bit differs between ranks, unless the state of all of them is damaged
            differing = differing.clone()
            differing[_STATE] |= self._state_changed
        if self._seen:
            self._seen[self._num_seen % 2].put(differing)
            self._num_seen += 1
        elif bool(differing.any()):
            return self.report(differing.tolist(), num_steps, num_reductions)
        return num_steps

    def check_previous(self, num_steps: int, num_reductions: int) -> int:
        """Report differences that the reduction before the last found on a GPU; return as :meth:`check` does.

        Called on all ranks at the beginning of each reduction.
        """
        if self._num_seen > 1 and not HostCopy.impossible():
            differing = self._seen[self._num_seen % 2].get()
            if any(differing):
                return self.report(differing, num_steps, num_reductions)
        return num_steps

    def forget_seen(self) -> None:
        """Report no differences of earlier reductions that have not been reported yet."""
        self._num_seen = 0

    def report(self, differing: Sequence[bool], num_steps: int, num_reductions: int) -> int:
        """Raise, warn or log the differences between the ranks. Collective; all ranks do the same.

        Returns:
            ``num_steps``; on an absent rank, which cannot know whether the others have left out a step, theirs.

        Raises:
            RuntimeError: the ranks are at different steps, or their parameters differ.
            DamageError: some ranks' parameters differ from those of most, or their state has changed by itself.
        """
        told = [json.loads(text) for text in self._all_gather_text(json.dumps([num_steps, self.absent]))]
        absent = [away for _, away in told]
        steps = [count for count, away in told if not away] or [count for count, _ in told]
        if any(differing[_STEP]) and (len(set(steps)) > 1 or not any(absent)) and not all(absent):
            raise RuntimeError(_out_of_step(told))
        if differing[_STATE]:
            self._report_state()
        if any(differing[_PARAMETERS]):
            self._report_parameters(num_reductions, absent)
        if any(differing[_BUFFERS]) and not self._logged:
            self._log_buffers(absent)
        return max(steps) if self.absent else num_steps

    def _log_buffers(self, absent: Sequence[bool]) -> None:
        names, _ = self._differing(self._buffer_hashes, absent)
        if names or not any(absent):
            self._logged = True
            _logger.warning(
                "buffer %r%s differs between the ranks: each rank keeps its own. "
                'attach(..., buffers="broadcast") or "average" makes them equal after each reduction',
                names[0] if names else "?",
                f", and {len(names) - 1} more," if len(names) > 1 else "",
            )

    def _report_state(self) -> None:
        found = self._all_gather_text(self.state_hashes.damaged())
        self.state_hashes.reported()
        damaged = {rank: label for rank, label in zip(self._world(), found, strict=True) if label}
        if damaged:
            where = ", ".join(f"the {label} on rank {rank}" for rank, label in damaged.items())
            raise DamageError.of(
                list(damaged),
                f"{where} is not what the last step left there, and nothing but pycomm writes to it: the memory is "
                "damaged, or something wrote beyond its own",
                rank=self._me,
            )

    def _report_parameters(self, num_reductions: int, absent: Sequence[bool]) -> None:
        names, by_rank = self._differing(self._parameter_hashes, absent)
        if any(absent) and not names:
            return
        processors = self._all_gather_text(_processor())
        apart, largest, count = self._distance()
        message = (
            f"the replicas differ after {num_reductions} reductions: parameter {names[0] if names else '?'!r} "
            f"{self._who(by_rank)}{f' ({len(names)} parameters differ)' if len(names) > 1 else ''}; "
            f"the largest difference is {apart:.3g}, the largest magnitude {largest:.3g}"
        )
        if len(set(processors)) == 1 or not apart <= _LAST_BITS * largest:
            self._raise_difference(message, [self._world()[rank] for rank in outvoted(by_rank)], count)
        if not self._warned:
            self._warned = True
            kinds = ", ".join(sorted(set(processors)))
            warnings.warn(
                f"{message}. The ranks' processors ({kinds}) round differently in optimizer.step(), which explains it",
                RuntimeWarning,
                stacklevel=2,
            )

    def _raise_difference(self, message: str, odd: list[int], count: int) -> NoReturn:
        """Raise DamageError if most ranks agree, or if it was no code by the look of it; else RuntimeError."""
        why = f"Something {_DRIFT}"
        if count <= _FEW:
            why = (
                f"Only {count} of their elements {'differs' if count == 1 else 'differ'}, as after a flipped bit in "
                f"memory or in a processor. If it was not that, something {_DRIFT}"
            )
        if odd:
            raise DamageError.of(odd, f"{message}. {why}", rank=self._me)
        if count <= _FEW:
            ranks = name_ranks(self._world())
            raise DamageError.of(
                [], f"{message}. One of {ranks} is wrong, no majority says which. {why}", rank=self._me
            )
        raise RuntimeError(f"{message}. {why}")

    def _distance(self) -> tuple[float, float, int]:
        """Return the largest difference between the ranks' parameters, the largest magnitude, and how many differ.

        Collective.
        """
        found, count = torch.zeros(2, dtype=torch.float64), 0
        for _, parameter in self._parameters():
            if parameter.numel() == 0:
                continue
            highest, lowest = parameter.detach().double().clone(), parameter.detach().double().clone()
            self._communicator.all_reduce(highest, "max")
            self._communicator.all_reduce(lowest, "min")
            here = torch.stack([(highest - lowest).max(), torch.maximum(highest.abs(), lowest.abs()).max()]).cpu()
            found = torch.where(found >= here, found, here)  # NaN stays
            count += int((highest != lowest).sum())
        return float(found[0]), float(found[1]), max(count, 1)  # 0 and -0 are equal

    def _differing(self, hashes: _Hashes, absent: Sequence[bool]) -> tuple[list[str], np.ndarray]:
        """Return the names that differ, and all ranks' hashes of them: a row for each rank. Collective.

        Ranks that are ``absent`` count as equal to the first that is not.
        """
        names, mine = hashes.by_name()
        by_rank = np.stack(
            [np.frombuffer(data, np.int64) for data in self._communicator.channel.all_gather_bytes(mine.tobytes())]
        )
        by_rank[np.array(absent)] = by_rank[absent.index(False) if False in absent else 0]
        # On a GPU the hashes may have been computed again since, so that none differs.
        columns = np.flatnonzero((by_rank != by_rank[0]).any(axis=0))
        return [names[column] for column in columns], by_rank[:, columns]

    def _who(self, by_rank: np.ndarray) -> str:
        """Return on which ranks the first of the differing tensors is odd, or between which it differs."""
        if by_rank.shape[1] == 0:
            return "differs"
        first = by_rank[:, :1]
        odd = [self._world()[rank] for rank in outvoted(first)]
        if odd:
            return f"on {name_ranks(odd)} differs from the other ranks"
        groups = alike(first[:, 0].tolist(), self._world())
        return f"differs between {' and '.join(map(name_ranks, groups)) if len(groups) < 4 else 'the ranks'}"

    @property
    def _me(self) -> int:
        return self._world()[self._communicator.rank]

    def _all_gather_text(self, text: str) -> list[str]:
        return [data.decode() for data in self._communicator.channel.all_gather_bytes(text.encode())]


def _out_of_step(told: Sequence[tuple[int, bool]]) -> str:
    """Return the message about ranks that have told their numbers of steps, and whether they are absent."""
    steps = {rank: count for rank, (count, away) in enumerate(told) if not away}
    behind = [rank for rank, count in steps.items() if count < max(steps.values())]
    counts = ", ".join(f"rank {rank}: {count}" for rank, count in steps.items())
    return (
        f"the ranks are out of step: averages that optimizer.step() has used before this reduction: {counts}. "
        f"{name_ranks(behind).capitalize()} ran a backward() that the others did not, or left out a step. The last "
        "averages were of different passes. A pass that is not a training step of all ranks (a saliency map, a "
        "penalty, validation) belongs in `with reducer.paused():`"
    )


def _processor() -> str:
    """Return the names of this rank's CPU and GPU, on which the rounding of floating-point numbers depends."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")
    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    return f"{model}, {torch.backends.cpu.get_cpu_capability()}{gpu}"
