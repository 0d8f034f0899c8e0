"""Readers of nccl-tests' output, written for that alone: they know its table and its report, and nothing of pycomm."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

COLUMNS = ("size", "count", "type", "redop", "root", "time", "algbw", "busbw", "#wrong")


def read_table(printed: str) -> list[dict[str, Any]]:
    """Return the lines of the table, by the header's names; those of in place behind "in_place".

    As parsers in the field do: comments are skipped, all else is split at blanks, and columns are found by the names in
    the one comment that has them.
    """
    names: list[str] = []
    lines = []
    for line in printed.splitlines():
        words = line.split()
        if words[:2] == ["#", "size"] and "redop" in words:
            names = words[1:]
        elif words and not line.startswith("#"):
            assert len(words) == len(names), f"{len(words)} cells below {len(names)} names: {line}"
            first, second = names.index("time"), len(names) - 1 - names[::-1].index("time")
            row: dict[str, Any] = dict(zip(names[:second], words[:second], strict=True))
            row["in_place"] = dict(zip(names[second:], words[second:], strict=True))
            assert first + 4 == second
            lines.append(row)
    assert tuple(names) == (*COLUMNS, *COLUMNS[5:])
    return lines


def read_report(path: Path) -> dict[str, Any]:
    """Return a report, after a look at every key of nccl-tests' that it has."""
    report: dict[str, Any] = json.loads(path.read_text())
    keys = "version start_time args config results out_of_bounds average_bus_bandwidth end_time"
    assert set(keys.split()) <= set(report)
    assert report["out_of_bounds"]["okay"] in ("true", "false")
    assert report["average_bus_bandwidth"]["okay"] in ("true", "false", "unchecked")
    for device in report["config"]["devices"]:
        assert {"rank", "pid", "hostname", "device", "device_info"} <= set(device)
    for line in report["results"]:
        assert {"size", "count", "type", "redop", "root"} <= set(line)
        assert len(line["root"]) == 6
        for place in ("out_of_place", "in_place"):
            assert {"time", "alg_bw", "bus_bw", "nwrong"} <= set(line[place])
    return report
