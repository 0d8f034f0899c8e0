"""Tables in torch's format, and in pictures."""

from __future__ import annotations

import csv
import io
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules as torch_schedules

from pycomm.schedule import pipeline
from pycomm.schedule.pipeline import Pipeline
from tests.schedule.pipeline.tables import TABLES


def same(one: Pipeline, other: Pipeline) -> bool:
    sizes = ("num_ranks", "num_stages", "num_microbatches")
    programs = [one.program(rank) == other.program(rank) for rank in range(one.num_ranks)]
    placed = np.array_equal(one.rank_of_stage, other.rank_of_stage)
    return placed and all(programs) and all(getattr(one, name) == getattr(other, name) for name in sizes)


@settings(max_examples=30, deadline=None)
@given(TABLES)
def test_there_and_back(table: Pipeline) -> None:
    text = pipeline.to_csv(table)
    back = pipeline.from_csv(text)
    assert same(table, back)
    assert pipeline.to_csv(back) == text
    assert pipeline.verify(back).num_actions == len(table)


@pytest.mark.skipif(not hasattr(torch_schedules, "_validate_schedule"), reason="this torch does not check tables")
@pytest.mark.parametrize("name", pipeline.names())
def test_torch_reads_all_cells(name: str) -> None:
    table = pipeline.by_name(name, 3, 7)
    rows = list(csv.reader(io.StringIO(pipeline.to_csv(table))))
    read = {rank: [torch_schedules._Action.from_str(cell) for cell in row] for rank, row in enumerate(rows)}
    for rank, row in enumerate(read.values()):
        actions = [action for action in row if action is not None]
        assert [str(action) for action in actions] == [action.cell for action in table.program(rank)]
    # torch's own check, and its passes that add sends and receives.
    placement = torch_schedules._validate_schedule(read, 3, table.num_stages, 7)
    assert placement == dict(enumerate(table.rank_of_stage.tolist()))
    acting = {rank: [action for action in row if action is not None] for rank, row in read.items()}
    lowered = torch_schedules._add_send_recv(acting, placement.__getitem__, table.num_stages)
    sends = [action for row in lowered.values() for action in row if str(action.computation_type.value)[:4] == "SEND"]
    assert len(sends) == pipeline.verify(table).num_messages


def test_by_hand() -> None:
    table = pipeline.from_csv("0F0,,0I0,0W0\n,1F0, 1B0 ,\n\n")
    assert (table.num_ranks, table.num_stages, table.num_microbatches, table.splits_weights) == (2, 2, 1, True)
    assert table.time.tolist() == [0, 2, 3, 1, 2]
    assert pipeline.to_csv(table) == "0F0,,0I0,0W0\n,1F0,1B0,\n"
    assert not pipeline.from_csv("0F0,0B0").splits_weights


def test_overlapping_pairs_are_read_in_order() -> None:
    """And take two columns, for all ranks."""
    table = pipeline.from_csv("0F0,(0F1; 0B0)OVERLAP_F_B,0B1\n,1F0,1B0,1F1,1B1", "by hand")
    assert table.name == "by hand"
    assert pipeline.to_csv(table) == "0F0,0F1,0B0,0B1,,\n,1F0,,1B0,1F1,1B1\n"


