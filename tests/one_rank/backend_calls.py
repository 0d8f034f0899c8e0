"""Collectives of torch.distributed on the backend "pycomm"."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from tests.one_rank.calls import Call, Make


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(*shape or (4, 4))


def freed() -> torch.Tensor:
    """Return a tensor whose memory was taken away, as FSDP leaves parameters that it has resharded."""
    x = ones()
    x.untyped_storage().resize_(0)
    return x


# torch itself looks at dtypes within a call; what it refuses it does not hand on, so that nobody can be told.
NO_DENSE: tuple[Make, ...] = (
    lambda: torch.ones(4, 4, device="meta"),
    lambda: torch.eye(4).to_sparse_csr(),
    lambda: torch.eye(4).to_sparse_csc(),
    lambda: ones().to_mkldnn(),
    freed,
)
OTHERS: tuple[Make, ...] = (
    *NO_DENSE,
    lambda: torch.eye(4).to_sparse(),
    lambda: torch.ones(4, 4, dtype=torch.float64),
    lambda: torch.ones(4, 4, dtype=torch.int32),
    lambda: torch.ones(4, 4, dtype=torch.uint16),
    lambda: ones().to(torch.float8_e4m3fn),
    lambda: torch.quantize_per_tensor(ones(), 1.0, 0, torch.qint8),
    lambda: ones(2),
)
EXPANDED: Make = lambda: torch.ones(1, 4).expand(4, 4)  # noqa: E731


def size() -> int:
    return dist.get_world_size()


def each() -> list[torch.Tensor]:
    return [ones() for _ in range(size())]


def first_of(make: Make) -> Make:
    """Return a function that makes a list, as :func:`each` does, whose first tensor ``make`` makes."""
    return lambda: [make(), *each()[1:]]


def call(run: Callable[..., Any], right: Callable[[], Mapping[str, Any]], **wrong: tuple[Make, ...]) -> Call:
    return Call(run, right, wrong)


def _listed(makers: tuple[Make, ...]) -> tuple[Make, ...]:
    return tuple(map(first_of, makers))


CALLS: dict[str, Call] = {
    "all_reduce": call(dist.all_reduce, lambda: {"tensor": ones()}, tensor=(*OTHERS, EXPANDED)),
    "all_reduce, async": call(
        lambda tensor: dist.all_reduce(tensor, async_op=True).wait(), lambda: {"tensor": ones()}, tensor=OTHERS
    ),
    "all_reduce of a sparse tensor": call(
        dist.all_reduce,
        lambda: {"tensor": torch.eye(4).to_sparse(), "op": dist.ReduceOp.SUM},
        tensor=(ones, lambda: torch.eye(5).to_sparse(), lambda: torch.eye(4).double().to_sparse(), *NO_DENSE),
        op=(lambda: dist.ReduceOp.MAX,),
    ),
    "all_reduce_coalesced": call(
        dist.all_reduce_coalesced,
        lambda: {"tensors": each()},
        tensors=(
            *_listed((*NO_DENSE, EXPANDED)),
            lambda: [ones()],
            lambda: each() * 2,
        ),
    ),
    "reduce": call(dist.reduce, lambda: {"tensor": ones(), "dst": 0}, tensor=(*OTHERS, EXPANDED), dst=(lambda: 1,)),
    "broadcast": call(
        dist.broadcast, lambda: {"tensor": ones(), "src": 0}, tensor=(*OTHERS, EXPANDED), src=(lambda: 1,)
    ),
    "all_gather": call(
        dist.all_gather,
        lambda: {"tensor_list": each(), "tensor": ones()},
        tensor_list=(*_listed((*NO_DENSE, EXPANDED)), lambda: each() * 2),
        tensor=NO_DENSE,
    ),
    "all_gather of another dtype": call(
        lambda dtype: dist.all_gather([x.to(dtype) for x in each()], ones().to(dtype)),
        lambda: {"dtype": torch.float32},
        dtype=(lambda: torch.int32, lambda: torch.float64, lambda: torch.complex64),
    ),
    "all_gather_into_tensor": call(
        dist.all_gather_into_tensor,
        lambda: {"output_tensor": ones(4 * size(), 4), "input_tensor": ones()},
        output_tensor=(*OTHERS, lambda: torch.ones(1, 4).expand(4 * size(), 4)),
        input_tensor=OTHERS,
    ),
    "reduce_scatter": call(
        dist.reduce_scatter,
        lambda: {"output": ones(), "input_list": each()},
        output=(*NO_DENSE, EXPANDED),
        input_list=(*_listed(NO_DENSE), lambda: each() * 2),
    ),
    "reduce_scatter_tensor": call(
        dist.reduce_scatter_tensor,
        lambda: {"output": ones(), "input": ones(4 * size(), 4)},
        output=(*OTHERS, EXPANDED),
        input=OTHERS,
    ),
    "gather": call(
        lambda tensor, gather_list: dist.gather(tensor, gather_list if dist.get_rank() == 0 else None),
        lambda: {"tensor": ones(), "gather_list": each()},
        tensor=NO_DENSE,
    ),
    "scatter": call(
        lambda tensor, scatter_list: dist.scatter(tensor, scatter_list if dist.get_rank() == 0 else None),
        lambda: {"tensor": ones(), "scatter_list": each()},
        tensor=(*NO_DENSE, EXPANDED),
    ),
    "all_to_all": call(
        dist.all_to_all,
        lambda: {"output_tensor_list": each(), "input_tensor_list": each()},
        output_tensor_list=_listed((*NO_DENSE, EXPANDED)),
        input_tensor_list=(*_listed(NO_DENSE), lambda: each() * 2),
    ),
    "all_to_all_single": call(
        dist.all_to_all_single,
        lambda: {"output": ones(2 * size(), 4), "input": ones(2 * size(), 4)},
        output=(*NO_DENSE, lambda: ones(1, 4).expand(2 * size(), 4)),
        input=(*NO_DENSE, lambda: ones(3 * size(), 4)),
    ),
    "all_to_all_single by sizes": call(
        lambda **given: dist.all_to_all_single(ones(2 * size(), 4), ones(2 * size(), 4), **given),
        lambda: {"output_split_sizes": [2] * size(), "input_split_sizes": [2] * size()},
        output_split_sizes=(lambda: [1] * size(), lambda: [2], lambda: [-1, 5, *[2] * (size() - 2)]),
        input_split_sizes=(lambda: [3, 1, *[2] * (size() - 2)], lambda: [2]),
    ),
}
