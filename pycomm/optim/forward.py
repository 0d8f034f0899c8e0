"""Noticing that a forward begins."""

from __future__ import annotations

from collections.abc import Callable


class ForwardHook:
    """Lies among the module's hooks; a copy of the module (``deepcopy``, ``pickle``) gets one without effect."""

    def __init__(self, before_forward: Callable[[], None] | None) -> None:
        self._before_forward = before_forward

    def __call__(self, *_: object) -> None:
        if self._before_forward is not None:
            self._before_forward()

    def __deepcopy__(self, memo: object) -> ForwardHook:
        return ForwardHook(None)

    def __reduce__(self) -> tuple[type[ForwardHook], tuple[None]]:
        return ForwardHook, (None,)
