"""Roll call: how many ranks have all their gradients of a step, for those that have not and need not be waited for."""

from __future__ import annotations

from pycomm.communicator import Communicator
from pycomm.elastic.board import Board
from pycomm.elastic.ledger import Ledger, shared_file
from pycomm.torch_internals import PrefixStore

_REMEMBERED = 2  # steps, before which nobody asks about one any more


class Roll:
    """Roll of the ranks that are ready, step by step. On one host it is a board, else it is counted in the ledger."""

    def __init__(self, ledger: Ledger, name: str, board: Board | None) -> None:
        self._ledger, self._board = ledger, board
        self._store = PrefixStore(f"roll/{name}", ledger.store)

    def answer(self, step: int) -> None:
        """Note that this rank is ready in ``step``.

        Raises:
            CommError: the ledger does not answer.
        """
        if self._board is not None:
            self._board.write(step)
            return
        self._ledger.ask(lambda: self._store.add(str(step), 1))
        self._ledger.ask(lambda: self._store.delete_key(str(step - _REMEMBERED)))

    def num_ready(self, step: int) -> int:
        """Return the number of ranks that are ready in ``step``. Raises as :meth:`answer` does."""
        if self._board is not None:
            return len(self._board.read(step))
        return self._ledger.ask(lambda: self._store.add(str(step), 0))


def open_roll(communicator: Communicator, ledger: Ledger, name: str) -> Roll:
    """Return the roll of the ranks of ``communicator``, by a ``name`` that no other one had. Collective."""
    file = -1
    if communicator.transport == "shared_memory" and communicator.size > 1:
        file = shared_file(communicator, "pycomm-roll", "who is ready is counted in the process group's store")
    return Roll(ledger, name, None if file < 0 else Board(file, communicator.rank, communicator.size))
