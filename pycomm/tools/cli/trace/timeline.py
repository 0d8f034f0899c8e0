"""Timeline of one step on all ranks: reading traces, writing them as chrome-trace JSON and as a picture."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from pycomm import untrusted
from pycomm.collectives.recorder.traces import ChromeTrace
from pycomm.untrusted import COUNT, ListOf, Number, OneOf

LANES = ("training", "communication", "wire")
_COLORS = {
    "forward": "#9ecae1",
    "backward": "#3182bd",
    "wait": "#de2d26",
    "unpack": "#fdae6b",
    "optimizer.step": "#31a354",
    # What the script does in between: loading data, logging, clipping.
    "between steps": "#d9d9d9",
    "between passes": "#f0d9b5",
    "before backward": "#e7cb94",
    "before step": "#c7e9c0",
    "communication": "#bcbddc",
    "wire": "#756bb1",
}
_OTHER_COLOR = "#969696"  # of spans with unknown names
_LARGEST = 16 << 20  # bytes: more spans than a picture can show
_LONGEST_NAME = 100  # characters in the picture
_SECONDS = Number(0, 1e11)
_SPAN = {"lane": OneOf(*LANES), "name": str, "began": _SECONDS, "ended": _SECONDS}
_NUMBER = Number(1, 2**31, whole=True)
_SHAPE = {"rank": COUNT, "size": _NUMBER, "step": _NUMBER, "optimizer?": _NUMBER, "spans": ListOf(_SPAN)}


class NoTraceError(ValueError):
    """A file is not a step trace."""


@dataclass(frozen=True)
class RankTrace:
    """Trace of one optimizer on one rank, written by :class:`pycomm.training.reducer.step_trace.StepTrace`."""

    rank: int
    size: int
    step: int
    optimizer: int
    spans: Sequence[dict[str, Any]]

    @property
    def name(self) -> str:
        """The rank, and the number of the optimizer unless it is the first."""
        return f"rank {self.rank}" + ("" if self.optimizer == 1 else f", optimizer {self.optimizer}")


def read_traces(paths: Iterable[Path]) -> list[RankTrace]:
    """Return the traces at ``paths``, by rank and optimizer."""
    found = sorted((_read(path) for path in paths), key=lambda trace: (trace.rank, trace.optimizer))
    if len({trace.step for trace in found}) > 1:
        raise NoTraceError("the files are of different steps: " + ", ".join(str(trace.step) for trace in found))
    return found


def _read(path: Path) -> RankTrace:
    try:
        text = untrusted.read_file(path, most=_LARGEST)
    except OSError as error:
        raise NoTraceError(f"{path} cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise NoTraceError(str(error)) from None
    try:
        content = untrusted.printable(untrusted.parse(text, _SHAPE, "it"), _SHAPE)
    except ValueError as error:
        raise NoTraceError(f"{path} is not a trace that pycomm has written: {error}") from None
    spans = content["spans"]
    if not spans or any(span["ended"] < span["began"] for span in spans):
        what = "a span ends before it begins" if spans else "it has no spans"
        raise NoTraceError(f"{path} is not a trace that pycomm has written: {what}")
    return RankTrace(content["rank"], content["size"], content["step"], content.get("optimizer", 1), spans)


def save_json(traces: Sequence[RankTrace], path: Path) -> None:
    """Write ``traces`` for chrome://tracing and Perfetto: a process per rank, a thread per lane."""
    with untrusted.naming(path), path.open("w") as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": ')
        made = ChromeTrace(file)
        for trace in traces:
            made.name_process(trace.rank, f"rank {trace.rank}")
            first = (trace.optimizer - 1) * len(LANES)
            for tid, lane in enumerate(LANES, first):
                made.name_row(trace.rank, tid, lane if trace.optimizer == 1 else f"{lane}, optimizer {trace.optimizer}")
            for span in trace.spans:
                times = {"ts": 1e6 * span["began"], "dur": 1e6 * (span["ended"] - span["began"])}
                tid = first + LANES.index(span["lane"])
                made.add(span["name"], "X", trace.rank, tid=tid, cat=span["lane"], **times)
        made.end()
        file.write("}")


def save_picture(traces: Sequence[RankTrace], path: Path) -> None:
    """Write a PNG with a row for each lane of each trace, in milliseconds since the first span."""
    start = min(span["began"] for trace in traces for span in trace.spans)
    rows = [(trace, lane) for trace in traces for lane in LANES]
    figure = Figure(figsize=(14, 1.5 + 0.45 * len(rows)), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    used: set[str] = set()
    for height, (trace, lane) in enumerate(rows):
        for span in trace.spans:
            if span["lane"] == lane:
                color = span["name"] if span["name"] in _COLORS else lane
                used.add(color)
                left, width = 1e3 * (span["began"] - start), 1e3 * (span["ended"] - span["began"])
                overlay = span["name"] in ("wait", "unpack")
                paint = _COLORS.get(color, _OTHER_COLOR)
                axes.barh(height, width, left=left, height=0.45 if overlay else 0.8, color=paint, linewidth=0)
                if lane == "communication":
                    name = span["name"].removeprefix("bucket ")[:_LONGEST_NAME].encode("ascii", "replace").decode()
                    axes.text(left, height, name, fontsize=7, va="center", clip_on=True, parse_math=False)
    axes.set_yticks(range(len(rows)), [f"{trace.name} {lane}" for trace, lane in rows], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds")
    axes.grid(axis="x", alpha=0.3)
    patches = [Patch(color=color, label=name) for name, color in _COLORS.items() if name in used]
    if patches:
        figure.legend(handles=patches, loc="outside upper center", ncols=len(patches), fontsize="small")
    with untrusted.naming(path):
        figure.savefig(path, format="png")


def summary(traces: Sequence[RankTrace]) -> list[str]:
    """Return a line per trace: milliseconds of each kind of span."""
    lines = []
    for trace in traces:
        sums: dict[str, float] = {}
        for span in trace.spans:
            name = span["name"] if span["lane"] == "training" else span["lane"]
            sums[name] = sums.get(name, 0.0) + span["ended"] - span["began"]
        lines.append(f"{trace.name}: " + ", ".join(f"{name} {1e3 * each:.3g} ms" for name, each in sums.items()))
    return lines
