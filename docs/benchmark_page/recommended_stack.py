"""What docs/recommended_stack.md has from the report of ``bench.recommended_stack``: tables, and what follows."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import mean, median, stdev
from typing import Any

from benchmark_page.reports import Report, Reports, heading
from benchmark_page.tables import MISSING, duration, link, megabytes, span, table, times

STACK, PLAIN = "the stack", "plain DDP"
_TARGET = 0.625  # of the plain run's epochs
_PART = re.compile(r"(<!-- stack: (\w+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
_OPTIONS = ("links", "hosts", "seeds", "epochs", "rates", "tuning_seeds")


@dataclass(frozen=True)
class Spread:
    """Mean and standard deviation over seeds."""

    mean: float
    deviation: float

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        return cls(mean(values), stdev(values) if len(values) > 1 else 0.0)

    def against(self, other: Spread) -> str:
        """Say whether this is another number than ``other``."""
        apart = abs(self.mean - other.mean) > self.deviation + other.deviation
        return "beyond" if apart else "within"


def recommended_stack(reports: Reports) -> str:
    """Show the losses, bytes and seconds, with a link to the page that has the rest."""
    (report,) = reports.values()
    text = (
        "Deep gradient compression, float16 with masters and a loss scale, LARS, warm-up and binary blocks together, "
        f"against DistributedDataParallel with tuned SGD, on {report['settings']['hosts']} hosts. [The recommended "
        "stack](recommended_stack.md) says what each ingredient gains, and which do not combine well.\n"
    )
    return "\n".join([heading("The recommended stack", reports), text, _links(report, (PLAIN, STACK))])


def filled(page: str, reports: Reports) -> str:
    """Return the page with what stands between its markers as the report has it.

    Raises:
        ValueError: there is more than one report, or a marker names no part.
    """
    if len(reports) != 1:
        raise ValueError(f"{', '.join(reports)}: docs/recommended_stack.md shows one report")
    ((name, report),) = reports.items()

    def fill(match: re.Match[str]) -> str:
        if match[2] == "origin":
            return match[1] + _origin(name, report) + match[4]
        if match[2] not in _PARTS:
            raise ValueError(f"recommended_stack.md has a part {match[2]!r}, wanted origin or {', '.join(_PARTS)}")
        return match[1] + _PARTS[match[2]](report) + match[4]

    return _PART.sub(fill, page)


def chosen_rates(report: Report) -> dict[str, float]:
    """Return the rate with the least loss on validation samples, by recipe."""
    finite = [row for row in report["search"] if row["loss"] is not None]  # the others broke down
    # The last of each name is the one that stays.
    return {row["name"]: row["rate"] for row in sorted(finite, key=lambda row: row["loss"], reverse=True)}


def _origin(name: str, report: Report) -> str:
    reports = {name: report}
    machine = heading("", reports).removeprefix("## \n\n")
    options = " ".join(_option(key, report["settings"][key]) for key in _OPTIONS)
    reason = report["simulated"]
    how = "Links were limited for real." if reason is None else f"Seconds on links are **simulated** ({reason})."
    return f"```sh\npython -m bench.recommended_stack {options} --json bench/results/{name}\n```\n\n{how} {machine}"


def _option(name: str, value: Any) -> str:
    text = ",".join(f"{each or 0:g}" for each in value) if isinstance(value, list) else f"{value:g}"
    return f"--{name.replace('_', '-')} {text}"


def _names(report: Report) -> list[str]:
    return list(dict.fromkeys(row["name"] for row in report["runs"]))


def _spread(report: Report, name: str, key: str) -> Spread:
    """Return what the seeds gave: of losses once each, as they do not depend on the link."""
    by_seed: dict[int, list[float]] = {}
    for row in (row for row in report["runs"] if row["name"] == name):
        by_seed.setdefault(row["seed"], []).append(row[key])
    return Spread.of([mean(values) for values in by_seed.values()])


def _trained(report: Report) -> str:
    rates = chosen_rates(report)
    tried = [row["rate"] for row in report["search"]]
    rows = [["", "learning rate", "training loss", "test accuracy", "steps skipped"]]
    for name in _names(report):
        loss, accuracy = (_spread(report, name, key) for key in ("loss", "accuracy"))
        edge = ", the last tried" if rates[name] in (min(tried), max(tried)) else ""
        rows.append(
            [
                name,
                f"{rates[name]:g}{edge}",
                f"{loss.mean:.4f} ± {loss.deviation:.4f}",
                f"{100 * accuracy.mean:.2f} ± {100 * accuracy.deviation:.2f} %",
                f"{_spread(report, name, 'skipped').mean:.1f}",
            ]
        )
    return table(rows)


def _all_links(report: Report) -> str:
    return _links(report, _names(report))


def _links(report: Report, names: Any) -> str:
    gbits = sorted({row["link"] for row in report["runs"]}, key=lambda gbit: gbit or float("inf"))
    rows = [["", "on the wire, of a host", *(f"{word}, {link(gbit)}" for gbit in gbits for word in ("step", "run"))]]
    for name in names:
        steps = _spread(report, name, "steps").mean
        cells = [megabytes(_spread(report, name, "wire_bytes").mean)]
        for gbit in gbits:
            seconds = _seconds(report, name, gbit)
            cells += [duration(median(seconds) / steps), f"{span(seconds, '{:.1f} s'.format)}"]
        rows.append([name, *cells])
    return table(rows)


def _reached(report: Report) -> str:
    """Show what it took to come to a loss on test samples: the plain run's after a part of its epochs."""
    gbits = sorted({row["link"] for row in report["runs"]}, key=lambda gbit: gbit or float("inf"))
    epoch = max(1, round(_TARGET * report["settings"]["epochs"]))
    plain = [row["points"][epoch - 1][1] for row in report["runs"] if row["name"] == PLAIN]
    target = mean(plain)
    rows = [[f"to a test loss of {target:.3f}", "seeds", "epochs", *(link(gbit) for gbit in gbits)]]
    for name in _names(report):
        found = {gbit: _ways_to(report, name, gbit, target) for gbit in gbits}
        first = found[gbits[0]]
        cells = [
            f"{len(first)} of {report['settings']['seeds']}",
            f"{median(n for n, _ in first):g}" if first else MISSING,
        ]
        cells += [f"{median(seconds for _, seconds in ways):.1f} s" if ways else MISSING for ways in found.values()]
        rows.append([name, *cells])
    return table(rows)


