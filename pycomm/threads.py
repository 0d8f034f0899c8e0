"""Threads of pycomm, which end before the interpreter does.

All are daemons: a rank whose thread waits for a lost peer must be able to exit. But a daemon that returns from C++
after the interpreter's end aborts the process ("terminate called without an active exception"). So each thread is
started here, with a function that interrupts it. A process ends in this order:

1. The main thread returns or raises. Python joins threads that are not daemons, and calls exit handlers.
2. Finalizers of open objects are called, the last one made first. They close communicators, which ends the waits of
   threads that communicate.
3. Remaining threads are interrupted by their functions, and joined.
4. The interpreter is torn down. No thread of pycomm is left.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable

EXIT_PATIENCE = 2.0
"""Seconds that the process's exit waits for unfinished operations, and then for threads.

Only an uninterruptible call, to a store whose server hangs, takes that long.
"""

_LONGEST_ERROR = 300  # characters
_interrupts: dict[threading.Thread, Callable[[], object] | None] = {}
_is_exiting = _has_ended = False


def start(run: Callable[[], object], name: str, interrupt: Callable[[], object] | None = None) -> threading.Thread:
    """Start a thread that calls ``run``.

    Args:
        run: function of the thread.
        name: name of the thread.
        interrupt: called by the main thread at exit; ``run`` must return soon after. ``None`` if ``run`` waits for
            peers only, whose communicator is closed by then.
    """
    if _has_ended:
        raise RuntimeError("the process is exiting: no more threads are started")

    def whole() -> None:
        try:
            run()
        finally:
            _interrupts.pop(thread, None)

    thread = threading.Thread(target=whole, name=name, daemon=True)
    _interrupts[thread] = interrupt
    try:
        thread.start()
    except RuntimeError:
        del _interrupts[thread]
        raise
    return thread


def is_exiting() -> bool:
    """Return whether the process is exiting, so that no result is needed any more."""
    return _is_exiting


def fatal_error() -> str:
    """Return type and text of the error that ends this process; "" without one, and in an interactive session."""
    error = getattr(sys, "last_value", None)  # of the last traceback that the interpreter has printed
    if error is None or not _is_exiting or hasattr(sys, "ps1"):
        return ""
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:  # a foreign one may raise anything
        text = type(error).__name__
    return text[:_LONGEST_ERROR].encode("utf-8", "replace").decode()


def _begin_exit() -> None:
    global _is_exiting
    _is_exiting = True


def _end_all() -> None:
    """Interrupt all threads, then join them."""
    global _has_ended
    _has_ended = True
    running = {thread: interrupt for thread, interrupt in list(_interrupts.items()) if thread.is_alive()}
    for interrupt in running.values():
        if interrupt is not None:
            interrupt()
    deadline = time.monotonic() + EXIT_PATIENCE
    for thread in running:
        thread.join(max(0.0, deadline - time.monotonic()))


# Finalizers are called in reverse order of creation, so this one after all later ones. One exit handler calls them all;
# it is registered by now, so that _begin_exit, registered after it, is called first.
_at_exit = weakref.finalize(_end_all, _end_all)
atexit.register(_begin_exit)
os.register_at_fork(after_in_child=_interrupts.clear)
