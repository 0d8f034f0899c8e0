"""Lines of the script: where it was that somebody called, as file, number and name of the function."""

from __future__ import annotations

import importlib.util
import os
import site
import sysconfig
import threading
from types import FrameType

import pycomm._native as _native

Line = tuple[str, int, str]
"""File, number of the line in it, and name of the function."""

_TORCH = importlib.util.find_spec("torch")  # not imported: `pycomm explain` answers without it
assert _TORCH is not None
_OWN = (
    *(os.path.dirname(os.path.abspath(path)) + os.sep for path in (os.path.dirname(__file__), str(_TORCH.origin))),
    threading.__file__,
    "<frozen ",
)
# A trainer calls us from the same line of its own whatever the script does.
_LIBRARIES = tuple(
    os.path.join(folder, "")
    for folder in (
        *(sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")),
        *site.getsitepackages(),
        site.getusersitepackages(),
    )
)
_native.set_origins(list(_OWN), list(_LIBRARIES))


def line_of(frame: FrameType | None) -> Line | None:
    """Return the innermost line of the script from ``frame`` outwards, which is neither pycomm's nor torch's.

    If there is none, it is the innermost of another library. ``None`` if there is none of these either, as on threads
    that pycomm and torch have started.
    """
    library: Line | None = None
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(_OWN):
            line = file, frame.f_lineno, frame.f_code.co_name
            if not file.startswith(_LIBRARIES):
                return line
            library = library or line
        frame = frame.f_back
    return library
