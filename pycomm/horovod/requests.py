"""Requests of a rank for operations, and signatures by which ranks compare them."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

Key = tuple[str, int]
"""Name of an operation, and its number among those without a name of their own (0 if it has one)."""

ALLREDUCE = "allreduce"
ALLGATHER = "allgather"
BROADCAST = "broadcast"
ALLTOALL = "alltoall"
REDUCESCATTER = "reducescatter"
BARRIER = "barrier"
JOIN = "join"
REFUSED = "refused"
SIZES_DIFFER = (ALLGATHER, ALLTOALL)
"""Kinds whose tensors may differ in their first dimension from rank to rank."""


@dataclass(frozen=True)
class RequestTerms:
    """Terms of an operation that all ranks must have in common.

    Attributes:
        kind: one of the names above.
        op: name of the reduction, as ``Communicator`` calls it, or "adasum"; empty if nothing is reduced.
        root: rank within the process set that is broadcast from.
        prescale, postscale: factors before and after the reduction.
        detail: anything else that must be equal, as text.
    """

    kind: str
    op: str = ""
    root: int = 0
    prescale: float = 1.0
    postscale: float = 1.0
    detail: str = ""

    def __str__(self) -> str:
        parts = [self.kind]
        if self.op:
            parts.append(f"op={self.op}")
        if self.kind == BROADCAST:
            parts.append(f"root={self.root}")
        if self.prescale != 1.0:
            parts.append(f"prescale_factor={self.prescale!r}")
        if self.postscale != 1.0:
            parts.append(f"postscale_factor={self.postscale!r}")
        if self.detail:
            parts.append(self.detail)
        return " ".join(parts)


@dataclass(eq=False)
class Request:
    """Request of this rank: one operation on one tensor, or on a group of them.

    Attributes:
        key: key by which the ranks match it.
        terms: settings that must be the same on all ranks.
        tensors: the inputs.
        outputs: tensors for the results; ``None`` before the run if their sizes depend on other ranks.
        signature: text that is equal on all ranks if their requests agree; made from the other attributes.
        splits: of an alltoall, number of rows for each rank.
        refusal: error of this rank, by which the others do not wait for it.
        ready: on GPUs, events after which the inputs are computed.
        parts: of an allgather, number of rows of each tensor from each rank.
        result: result besides the outputs.
        since: time of its creation, by ``time.monotonic()``.
    """

    key: Key
    terms: RequestTerms
    tensors: Sequence[torch.Tensor] = ()
    outputs: list[torch.Tensor | None] = field(default_factory=list)
    signature: str = ""
    splits: list[int] | None = None
    refusal: str = ""
    ready: list[Any] = field(default_factory=list)
    parts: list[list[int]] = field(default_factory=list)
    result: Any = None
    error: Exception | None = None

    def __post_init__(self) -> None:
        self.done, self.since = False, time.monotonic()
        self._ending = threading.Lock()
        self._gate = threading.Lock()
        self._gate.acquire()

        if self.refusal:
            self.signature = f"{REFUSED} {self.refusal}"
        else:
            forms = tuple((x.dtype, x.shape, x.device.type) for x in self.tensors)
            self.signature = _signature_of(self.terms, forms)

    def end(self, error: Exception | None = None) -> None:
        """Note that it has ended, and wake those that wait. Does nothing the second time."""
        with self._ending:
            if self.done:
                return
            self.error = error
            self.tensors = ()
            self.done = True
        self._gate.release()

    def ends_within(self, seconds: float) -> bool:
        """Wait for its end for at most ``seconds``; return whether it has ended."""
        if not self.done and self._gate.acquire(timeout=seconds):
            self._gate.release()  # for the next who waits
        return self.done


Form = tuple[torch.dtype, torch.Size, str]
"""Dtype, shape and kind of device of a tensor."""


@functools.lru_cache(maxsize=4096)
def _signature_of(terms: RequestTerms, forms: tuple[Form, ...]) -> str:
    return " ".join([str(terms), *(_described(form, terms.kind in SIZES_DIFFER) for form in forms)])


def _described(form: Form, free: bool) -> str:
    dtype, shape, device = form
    dims = list(map(str, shape))
    if free and dims:
        dims[0] = "*"
    where = "" if device == "cpu" else f"@{device}"
    return f"{str(dtype)[6:]}{where}[{','.join(dims)}]"


@functools.lru_cache(maxsize=1024)
def terms_of(kind: str, op: str, before: float, after: float, detail: str = "") -> RequestTerms:
    """Return the terms of a reduction."""
    return RequestTerms(kind, op, 0, before, after, detail)


def zeros_for(signature: str) -> list[torch.Tensor]:
    """Return the zeros that a joined rank contributes to an allreduce with this ``signature``."""
    made = []
    for word in signature.split(" "):
        if word.endswith("]") and "=" not in word:
            head, dims = word[:-1].split("[")
            dtype = getattr(torch, head.split("@")[0])
            made.append(torch.zeros([int(d) for d in dims.split(",") if d], dtype=dtype))
    return made


def kind_of(signature: str) -> str:
    """Return the kind of operation that ``signature`` is of."""
    return signature.split(" ", 1)[0]


def op_of(signature: str) -> str:
    """Return the reduction of ``signature``; empty if it has none."""
    return next((word[3:] for word in signature.split(" ") if word.startswith("op=")), "")
