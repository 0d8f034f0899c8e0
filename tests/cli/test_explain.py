"""pycomm explain: one sentence about what the ranks did, from files that they have written."""

from __future__ import annotations

import gc
import getpass
import json
import os
import re
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import pycomm
from pycomm.collectives.recorder import DIRECTORY
from pycomm.collectives.recorder.dump import dump
from pycomm.tools.cli.main import main
from tests.on_ranks import Pools
from tests.ranks import PerRank, RankPool


@pytest.fixture
def two_ranks(new_ranks: Pools) -> RankPool:
    """Return ranks of which files tell nothing of what other tests have called."""
    return new_ranks(2)


def explain(*arguments: object) -> int:
    return main(["explain", *map(str, arguments)])


def _work(place: str, kind: str, nap: float) -> int:
    """Do something of ``kind``, and write a file; return a line in here that says where."""
    os.environ[DIRECTORY] = place
    gc.collect()  # the communicators of earlier tests, of which files would tell, too
    try:
        with pycomm.Communicator(timeout=20) as c:
            x = torch.ones(1000)
            c.all_reduce(x)
            time.sleep(nap)
            if kind == "other" and c.rank == 1:
                with pytest.raises(ValueError, match="disagree"):
                    c.broadcast(x, 0)
            elif kind == "other":
                with pytest.raises(ValueError, match="disagree"):
                    c.all_reduce(x, "max")
            else:
                c.barrier()
            if kind == "absent" and c.rank == 0:
                c.send(torch.ones(1), 1)  # no collective
            dump("asked for")
            c.barrier()
    finally:
        os.environ[DIRECTORY] = ""
    return _work.__code__.co_firstlineno


