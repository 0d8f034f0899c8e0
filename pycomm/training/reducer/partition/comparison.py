"""Comparison of the ranks' inputs to a sharded step.

A sharded step makes all replicas equal, because each rank steps its own parameters and sends them to all. This hides
earlier differences, which are blended into every replica: values written to the parameters of one rank, state loaded
on one, gradients clipped on one. So ranks compare these inputs before each step, in the message by which they agree to
take it.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch

from pycomm.agreement import exchanged, require_same
from pycomm.collectives.broadcasting import encode
from pycomm.collectives.communicator import Communicator
from pycomm.collectives.layout import on_gpu
from pycomm.collectives.tensor_memory import digests_of, memory_of
from pycomm.optim.masters import MasterWeights
from pycomm.optim.parameters import optimizer_parameters
from pycomm.optim.stamps import Stamp
from pycomm.optim.step_override import Factor, stepper_of
from pycomm.torch_internals import version_of
from pycomm.training.reducer.buckets import SentBucket
from pycomm.training.reductions.fields import FieldWords, Source
from pycomm.training.reductions.record import Record

_PLAIN = (bool, int, float, str, tuple, type(None))
_NAMES = ("params", "param_names")
_ADVICE = (
    ". Do the same on all ranks before optimizer.step(), and clip by reducer.clip_grad_norm(): with shard=, each rank "
    "steps its own parameters for all"
)


CompareReplicas = Callable[[], Callable[[], None] | None]
"""Returns the function that compares all parameters of the ranks, if the Reducer still exists."""


class StepComparison:
    """Comparison between ranks before each step of ``optimizer``.

    Args:
        communicator: the ranks.
        optimizer: the optimizer.
        has_full_grad: whether every rank has all averages, to which users may write.
        compare: returns the function that compares all parameters, if the Reducer lives.
    """

    def __init__(
        self,
        communicator: Communicator,
        optimizer: torch.optim.Optimizer,
        has_full_grad: bool,
        compare: CompareReplicas,
    ) -> None:
        self._communicator, self._optimizer, self._has_full_grad = communicator, optimizer, has_full_grad
        self._loaded: list[str] = []  # hashes of the state that was loaded since the last step
        self._factor: list[str] | None = None  # of the present step
        self._params = Stamp()
        self._hook = optimizer.register_load_state_dict_post_hook(self._note_loaded)
        values = {
            "settings": partial(settings_of, optimizer),
            "loaded": partial(getattr, self, "_loaded"),
            "factor": partial(getattr, self, "_factor"),
        }
        self._record = Record(Source(values, words=FieldWords(_ADVICE)))
        self._compare = compare

    def _note_loaded(self, optimizer: torch.optim.Optimizer) -> None:
        self._loaded = digests_of_state(optimizer)

    def note_step(self, params: Iterable[torch.Tensor]) -> None:
        """Note that ``params``, which all ranks have, are about to be sent to all, and so become equal."""
        self._params = Stamp(params)

    def agree(self, buckets: Sequence[SentBucket], *, is_skipped: bool, factor: Factor) -> bool:
        """Agree on the step; return whether it is taken. Collective.

        Args:
            buckets: buckets of the gradients.
            is_skipped: whether this rank skips the step.
            factor: factor of its gradients in the step.

        Raises:
            ValueError: on all ranks: hyperparameters, factors, loaded state or gradients differ.
            RuntimeError: on all ranks: parameters differ, to which a rank has written since the last step.
        """
        is_on_gpu = isinstance(factor, torch.Tensor) and on_gpu(factor)  # for which the host would wait
        self._factor = None if is_on_gpu or is_skipped else [str(float(factor))]
        mine = is_skipped, bool(self._params.changed()), self._are_written(buckets)
        world = range(self._communicator.size)
        flags = self._record.meet(self._communicator, world, self._record.read(), *mine)
        skips, written, grads_written = flags.max(axis=0).tolist()
        self._loaded = []
        compare = self._compare() if written else None
        if compare is not None:
            compare()
        if grads_written and not skips:
            lines = {"gradient after backward()": self._gradients(buckets)}
            everyones = exchanged(self._communicator.channel.all_gather_bytes, lines, "compare")
            require_same(everyones, "compare", hint=_ADVICE)
        return not skips

    def _are_written(self, buckets: Sequence[SentBucket]) -> bool:
        """Return whether a gradient was removed, written to or replaced since it was handed out."""
        for sent in buckets:
            for slot, view in zip(sent.slots, sent.bucket.views, strict=True):
                grad = slot.param.grad
                if grad is None and slot not in sent.unused:
                    return True
                if self._has_full_grad and grad is not None and (grad is not view or version_of(view) != slot.version):
                    return True
        return self._has_full_grad and has_written_unscaled(self._optimizer)

    def _gradients(self, buckets: Sequence[SentBucket]) -> list[str]:
        """Return a line for each gradient, with its hash if all ranks have the same."""
        unscaled = stepper_of(self._optimizer).unscaled() or {}
        slots = [slot for sent in buckets for slot in sent.slots]
        grads = [unscaled.get(slot.param, slot.param.grad) for slot in slots]
        read = self._has_full_grad
        return [
            f"{slot.name}: {'None' if grad is None else _digest([grad.detach()]) if read else 'there'}"
            for slot, grad in zip(slots, grads, strict=True)
        ]

    def remove(self) -> None:
        """Remove the hook."""
        self._hook.remove()


def has_written_unscaled(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether unscaled gradients of masters were written to."""
    stepper = stepper_of(optimizer)
    return isinstance(stepper, MasterWeights) and stepper.has_written_unscaled()


def digests_of_state(optimizer: torch.optim.Optimizer) -> list[str]:
    """Return a digest of each parameter's state."""
    lines = []
    for param in optimizer_parameters(optimizer):
        tensors: list[torch.Tensor] = []
        lines.append(json.dumps(encode(dict(optimizer.state.get(param, {})), tensors)) + _digest(tensors))
    return [str(zlib.crc32(line.encode())) for line in lines]


def _digest(tensors: Iterable[torch.Tensor]) -> str:
    return b"".join(digests_of(map(memory_of, tensors))).hex()


def settings_of(optimizer: torch.optim.Optimizer) -> list[str]:
    """Return the hyperparameters of each group, as text that is the same for equal ones."""
    lines = []
    for group in optimizer.param_groups:
        plain = {key: value.tolist() if isinstance(value, torch.Tensor) else value for key, value in group.items()}
        values = {key: _simple(v) for key, v in plain.items() if isinstance(v, _PLAIN) and key not in _NAMES}
        lines.append(f"{len(group['params'])} parameters, {values!r}")
    return lines


def _simple(value: Any) -> Any:
    """Return ``value`` without a class of its own, such as an enumeration's, which other ranks may not have."""
    kind = next((kind for kind in (bool, int, float, str) if isinstance(value, kind)), None)
    return value if kind is None else kind(value)
