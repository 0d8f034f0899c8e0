"""Reports name their processor: what /proc/cpuinfo and the caches in /sys say, on machines made of files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from bench.harness.processor import describe_processor
from bench.harness.results import headline, write_json

EPYC = {"vendor_id": "AuthenticAMD", "cpu family": "25", "model": "17", "model name": "AMD EPYC", "stepping": "1"}
XEON = {"cpu family": "6", "model": "143", "model name": "Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz"}
ARM = {"BogoMIPS": "50.00", "Features": "fp asimd", "CPU implementer": "0x41", "CPU part": "0xd40"}


def write_cpuinfo(root: Path, *cores: Mapping[str, str]) -> None:
    (root / "proc").mkdir()
    blocks = [{"processor": str(number), **core, "flags": "fpu vme"} for number, core in enumerate(cores)]
    text = "\n".join("".join(f"{name}\t: {value}\n" for name, value in block.items()) for block in blocks)
    (root / "proc" / "cpuinfo").write_text(text)


def write_cache(root: Path, core: int, level: int, size: str, shared: str, kind: str = "Unified") -> None:
    folder = root / f"sys/devices/system/cpu/cpu{core}/cache/index{level if kind == 'Unified' else 9}"
    folder.mkdir(parents=True)
    for name, text in {"level": level, "size": size, "shared_cpu_list": shared, "type": kind}.items():
        (folder / name).write_text(f"{text}\n")


def test_models_of_one_brand_are_told_apart(tmp_path: Path) -> None:
    write_cpuinfo(tmp_path, EPYC, EPYC)
    found = describe_processor(tmp_path, cores=[0, 1])
    assert found["label"] == "AMD EPYC, family 25 model 17"
    assert EPYC.items() <= found.items()
    assert found["cores"] == 2
    assert "flags" not in found


@pytest.mark.parametrize(
    ("name", "label"),
    [
        (XEON["model name"], "Intel Xeon Platinum 8481C, family 6 model 143"),
        ("AMD EPYC 9654 96-Core Processor", "AMD EPYC 9654, family 6 model 143"),
    ],
)
def test_labels_leave_out_noise(name: str, label: str, tmp_path: Path) -> None:
    write_cpuinfo(tmp_path, XEON | {"model name": name})
    assert describe_processor(tmp_path, cores=[0])["label"] == label


def test_the_core_is_one_that_may_be_used(tmp_path: Path) -> None:
    write_cpuinfo(tmp_path, EPYC, XEON)
    assert "family 6 model 143" in describe_processor(tmp_path, cores=[1])["label"]


def test_other_architectures_keep_what_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    write_cpuinfo(tmp_path, ARM)
    found = describe_processor(tmp_path, cores=[0])
    assert found["label"] == "aarch64, implementer 0x41 part 0xd40"
    assert (found["CPU part"], found["architecture"]) == ("0xd40", "aarch64")
    assert not {"Features", "BogoMIPS", "processor"} & set(found)


@pytest.mark.parametrize(("cores", "share"), [([0, 1], True), ([0, 4], True), ([0, 2], False), ([0], True)])
def test_caches(cores: list[int], share: bool, tmp_path: Path) -> None:
    write_cache(tmp_path, 0, 1, "32K", "0", kind="Instruction")
    write_cache(tmp_path, 0, 2, "1024K", "0")
    write_cache(tmp_path, 0, 3, "32M", "0-1,4")
    found: dict[str, Any] = describe_processor(tmp_path, cores=cores)
    assert (found["l2_bytes"], found["l3_bytes"], found["share_last_cache"]) == (1 << 20, 32 << 20, share)


def test_where_nothing_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    assert describe_processor(tmp_path, cores=[0]) == {
        "label": "riscv64",
        "architecture": "riscv64",
        "cores": 1,
        **dict.fromkeys(("l2_bytes", "l3_bytes", "share_last_cache")),
    }


def test_reports_name_their_processor_and_day(tmp_path: Path) -> None:
    write_json(tmp_path / "x.json", "x", {}, {"figure": 1.5})
    report = json.loads((tmp_path / "x.json").read_text())
    assert report["environment"]["processor"] == describe_processor()
    assert report["environment"]["processor"]["label"] in headline()
    assert len(report["date"]) == len("2026-01-31")
    assert report["figure"] == 1.5