def first_line(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().out.split("\n")[0]


@pytest.mark.behavior(
    "Lost, late and unreachable ranks",
    "`the last operations of this rank are in ...`",
    "`pycomm explain` with these files says which rank did something else.",
)
def test_ranks_that_call_different_operations(
    two_ranks: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = two_ranks.run(_work, str(tmp_path), "other", 0.0)[0]
    assert explain(tmp_path) == 0
    said = first_line(capsys)
    assert f"rank 0 called all_reduce of 1,000 float32 (max) at {__file__}:{first + 14} (_work)" in said
    assert f"where rank 1 called broadcast of 1,000 float32 from rank 0 at {__file__}:{first + 11} (_work)" in said
    assert said.endswith(".")


def test_ranks_that_come_late(two_ranks: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    two_ranks.run(_work, str(tmp_path), "same", PerRank([0.0, 1.3]))
    assert explain(tmp_path) == 0
    said = first_line(capsys)
    assert "All ranks made the same calls, but rank 1 came 1." in said
    assert "barrier at" in said


def test_ranks_that_do_the_same(two_ranks: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    two_ranks.run(_work, str(tmp_path), "absent", 0.0)
    shutil.copy(next(tmp_path.glob("rank0-*")), tmp_path / "rank0-again.json")  # of the same process
    assert explain(*tmp_path.glob("*.json")) == 0
    assert "all ranks made the same calls, and none was late" in first_line(capsys)


def edited(path: Path, **changes: Any) -> None:
    content = json.loads(path.read_text())
    for group in content["groups"]:
        group.update(changes)
    path.write_text(json.dumps(content))


def test_ranks_that_do_not_come(two_ranks: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    two_ranks.run(_work, str(tmp_path), "same", 0.0)
    [zero], [one] = tmp_path.glob("rank0-*"), tmp_path.glob("rank1-*")
    without_the_last(one)
    assert explain(tmp_path) == 0
    assert "none was late" in first_line(capsys)  # a barrier that has ended: the file was written earlier, that is all
    edited_last(zero, seconds=None)
    assert explain(tmp_path, "--last", 0) == 0
    said = first_line(capsys)
    assert said.startswith("Rank 0 waited")
    assert "rank 1 never reached it: its last was operation" in said
    assert "all_reduce of 1,000 float32 (sum)" in said
    assert f"and it was at {__file__}" in said

    content = json.loads(one.read_text())
    one.write_text(json.dumps({**content, "time": content["time"] - 60.0}))  # before rank 0 came there
    assert explain(tmp_path) == 0
    assert "did not come" not in capsys.readouterr().out

    one.unlink()
    content = json.loads(zero.read_text())
    for group in content["groups"]:
        group["operations"][-1] |= {"error": "rank 0: barrier: timed out", "seconds": 3.0}
    zero.write_text(json.dumps(content))
    assert explain(zero) == 0
    assert "waited 3 s" in (said := first_line(capsys))
    assert "there is no file of rank 1, which may have died" in said


def without_the_last(path: Path) -> None:
    """Have the file say what it would if its rank had not called the last operation."""
    content = json.loads(path.read_text())
    for group in content["groups"]:
        group["operations"].pop()
        group["count"] -= 1
    path.write_text(json.dumps(content))


def edited_last(path: Path, **changes: Any) -> None:
    content = json.loads(path.read_text())
    for group in content["groups"]:
        group["operations"][-1] |= changes
    path.write_text(json.dumps(content))


def test_ranks_of_a_subgroup_have_the_numbers_of_all(
    two_ranks: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    two_ranks.run(_work, str(tmp_path), "same", 0.0)
    files = [next(tmp_path.glob(f"rank{rank}-*")) for rank in (0, 1)]
    for file in files:
        edited(file, ranks=[1, 3])
        edited_last(file, operation="broadcast", detail=[1], seconds=None)
    assert explain(tmp_path, "--last", 1) == 0
    out = capsys.readouterr().out
    assert " of ranks 1 and 3, broadcast from rank 3 at " in out
    assert "\n  rank 3 (" in out
    files[1].unlink()
    assert explain(tmp_path) == 0
    assert "there is no file of rank 3, which may have died" in capsys.readouterr().out


def test_operations_of_nccl_are_only_enqueued(
    two_ranks: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    two_ranks.run(_work, str(tmp_path), "same", 0.0)
    for path in tmp_path.glob("rank*"):
        edited(path, name="0/abc/nccl native")
    [one] = tmp_path.glob("rank1-*")
    without_the_last(one)
    assert explain(tmp_path) == 0
    assert "none was late" in first_line(capsys)
    content = json.loads(one.read_text())
    one.write_text(json.dumps({**content, "time": content["time"] + 5.0}))
    assert explain(tmp_path) == 0
    assert "rank 1 never reached it" in first_line(capsys)


def test_a_rank_without_a_file_is_never_said_to_be_well(
    two_ranks: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    two_ranks.run(_work, str(tmp_path), "same", 0.0)
    next(tmp_path.glob("rank1-*")).unlink()
    assert explain(tmp_path) == 0
    said = first_line(capsys)
    assert said.startswith("There is no file of rank 1 of group")
    assert "all ranks made the same calls" not in said

    edited_last(next(tmp_path.glob("rank0-*")), seconds=None)  # SIGUSR2, sent to rank 0 alone
    assert explain(tmp_path) == 0
    said = first_line(capsys)
    assert said.startswith("Rank 0 waited")
    assert "there is no file of rank 1" in said


def test_ranks_that_are_still_in_an_operation(
    two_ranks: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    two_ranks.run(_work, str(tmp_path), "same", 0.0)
    edited_last(next(tmp_path.glob("rank1-*")), seconds=None)
    assert explain(tmp_path) == 0
    said = first_line(capsys)
    assert said.startswith("All ranks entered operation")
    assert said.endswith("and rank 1 is still in it.")
    edited_last(next(tmp_path.glob("rank0-*")), seconds=None)
    assert explain(tmp_path) == 0
    assert first_line(capsys).endswith("and all are still in it.")


def test_other_files_in_the_folder_are_left_out(
    two_ranks: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    two_ranks.run(_work, str(tmp_path), "same", 0.0)
    (tmp_path / "rank0-results.json").write_text('{"loss": 1.0}')
    (tmp_path / "rank0-older-1.json").write_text('{"format": 0}')
    monkeypatch.setenv(DIRECTORY, str(tmp_path))
    for arguments in ([], [tmp_path]):
        assert explain(*arguments) == 0
        out, err = capsys.readouterr()
        assert "all ranks made the same calls, and none was late" in out
        assert "rank0-results.json is not a file of pycomm's flight recorder" in err
        assert "rank0-older-1.json has format 0" in err
    assert explain(tmp_path / "rank0-results.json") == 2  # this one is named


def test_without_arguments_the_newest_job_is_meant(
    two_ranks: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DIRECTORY, str(tmp_path))
    assert explain() == 2
    assert "there are no files" in capsys.readouterr().err
    two_ranks.run(_work, str(tmp_path), "other", 0.0)
    stale = tmp_path / "rank0-elsewhere-1.json"
    shutil.copy(next(tmp_path.glob("rank0-*")), stale)
    edited(stale, name="another group", operations=[], count=0)
    os.utime(stale, (0, 0))
    assert explain() == 0
    out = capsys.readouterr().out
    assert re.match(rf"newest run in {re.escape(os.getcwd())}: \S.*, 2 files in {tmp_path}, written \d+ s ago\n", out)
    assert "another group" not in out
    monkeypatch.setenv(DIRECTORY, "")
    assert explain() == 2
    assert "nothing has been written" in capsys.readouterr().err


@pytest.mark.timeout(60)
def test_runs_of_other_directories_are_not_meant(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    files, mine = tmp_path / "files", tmp_path / "mine"
    files.mkdir()
    mine.mkdir()
    monkeypatch.setenv(DIRECTORY, str(files))
    for number, (directory, name, age) in enumerate(
        [("/else", "b", 10), (str(mine), "a", 7300), ("/third", "a", 8000)]
    ):
        content = {**DUMP, "time": time.time() - age, "groups": [{**GROUP, "name": name, "rank": number % 2}]}
        file = files / f"rank{number}-h-{number}.json"
        file.write_text(json.dumps({**content, "directory": directory, "pid": number}))
        os.utime(file, (0, time.time() - age))
    (files / "rank0-old-9.json").write_text(json.dumps({key: DUMP[key] for key in DUMP if key != "directory"}))
    monkeypatch.chdir(mine)
    assert explain() == 0
    out = capsys.readouterr().out
    assert out.startswith(f"newest run in {mine}: train.py --lr 1, 2 files in {files}, written 2 hours ago\n")
    assert "process 1," in out  # and the one on another host, in the same group
    assert "process 2," in out
    assert "process 0," not in out
    monkeypatch.chdir(tmp_path)
    assert explain() == 2
    said = capsys.readouterr().err
    assert (
        f"no run in {tmp_path} has left files in {files}, but runs in /else, /third, {mine}, unknown directories"
        in said
    )
    assert explain(files) == 0  # all of them


def test_folders_without_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rank0-results.json").write_text('{"loss": 1.0}')
    assert explain(tmp_path) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines()[-1] == f"pycomm explain: there are no files of the flight recorder in {tmp_path}"


def test_files_that_are_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert explain(tmp_path / "missing.json") == 2
    assert "cannot be read: No such file" in capsys.readouterr().err
    other = tmp_path / "other.json"
    for text in ("", "[1]", '{"format": 1}', "\x00"):
        other.write_text(text)
        assert explain(other) == 2
        assert "is not a file of pycomm's flight recorder" in capsys.readouterr().err
    other.write_text('{"format": 99}')
    assert explain(other) == 2
    assert "has format 99, wanted 1" in capsys.readouterr().err


OPERATION: dict[str, Any] = {
    "number": 1,
    "operation": "all_reduce",
    "dtype": "float32",
    "elements": 10,
    "detail": ["sum"],
    "label": "",
    "line": {"file": "a.py", "line": 3, "function": "f"},
    "began": 1.0,
    "seconds": None,
    "error": "",
}
GROUP: dict[str, Any] = {"name": "g", "rank": 0, "ranks": [0, 1], "count": 1, "operations": [OPERATION]}
DUMP: dict[str, Any] = {
    "format": 1,
    "host": "h",
    "pid": 1,
    "command": ["train.py", "--lr", "1"],
    "directory": os.getcwd(),
    "time": 1.0,
    "reason": "r",
    "main_thread": None,
    "groups": [GROUP],
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("change", "group", "operation", "says"),
    [
        ({"time": None}, {}, {}, "time is null, wanted a finite number"),
        ({"time": 1e30}, {}, {}, r"time is 1e\+30, wanted a finite number"),
        ({"format": True}, {}, {}, "has format True, wanted 1"),
        ({"groups": {}}, {}, {}, "groups is an object, wanted a list"),
        ({}, {"rank": 9}, {}, r"groups\[0\] has rank 9 of 2"),
        ({}, {"operations": None}, {}, r"groups\[0\].operations is null, wanted a list"),
        ({}, {}, {"elements": "x"}, r"operations\[0\].elements is \"x\", wanted null or an integer"),
        ({}, {}, {"detail": [[1]]}, r"detail\[0\] is a list, wanted null or a string or an integer"),
        ({}, {}, {"line": {"file": "a", "line": 1}}, "line is an object, wanted null or an object"),
    ],
)
def test_files_with_a_wrong_value(
    change: dict[str, Any],
    group: dict[str, Any],
    operation: dict[str, Any],
    says: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    content = {**DUMP, "groups": [{**GROUP, "operations": [{**OPERATION, **operation}], **group}], **change}
    (tmp_path / "rank0-h-1.json").write_text(json.dumps(content))
    assert explain(tmp_path / "rank0-h-1.json") == 2
    assert re.search(says, capsys.readouterr().err)


@pytest.mark.timeout(60)
def test_texts_of_files_do_not_reach_the_terminal_as_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evil = "\x1b]0;owned\x07\n  rank 7: all is well"
    line = {"file": evil, "line": 3, "function": evil}
    operation = {**OPERATION, "operation": evil, "dtype": evil, "label": evil, "detail": [evil], "line": line}
    group = {**GROUP, "name": evil, "operations": [{**operation, "error": evil}]}
    content = {**DUMP, "reason": evil, "host": evil, "main_thread": line, "groups": [group]}
    (tmp_path / "rank0-h-1.json").write_text(json.dumps(content))
    (tmp_path / f"rank0-{evil.strip().replace('/', '')}-2.json").write_text("{}")
    assert explain(tmp_path) == 0
    out, err = capsys.readouterr()
    assert "\\x1b]0;owned\\x07\\n  rank 7: all is well" in out
    assert (out + err).replace("\n", "").isprintable()
    assert "\n  rank 7" not in out + err


@pytest.mark.timeout(60)
def test_the_default_folder_must_be_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv(DIRECTORY)
    place = tmp_path / f"pycomm_flight_{getpass.getuser()}"
    place.mkdir(mode=0o700)
    file = place / "rank0-h-1.json"
    file.write_text(json.dumps(DUMP))
    assert explain() == 0
    os.mkfifo(place / "rank1-h-2.json")
    assert explain() == 0
    assert "rank1-h-2.json is a FIFO, wanted a regular file" in capsys.readouterr().err
    file.chmod(0o666)
    assert explain() == 2
    assert "rank0-h-1.json can be written by other users" in capsys.readouterr().err
    file.chmod(0o600)
    place.chmod(0o777)
    assert explain() == 2
    assert f"{place} can be written by other users" in capsys.readouterr().err
    place.rename(tmp_path / "elsewhere")
    place.symlink_to(tmp_path / "elsewhere")
    assert explain() == 2
    assert f"{place} is a link, wanted a folder" in capsys.readouterr().err
