"""``pycomm explain``: its arguments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pycomm.cli.arguments import later


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "explain",
        help="say which rank did something else, or was late, before an error",
        description=(
            "Reads the files that ranks write when an operation fails, or at SIGUSR2 (kill -USR2 PID), and says which "
            "rank did something else or was late. They are in the folder PYCOMM_FLIGHT_DIR, or in your folder below "
            "that of temporary files. Copy those of several hosts to one place first."
        ),
        epilog="Exit code: 0 success; 2 wrong arguments, or no files.",
    )
    parser.add_argument(
        "dumps",
        nargs="*",
        type=Path,
        metavar="DUMP",
        help="files, or folders (default: the newest run in this directory)",
    )
    parser.add_argument("--last", type=int, default=3, metavar="N", help="operations to list per rank (default 3)")
    parser.set_defaults(run=later("pycomm.cli.explain.report"))
