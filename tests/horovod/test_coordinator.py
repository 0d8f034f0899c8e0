"""The coordinator by itself: simulated ranks come to the same answers, whatever they announce, in whatever order."""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from pycomm.horovod.coordinator import Coordinator, op_of, zeros_for

SUM = "allreduce op=sum float32[2]"


def announce(coordinators: list[Coordinator], rank: int, name: str, count: int = 0, signature: str = SUM) -> None:
    """Let all hear that ``rank`` announces an operation: by its number if it has one, as ranks do."""
    number = coordinators[rank].number_of(name, signature)
    for coordinator in coordinators:
        if number is not None:
            coordinator.announce(rank, number, count)
        else:
            coordinator.announce_new(rank, name, count, signature)
            coordinator.register(name, signature)


@given(st.integers(1, 5), st.lists(st.integers(0, 6), min_size=1, max_size=40), st.integers(0, 9999))
def test_every_operation_is_done_once_by_all(size: int, asked: list[int], seed: int) -> None:
    random = Random(seed)
    coordinators = [Coordinator(size) for _ in range(size)]
    keys = [(f"n{name}", i + 1) for i, name in enumerate(asked)]
    orders = [random.sample(keys, len(keys)) for _ in range(size)]
    done: list[list[tuple[str, int]]] = [[] for _ in range(size)]
    while any(orders):
        for rank in range(size):
            for _ in range(random.randint(0, 3)):
                if orders[rank]:
                    name, count = orders[rank].pop()
                    announce(coordinators, rank, name, count)
        for rank, coordinator in enumerate(coordinators):
            responses = coordinator.responses()
            assert not any(response.error for response in responses)
            done[rank] += [response.key for response in responses]
    assert all(sorted(each) == sorted(keys) for each in done)
    assert all(each == done[0] for each in done), "not in the same order"
    assert not coordinators[0].waiting()


def test_what_all_announce_at_once_takes_no_notes() -> None:
    coordinator = Coordinator(2)
    number = coordinator.register("a", SUM)
    found = coordinator.agreed([number], [3])
    assert found is not None
    assert (found[0].key, found[0].signature, found[0].error) == (("a", 3), SUM, "")
    coordinator.announce_new(0, "b", 0, SUM)
    assert coordinator.agreed([number], [4]) is None, "b is pending"
    assert coordinator.waiting() == {("b", 0): [1]}


def test_old_names_are_forgotten_on_all_ranks_alike() -> None:
    coordinators = [Coordinator(2) for _ in range(2)]
    for i in range(5000):
        for rank in range(2):
            announce(coordinators, rank, "used" if i % 100 == 0 else f"step {i}")
        assert [len(coordinator.responses()) for coordinator in coordinators] == [1, 1]
    known = [
        {i for i in range(5000) if coordinator.number_of(f"step {i}", SUM) is not None} for coordinator in coordinators
    ]
    assert known[0] == known[1]
    assert len(known[0]) < 4097
    assert max(known[0]) == 4999
    assert coordinators[0].number_of("used", SUM) is not None


def test_signatures_say_what_zeros_to_make() -> None:
    zeros = zeros_for("allreduce op=mean prescale_factor=0.5 float32[2,3] int64[] float16@cuda[0]")
    assert [(list(x.shape), str(x.dtype)) for x in zeros] == [
        ([2, 3], "torch.float32"),
        ([], "torch.int64"),
        ([0], "torch.float16"),
    ]
    assert op_of("allreduce op=mean float32[2]") == "mean"


def test_a_name_is_known_until_the_round_is_over() -> None:
    coordinator = Coordinator(2)
    for i in range(4096):
        announce([coordinator, coordinator], i % 2, f"old {i}")
        coordinator.announce_new(1 - i % 2, f"old {i}", 0, SUM)
        coordinator.responses()
    number = coordinator.number_of("old 0", SUM)
    assert number is not None
    announce([coordinator], 0, "new")
    coordinator.announce(1, number, 0)
    coordinator.responses()
    assert coordinator.number_of("old 0", SUM) == number
    assert coordinator.number_of("old 1", SUM) is None, "the oldest that nobody has asked for"


def test_what_is_outstanding_is_not_forgotten() -> None:
    coordinator = Coordinator(2)
    for i in range(5000):
        announce([coordinator], 0, f"n{i}")
    coordinator.responses()
    for i in range(5000):
        number = coordinator.number_of(f"n{i}", SUM)
        assert number is not None
        coordinator.announce(1, number, 0)
    assert len(coordinator.responses()) == 5000
    assert sum(coordinator.number_of(f"n{i}", SUM) is not None for i in range(5000)) == 4096
