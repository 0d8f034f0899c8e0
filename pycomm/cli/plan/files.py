"""Files that ``pycomm plan`` writes: none is replaced unasked."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path
from typing import Any

from pycomm.cli.terminal import complain


def require_free(path: Path, option: str, arguments: argparse.Namespace) -> None:
    """Raise ValueError unless ``path`` can be written, and is not there yet or may be replaced."""
    if not path.parent.is_dir():
        raise ValueError(f"{path} cannot be written: {path.parent} is no folder")
    if path.exists() and not arguments.force:
        raise ValueError(f"{path} is there already: give another name with {option}, or --force to replace it")


def draw(function: str, what: str, arguments: argparse.Namespace, *data: Any) -> int:
    """Write a plot of ``data`` by that function of :mod:`pycomm.cli.plan.plot` if there is to be one.

    What was to be drawn is printed already. So nothing that keeps it from being drawn is an error of the arguments:
    the exit code, which is returned, is 1 then.
    """
    if arguments.plot is None:
        return 0
    try:
        require_free(arguments.plot, "--plot", arguments)
        plot = importlib.import_module("pycomm.cli.plan.plot")  # needs an extra
        getattr(plot, function)(*data, arguments.plot)
    except ModuleNotFoundError as error:
        complain(f"pycomm plan: no plot, {error.name} is not installed: pip install 'pycomm-torch[demo]'")
        return 1
    except (OSError, ValueError) as error:
        complain(f"pycomm plan: no plot: {error}")
        return 1
    print(f"\nplot of {what}: {arguments.plot}")
    return 0