def _ways_to(report: Report, name: str, gbit: Any, target: float) -> list[tuple[int, float]]:
    """Return epochs and seconds to the target, of each seed that came to it."""
    found = []
    for row in (row for row in report["runs"] if (row["name"], row["link"]) == (name, gbit)):
        reached = [(epoch, seconds) for epoch, (seconds, loss) in enumerate(row["points"], 1) if loss <= target]
        found += reached[:1]
    return found


def _bought(report: Report) -> str:
    """Show the stack without each ingredient, over the whole stack; of seconds, medians over the seeds."""
    gbits = sorted({row["link"] for row in report["runs"]}, key=lambda gbit: gbit or float("inf"))
    rows = [["left out", "training loss, less the stack's", "bytes", *(f"time, {link(gbit)}" for gbit in gbits)]]
    whole = _spread(report, STACK, "loss")
    for name in _names(report):
        if name in (STACK, PLAIN):
            continue
        loss = _spread(report, name, "loss")
        sent = _spread(report, name, "wire_bytes").mean / _spread(report, STACK, "wire_bytes").mean
        pace = [median(_seconds(report, name, gbit)) / median(_seconds(report, STACK, gbit)) for gbit in gbits]
        difference = f"{loss.mean - whole.mean:+.4f} ({loss.against(whole)} the deviations)"
        rows.append([name.removeprefix("without "), difference, *map(times, [sent, *pace])])
    return table(rows)


def _seconds(report: Report, name: str, gbit: Any) -> list[float]:
    return [row["seconds"] for row in report["runs"] if (row["name"], row["link"]) == (name, gbit)]


_PARTS: Mapping[str, Callable[[Report], str]] = {
    "trained": _trained,
    "links": _all_links,
    "reached": _reached,
    "bought": _bought,
}
