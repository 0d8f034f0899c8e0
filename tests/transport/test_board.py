"""Boards: whoever asks a store gets an answer or an error, in time, also if its server hangs."""

from __future__ import annotations

import threading

import pytest
from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]

from pycomm.collectives.transport.board import Board, StoreError
from pycomm.errors import CommError
from pycomm.training.elastic import join_requests
from pycomm.training.elastic.join_requests import JoinClient, JoinListener
from pycomm.training.elastic.liveness import this_process


def raising(error: Exception) -> None:
    raise error


def test_an_answer_or_the_error_that_the_question_raises() -> None:
    store = HashStore()
    store.set("key", "value")
    with Board("test-board") as board:
        assert board.ask(lambda: store.get("key"), 10.0) == b"value"
        assert not board.is_stuck
        with pytest.raises(StoreError, match="^failed: connection reset$"):
            board.ask(lambda: raising(RuntimeError("connection reset")), 10.0)
        for error in (ValueError("no rank has written this"), CommError.during("meet", "lost", rank=0)):
            with pytest.raises(type(error)) as found:
                board.ask(lambda error=error: raising(error), 10.0)  # type: ignore[misc]
            assert found.value is error


def test_a_question_without_an_answer_is_given_up_and_keeps_only_its_own_thread() -> None:
    released = threading.Event()
    with Board("test-board-stuck") as board:
        with pytest.raises(StoreError, match="^did not answer$"):
            board.ask(lambda: released.wait(60), 0.05)
        assert board.is_stuck
        assert [thread.name for thread in threading.enumerate()].count("test-board-stuck") == 1
        with pytest.raises(StoreError, match="^did not answer$"):  # it waits behind the first one
            board.ask(lambda: None, 0.05)
        released.set()
        assert board.ask(lambda: 5, 10.0) == 5
    ended = next((each for each in threading.enumerate() if each.name == "test-board-stuck"), None)
    if ended is not None:
        ended.join(10)
        assert not ended.is_alive()


def test_after_its_end_a_board_refuses() -> None:
    board = Board("test-board")
    board.close()
    board.close()
    with pytest.raises(StoreError, match=r"^failed: .* is closed$"):
        board.ask(lambda: 1, 10.0)


class StoppedStore(HashStore):
    """Store whose server is stopped: ``set`` does not return before ``released``."""

    def __init__(self) -> None:
        super().__init__()
        self.released = threading.Event()

    def set(self, key: str, value: str) -> None:
        self.released.wait(60)


def test_a_listener_does_not_hold_up_training_when_the_store_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(join_requests, "_PATIENCE", 0.1)
    store = StoppedStore()
    listener = JoinListener(HashStore(), 0, [], "")
    listener._store = store  # type: ignore[assignment]
    with pytest.raises(StoreError, match="did not answer"):
        listener.answer(1, {"refused": "late"})
    store.released.set()
    listener.close()


def test_a_newcomer_gives_up_when_the_store_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(join_requests, "_PATIENCE", 0.1)
    monkeypatch.delenv("PYCOMM_SECRET", raising=False)
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client, store = JoinClient(f"127.0.0.1:{server.port}", 0, 0.2), StoppedStore()
    client._requests = store  # type: ignore[assignment]
    with pytest.raises(CommError, match="can no longer be reached: it did not answer"):
        client.ask(this_process(), [])
    store.released.set()
