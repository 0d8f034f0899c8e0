"""Console script ``pycomm``.

``import pycomm`` imports torch, as it makes the backend "pycomm" known there, and that takes seconds. So the script
enters by this package: it puts ``pycomm`` in place as a package whose ``__init__.py`` has not run yet.
``pycomm.tools.cli`` can be imported from it, and reads the arguments with the standard library alone. Commands that
need more run ``__init__.py`` first, by ``pycomm.tools.cli.arguments.load_package``.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib.machinery import PathFinder


def main() -> int:
    """Run one command and return the exit code, see ``pycomm.tools.cli.main.main``."""
    if "pycomm" not in sys.modules:
        # The one beside this package: they are installed together, and the working directory may have another.
        spec = PathFinder.find_spec("pycomm", [os.path.dirname(os.path.dirname(__file__))])
        assert spec is not None
        sys.modules["pycomm"] = importlib.util.module_from_spec(spec)
    from pycomm.tools.cli.main import main as run_command

    return run_command()
