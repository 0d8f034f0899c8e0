"""Writes docs/tested_optimizers.md from a report of `python -m tests.integrations.optimizers`, which lies beside it.

python docs/optimizers.py                # rewrites the page
python docs/optimizers.py --check        # changes nothing; exits with 1 and says that it is stale
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rewriting import rewrite, wrapped

REPORT = Path(__file__).with_name("tested_optimizers.json")
PAGE = Path(__file__).with_name("tested_optimizers.md")

_PAGE = """# Tested optimizers

<!-- Written by python docs/optimizers.py from docs/tested_optimizers.json: changes here are lost. -->

Look up whether your optimizer works with pycomm. {equal} of {number} optimizers give **equal** parameters, to the last
bit, with and without pycomm; the others did not run. With [`shard="optimizer"`](sharding.md#any-optimizer), {sharded}
give equal parameters, {rounded} of them only to rounding; the others are refused with an error.

Each optimizer took {steps} steps in float32: on two ranks with different samples, averaged by `pycomm.attach`, and
alone, with the mean of both ranks' gradients. To repeat the test:

```sh
python -m tests.integrations.optimizers
```

{versions}

If an optimizer uses the value of the loss, average the loss over the ranks, as this test did. Optimizers like Muon got
only the matrices, or a list of them.

{tables}"""

_REFUSED = {
    "all gradients together|with other gradients of some parameters": "a step depends on all gradients",
    "cannot be sent": "state cannot be sent",
    r"step\(closure\)": "requires a closure",
    "requires the optimizer that steps": "wraps another optimizer",
}
"""What refusals with ``shard="optimizer"`` say, and what the page says for short."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Rewrite the page, or say that it is stale; return the exit code."""
    return rewrite("the page of tested optimizers", "optimizers.py", _pages, arguments)


def _pages() -> dict[Path, str]:
    return {PAGE: render(json.loads(REPORT.read_text(encoding="utf-8")))}


def render(report: dict[str, Any]) -> str:
    """Return the page of a report.

    Raises:
        ValueError: the report has an optimizer that came to something else, for which the page has no words.
    """
    tried = report["optimizers"]
    differing = [f"{package}.{name}: {said}" for package, name, *both in tried for said in both if _differs(said)]
    if differing:
        raise ValueError(f"the page says that none differs, but {', '.join(differing)}")
    versions = wrapped(f"Versions: {', '.join(' '.join(version) for version in report['versions'].items())}.")
    packages = dict.fromkeys(package for package, *_ in tried)
    return _PAGE.format(
        steps=report["steps"],
        equal=sum(outcome == "equal" for _, _, outcome, _ in tried),
        sharded=sum(sharded.startswith("equal") for *_, sharded in tried),
        rounded=sum(sharded == "equal to rounding" for *_, sharded in tried),
        number=len(tried),
        versions=versions,
        tables="\n".join(_section(package, tried) for package in packages),
    )


def _section(package: str, tried: list[list[str]]) -> str:
    """Return the names of ``package``'s optimizers by result; those that are equal first."""
    results: dict[str, list[str]] = {}
    for owner, name, outcome, sharded in tried:
        if owner == package:
            results.setdefault(_result(outcome, sharded), []).append(f"`{name}`")
    ordered = sorted(results, key=lambda result: (not result.startswith("Equal"), result))
    shown = [wrapped(f"- {result}: {', '.join(results[result])}.") for result in ordered]
    return "\n".join([f"## {package}", "", *shown, ""])


def _result(outcome: str, sharded: str) -> str:
    if outcome != "equal":
        what, _, why = outcome.rstrip(".").partition(": ")
        return f"{what.capitalize()} ({why})"
    if "refused" not in sharded:
        return "Equal, also with `shard`"
    told = (short for pattern, short in _REFUSED.items() if re.search(pattern, sharded))
    return f"Equal, refused with `shard` ({next(told, sharded.removeprefix('refused: '))})"


def _differs(outcome: str) -> bool:
    return "differs by" in outcome or outcome.startswith("fails")


if __name__ == "__main__":
    sys.exit(main())
