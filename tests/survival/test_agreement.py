"""Agreement on who is left, where somebody else has written to its store."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from torch._C._distributed_c10d import HashStore

from pycomm import CommError
from pycomm.training.elastic.agreement_store import AgreementStore
from pycomm.training.elastic.liveness import ProcessWatch, round_store
from pycomm.training.elastic.membership import Decision, _Round


@pytest.fixture
def agreement() -> Iterator[AgreementStore]:
    made = AgreementStore(0, HashStore(), "test")
    yield made
    made.close()


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("key", "text", "message"),
    [
        ("report/1", "{}", "report/1 is malformed: it has no 'committed'"),
        ("report/1", '{"committed": "3", "silent": [], "why": ""}', 'report/1 .* committed is "3", wanted an integer'),
        ("report/1", '{"committed": 3, "silent": {"x": "died"}, "why": ""}', "silent is an object, wanted a list"),
        ("report/1", '{"committed": 3, "silent": [["x", ""]], "why": ""}', r'silent\[0\]\[0\] is "x", wanted an'),
        ("report/1", "[" * 100_000, "report/1 is nested too deeply"),
        (
            "decision",
            '{"world": [], "committed": 3, "gone": []}',
            "decision .* world is a list of 0, wanted one of >= 1",
        ),
        ("decision", '{"world": [0, 7], "committed": 3, "gone": []}', r"its world \[0, 7\] is no part of \[0, 1\]"),
        ("decision", '{"world": [0], "committed": 3, "gone": [["1\\u001b", ""]]}', "gone.* wanted an integer"),
        ("decision", "[[0], 3, {}]", "decision is malformed: it is a list, wanted an object"),
    ],
)
def test_what_no_rank_has_written_is_named(agreement: AgreementStore, key: str, text: str, message: str) -> None:
    round_store(agreement.store, 1).set(key, text)
    with pytest.raises(CommError, match=f"holds what no rank has written: .*{message}"):
        _Round(agreement, 1, (0, 1), ProcessWatch(), 1.0).decision()


@pytest.mark.timeout(60)
def test_ranks_follow_a_proposal_of_what_they_reported(agreement: AgreementStore) -> None:
    attempt = _Round(agreement, 1, (0, 1, 2), ProcessWatch(), 60.0)
    attempt.report(0, {"committed": 3, "silent": [(1, "died\x1b")], "why": ""})
    attempt.report(2, {"committed": 4, "silent": [], "why": ""})
    attempt.note_gone(1, "died\x1b")
    assert attempt.decision() is None
    attempt.propose()
    assert attempt.decision() == Decision((0, 2), 4, {1: "died\\x1b"})
