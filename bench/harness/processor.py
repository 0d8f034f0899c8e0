"""The processor that a report was made on, named so that two kinds of one brand are not mistaken for each other."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

_X86 = ("vendor_id", "cpu family", "model", "model name", "stepping")
_NOT_KEPT = re.compile(r"processor|flags|features|bugs|serial|.*mips.*|.*mhz.*", re.IGNORECASE)
_NOISE = re.compile(r"\((?:R|TM)\)|@.*|\b\d+-Core\b|\bCPU\b|\bProcessor\b", re.IGNORECASE)
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def describe_processor(root: Path = Path("/"), cores: Collection[int] | None = None) -> dict[str, Any]:
    """Return what identifies the processor, and what bounds its speed, as far as Linux says.

    Args:
        root: folder in which ``proc`` and ``sys`` are.
        cores: numbers of the cores that may be used; by default, the cores of this process.

    Returns:
        "label", a short name for people; "architecture"; of /proc/cpuinfo, what says which model it is, under the
        names there; "cores", how many may be used; "l2_bytes" and "l3_bytes", the size of one such cache, and
        "share_last_cache", whether all these cores have their last-level cache in common: ``None`` if unknown.
    """
    usable = os.sched_getaffinity(0) if cores is None else set(cores)
    told = _identity(root / "proc" / "cpuinfo", min(usable))
    found = {"architecture": platform.machine(), **told, "cores": len(usable)}
    caches = root / "sys" / "devices" / "system" / "cpu" / f"cpu{min(usable)}" / "cache"
    return {"label": _label(found), **found, **_caches(caches, usable)}


def _label(found: Mapping[str, Any]) -> str:
    """Derive the label: the brand alone does not do, as virtual machines say "AMD EPYC" for every generation."""
    named = found.get("model name") or found.get("cpu") or found.get("uarch") or found["architecture"]
    name = " ".join(_NOISE.sub(" ", str(named)).split())
    if "cpu family" in found:
        return f"{name}, family {found['cpu family']} model {found.get('model', 'unknown')}"
    if "CPU part" in found:  # Arm
        return f"{name}, implementer {found.get('CPU implementer', 'unknown')} part {found['CPU part']}"
    return name


def _identity(cpuinfo: Path, core: int) -> dict[str, str]:
    """Return what ``cpuinfo`` says of a core's model; on x86 the five usual names, elsewhere all but what is noise."""
    try:
        blocks = [dict(_fields(block)) for block in cpuinfo.read_text().split("\n\n")]
    except OSError:
        return {}
    block = next((block for block in blocks if block.get("processor") == str(core)), blocks[0])
    if "cpu family" in block:
        return {name: block[name] for name in _X86 if name in block}
    return {name: value for name, value in block.items() if not _NOT_KEPT.fullmatch(name)}


def _fields(block: str) -> Iterator[tuple[str, str]]:
    for line in block.splitlines():
        name, colon, value = line.partition(":")
        if colon and value.strip():
            yield name.strip(), value.strip()


def _caches(folder: Path, cores: Collection[int]) -> dict[str, Any]:
    """Return the sizes of one core's caches, and whether all ``cores`` share the last of them."""
    sizes: dict[int, int | None] = {}
    sharing: dict[int, set[int]] = {}
    for index in sorted(folder.glob("index*")):
        try:
            if (index / "type").read_text().strip() == "Instruction":
                continue
            level = int((index / "level").read_text())
            sizes[level] = _bytes((index / "size").read_text().strip())
            sharing[level] = _numbers((index / "shared_cpu_list").read_text().strip())
        except (OSError, ValueError):  # a hypervisor shows some files and not others
            continue
    shared = set(cores) <= sharing[max(sharing)] if sharing else None
    return {"l2_bytes": sizes.get(2), "l3_bytes": sizes.get(3), "share_last_cache": shared}


def _bytes(text: str) -> int | None:
    match = re.fullmatch(r"(\d+)([KMG]?)", text)
    return int(match[1]) * _UNITS[match[2]] if match else None


def _numbers(text: str) -> set[int]:
    """Return the numbers in a list such as "0-3,8"."""
    ends = (part.partition("-") for part in text.split(","))
    return {number for low, _, high in ends for number in range(int(low), int(high or low) + 1)}
