"""Help, the version and wrong arguments: answered by the standard library and numpy, without importing torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import pycomm

_EACH = """
import contextlib, io, json, sys
from pycomm_console import main
for words in json.loads(sys.argv[1]):
    sys.argv = ["pycomm", *words]
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            code = main()
        except SystemExit as error:
            code = error.code
    found = dict(words=words, code=code, out=out.getvalue(), err=err.getvalue(), torch="torch" in sys.modules)
    print(json.dumps(found))
"""

COMMANDS = (
    *(["info"], ["demo"], ["plan"], ["bench"], ["trace"], ["explain"]),
    *(["checkpoint"], ["checkpoint", "show"]),
    *(["plan", name] for name in ("ranks", "compression", "calibrate", "layers")),
    *(["bench", name] for name in ("all_reduce", "barrier")),
)

WRONG = [
    ([], "the following arguments are required: COMMAND"),
    (["train"], "invalid choice: 'train'"),
    (["--verbose"], "the following arguments are required: COMMAND"),
    (["--verbose", "info"], "unrecognized arguments: --verbose"),
    (["info", "--json"], "unrecognized arguments: --json"),
    (["info", "here"], "unrecognized arguments: here"),
    (["demo", "--ranks", "0"], "--ranks: 0, wanted at least"),
    (["demo", "--ranks", "two"], "--ranks: invalid integer value: 'two'"),
    (["demo", "--bogus"], "pycomm demo: error: unrecognized arguments: --bogus"),
    (["plan"], "the following arguments are required: WHAT"),
    (["plan", "rank"], "invalid choice: 'rank'"),
    (["plan", "ranks"], "the following arguments are required: --ranks"),
    (["plan", "ranks", "--ranks", "0"], "--ranks: 0, wanted at least 1"),
    (["plan", "ranks", "--ranks", "4", "--bytes", "much"], "'much', wanted a size such as 100MB"),
    (["plan", "ranks", "--ranks", "4", "--memory", "3GB"], "--memory is an option of pycomm plan layers"),
    (["plan", "ranks", "--ranks", "4", "--transport", "torch"], "--transport is an option of pycomm plan calibrate"),
    (["plan", "ranks", "--ranks", "4", "--speed=3"], "unrecognized arguments: --speed=3\n"),
    (["plan", "ranks", "--ranks", "4", "--network", "pigeon"], "network is 'pigeon'"),
    (["plan", "ranks", "--ranks", "10", "--per-host", "4"], "--ranks 10 do not factor into hosts of 4"),
    (["plan", "ranks", "--ranks", "4", "--network", "empty.json"], "empty.json is not JSON"),
    (["plan", "--ranks", "4"], "invalid choice: '4'"),
    (["plan", "compression"], "pycomm plan compression: error: the following arguments are required: --ranks"),
    (["plan", "compression", "--ranks", "4", "--output", "x"], "--output is an option of pycomm plan calibrate"),
    (["plan", "compression", "--ranks", "0"], "--ranks: 0, wanted at least 1"),
    (["plan", "compression", "--ranks", "4", "--bytes", "-1"], "--bytes: '-1', wanted a size such as 100MB"),
    (["plan", "compression", "--ranks", "4", "--devices", "2"], "--devices is an option of pycomm plan layers"),
    (["plan", "compression", "--ranks", "4", "--force"], "--force is an option of"),
    (["plan", "calibrate", "--transport", "smoke"], "invalid choice: 'smoke'"),
    (
        ["plan", "calibrate", "--ranks", "2", "--output", "empty.json"],
        "empty.json already exists: pass another name wi",
    ),
    (["plan", "calibrate", "--ranks", "2", "--output", "no/x.json"], "no/x.json cannot be written: no is not a folder"),
    (["plan", "calibrate"], "--ranks is missing: how many local ranks?"),
    (["plan", "layers"], "the following arguments are required: SIZES, --devices, --memory"),
    (["plan", "layers", "8GB,", "--devices", "2", "--memory", "9GB"], "SIZES: '', wanted a size such as 100MB"),
    (["plan", "layers", "0", "--devices", "2", "--memory", "9GB"], "SIZES: '0', wanted a size above 0"),
    (
        ["plan", "layers", "8GB,8GB", "--devices", "2", "--memory", "9GB", "--ranks", "3"],
        "--ranks is an option of pycomm plan ranks, pycomm plan co",
    ),
    (["plan", "layers", "8GB", "--devices", "2"], "the following arguments are required: --memory"),
    (["plan", "layers", "8GB", "--devices", "0", "--memory", "9GB"], "--devices: 0, wanted at least 1"),
    (["plan", "layers", "8GB", "--devices", "70000", "--memory", "9GB"], "devices is 70000, wanted an integer"),
    (["plan", "layers", "8GB", "--devices", "2", "--memory", "0"], "--memory: '0', wanted a size above 0"),
    (["bench"], "the following arguments are required: WHAT"),
    (["bench", "all_scatter"], "invalid choice: 'all_scatter'"),
    (["bench", "all_reduce", "-b", "0"], "-b/--minbytes: '0', wanted a size such as"),
    (["bench", "all_reduce", "-b", "1M", "-e", "1K"], "-e: 1024 bytes, which is less than the 1048576 of -b"),
    (["bench", "all_reduce", "-f", "1"], "-f/--stepfactor: 1, wanted at least 2"),
    (["bench", "all_reduce", "-e", "900000G", "-f", "2"], "-e: 3 arrays of "),
    (["bench", "all_reduce", "-d", "float128"], "-d/--datatype: invalid choice: 'float128'"),
    (["bench", "all_reduce", "-J", "no/x.json"], "-J: no/x.json cannot be written"),
    (["bench", "all_reduce", "--peers", "gloo,"], "--peers: 'gloo,', wanted names separated by commas"),
    (["bench", "all_reduce", "--peers", "pycomm"], "--peers: pycomm is what is measured (--backend)"),
    (["bench", "broadcast", "-r", "2"], "-r: 2, wanted a rank below 2, or all"),
    (["bench", "barrier", "-b", "4"], "pycomm bench barrier: error: unrecognized arguments: -b 4"),
    (["bench", "barrier", "--ranks", "0"], "--ranks: 0, wanted at least 1"),
    (["bench", "all_reduce", "--busy", "1"], "pycomm bench all_reduce: error: unrecognized arguments: --busy 1"),
    (["trace"], "the following arguments are required: script"),
    (["trace", "nothing.py"], "there is no nothing.py"),
    (["trace", "--step", "0", "empty.json"], "--step: 0, wanted at least 1"),
    (["trace", "-o", "empty.json/x", "empty.json"], "cannot write to empty.json/x"),
    (["explain", "nothing.json"], "nothing.json cannot be read: No such file"),
    (["explain", "empty.json"], "empty.json is not a file of pycomm's flight recorder"),
    (["explain", "--last", "many"], "--last: invalid int value: 'many'"),
    (["checkpoint"], "the following arguments are required: ACTION"),
    (["checkpoint", "show"], "the following arguments are required: FOLDER"),
    (["explain", "--first", "3"], "pycomm explain: error: unrecognized arguments: --first"),
]


def answers(folder: Path, commands: list[list[str]]) -> list[dict[str, Any]]:
    """Return what the console script answers to each of ``commands``, in one process that starts in ``folder``."""
    command = [sys.executable, "-c", _EACH, json.dumps(commands)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=100, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_the_version_and_all_help(tmp_path: Path) -> None:
    version, *helps = answers(tmp_path, [["--version"], ["--help"], *([*words, "--help"] for words in COMMANDS)])
    assert version["out"] == f"pycomm {pycomm.__version__}\n"
    for words, found in zip([[], *COMMANDS], helps, strict=True):
        assert found["out"].startswith(f"usage: {' '.join(['pycomm', *words])} "), found
    assert not [found for found in (version, *helps) if found["code"] != 0 or found["torch"]]


def test_sixty_wrong_invocations(tmp_path: Path) -> None:
    (tmp_path / "empty.json").touch()
    assert len(WRONG) >= 60
    for found, (words, says) in zip(answers(tmp_path, [words for words, _ in WRONG]), WRONG, strict=True):
        assert found["words"] == words
        *usage, error = found["err"].rstrip("\n").split("\n")
        assert says in f"{error}\n", found
        assert error.startswith("pycomm"), found
        assert not usage or usage[0].startswith("usage: "), found
        assert not [line for line in usage if "error" in line or "Traceback" in line], found
        assert (found["code"], found["torch"], found["out"]) == (2, False, ""), found
    assert [path.name for path in tmp_path.iterdir()] == ["empty.json"]


@pytest.mark.timeout(100)
def test_a_command_that_needs_torch_has_all_of_the_package(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import sys; from pycomm_console import main; sys.exit(main())", "info"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=90, check=True)
    assert f"pycomm      {pycomm.__version__}\n" in done.stdout
