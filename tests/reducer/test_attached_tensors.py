"""Tensors that are not plain parameters: taken where that is right, else one error on all ranks that names them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import pycomm
from tests.on_ranks import on_ranks
from tests.ranks import RankPool
from tests.reducer.attaching import attached, grouped
from tests.reducer.models import average_gradients, close, loss_of, losses_at, make_model, sgd
from tests.reducer.odd_tensors import Quantized, quantized


def frozen(tensor: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


class Holder(nn.Module):
    """Model with a parameter or buffer called "side.odd"."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__()
        self.body, self.side = make_model(), nn.Module()
        if isinstance(tensor, nn.Parameter):
            self.side.register_parameter("odd", tensor)
        else:
            self.side.register_buffer("odd", tensor)

    def forward(self, x: torch.Tensor) -> Any:
        return self.body(x)


TAKEN: dict[str, Callable[[], torch.Tensor]] = {
    "fp8": lambda: frozen(torch.eye(4).to(torch.float8_e4m3fn)),
    "uint8": lambda: frozen(torch.arange(8, dtype=torch.uint8)),
    "complex": lambda: frozen(torch.ones(3, dtype=torch.complex64)),
    "expanded": lambda: frozen(torch.eye(3).expand(4, 3, 3)),
    "two tensors": lambda: frozen(TwoTensor(torch.eye(2), torch.ones(2, 2))),
    "sparse": lambda: frozen(torch.eye(3).to_sparse()),
    "scales beside it": lambda: Quantized.of(torch.ones(4), 0.5),
    "meta": lambda: frozen(torch.empty(3, device="meta")),
    "empty": lambda: frozen(torch.empty(0, 3)),
    "expanded buffer": lambda: torch.eye(3).expand(4, 3, 3),
    "windows": lambda: torch.arange(5.0).as_strided((3, 3), (1, 1)),
    "sparse buffer": lambda: torch.eye(3).to_sparse(),
    "csr buffer": lambda: torch.eye(3).to_sparse_csr(),
    "quantized buffer": lambda: quantized(0.5, by_channel=True),
    "fp8 buffer": lambda: torch.ones(3).to(torch.float8_e5m2),
    "conjugated buffer": lambda: torch.tensor([1 + 2j]).conj(),
    "buffer of two tensors": lambda: TwoTensor(torch.eye(2), torch.ones(2, 2)),
    "meta buffer": lambda: torch.empty(3, device="meta"),
}


@pytest.mark.behavior(
    "Wrappers, copies and parameters",
    "freeze float8, quantized or sparse parameters",
    "Left alone, or set to rank 0's bytes if they are plain memory.",
)
@pytest.mark.filterwarnings("ignore:.*(Sparse|quantized|ComplexHalf)")
@pytest.mark.parametrize("buffers", ["local", "broadcast", "average"])
@on_ranks(2)
def test_odd_tensors_are_taken(buffers: str) -> None:
    """In the optimizer and outside it; with every step's comparison of replicas, and of buffers."""
    for make in TAKEN.values():
        for inside in (True, False) if isinstance(make(), nn.Parameter) else (False,):
            model, plain = Holder(make()), make_model()
            optimizer = sgd(model if inside else model.body)
            with attached(optimizer, model, buffers=buffers, check_replicas=1):
                for step in range(2):
                    optimizer.zero_grad()
                    loss_of(model, dist.get_rank(), step).backward()
                    for name, grad in average_gradients(plain, losses_at(step)).items():
                        close(model.body.get_parameter(name).grad, grad)
                    optimizer.step()
                    plain.load_state_dict(model.body.state_dict())


@on_ranks(2)
def test_rank_0s_bytes_are_sent() -> None:
    rank = dist.get_rank()
    model = make_model()
    base = torch.arange(3.0) * (rank + 1)
    model.register_buffer("expanded", base.expand(4, 3))
    model.register_buffer("fp8", torch.full((3,), float(rank + 1)).to(torch.float8_e4m3fn))
    model.register_parameter("ints", frozen(torch.full((2,), rank, dtype=torch.int64)))
    model.register_buffer("conjugated", torch.tensor([1j * (rank + 1)]).conj())
    with attached(sgd(model[:5]), model):
        assert model.expanded.tolist() == [[0, 1, 2]] * 4
        assert model.expanded.stride() == (0, 1)
        assert model.fp8.float().tolist() == [1, 1, 1]
        assert model.ints.tolist() == [0, 0]
        assert model.conjugated.tolist() == [-1j]


