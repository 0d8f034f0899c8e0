"""``pycomm explain``: its arguments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pycomm.cli.arguments import later


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "explain",
        help="what the ranks did before an error, by their flight recorders",
        description=(
            "Reads the files that ranks have written when an operation failed, or at SIGUSR2 (kill -USR2 PID), and "
            "says which rank did what else, or was late. They lie in the folder that PYCOMM_FLIGHT_DIR names, or in "
            "one of yours below that of temporary files; from several hosts, bring them together."
        ),
        epilog="Exit code: 0 there is something to say, or all is well; 2 wrong arguments, or no files.",
    )
    parser.add_argument(
        "dumps",
        nargs="*",
        type=Path,
        metavar="DUMP",
        help="files, or folders (default: the newest run in this directory)",
    )
    parser.add_argument("--last", type=int, default=3, metavar="N", help="operations to list of each rank (default 3)")
    parser.set_defaults(run=later("pycomm.cli.explain.report"))
