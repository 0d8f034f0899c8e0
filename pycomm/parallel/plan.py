"""Plans: how a model is split over devices, as data that can be written, read and explained."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import MappingProxyType

from pycomm import checks, untrusted
from pycomm.untrusted import ANYTHING, COUNT, MapOf, OneOf

DIMENSIONS = ("pp", "dp", "ep", "tp")
"""Dimensions of a mesh, from the outermost to the innermost: stages, replicas, experts, parts of an operator."""

STYLES = ("columns", "rows", "vocabulary", "sequence")
"""Ways to split an operator over the ranks of "tp"; see :func:`pycomm.parallel.split`."""

_LARGEST = 16 << 20  # bytes
_SHAPE = {
    "mesh?": MapOf(ANYTHING),
    "split?": MapOf(str),
    "stages?": ANYTHING,
    "schedule?": str,
    "microbatches?": COUNT,
    "recompute?": bool,
    "sharded_optimizer?": bool,
    "compression?": OneOf(None, str),
}
"""Shape of the JSON. The plan's constructor checks the values."""


@dataclass(frozen=True)
class Plan:
    """Plan of a model's split over devices, written by ``pycomm plan``. ``split`` takes it and applies ``split``.

    The script applies the other fields: ``mesh(**plan.mesh)``, ``cut(model, plan.stages)``, and so on.

    Attributes:
        mesh: size of each dimension of ``DIMENSIONS`` that is in use, such as ``{"pp": 2, "dp": 2}``.
        split: style of each module that is split over "tp", by its name in the model, in which ``*`` stands for one
            part of a dotted name: ``{"blocks.*.up": "columns"}``.
        stages: for each stage of the pipeline, the names of its modules, in order; empty without a pipeline.
        schedule: name of the table that orders the stages' work, from :mod:`pycomm.schedule.pipeline`.
        microbatches: number of parts that a replica's batch is cut into.
        recompute: whether activations are computed again in the backward pass instead of kept.
        sharded_optimizer: whether the optimizer's state is sharded over "dp" instead of replicated.
        compression: method that compresses gradients on "dp", by its name in ``cost.planning.METHODS``, such as
            "fp16"; ``None`` for none.

    Raises:
        ValueError: a field has a value that no model could be split by.
    """

    mesh: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    split: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    stages: tuple[tuple[str, ...], ...] = ()
    schedule: str = "one_f_one_b"
    microbatches: int = 1
    recompute: bool = False
    sharded_optimizer: bool = False
    compression: str | None = None

    def __post_init__(self) -> None:
        for name, size in self.mesh.items():
            if name not in DIMENSIONS:
                raise ValueError(f"mesh has a dimension {name!r}, wanted some of {', '.join(DIMENSIONS)}")
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ValueError(f"mesh has {name} = {size!r}, wanted a whole number of at least 1")
        for module, style in self.split.items():
            if style not in STYLES:
                raise ValueError(f"split of {module!r} is {style!r}, wanted one of {', '.join(STYLES)}")
        if not isinstance(self.microbatches, int) or isinstance(self.microbatches, bool) or self.microbatches < 1:
            raise ValueError(f"microbatches is {self.microbatches!r}, wanted a whole number of at least 1")
        counts = Counter(name for stage in self.stages for name in stage)
        twice = next((name for name, count in counts.items() if count > 1), None)
        if twice is not None:
            raise ValueError(f"module {twice!r} is in two stages, or twice in one: wanted each module once")
        if any(not stage for stage in self.stages):
            raise ValueError(f"stage {self.stages.index(())} has no modules")

    @property
    def devices(self) -> int:
        """Number of devices: the product of the mesh's sizes."""
        return math.prod(self.mesh.values())

    def to_json(self) -> str:
        """Return the plan as a JSON object, which :meth:`from_json` reads."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        plain = {name: dict(value) if isinstance(value, Mapping) else value for name, value in values.items()}
        return json.dumps(plain, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes, source: str = "this plan") -> Plan:
        """Read what :meth:`to_json` wrote.

        Raises:
            ValueError: ``text`` is no JSON object, has an unknown field, or one with a wrong value; names ``source``.
        """
        data = untrusted.parse(text, _SHAPE, source)
        known = [each.name for each in fields(cls)]
        unknown = next((name for name in data if name not in known), None)
        if unknown is not None:
            raise ValueError(f"{source} has a field {checks.shown(unknown)}, wanted some of {', '.join(known)}")
        stages = data.get("stages", [])
        if not isinstance(stages, list) or not all(isinstance(stage, list) for stage in stages):
            raise ValueError(
                f"{source} is malformed: stages is {checks.shown(stages)}, wanted a list of lists of names"
            )
        try:
            return cls(**{**data, "stages": tuple(tuple(map(str, stage)) for stage in stages)})
        except ValueError as error:
            raise ValueError(f"{source} is of no use: {error}") from error

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read the plan in the file ``path``.

        Raises:
            OSError: the file cannot be read.
            ValueError: it is no regular file, or as from :meth:`from_json`.
        """
        return cls.from_json(untrusted.read_file(path, most=_LARGEST), str(path))
