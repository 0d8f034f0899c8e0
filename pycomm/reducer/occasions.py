"""Occasions at which an engine does something if ranks may be lost, come later, or need not be waited for."""

from __future__ import annotations

from pycomm.errors import CommError


class Occasions:
    """Engine of ranks that are all there, from beginning to end: nothing is to be done."""

    def open_door(self) -> None:
        """Let in a newcomer that waits, if ranks may come later."""

    def stand_in(self) -> None:
        """Prepare to go on without this rank's gradients in the next step, if it need not be waited for."""

    def stand_down(self) -> None:
        """Let operations of the main thread come before the next step again; see :meth:`stand_in`."""

    def give_up(self) -> None:
        """Let go of the step that is under way, as this rank takes part no more."""

    def recover(self, error: CommError) -> bool:
        """Raise ``error``, after which nothing goes on here."""
        raise error
