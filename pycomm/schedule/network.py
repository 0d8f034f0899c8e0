"""Networks: the cost of a message within a host and between hosts."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from pycomm import untrusted
from pycomm.checks import shown
from pycomm.schedule.table import Ints

_LARGEST_FILE = 16 << 20  # bytes
_LONGEST_NAME = 256  # characters of an algorithm's name
_MOST_RANKS = 2**31
_LARGEST = 1e300  # integers may be larger than any float
_KEYS = ("alpha", "beta", "gamma")


@dataclass(frozen=True, kw_only=True)
class Link:
    """Class of links.

    Attributes:
        alpha: seconds per message. beta: seconds per byte. gamma: seconds per byte to add what was
            received.
    """

    alpha: float
    beta: float
    gamma: float

    def __post_init__(self) -> None:
        for key in _KEYS:
            value = getattr(self, key)
            if not _is_seconds(value):
                raise ValueError(f"{key} is {shown(value)}, wanted a number of seconds, not negative")


@dataclass(frozen=True, kw_only=True)
class Network:
    """Network of hosts with ``per_host`` consecutive ranks each; every rank has a sending and a receiving port.

    Attributes:
        name: a name for people.
        per_host: ranks on a host; ``None``: all of them.
        within_host, between_hosts: the two classes of links.
        overhead: seconds that a collective takes before it sends anything.
        measured: algorithm -> ((bytes, seconds), ...), increasing in bytes, as measured among
            ``measured_ranks`` ranks; preferred to simulation. "native" is the transport's own algorithm.
        measured_ranks: 0 if nothing was measured.
        transport: the transport it was calibrated over; "" for a description.
    """

    name: str
    within_host: Link
    between_hosts: Link
    per_host: int | None = None
    measured: Mapping[str, tuple[tuple[float, float], ...]] = field(default_factory=dict)
    measured_ranks: int = 0
    overhead: float = 0.0
    transport: str = ""

    def __post_init__(self) -> None:
        if self.per_host is not None and not _is_count(self.per_host, 1):
            raise ValueError(f"per_host is {shown(self.per_host)}, wanted a whole number of at least 1")
        if not _is_count(self.measured_ranks, 0):
            raise ValueError(f"measured_ranks is {shown(self.measured_ranks)}, wanted a whole number")
        if not _is_seconds(self.overhead):
            raise ValueError(f"overhead is {shown(self.overhead)}, wanted a number of seconds, not negative")
        for algorithm, curve in self.measured.items():
            sizes = [size for size, _ in curve]
            numbers = all(_is_seconds(number) for point in curve for number in point)
            if not curve or not numbers or sizes != sorted(set(sizes)):
                raise ValueError(
                    f"measured[{shown(algorithm)}] is {shown(curve)}, wanted (bytes, seconds), increasing in bytes"
                )

    def links(self, src: Ints, dst: Ints) -> Ints:
        """Return the class of link of each pair of ranks: 0 within a host, 1 between hosts."""
        if self.per_host is None:
            return np.zeros(len(src), np.int64)
        return np.not_equal(src // self.per_host, dst // self.per_host).astype(np.int64)

    def costs(self) -> dict[str, npt.NDArray[np.float64]]:
        """Return alpha, beta and gamma by class of link."""
        return {key: np.array([getattr(self.within_host, key), getattr(self.between_hosts, key)]) for key in _KEYS}

    def with_hosts_of(self, per_host: int | None) -> Network:
        """Return the same links among hosts of ``per_host`` ranks; the network as it is for ``None``."""
        return self if per_host is None else replace(self, per_host=per_host)

    def to_json(self) -> str:
        """Return the text that :func:`load` reads."""
        return json.dumps(asdict(self), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes, source: str = "the network") -> Network:
        """Make a network of the text that :meth:`to_json` returned.

        Raises:
            ValueError: ``text`` is no JSON, or an entry is missing, negative or unknown; names ``source``.
        """
        try:
            data = untrusted.parse(text, untrusted.ANYTHING, "it")
        except ValueError as error:
            raise ValueError(f"{source} is not JSON: {error}") from None
        try:
            return _from_dict(data)
        except ValueError as error:
            raise ValueError(f"{source}: {error}") from None


def _is_seconds(value: object) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return 0 <= value < _LARGEST and math.isfinite(value)


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= _MOST_RANKS


def _from_dict(data: Any) -> Network:
    optional = ("per_host", "measured", "measured_ranks", "overhead", "transport")
    _require_entries(data, ("name", "within_host", "between_hosts"), optional, "")
    for key in ("name", "transport"):
        if not isinstance(data.get(key, ""), str):
            raise ValueError(f"{key} is {shown(data[key])}, wanted a string")
    measured = data.get("measured", {})
    try:
        curves = {str(a): tuple((size, seconds) for size, seconds in curve) for a, curve in measured.items()}
    except (AttributeError, TypeError, ValueError):
        raise ValueError(f"measured is {shown(measured)}, wanted algorithm: [[bytes, seconds], ...]") from None
    if any(len(name) > _LONGEST_NAME for name in curves):
        raise ValueError(f"measured has a name of more than {_LONGEST_NAME} characters")
    found = Network(
        name=data["name"],
        within_host=_link(data, "within_host"),
        between_hosts=_link(data, "between_hosts"),
        per_host=data.get("per_host"),
        measured=curves,
        measured_ranks=data.get("measured_ranks", 0),
        overhead=data.get("overhead", 0.0),
        transport=data.get("transport", ""),
    )
    # numpy would turn integers that exceed its own into objects.
    floats = {name: tuple((float(x), float(y)) for x, y in curve) for name, curve in found.measured.items()}
    return replace(found, measured=floats, overhead=float(found.overhead))


def _link(data: dict[str, Any], key: str) -> Link:
    _require_entries(data[key], _KEYS, (), f"{key}.")
    try:
        link = Link(**data[key])
        return Link(**{name: float(getattr(link, name)) for name in _KEYS})
    except ValueError as error:
        raise ValueError(f"{key}.{error}") from None


def _require_entries(data: Any, wanted: tuple[str, ...], optional: tuple[str, ...], where: str) -> None:
    if not isinstance(data, dict):
        raise ValueError(f"{where or 'the whole '}is {shown(data)}, wanted an object with {', '.join(wanted)}")
    for key in wanted:
        if key not in data:
            raise ValueError(f"{where}{key} is missing")
    unknown = [key for key in data if key not in (*wanted, *optional)]
    if unknown:
        what = untrusted.one_line(unknown[0][:_LONGEST_NAME])
        raise ValueError(f"{where}{what} is unknown, wanted {', '.join((*wanted, *optional))}")


def _ethernet(gigabits: float, alpha: float) -> Network:
    """Describe hosts without GPUs, of one rank each: TCP between, shared memory within if there are more ranks.

    A core adds 5 GB/s.
    """
    gamma = 1 / 5e9
    return Network(
        name=f"ethernet-{gigabits:g}g",
        within_host=Link(alpha=5e-6, beta=1 / 8e9, gamma=gamma),
        between_hosts=Link(alpha=alpha, beta=8 / (gigabits * 1e9 * 0.94), gamma=gamma),
        per_host=1,
    )


def _infiniband(gigabits: float) -> Network:
    """Describe hosts of 8 GPUs: NVLink within, an adapter per GPU between; a GPU adds at its memory's speed."""
    gamma = 1 / 500e9
    return Network(
        name=f"infiniband-{gigabits:g}g",
        within_host=Link(alpha=6e-6, beta=1 / 150e9, gamma=gamma),
        between_hosts=Link(alpha=12e-6, beta=8 / (gigabits * 1e9 * 0.92), gamma=gamma),
        per_host=8,
    )