DIFFERENT: dict[str, tuple[Callable[[int], torch.Tensor], str]] = {
    "contents of two tensors": (
        lambda r: frozen(TwoTensor(torch.eye(2), torch.eye(2) * r)),
        "contents of 'side.odd' on rank 1",
    ),
    "contents of scales": (lambda r: Quantized.of(torch.ones(4), r), "contents of 'side.odd' on rank 1"),
    "contents of a matrix": (lambda r: (torch.eye(2) * (r + 1)).to_sparse(), "contents of 'side.odd' on rank 1"),
    "number of values": (
        lambda r: torch.eye(2 + r).to_sparse(),
        "'side.odd: [3, 3] torch.float32, sparse, 3 values' on rank 1",
    ),
    "size of a buffer": (lambda r: torch.ones(8 * (r + 1)), r"'side.odd: [16] torch.float32' on rank 1"),
    "dtype of a buffer": (
        lambda r: torch.ones(3).to([torch.float32, torch.int32][r]),
        "'side.odd: [3] torch.int32' on rank 1",
    ),
    "expanded on one": (lambda r: torch.ones(4) if r else torch.ones(1).expand(4), "1 elements in memory' on rank 0"),
    "meta on one": (
        lambda r: frozen(torch.ones(3, device="meta" if r else "cpu")),
        "on meta, without memory frozen' on rank",
    ),
    "size outside": (lambda r: nn.Parameter(torch.ones(3 + r)), "'side.odd: [4] torch.float32' on rank 1"),
}


def differ(kind: str) -> str:
    rank = dist.get_rank()
    model = Holder(DIFFERENT[kind][0](rank))
    optimizer = sgd(model.body)
    with pytest.raises(ValueError, match=r"side\.odd") as caught:
        pycomm.attach(optimizer, model)
    del model.side
    with attached(optimizer, model):  # nothing is left behind
        loss_of(model, rank, 0).backward()
    return str(caught.value)


@pytest.mark.behavior(
    "Wrappers, copies and parameters",
    "buffers or frozen parameters with another size or dtype on one rank",
    "`ValueError` everywhere.",
)
@pytest.mark.filterwarnings("ignore:.*Sparse")
@pytest.mark.parametrize("kind", DIFFERENT)
def test_ranks_that_differ_are_named_on_all(two_ranks: RankPool, kind: str) -> None:
    first, second = two_ranks.run(differ, kind)
    assert first == second
    assert DIFFERENT[kind][1] in first
    assert "ignore=" in first


REFUSED: list[tuple[type[Exception], str, Callable[[], Any]]] = [
    (TypeError, "parameter 'side.odd' is a TwoTensor, wrapped around", lambda: TwoTensor(torch.eye(2), torch.eye(2))),
    (TypeError, "parameter 'side.odd' is not laid out in ordinary memory", lambda: torch.eye(2).to_sparse()),
    (TypeError, "parameter 'side.odd' has dtype torch.complex64", lambda: torch.ones(2, dtype=torch.complex64)),
    (TypeError, "parameter 'side.odd' has dtype torch.float8", lambda: torch.ones(2).to(torch.float8_e4m3fn)),
    (
        TypeError,
        "parameter 'side.odd', a Parameter on device meta, has no memory",
        lambda: torch.ones(2, device="meta"),
    ),
    (ValueError, r"parameter 'side.odd' of shape \[4, 3\] has gaps or overlaps", lambda: torch.ones(3).expand(4, 3)),
    (ValueError, "parameter 'side.odd' of shape .* has gaps or overlaps", lambda: torch.ones(4, 4)[:, :2]),
]


def attach_refused(number: int, guilty: list[int]) -> str:
    model = Holder(nn.Parameter(REFUSED[number][2]() if dist.get_rank() in guilty else torch.ones(2)))
    with pytest.raises((TypeError, ValueError)) as caught:
        pycomm.attach(sgd(model), model, tuning=pycomm.Tuning(timeout=20))
    with attached(sgd(model.body), model.body):
        pass
    return f"{type(caught.value).__name__} {caught.value}"


@pytest.mark.behavior(
    "Wrappers, copies and parameters",
    "train sparse, complex, float8 or overlapping parameters",
    "`TypeError` or `ValueError` everywhere.",
)
@pytest.mark.filterwarnings("ignore:.*Sparse")
@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_trainable_ones_are_refused_by_name(two_ranks: RankPool, number: int) -> None:
    kind, says, _ = REFUSED[number]
    for message in two_ranks.run(attach_refused, number, [0, 1]):
        with pytest.raises(kind, match=says):
            raise kind(message.removeprefix(f"{kind.__name__} "))
    innocent, guilty = two_ranks.run(attach_refused, number, [1])
    assert innocent == f"ValueError rank 1 could not attach: {guilty.split(' ', 1)[1]}"


