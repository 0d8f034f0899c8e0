"""All agree or all raise: a wrong argument on one rank is an error on every rank, and the next call works."""

from __future__ import annotations

import tempfile

import pytest
import torch.distributed as dist

from pycomm.collectives.transport import rendezvous
from tests.on_ranks import on_ranks
from tests.one_rank import backend_calls, horovod_calls, parallel_calls, training_calls
from tests.one_rank.anything import ANYTHING
from tests.one_rank.calls import Call, check_call

CALLS: dict[str, Call] = {
    **backend_calls.CALLS,
    **parallel_calls.CALLS,
    **horovod_calls.CALLS,
    **training_calls.CALLS,
}
"""Public collective calls by name: add one to a table in tests/one_rank."""

FEW = 2
"""Number of wrong values of each argument that the quick test tries."""

NO_COLLECTIVES = ("spoil", "number")
"""Arguments of functions in the tables that are not arguments of the call."""


@pytest.mark.behavior(
    "Starting and launching",
    "pass a wrong argument, tensor or object to a collective call on one rank",
    "Error everywhere at once; the next call works.",
)
@pytest.mark.parametrize("name", CALLS)
@on_ranks(2, timeout=60)
def test_a_wrong_argument_on_one_rank(name: str) -> None:
    check_call(CALLS[name], name, {argument: values[:FEW] for argument, values in CALLS[name].wrong.items()})


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
@on_ranks(2, 3, timeout=300)
def test_all_wrong_arguments_on_one_rank(name: str) -> None:
    check_call(CALLS[name], name, CALLS[name].wrong)


@pytest.mark.slow
@pytest.mark.parametrize("per_host", [1, 2], ids=["torch", "hierarchical"])
@pytest.mark.parametrize("name", [*backend_calls.CALLS, *parallel_calls.CALLS])
@on_ranks(3, timeout=300)
def test_a_wrong_argument_on_one_host(name: str, per_host: int) -> None:
    """With ``per_host`` ranks on each host."""
    host = f"{rendezvous.host_identity()}/{dist.get_rank() // per_host}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rendezvous, "host_identity", lambda: host)
        check_call(CALLS[name], name, CALLS[name].wrong)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", [*parallel_calls.CALLS, *horovod_calls.CALLS, *training_calls.CALLS])
@on_ranks(2, timeout=600)
def test_any_value_of_an_argument_on_one_rank(name: str) -> None:
    """All ranks accept it, or none. (torch itself checks the arguments of its own collectives, on each rank alone.)"""
    call = CALLS[name]
    values = {argument: ANYTHING for argument in call.wrong if argument not in NO_COLLECTIVES}
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)  # some values are names of folders that a call makes
        check_call(call, name, values, are_wrong=False)
