"""What is behind tensors of all kinds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from pycomm.collectives import tensor_memory
from pycomm.collectives.tensor_memory import comparable, digests_of, memory_of
from tests.reducer.odd_tensors import Quantized, overlapping, quantized

PLAIN: list[Callable[[], torch.Tensor]] = [
    lambda: torch.arange(12.0).view(3, 4),
    lambda: torch.arange(12.0).view(3, 4).t(),
    lambda: torch.arange(24.0).view(4, 6)[::2, 1:4],  # with gaps
    lambda: torch.arange(12).as_strided((2, 2), (2, 3)),  # gaps in the middle, no overlap
    lambda: torch.arange(3.0).expand(4, 3),
    lambda: torch.tensor(2.0).expand(2, 3),
    lambda: torch.ones(1).expand(8),
    lambda: torch.arange(5.0).as_strided((3, 3), (1, 1)),
    lambda: torch.empty(0, 3),
    lambda: torch.tensor([True, False]),
    lambda: torch.eye(4).to(torch.float8_e4m3fn).t(),
    lambda: torch.tensor([1 + 2j, 3 - 1j], dtype=torch.complex128),
    lambda: torch.tensor([1 + 2j, 3 - 1j]).conj(),
    lambda: torch.tensor([1 + 2j, 3 - 1j]).conj().imag,
    lambda: nn.Parameter(torch.arange(4.0), requires_grad=False),
]


@pytest.mark.parametrize("make", PLAIN)
def test_plain_memory_is_copied_through_its_parts(make: Callable[[], torch.Tensor]) -> None:
    source, target = make(), make()
    storage = target.untyped_storage()
    storage.copy_(torch.UntypedStorage(bytes(len(storage))) if len(storage) else storage)
    memory, there = memory_of(source), memory_of(target)
    assert memory.writable
    assert memory.text == there.text
    for part, other in zip(there.parts, memory.parts, strict=True):
        assert part.numel() * part.element_size() <= len(storage)
        part.copy_(other)
    assert digests_of([memory]) == digests_of([there])
    assert torch.equal(_bytes(target), _bytes(source))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)


def test_expanded_memory_is_sent_once() -> None:
    (part,) = memory_of(torch.eye(3).expand(100, 3, 3)).parts
    assert part.numel() == 9
    assert memory_of(torch.zeros(()).expand(5)).text == "1 elements in memory"


ODD: dict[str, Callable[[float], torch.Tensor]] = {
    "two tensors": lambda x: TwoTensor(torch.eye(2), torch.full((2, 2), x)),
    "parameter of two": lambda x: nn.Parameter(TwoTensor(torch.eye(2), torch.full((2, 2), x)), requires_grad=False),
    "sparse": lambda x: torch.diag(torch.tensor([1.0, x])).to_sparse(),
    "csr": lambda x: torch.diag(torch.tensor([1.0, x])).to_sparse_csr(),
    "csc": lambda x: torch.diag(torch.tensor([1.0, x])).to_sparse_csc(),
    "quantized": lambda x: quantized(x, by_channel=False),
    "quantized by channel": lambda x: quantized(x, by_channel=True),
    "mkldnn": lambda x: torch.full((2, 2), x).to_mkldnn(),
    "nested": lambda x: torch.nested.nested_tensor([torch.full((2,), x), torch.ones(3)]),
    "jagged": lambda x: torch.nested.nested_tensor([torch.full((2,), x), torch.ones(3)], layout=torch.jagged),
    "scales beside it": lambda x: Quantized.of(torch.ones(4), x),
    "overlapping with gaps": overlapping,
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ODD)
def test_odd_memory_is_compared(kind: str) -> None:
    if kind == "mkldnn" and not torch.backends.mkldnn.is_available():
        pytest.skip("torch has no mkldnn here")
    first, same, other = (memory_of(ODD[kind](x)) for x in (2.0, 2.0, 3.0))
    assert not first.writable
    assert first.parts
    first, same, other = digests_of([first, same, other])  # type: ignore[assignment]
    assert first == same != other


def test_sparse_matrices_in_another_order_are_equal() -> None:
    indices, values = torch.tensor([[0, 1], [0, 1]]), torch.tensor([1.0, 2.0])
    first = torch.sparse_coo_tensor(indices, values, (2, 2), check_invariants=True)
    other = torch.sparse_coo_tensor(indices.flip(1), values.flip(0), (2, 2), check_invariants=True)
    assert digests_of([memory_of(first)]) == digests_of([memory_of(other)])


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_tensors_without_memory() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    freed = torch.ones(3)
    freed.untyped_storage().resize_(0)
    with FakeTensorMode():
        fake = torch.ones(3)
    for tensor in (torch.empty(3, device="meta"), freed, fake):
        assert memory_of(tensor).parts == ()
    with pytest.raises(TypeError, match="is not initialized: first run a forward"):
        memory_of(nn.LazyLinear(3).weight)


def test_what_replicas_compare_is_hashable() -> None:
    plain = torch.ones(3)
    named: list[tuple[str, Any]] = [
        ("plain", plain),
        ("fp8", torch.ones(3).to(torch.float8_e5m2)),
        ("two", TwoTensor(torch.ones(2), torch.ones(2))),
        ("sparse", torch.eye(2).to_sparse()),
        ("nothing", torch.empty(3, device="meta")),
    ]
    found = comparable(named)
    assert found[0][1] is plain
    assert [name for name, _ in found] == ["plain", "fp8", "two", "two", "sparse", "sparse"]


FLAT = torch.arange(64.0)
SQUARE = FLAT.view(8, 8)
COMPLEX = torch.zeros(4, dtype=torch.complex64)
SPARSE = torch.eye(3).to_sparse()

OVERLAPS: list[tuple[list[torch.Tensor], list[tuple[int, int]]]] = [
    ([nn.Parameter(SQUARE), nn.Parameter(SQUARE.t()), FLAT[63:]], [(0, 1), (0, 2), (1, 2)]),
    ([SQUARE[:4], SQUARE[4:], SQUARE[3:5]], [(0, 2), (1, 2)]),
    (list(nn.LSTM(3, 4, 2).parameters()), []),
    ([SQUARE[:, ::2], SQUARE[:, 1::2]], []),  # they interleave
    ([SQUARE[:, ::2], SQUARE[:, 1::2], SQUARE[:, 2:4]], [(0, 2), (1, 2)]),
    ([SQUARE[::2], SQUARE[1]], []),
    ([SQUARE[::2], SQUARE[2]], [(0, 1)]),
    ([SQUARE[:, 1:2], FLAT.view(torch.int16)[3:4]], [(0, 1)]),  # its upper half
    ([SQUARE[:, 1:2], FLAT.view(torch.int16)[4:5]], []),
    ([FLAT[:1].expand(5), FLAT[1:]], []),
    ([FLAT[:1].expand(5), FLAT[:2]], [(0, 1)]),
    ([FLAT[4:8], FLAT.as_strided((3, 3), (1, 1))], [(0, 1)]),
    ([COMPLEX, torch.view_as_real(COMPLEX), COMPLEX.conj()], [(0, 1), (0, 2), (1, 2)]),
    ([SPARSE, SPARSE.values()[1:]], [(0, 1)]),  # part of what it consists of
    ([torch.empty(0), torch.empty(3, 0), torch.empty(3, device="meta"), torch.empty(3, device="meta")], []),
    ([nn.UninitializedParameter(), FLAT], []),
]


@pytest.mark.parametrize(("tensors", "wanted"), OVERLAPS)
def test_overlaps_are_of_elements(tensors: list[torch.Tensor], wanted: list[tuple[int, int]]) -> None:
    """Not of storages, nor of the memory between the first and the last element."""
    assert tensor_memory.overlapping(tensors) == wanted


def test_overlaps_are_those_of_the_elements_one_by_one() -> None:
    generator = torch.Generator().manual_seed(0)

    def number(end: int) -> int:
        return int(torch.randint(end, (1,), generator=generator))

    def part() -> torch.Tensor:
        size, stride = (1 + number(3), 1 + number(3)), (number(6), 1 + number(4))
        return FLAT.as_strided(size, stride, number(30))

    for _ in range(300):
        tensors = [part() for _ in range(3)]
        found = [set(tensor.contiguous().view(-1).tolist()) for tensor in tensors]
        pairs = [(i, j) for i in range(3) for j in range(i + 1, 3) if found[i] & found[j]]
        assert tensor_memory.overlapping(tensors) == pairs
