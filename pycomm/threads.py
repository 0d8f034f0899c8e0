"""Threads of pycomm, which have ended before the interpreter does.

All are daemons: a rank whose thread waits for a lost peer must be able to end. But a daemon that comes out of C++ after
the interpreter's end takes the process along ("terminate called without an active exception"). So each one is started
here, with a function that ends its wait. This is the order in which a process ends:

1. The main thread returns or raises. Python joins threads that are no daemons, and calls exit handlers.
2. Finalizers of what is still open are called, the last one made first. They close communicators, which ends the waits
   of threads that communicate.
3. Threads that are still there are interrupted by the functions that came with them, and joined.
4. The interpreter is torn down. No thread of pycomm is there any more.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections.abc import Callable

EXIT_PATIENCE = 2.0
"""Seconds for which the process's end waits for operations of which nobody wants the result, and then for threads.

Only what nothing can interrupt takes so long: a store whose server hangs.
"""

_interrupts: dict[threading.Thread, Callable[[], object] | None] = {}
_is_exiting = _has_ended = False


def start(run: Callable[[], object], name: str, interrupt: Callable[[], object] | None = None) -> threading.Thread:
    """Start a thread that calls ``run``.

    Args:
        run: what it does.
        name: name of the thread.
        interrupt: called by the main thread when the process ends; ``run`` must return soon after. ``None`` where it
            waits for nothing but peers, whose communicator has been closed by then.

    Raises:
        RuntimeError: the thread cannot be started, or the process ends.
    """
    if _has_ended:
        raise RuntimeError("the process ends: no thread is started any more")

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
    """Return whether the process ends, and nobody can want the result of an operation any more."""
    return _is_exiting


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


# Finalizers are called from the last to the first: this one after those of all that is made later. They all are called
# by one exit handler, which is there now at the latest; and handlers, too, are called from the last to the first.
_at_exit = weakref.finalize(_end_all, _end_all)
atexit.register(_begin_exit)
os.register_at_fork(after_in_child=_interrupts.clear)
