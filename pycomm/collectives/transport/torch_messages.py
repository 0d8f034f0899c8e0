"""Messages between two ranks by torch.distributed: copied when they are sent, and matched by source and tag.

A message is a header and its payload. The header has the message's tag, by which receives match it, and contains the
size and the tag, unique at the time, of the payload. So a receive into an array of another size fails without breaking
the connection.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections import defaultdict, deque
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch

import pycomm._native as _native
from pycomm.collectives.transport.base import BUFFER_VARIABLE, buffer_limit
from pycomm.collectives.transport.host_tensors import rank_of, require, tensor_of
from pycomm.collectives.transport.torch_group import TorchGroup
from pycomm.errors import CommError, reworded

TAG_END = 1 << 30
"""Tags are smaller. Headers have them; payloads have the other half of the numbers."""
_HEADER_LENGTH = 5
_NOT_YET = -1  # in a header that has not come; numbers in one that has are not negative
_LONGEST_PAUSE = 1e-3  # seconds between two looks whether it has come


@dataclass
class _Sent:
    """Message whose memory torch may still read."""

    works: list[Any]
    tensors: list[torch.Tensor]
    cost: int


@dataclass
class _Posted:
    """Receive of a header under way, which a receipt waits for or has left to the next one."""

    work: Any
    header: torch.Tensor


@dataclass
class _Peer:
    """What went to and from another rank."""

    num_sent: int = 0
    sent: deque[_Sent] = field(default_factory=deque)  # the last of them
    num_taken: int = 0  # of those, from the first on, as far as the other rank has said
    received: set[int] = field(default_factory=set)  # numbers of messages, beyond ...
    num_received: int = 0  # ... these, from the first on

    def count(self, number: int) -> None:
        self.received.add(number)
        while self.num_received in self.received:
            self.received.remove(self.num_received)
            self.num_received += 1


class TorchMessages:
    """Messages of ``group``.

    Attributes:
        buffer_limit: number of bytes that may be sent and not acknowledged. Messages from the receiver acknowledge;
            without room, the sender waits for the oldest ones.
    """

    def __init__(self, group: TorchGroup) -> None:
        self.buffer_limit = buffer_limit()
        self.buffered_bytes = 0
        self.rank = group.rank
        self._group = group
        self._peers = [_Peer() for _ in range(group.size)]
        self._left_over: defaultdict[tuple[int | None, int], deque[_Posted]] = defaultdict(deque)
        self._lock = threading.RLock()  # of all this; not held while waiting for a message

    def send(self, x: Any, dst: int, tag: int, timeout: float) -> None:
        """Send as :meth:`pycomm.collectives.transport.base.Transport.send` says; a timeout breaks the group."""
        array = _native.HostArray(x, "x", False, True)
        peer = self._rank("dst", dst)
        tag = rank_of(tag, "tag", TAG_END)
        payload = tensor_of(array).view(torch.uint8)
        cost = payload.numel() + 8 * _HEADER_LENGTH
        room = f"the {self.buffer_limit} bytes that may be buffered ({BUFFER_VARIABLE})"
        require(cost <= self.buffer_limit, f"x has {payload.numel()} bytes, wanted a message that fits into {room}")
        with self._lock:
            self._make_room(peer, cost, timeout)
            self._start(peer, payload.clone(), _width(array), tag, cost)

    def receive(self, x: Any, src: int | None, tag: int) -> TorchReceipt:
        """Receive as :meth:`pycomm.collectives.transport.base.Transport.receive` says."""
        array = _native.HostArray(x, "x", True, True)
        peer = None if src is None else self._rank("src", src)
        tag = rank_of(tag, "tag", TAG_END)
        with self._lock:
            left_over = self._left_over[peer, tag]
            posted = left_over.popleft() if left_over else self._post(peer, tag)
        return TorchReceipt(self, array, peer, tag, posted)

    def hand_over(self, patience: float) -> None:
        """Wait until torch has sent all messages: over Gloo, once their receivers have asked for them."""
        if not self._group.works():
            return
        deadline = time.monotonic() + patience
        with self._lock:
            for peer in self._peers:
                with contextlib.suppress(RuntimeError):  # the receiver has ended, or asks too late
                    for work in itertools.chain.from_iterable(sent.works for sent in peer.sent):
                        work.wait(timedelta(seconds=max(0.001, deadline - time.monotonic())))

    def _rank(self, name: str, value: int) -> int:
        rank = rank_of(value, name, self._group.size)
        require(rank != self._group.rank, f"{name} is {rank}, this rank itself; wanted another one")
        return rank

    def _start(self, dst: int, payload: torch.Tensor, width: int, tag: int, cost: int) -> None:
        peer = self._peers[dst]
        header = torch.tensor([payload.numel(), width, peer.num_sent, self._group.rank, peer.num_received])
        tensors = {tag: header}
        if payload.numel() > 0:
            tensors[_payload_tag(peer.num_sent)] = payload
        works = [self._group.begin_send(dst, tensor, "send", wire) for wire, tensor in tensors.items()]
        peer.num_sent += 1
        peer.sent.append(_Sent(works, list(tensors.values()), cost))
        self.buffered_bytes += cost

    def _make_room(self, dst: int, cost: int, timeout: float) -> None:
        """Forget acknowledged messages, and wait for the oldest ones until the new one has room."""
        deadline = time.monotonic() + timeout
        for p, peer in enumerate(self._peers):
            while peer.num_sent - len(peer.sent) < peer.num_taken:
                self._forget_oldest(p, timeout)
        while self.buffered_bytes + cost > self.buffer_limit:
            first = (
                dst if self._peers[dst].sent else max(range(len(self._peers)), key=lambda p: len(self._peers[p].sent))
            )
            self._forget_oldest(first, max(0.001, deadline - time.monotonic()))

    def _forget_oldest(self, dst: int, timeout: float) -> None:
        sent = self._peers[dst].sent
        try:
            for work in sent[0].works:
                self._group.wait("send", work, timeout, dst)
        except CommError as error:
            buffered = f"{self.buffered_bytes} bytes are buffered, of at most {self.buffer_limit} ({BUFFER_VARIABLE})"
            raise reworded(error, f"{buffered}: {error}", CommError) from None
        self.buffered_bytes -= sent.popleft().cost

    def _post(self, src: int | None, tag: int) -> _Posted:
        header = torch.full((_HEADER_LENGTH,), _NOT_YET)
        return _Posted(self._group.begin_receive(src, header, "recv", tag), header)

    def _await_any(self, header: torch.Tensor, timeout: float) -> None:
        """Return once a header has begun to come from any rank, or nearly after ``timeout``.

        Nothing ends a wait of Gloo's for any rank before its timeout, not even that all connections are closed. So this
        looks at the header's last number instead.
        """
        last, start = header.numpy()[-1:], time.monotonic()
        while last[0] == _NOT_YET and (waited := time.monotonic() - start) < timeout:
            _ = self._group.group  # raises if it has been closed
            time.sleep(min(_LONGEST_PAUSE, waited / 8))

    def _leave(self, src: int | None, tag: int, posted: _Posted) -> None:
        """Keep a posted receive, which cannot be withdrawn, for the next one of the same source and tag."""
        with self._lock:
            self._left_over[src, tag].append(posted)

    def _take(self, receipt: TorchReceipt, posted: _Posted, timeout: float) -> tuple[int, ValueError | None]:
        """Wait for a header and its payload; return the source, and the error of the size, if any."""
        start, left = time.monotonic(), timeout
        if receipt.src is None and self._group.is_gloo:
            self._await_any(posted.header, timeout)
            left = max(0.001, start + timeout - time.monotonic())
        self._group.wait("recv", posted.work, left, receipt.src, since=start)
        num_bytes, width, number, src, taken = posted.header.tolist()
        array = receipt.array
        out = tensor_of(array).view(torch.uint8)
        problem = None
        if num_bytes != out.numel():
            mine, theirs = _elements(out.numel(), _width(array)), _elements(num_bytes, width)
            problem = ValueError(f"x has {mine}, but the message from rank {src} with tag {receipt.tag} has {theirs}")
            out = torch.empty(num_bytes, dtype=torch.uint8)
        if num_bytes > 0:
            work = self._group.begin_receive(src, out, "recv", _payload_tag(number))
            self._group.wait("recv", work, timeout, src)
        with self._lock:
            self._peers[src].count(number)
            self._peers[src].num_taken = max(self._peers[src].num_taken, taken)
        return src, problem


class TorchReceipt:
    """Receive that has been posted, see :class:`pycomm.collectives.transport.base.Receipt`.

    torch.distributed does not report arrivals: only :meth:`wait` finds a message.
    """

    def __init__(
        self, messages: TorchMessages, array: _native.HostArray, src: int | None, tag: int, posted: _Posted
    ) -> None:
        self._messages = messages
        self._array: _native.HostArray | None = array
        self.src, self.tag = src, tag
        self._posted: _Posted | None = posted
        self._source = -1
        self._error: Exception | None = None
        self._lock = threading.Lock()  # held by the thread that waits

    @property
    def array(self) -> _native.HostArray:
        """Array to receive into; there is none once it is completed."""
        assert self._array is not None
        return self._array

    def wait(self, timeout: float) -> int:
        """Return the rank whose message the array now holds. A timeout breaks the group."""
        with self._lock:
            if self._posted is not None:
                try:
                    self._source, self._error = self._messages._take(self, self._posted, timeout)
                except Exception as error:
                    self._error = error
                self._posted = self._array = None
        if self._error is not None:
            raise self._error
        return self._source

    def is_completed(self) -> bool:
        """Return whether :meth:`wait` has ended, or it was cancelled."""
        return self._posted is None

    def cancel(self) -> bool:
        """Withdraw it; a later receive from the same ``src``, or the same "any", with the same tag takes its place."""
        if not self._lock.acquire(blocking=False):
            return False  # a thread waits for it
        try:
            if self._posted is None:
                return False
            self._messages._leave(self.src, self.tag, self._posted)
            self._posted = self._array = None
            what = "this receive was cancelled"
            self._error = CommError.during("recv", what, rank=self._messages.rank)
            return True
        finally:
            self._lock.release()


def _payload_tag(number: int) -> int:
    return TAG_END + number % TAG_END


def _width(array: _native.HostArray) -> int:
    itemsize: int = getattr(torch, array.dtype).itemsize
    return itemsize * (array.count // array.elements if array.elements else 1)


def _elements(num_bytes: int, width: int) -> str:
    return f"{num_bytes} bytes ({num_bytes // max(1, width)} elements of {width})"
