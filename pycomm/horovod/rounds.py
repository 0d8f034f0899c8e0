"""Rounds: every rank tells all others what it has to announce, in one small message.

A message has a fixed size, so that one all-gather does it: of shared memory, in a few microseconds. It names what is
known by numbers. What is announced for the first time follows in a second all-gather, with its name and signature.
"""

from __future__ import annotations

import json
from collections import deque
from typing import Any

import numpy as np

from pycomm.communicator import Communicator
from pycomm.horovod.coordinator import Coordinator, Response
from pycomm.horovod.requests import Request

_WORDS = 256
_HEAD = 2  # words: how many numbers follow, and how many bytes of JSON
_MOST = (_WORDS - _HEAD) // 2
_MOST_NEW = 512

New = list[tuple[str, int, str]]


class Rounds:
    """Rounds of the ranks of ``communicator``, all of which are this object's."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._transport, self._timeout = communicator.channel.transport, communicator.channel.timeout
        self.coordinator = Coordinator(communicator.size)
        self._mine = np.zeros(_WORDS, np.uint32)
        self._all = np.zeros(_WORDS * communicator.size, np.uint32)
        self._words, self._read = memoryview(self._mine.data), memoryview(self._all.data)
        self._sent, self._heard = self._words.cast("B"), self._read.cast("B")
        self._starts = range(0, len(self._heard), 4 * _WORDS)

    def run(self, fresh: deque[Request]) -> tuple[list[Response], bool]:
        """Announce what is ``fresh``, which is taken out; return what can be done now, and whether anyone had news.

        Collective. What does not fit into a message remains for the next round.
        """
        new: New = []
        text = self._write(fresh, new)
        self._transport.all_gather(self._all, self._mine, self._timeout)
        if not text and (agreed := self._agreed()) is not None:
            return agreed, True
        heads = [(self._read[at], self._read[at + 1]) for at in range(0, len(self._read), _WORDS)]
        texts = self._exchange(text, max(length for _, length in heads)) if any(length for _, length in heads) else []
        for rank, (count, length) in enumerate(heads):
            if count:
                self._announce(rank, count)
            if length:
                self._announce_new(rank, json.loads(texts[rank][:length]))
        return self.coordinator.responses(), any(count or length for count, length in heads)

    def _agreed(self) -> list[Response] | None:
        """Return what can be done if all ranks have announced the same, which is known; ``None`` if they have not."""
        end = _HEAD + 2 * self._words[0]
        if end == _HEAD:
            return None
        mine = self._sent[: 4 * end]
        for start in self._starts:
            if self._heard[start : start + 4 * end] != mine:
                return None
        words = self._words[_HEAD:end].tolist()
        return self.coordinator.agreed(words[::2], words[1::2])

    def _write(self, fresh: deque[Request], new: New) -> bytes:
        words, at = self._words, _HEAD
        while fresh and len(new) < _MOST_NEW and at < _HEAD + 2 * _MOST:
            request = fresh.popleft()
            name, count = request.key
            number = self.coordinator.number_of(name, request.signature)
            if number is None:
                new.append((name, count, request.signature))
            else:
                words[at], words[at + 1] = number, count
                at += 2
        text = json.dumps(new).encode() if new else b""
        words[0], words[1] = (at - _HEAD) // 2, len(text)
        return text

    def _exchange(self, text: bytes, longest: int) -> list[bytes]:
        padded = np.zeros(longest, np.uint8)
        padded[: len(text)] = np.frombuffer(text, np.uint8)
        everyones = np.empty((self._communicator.size, longest), np.uint8)
        self._transport.all_gather(everyones, padded, self._timeout)
        return [row.tobytes() for row in everyones]

    def _announce(self, rank: int, count: int) -> None:
        start = rank * _WORDS + _HEAD
        for at in range(start, start + 2 * count, 2):
            self.coordinator.announce(rank, self._read[at], self._read[at + 1])

    def _announce_new(self, rank: int, new: list[Any]) -> None:
        for name, count, signature in new:
            self.coordinator.announce_new(rank, name, count, signature)
            self.coordinator.register(name, signature)
