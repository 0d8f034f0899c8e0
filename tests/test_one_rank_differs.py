"""All agree or all raise: a wrong argument on one rank is an error on every rank, and the next call works."""

from __future__ import annotations

import pytest

from tests.on_ranks import on_ranks
from tests.one_rank import backend_calls, horovod_calls, parallel_calls, training_calls
from tests.one_rank.calls import Call, check_call

CALLS: dict[str, Call] = {**backend_calls.CALLS, **parallel_calls.CALLS, **horovod_calls.CALLS, **training_calls.CALLS}
"""Add a call here by adding it to one of the tables in tests/one_rank."""


@pytest.mark.parametrize("name", CALLS)
@on_ranks(2, timeout=60)
def test_a_wrong_argument_on_one_rank(name: str) -> None:
    check_call(CALLS[name], name)