_KNOWN = [_ethernet(1, 60e-6), _ethernet(10, 40e-6), _ethernet(25, 30e-6), _infiniband(100), _infiniband(400)]
NETWORKS: dict[str, Network] = {network.name: network for network in _KNOWN}
"""Networks described from data sheets, not measured: orders of magnitude. Calibrate for figures of your own."""

DEFAULT_NETWORK = "ethernet-10g"


def load(network: Network | str | os.PathLike[str] | None) -> Network:
    """Load a network: itself, by its name in ``NETWORKS``, from a file, or the default one for ``None``.

    Raises:
        ValueError: there is no network of that name and no such file, or what the file says is wrong.
        TypeError: ``network`` is neither a network nor a name or path.
    """
    if isinstance(network, Network):
        return network
    if network is None:
        return NETWORKS[DEFAULT_NETWORK]
    if isinstance(network, str) and network in NETWORKS:
        return NETWORKS[network]
    if not isinstance(network, str | os.PathLike):
        raise TypeError(f"network is {network!r}, wanted a Network, a name or a path")
    return Network.from_json(_text_of(network), f"network file {network}")


def _text_of(path: str | os.PathLike[str]) -> str:
    """Return the text of a regular file; a pipe or a device might block the reader forever."""
    try:
        return untrusted.read_file(os.fspath(path), most=_LARGEST_FILE).decode()
    except (OSError, ValueError) as error:
        known = f"no such file that can be read, and none of {', '.join(NETWORKS)}"
        raise ValueError(f"network is {str(path)!r}: {known}: {error}") from None
