"""Writes docs/tested_optimizers.md from a report of `python -m tests.integrations.optimizers`, which lies beside it.

python docs/optimizers.py                # rewrites the page
python docs/optimizers.py --check        # changes nothing; exits with 1 and says that it is stale
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rewriting import rewrite

REPORT = Path(__file__).with_name("tested_optimizers.json")
PAGE = Path(__file__).with_name("tested_optimizers.md")

_PAGE = """# Tested optimizers

<!-- Written by python docs/optimizers.py from docs/tested_optimizers.json: changes here are lost. -->

{equal} of {number} optimizers give **equal** parameters, to the last bit, with and without pycomm. The others did not
run; none gave different parameters. Each took {steps} steps twice, in float32: on two ranks with different samples,
averaged by `pycomm.attach`, and alone, with the mean of both ranks' gradients. With `shard="optimizer"` in addition
(see [Any optimizer](sharding.md#any-optimizer)), {sharded} of them give equal parameters to rounding, and most to the
last bit; the others are refused, with the reason. To repeat it:

```sh
python -m tests.integrations.optimizers
```

Versions: {versions}.

Optimizers that require a closure got one. Those that use the value of the loss got the mean over the ranks; a script
must compute it. Optimizers like Muon got a list of the matrices, or only these.

{tables}"""


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
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    packages = dict.fromkeys(package for package, *_ in tried)
    return _PAGE.format(
        steps=report["steps"],
        equal=sum(outcome == "equal" for _, _, outcome, _ in tried),
        sharded=sum(sharded.startswith("equal") for *_, sharded in tried),
        number=len(tried),
        versions=versions,
        tables="\n".join(_section(package, tried) for package in packages),
    )


def _section(package: str, tried: list[list[str]]) -> str:
    mine = [(name, outcome) for owner, name, outcome, _ in tried if owner == package]
    equal = ", ".join(f"`{name}`" for name, outcome in mine if outcome == "equal")
    others = [f"| `{name}` | {outcome.replace('|', '/')} |" for name, outcome in mine if outcome != "equal"]
    table = ["", "| not among them | |", "| --- | --- |", *others] if others else []
    refused = [(name, sharded) for owner, name, _, sharded in tried if owner == package and "refused" in sharded]
    rows = [f"| `{name}` | {why.removeprefix('refused: ').replace('|', '/')} |" for name, why in refused]
    sharded = ["", '| refused with `shard="optimizer"` | |', "| --- | --- |", *rows] if rows else []
    return "\n".join([f"## {package}", "", f"Equal: {equal}.", *table, *sharded, ""])


def _differs(outcome: str) -> bool:
    return "differs by" in outcome or outcome.startswith("fails")


if __name__ == "__main__":
    sys.exit(main())
