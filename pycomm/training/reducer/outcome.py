"""Outcome of a reduction: whether it was finite, and the averages that are handed out.

All ranks must reach the same verdict on what was received. Ranks that average the same gradients receive the same bits,
and so agree without a message. Parts of DTensors are averaged separately, so the ranks that hold them exchange their
verdicts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from pycomm.collectives.communicator import Communicator
from pycomm.collectives.layout import is_capturing
from pycomm.compression.base import Flag
from pycomm.compression.nonfinite import nonfinite_source
from pycomm.optim.loss_scaler import LossScaler
from pycomm.optim.shards import Shards
from pycomm.training.reducer import clipping as norms
from pycomm.training.reducer.buckets import SentBucket
from pycomm.training.reducer.ledger import Ledger
from pycomm.training.reducer.parameters import ParameterTable
from pycomm.training.reducer.settings import Options
from pycomm.training.reductions.phase import StepState
from pycomm.training.reductions.record import Fingerprint
from pycomm.training.reductions.reduction import Reduction, all_finite

if TYPE_CHECKING:
    from pycomm.training.reducer.partition import StepPartition


def spread_failure_of_parts(buckets: Sequence[SentBucket], partition: StepPartition, loss_scaler: Any) -> str | None:
    """Make all gradients NaN, on all ranks, if a rank's own part of the averages is not finite; return its name.

    So every rank and its loss scaler decide the same about the step. Collective only if a rank had gradients so large
    that their sum may not be finite, which all ranks know from the flags. On a GPU, where the host does not wait, that
    is enough, and an element of each gradient becomes NaN, if there is a scaler.
    """
    if any(sent.bucket.on_gpu for sent in buckets):
        if loss_scaler is not None:
            poison = torch.where(torch.stack([sent.bucket.finite() for sent in buckets]).all(), 0.0, math.nan)
            for sent in buckets:
                torch._foreach_add_([part[:1] for part in sent.bucket.parts(sent.bucket.memory)], poison)
        return None
    if all(bool(sent.exchange.finite()) for sent in buckets):
        return None
    pairs = [pair for sent in buckets for pair in zip(sent.slots, sent.bucket.own_parts(), strict=True)]
    parts = [(slot.name, part) for slot, part in pairs]
    found = next((i for i, (_, part) in enumerate(parts) if not bool(torch.isfinite(part).all())), len(parts))
    first = partition.first_of(found)
    if first == len(parts):
        return None
    for sent in buckets:
        sent.bucket.flat.fill_(math.nan)
    return parts[first][0]


def fails_elsewhere(buckets: Sequence[SentBucket], shards: Shards, loss_scaler: Any) -> bool:
    """Return whether gradients must be NaN, as some rank's parts of DTensors are not finite.

    torch's GradScaler checks only each rank's own gradients, and would step on some ranks only. Never without a scaler
    or DTensors, nor for :class:`pycomm.LossScaler`, which asks the Reducer. Otherwise it is collective over the ranks
    of ``shards``, and waits for a GPU, as GradScaler is about to do.
    """
    if not shards or loss_scaler is None or isinstance(loss_scaler, LossScaler):
        return False
    return not bool(all_finite(buckets, shards))


class ReductionOutcome:
    """Outcome of the last reduction, and counts of all of them.

    Attributes:
        finite: whether the last step was finite; ``None`` if that was not computed.
        not_finite: name of the first non-finite gradient of any rank, if each rank has only its own part.
        vetoed_steps, last_veto: number of vetoed steps; ranks and reasons of the last one.
    """

    def __init__(
        self,
        table: ParameterTable,
        settings: Options,
        fingerprint: Fingerprint,
        state: StepState,
        reduction: Reduction,
        ledger: Ledger,
        communicator: Communicator,
    ) -> None:
        self._table, self._settings, self._fingerprint, self._state = table, settings, fingerprint, state
        self._reduction, self._ledger, self._communicator = reduction, ledger, communicator
        self.finite: Flag | None = None
        self.not_finite: str | None = None
        self.vetoed_steps = 0
        self.last_veto: str | None = None
        self._is_discarded = False

    def is_left_out(self) -> bool:
        """Return whether the last reduction was discarded, so that the step has no gradients on any rank."""
        return self._is_discarded

    def hand_out(self) -> None:
        """Hand out the averages of all buckets, unless a rank has vetoed the step or no rank had a gradient."""
        # All ranks without a gradient get the same answer.
        buckets = self._table.buckets
        any_used = self._state.contributed or not buckets or any(any(sent.exchange.used()) for sent in buckets)
        self._is_discarded = bool(self._fingerprint.verdict.vetoes) or not any_used
        if self._is_discarded:
            self._discard()
        else:
            self._hand_out()

    def _hand_out(self) -> None:
        table, buckets = self._table, self._table.buckets
        # "auto" may choose differently for other parts of DTensors, whose ranks wait for this rank's verdict.
        waits = bool(table.shards) and self._settings.compression.transactional
        self.finite = None
        if waits or any(sent.exchange.transactional for sent in buckets):
            self.finite = self._reduction.verdict(buckets, table.shards)
            self._reduction.count(self.finite)
        finite: Flag = True if self.finite is None else self.finite
        is_spoiled = fails_elsewhere(buckets, table.shards, self._settings.loss_scaler)
        factor = math.nan if is_spoiled else self.skipping_factor()
        self._ledger.hand_out({id(slot.param) for sent in buckets for slot in sent.hand_out(finite, factor)})
        if table.partial is not None:
            self.not_finite = spread_failure_of_parts(buckets, table.partial, self._settings.loss_scaler)
        committed = False if self.finite is None else self.finite
        self._state.handed_out(committed, has_averages=True, is_seen=not is_capturing())

    def skipping_factor(self) -> float:
        """Return the factor that turns the mean over all ranks into the mean over the ranks with a batch."""
        num_skipping, size = self._fingerprint.verdict.skipping, self._communicator.size
        return size / (size - num_skipping) if 0 < num_skipping < size and self._settings.average else 1.0

    def _discard(self) -> None:
        """Discard this reduction.

        With a loss scaler, gradients become NaN, so that it skips the step. Without one they become ``None``, so that
        ``optimizer.step()`` does nothing.
        """
        vetoes = self._fingerprint.verdict.vetoes
        for sent in self._table.buckets:
            sent.hand_out(False, math.nan)
        self._ledger.hand_out({id(slot.param) for slot in self._table.slots()})
        if not vetoes or self._settings.loss_scaler is None:
            self._table.drop_gradients()
        if vetoes:
            self.finite = False
            self.vetoed_steps, self.last_veto = self.vetoed_steps + 1, vetoes
        self._state.handed_out(False, has_averages=bool(vetoes))

    # Queries.

    def stats(self) -> dict[str, Any]:
        """Return the counters of ``Reducer.stats`` about skipped steps, and about where averages are received."""
        return {
            **self._reduction.stats(self._table.buckets, "a sum over the ranks"),
            "vetoed_steps": self.vetoed_steps,
            "last_veto": self.last_veto,
            "registered_bytes": self._communicator.channel.registered_bytes,
            "symmetric_bytes": self._communicator.channel.symmetric_bytes,
        }

    def name_of_not_finite(self) -> str | None:
        """Return the location or source of the first non-finite value; ``None`` if all are finite. Waits for a GPU."""
        if self.finite is not None and not bool(self.finite):
            found = nonfinite_source(sent.exchange for sent in self._table.buckets)
            if found is not None:
                return found
        name = self.not_finite or norms.first_not_finite(self._table.gradients())
        return None if name is None else f"parameter {name!r}"

    def settle(self, was_exchanged: bool) -> bool:
        """Return whether the last gradients are finite; the same on all ranks. Waits for a GPU.

        Args:
            was_exchanged: whether the engine has reduced them; with a single rank they are checked here.
        """
        table = self._table
        if not was_exchanged:
            return bool(torch.isfinite(norms.squared_norm(table.slots(), table.shards)))
        if self.finite is None:
            self.finite = bool(all_finite(table.buckets, table.shards))
        return bool(self.finite)