@pytest.mark.skipif(not hasattr(nn.Parameter(torch.ones(1)), "grad_dtype"), reason="torch before 2.10")
@on_ranks(2)
def test_gradients_of_another_dtype_are_refused() -> None:
    model: Any = nn.Linear(3, 3, dtype=torch.bfloat16)
    if dist.get_rank() == 0:
        model.bias.grad_dtype = torch.float32
    with pytest.raises(
        (TypeError, ValueError), match="parameter 'bias' has dtype torch.bfloat16 and grad_dtype torch.fl"
    ):
        pycomm.attach(sgd(model), model, tuning=pycomm.Tuning(timeout=20))
    model.bias.requires_grad_(False)  # has no gradients
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of half-precision parameters
        with attached(sgd(model), model):
            pass


@on_ranks(2)
def test_lazy_tensors_are_named() -> None:
    model = make_model()
    model.append(nn.LazyLinear(3))
    with pytest.raises(TypeError, match="parameter or buffer '5.weight' is not initialized: first run a forward"):
        pycomm.attach(sgd(model[:5]), model)


def keyed(how: str) -> str:
    """Rank 1 has momentum that rank 0 lacks."""
    rank = dist.get_rank()
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (rank + 1), momentum=0.9)
    if rank == 1 or how == "on both":
        optimizer.state[model[2].bias]["momentum_buffer"] = torch.full((30,), float(rank))
    if how == "on both" and rank == 1:
        optimizer.state[model[0].bias]["buffers"] = [1, 2]
    options: dict[str, Any] = {"ignore": ["optimizer state"]} if how == "keep" else {}
    try:
        reducer = pycomm.attach(optimizer, model, **grouped(timeout=20, **options))
    except ValueError as error:
        return str(error)
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert len(optimizer.state) == (rank if how == "keep" else 0)
    reducer.detach()
    return "attached"


@pytest.mark.behavior(
    "Replicas, buffers and state",
    "`the optimizer state of rank ... does not fit rank ...: ...`",
    '`attach` copies rank 0\'s state. If ranks hold shards: `Tuning(ignore=["optimizer state"])`. Otherwise load it '
    "on all ranks.",
)
def test_state_that_rank_0_lacks(two_ranks: RankPool) -> None:
    for how, says in (
        ("on one", "'momentum_buffer' of parameter '2.bias'"),
        ("on both", "'buffers' of parameter '0.bias'"),
    ):
        first, second = two_ranks.run(keyed, how)
        assert first == second
        assert first.startswith(
            f"the optimizer state of rank 0 does not fit rank 1: it has {says}, which would be lost"
        )
        assert 'ignore=["optimizer state"]' in first
    assert two_ranks.run(keyed, "keep") == ["attached", "attached"]


@on_ranks(2)
def test_a_sharded_optimizer_is_resumed_with_its_state() -> None:
    rank = dist.get_rank()
    model = make_model()

    def train(resumed: bool) -> list[torch.Tensor]:
        net = make_model()
        state: dict[int, torch.Tensor] = {}
        for part in range(2):
            if part == 0 or resumed:
                optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
                optimizer.state.update(
                    {p: {"momentum_buffer": state[i]} for i, p in enumerate(net.parameters()) if i in state}
                )
                reducer = pycomm.attach(optimizer, net, tuning=pycomm.Tuning(timeout=20, ignore=["optimizer state"]))
            for step in range(3):
                optimizer.zero_grad()
                loss_of(net, rank, 3 * part + step).backward()
                optimizer.step()
            state = {i: optimizer.state[p]["momentum_buffer"] for i, p in enumerate(net.parameters())}
            if part == 1 or resumed:
                reducer.detach()
        return [p.detach() for p in net.parameters()]

    for here, there in zip(train(True), train(False), strict=True):
        assert torch.equal(here, there)
    for options, says in (({"on_failure": "shrink"}, "Survive"), ({"shard": "optimizer"}, "shard")):
        with pytest.raises(ValueError, match=rf'ignore=\["optimizer state"\] cannot be combined with .*{says}'):
            pycomm.attach(sgd(model), model, **grouped(ignore=["optimizer state"], **options))
