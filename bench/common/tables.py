"""The package's printer of tables, read from its file: reports are printed also where pycomm is not built."""

from __future__ import annotations

import runpy
from typing import TYPE_CHECKING

from bench import ROOT

if TYPE_CHECKING:
    from pycomm.cli.table import print_table as print_table
else:
    print_table = runpy.run_path(str(ROOT / "pycomm" / "cli" / "table.py"))["print_table"]
