"""shard_batch: pieces partition the batch in order, whatever it is made of, and mistakes name their place."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict, namedtuple
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils.rnn import pack_sequence

from pycomm.optim.batch_shards import Shard, shard_batch
from tests.on_ranks import on_ranks


class Pair(NamedTuple):
    image: Any
    label: Any


def shards(batch: Any, world_size: int, **options: Any) -> list[Shard]:
    return [shard_batch(batch, rank=rank, world_size=world_size, **options) for rank in range(world_size)]


def test_golden_numbers() -> None:
    pieces = shards(10, 4)
    assert [piece.data for piece in pieces] == [slice(0, 3), slice(3, 6), slice(6, 8), slice(8, 10)]
    assert [piece.num_samples for piece in pieces] == [3, 3, 2, 2]
    assert [piece.weight for piece in pieces] == [0.3, 0.3, 0.2, 0.2]
    assert [piece.data for piece in shards(12, 4, per_rank=3)] == [slice(3 * rank, 3 * rank + 3) for rank in range(4)]
    # The last batch of an epoch.
    assert [piece.data for piece in shards(5, 4, per_rank=3)] == [slice(0, 2), slice(2, 3), slice(3, 4), slice(4, 5)]


@given(world_size=st.integers(1, 40), samples=st.integers(1, 300), slack=st.integers(0, 20), fixed=st.booleans())
def test_pieces_partition_the_batch(world_size: int, samples: int, slack: int, fixed: bool) -> None:
    samples = max(samples, world_size)
    options = {"per_rank": -(-samples // world_size) + slack} if fixed else {}
    batch = torch.arange(samples * 2).view(samples, 2)
    pieces = shards(batch, world_size, **options)
    counts = [piece.num_samples for piece in pieces]
    assert max(counts) - min(counts) <= 1
    assert [piece.weight for piece in pieces] == [count / samples for count in counts]
    assert sum(piece.weight for piece in pieces) == pytest.approx(1, abs=1e-12)
    for piece, wanted in zip(pieces, torch.tensor_split(batch, world_size), strict=True):
        assert torch.equal(piece.data, wanted)
        assert piece.data.data_ptr() == wanted.data_ptr(), "a view"
        assert len(piece.data) == piece.num_samples
    assert torch.equal(torch.cat([piece.data for piece in pieces]), batch)
    ranges = [range(samples)[piece.data] for piece in shards(samples, world_size, **options)]
    assert [i for piece in ranges for i in piece] == list(range(samples))


@given(per_rank=st.integers(1, 20), world_size=st.integers(1, 20))
def test_full_batch_of_per_rank(per_rank: int, world_size: int) -> None:
    for rank, piece in enumerate(shards(per_rank * world_size, world_size, per_rank=per_rank)):
        assert piece.data == slice(rank * per_rank, (rank + 1) * per_rank)


def tensors(*shape: int) -> torch.Tensor:
    return torch.rand(6, *shape)


nestings = st.recursive(
    st.sampled_from([(), (3,), (2, 2)]).map(lambda shape: tensors(*shape)),
    lambda inner: (
        st.lists(inner, min_size=1, max_size=3)
        | st.lists(inner, min_size=1, max_size=3).map(tuple)
        | st.dictionaries(st.sampled_from("abc"), inner, min_size=1)
        | st.builds(Pair, inner, inner)
    ),
    max_leaves=8,
)


def same(joined: list[Any], whole: Any) -> None:
    """The pieces have the types of the whole, and their tensors come together to its."""
    assert {type(piece) for piece in joined} == {type(whole)}
    if isinstance(whole, torch.Tensor):
        assert torch.equal(torch.cat(joined), whole)
        return
    keys = list(whole) if isinstance(whole, dict) else range(len(whole))
    for piece in joined:
        assert (list(piece) if isinstance(whole, dict) else range(len(piece))) == keys
    for key in keys:
        same([piece[key] for piece in joined], whole[key])


@given(batch=nestings, world_size=st.integers(1, 6))
def test_any_nesting(batch: Any, world_size: int) -> None:
    same([piece.data for piece in shards(batch, world_size)], batch)


def test_kinds_of_dicts_and_tuples() -> None:
    x = torch.arange(4)
    ordered = shard_batch(OrderedDict(b=x, a=x), rank=1, world_size=2).data
    assert isinstance(ordered, OrderedDict)
    assert list(ordered) == ["b", "a"]
    whole: defaultdict[str, Any] = defaultdict(list, x=x)
    default = shard_batch(whole, rank=1, world_size=2).data
    assert default.default_factory is list
    assert default["x"].tolist() == [2, 3]
    assert whole["x"] is x, "the batch stays as it was"
    user = shard_batch(UserDict(x=x), rank=0, world_size=2).data
    assert isinstance(user, UserDict)
    assert user["x"].tolist() == [0, 1]
    old = namedtuple("old", "first second")
    assert shard_batch(old(x, (x,)), rank=0, world_size=4).data == old(torch.tensor([0]), (torch.tensor([0]),))


@pytest.mark.parametrize(
    ("batch", "error", "says"),
    [
        (torch.tensor(3.0), ValueError, "^batch has no dimensions, wanted the samples along the first"),
        ({"x": [torch.rand(4), torch.tensor(1)]}, ValueError, r"^batch\['x'\]\[1\] has no dimensions"),
        (
            (torch.rand(4), torch.rand(5)),
            ValueError,
            r"^batch\[1\] has 5 samples, batch\[0\] has 4; wanted the same in",
        ),
        (
            {"x": Pair(torch.rand(0), torch.rand(4))},
            ValueError,
            r"batch\['x'\].label has 4 samples, batch\['x'\].image",
        ),
        (
            {"x": torch.rand(4), 3: "y"},
            TypeError,
            r"^batch\[3\] is a str, wanted a tensor, or a tuple, list or dict of",
        ),
        ([torch.rand(4), None], TypeError, r"^batch\[1\] is a NoneType, wanted a tensor, .* tensors$"),
        ([torch.rand(4), 4], TypeError, r"^batch\[1\] is a int"),
        ("abc", TypeError, "^batch is a str, wanted a tensor, .* or an int$"),
        (True, TypeError, "^batch is a bool"),
        (4.0, TypeError, "^batch is a float"),
        (pack_sequence([torch.rand(3), torch.rand(2)]), TypeError, "^batch is a PackedSequence"),
        ([], ValueError, "^batch holds no tensor"),
        ({"x": ()}, ValueError, "^batch holds no tensor"),
        (torch.rand(0, 3), ValueError, "^batch has 0 samples, wanted at least one for each of 4 ranks"),
        ([torch.rand(3)], ValueError, "^batch has 3 samples, wanted at least one for each of 4 ranks"),
        (-1, ValueError, "^batch has -1 samples, wanted at least one for each of 4 ranks"),
    ],
)
def test_bad_batches(batch: Any, error: type[Exception], says: str) -> None:
    messages = set()
    for rank in range(4):
        with pytest.raises(error, match=says) as caught:
            shard_batch(batch, rank=rank, world_size=4)
        messages.add(str(caught.value))
    assert len(messages) == 1, "the same on every rank"


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"rank": 4, "world_size": 4}, ValueError, "rank is 4, wanted 0 <= rank < 4"),
        ({"rank": -1, "world_size": 4}, ValueError, "rank is -1, wanted at least 0"),
        ({"rank": 0, "world_size": 0}, ValueError, "world_size is 0, wanted at least 1"),
        ({"rank": 0.0, "world_size": 4}, TypeError, "rank is 0.0, wanted an int"),
        ({"rank": 0, "world_size": 4, "per_rank": 0}, ValueError, "per_rank is 0, wanted at least 1"),
        ({"rank": 0, "world_size": 4, "per_rank": 2.0}, TypeError, "per_rank is 2.0, wanted an int"),
        (
            {"rank": 0, "world_size": 4, "per_rank": 15},
            ValueError,
            r"batch has 64 samples, wanted at most per_rank \* world_size = 15 \* 4 = 60",
        ),
        ({"rank": 0}, RuntimeError, "torch.distributed is not initialized: .* or give both rank and world_size"),
        ({"world_size": 4}, RuntimeError, "torch.distributed is not initialized"),
        ({}, RuntimeError, "torch.distributed is not initialized"),
    ],
)
def test_bad_arguments(options: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        shard_batch(64, **options)


def test_shard_is_frozen() -> None:
    shard = shard_batch(torch.rand(4), rank=0, world_size=2)
    with pytest.raises(AttributeError):
        shard.weight = 1.0  # type: ignore[misc]
    assert shard == shard
    assert shard != shard_batch(torch.rand(4), rank=0, world_size=2)


@on_ranks(2)
def test_rank_and_world_size_of_the_group() -> None:
    rank = dist.get_rank()
    assert shard_batch(5).data == [slice(0, 3), slice(3, 5)][rank]
    alone = dist.new_group([1])
    if rank == 1:
        assert shard_batch(5, process_group=alone).data == slice(0, 5)
    else:
        with pytest.raises(ValueError, match="this process is not a member of process_group"):
            shard_batch(5, process_group=alone)
    assert shard_batch(5, rank=0).data == slice(0, 3)
