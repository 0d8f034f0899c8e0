"""The documentation's scripts as modules."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

from tests.docs.pages import ROOT


def load(path: str) -> ModuleType:
    """Return the script at ``path``, which finds what lies next to it, as when it is run."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with patch.object(sys, "path", [str((ROOT / path).parent), *sys.path]):
        spec.loader.exec_module(module)
    return module