WRONG = {
    "0F0,0X0": "row 0, cell 1 is '0X0', wanted an action such as 0F0, 0B0, 0I0 or 0W0",
    "0F0\n1F": "row 1, cell 0 is '1F', wanted an action",
    "0F0\n-1F0": "row 1, cell 0 is '-1F0', wanted",
    "0F0,1SEND_F0": "row 0, cell 1 is '1SEND_F0', wanted",
    "0F0,0F0x": "row 0, cell 1 is '0F0x', wanted",
    "(0F0;1B1)OVERLAP": "row 0, cell 0 is '(0F0;1B1)OVERLAP', wanted",
    "()OVERLAP_F_B": "row 0, cell 0 is '()OVERLAP_F_B', wanted",
    "((0F0;1B1)OVERLAP_F_B;0F0)OVERLAP_F_B": "row 0, cell 0 is ",
    "x" * 100: "'" + "x" * 80 + "...'",
    "0F9999999999": "row 0, cell 0 is ",
    "0F999999999": "row 0, cell 0 (0F999999999): wanted numbers of at most ",
    "999999999F0": "row 0, cell 0 (999999999F0): wanted numbers of at most ",
    "\u0661F\u0662": "row 0, cell 0 is ",  # digits, but Arabic ones
    "0F0\n0B0": "row 1, cell 0 (0B0): stage 0 is on two ranks, see row 0, cell 0 (0F0)",
    "0F0,2F0": "stage 1 of 3 has no action, so no rank has it",
    "": "this table has no action",
    "\n,,\n": "this table has no action",
    '"0F0': "this is not a table of comma-separated cells: ",
    "0F0," + "x" * 200000: "this is not a table of comma-separated cells: ",
}


@pytest.mark.parametrize("text", WRONG, ids=range(len(WRONG)))
def test_mistakes_are_named(text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(WRONG[text])):
        pipeline.from_csv(text)


@pytest.mark.parametrize("text", [None, 5, b"0F0", ["0F0"]])
def test_text_that_is_none(text: Any) -> None:
    with pytest.raises(ValueError, match="text is .*, wanted a string"):
        pipeline.from_csv(text)


@given(st.text(alphabet='0123FBIW,;()\n" OVERLAP_', max_size=40))
def test_any_text_is_a_table_or_a_mistake(text: str) -> None:
    try:
        table = pipeline.from_csv(text)
    except ValueError:
        return
    assert same(table, pipeline.from_csv(pipeline.to_csv(table)))


def test_sizes_may_be_said() -> None:
    """So that a text from which a microbatch or a stage is missing is not taken for a smaller table."""
    with pytest.raises(pipeline.ScheduleError, match="forward 1 of stage 0 is missing"):
        pipeline.verify(pipeline.from_csv("0F0,0B0", num_microbatches=2))
    with pytest.raises(ValueError, match="stage 1 of 2 has no action"):
        pipeline.from_csv("0F0,0B0", num_stages=2)
    with pytest.raises(ValueError, match=r"row 0, cell 0 \(0F3\): wanted less than num_microbatches, 3"):
        pipeline.from_csv("0F3,0B0", num_microbatches=3)
    with pytest.raises(ValueError, match="num_stages is 0, wanted"):
        pipeline.from_csv("0F0,0B0", num_stages=0)
    assert pipeline.from_csv("0F0,0B0", splits_weights=True).splits_weights


def test_picture() -> None:
    assert pipeline.picture(pipeline.one_f_one_b(3, 4)) == (
        "one_f_one_b: 3 ranks, 3 stages, 4 microbatches\n"
        "\n"
        "rank 0 F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3\n"
        "rank 1 .  F0 F1 .  B0 F2 B1 F3 B2 .  B3 .\n"
        "rank 2 .  .  F0 B0 F1 B1 F2 B2 F3 B3 .  .\n"
    )


def test_picture_of_several_stages_per_rank() -> None:
    assert pipeline.picture(pipeline.zero_bubble_v(2, 1)) == (
        "zero_bubble_v: 2 ranks, 4 stages, 1 microbatch\n"
        "\n"
        "rank 0 0F0 .   .   3F0 3I0 3W0 .   .   0I0 0W0\n"
        "rank 1 .   1F0 2F0 .   .   2I0 2W0 1I0 1W0 .\n"
    )


def test_sparse_times_are_drawn_close() -> None:
    table = pipeline.from_csv("0F0,0B0\n1F0,1B0")
    table.time[:] = [-(2**62), 2**62, 0, 5]
    assert pipeline.to_csv(table) == "0F0,,,0B0\n,1F0,1B0,\n"
