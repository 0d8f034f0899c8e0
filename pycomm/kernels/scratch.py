"""Temporary memory of kernels on a GPU."""

from __future__ import annotations

import pycomm._native as _native


class Scratch(_native.Scratch):
    """Scratch memory on a GPU, kept from call to call; without one, every call allocates its own.

    Allocated at first use in the library of the arrays at hand; grows as needed. It also remembers the
    arrays of the last call, so that their addresses are sent to the GPU only when they change. Calls that
    share one must be on one stream. Calls on CPU arrays need none and ignore it.
    """
