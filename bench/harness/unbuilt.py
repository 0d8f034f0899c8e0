"""Parts of the package, read from their files: GPU reports and checks also run where pycomm is not built yet."""

from __future__ import annotations

import importlib.util
import sys
from typing import TYPE_CHECKING, Any

from bench import ROOT

if TYPE_CHECKING:
    from pycomm.tools.cli.table import print_table as print_table
    from pycomm.tools.cli.timing import Samples as Samples
    from pycomm.tools.cli.timing import duration as duration
    from pycomm.tools.cli.timing import times as times


def _load(name: str) -> Any:
    """Return the module in ``pycomm/tools/cli/NAME.py``, without what lies above it."""
    spec = importlib.util.spec_from_file_location(f"_pycomm_{name}", ROOT / f"pycomm/tools/cli/{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


if not TYPE_CHECKING:
    print_table = _load("table").print_table
    Samples, duration, times = (getattr(_load("timing"), name) for name in ("Samples", "duration", "times"))
