"""Tables for tests: by chance, and by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from pycomm.schedule import pipeline

TABLES = st.builds(pipeline.by_name, st.sampled_from(pipeline.names()), st.integers(1, 4), st.integers(1, 9))


def table_of(cells: list[list[str]], **changes: Any) -> pipeline.Pipeline:
    """Return the table whose ranks do what ``cells`` say, with ``changes`` to its attributes.

    With ``rank_of_stage`` among them, stages may be on several ranks.
    """
    if "rank_of_stage" in changes:
        whole = pipeline.from_csv(",".join(cell for row in cells for cell in row), splits_weights=False)
        changes["rank"] = [rank for rank, row in enumerate(cells) for _ in row]
        return replace(whole, num_ranks=len(cells), **changes)
    return replace(pipeline.from_csv("\n".join(",".join(row) for row in cells)), **changes)
