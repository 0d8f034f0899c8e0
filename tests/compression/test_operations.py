"""What TopK and DGC do to a bucket: some kernels and one collective, no operation of torch, and none per parameter."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import pycomm
from pycomm import Communicator, kernels
from pycomm.collectives.bucket import FINGERPRINT_BITS, Bucket
from pycomm.compression.base import Scaling
from tests.on_ranks import on_ranks
from tests.reducer.test_gpu_path import METHODS as ALL_METHODS

KERNELS = ["sparsify", "pack_entries", "all_gather", "unpack_entries", "add_entries"]

# Of a GPU's operations these launch nothing, and the last one waits on the CPU alone.
FREE = ("view", "slice", "select", "as_strided", "detach", "alias", "split", "empty", "_local_scalar_dense")


class Operations(TorchDispatchMode):
    """Notes the operations of torch that would launch something on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if not name.startswith(FREE):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def operations_of(
    method: Any,
    num_params: int,
    monkeypatch: pytest.MonkeyPatch,
    missing: bool = False,
    loss_scale: float | torch.Tensor = 1.0,
) -> list[str]:
    """Return the kernels, collectives and torch's operations of one bucket, once it has seen a few steps."""
    noted: list[str] = []

    def noting(name: str, function: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            noted.append(name)
            return function(*args, **options)

        return call

    for name in kernels.__all__:
        if callable(getattr(kernels, name)) and not isinstance(getattr(kernels, name), type):
            monkeypatch.setattr(kernels, name, noting(name, getattr(kernels, name)))
    with Communicator(timeout=20) as communicator:
        monkeypatch.setattr(communicator, "all_gather", noting("all_gather", communicator.all_gather))
        params = [torch.zeros(9, 7 + j) for j in range(num_params)]
        bucket = Bucket([f"p{j}" for j in range(num_params)], params, communicator)
        exchange = method.make(bucket, communicator)
        with torch.no_grad():
            for _ in range(3):
                grads: list[torch.Tensor | None] = [torch.randn_like(p) for p in params]
                if missing:
                    grads[0] = None
                scaling = Scaling(communicator.size, loss_scale=loss_scale)
                exchange.pack([torch.zeros_like(p) for p in params], scaling)  # as another bucket of this step
                exchange.send()
                exchange.finish(True)
                noted.clear()
                with Operations() as operations:
                    exchange.pack(grads, scaling)
                    exchange.send()
                    assert exchange.finite()
                    exchange.finish(True)
    return noted + operations.names


METHODS = {
    "TopK": pycomm.TopK(0.02),
    "TopK, half": pycomm.TopK(0.02, half_values=True),
    "TopK, nothing kept": pycomm.TopK(0.02, error_feedback=False),
    "DGC": pycomm.DGC(0.02, weight_decay=0.1),
    "DGC, clipped": pycomm.DGC(0.02, clip_norm=1.0),
    "DGC, Nesterov": pycomm.DGC(0.02, nesterov=True, half_values=True),
}


@on_ranks(2)
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("num_params", [1, 40])
def test_kernels_and_nothing_else(name: str, num_params: int) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        assert operations_of(METHODS[name], num_params, monkeypatch) == KERNELS


@on_ranks(2)
def test_a_loss_scale_on_the_device_is_divided_by_once_per_step() -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        found = operations_of(METHODS["DGC"], 3, monkeypatch, loss_scale=torch.tensor(1024.0))
    assert found == KERNELS


@on_ranks(2)
@pytest.mark.parametrize("num_params", [2, 40])
def test_a_gradient_is_missing(num_params: int) -> None:
    """Zeros for all that are missing, their codes, and the flags that say whether another rank has them."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        found = operations_of(METHODS["DGC"], num_params, monkeypatch, missing=True)
    assert found[: len(KERNELS)] == KERNELS
    assert sorted(found[len(KERNELS) :]) == ["_foreach_zero_", "index_fill_"]


@on_ranks(2)
@pytest.mark.parametrize("missing", [False, True])
@pytest.mark.parametrize(("method", "after"), [(pycomm.NoCompression(), []), (pycomm.BF16(), ["unpack", "copy_"])])
def test_a_dense_bucket_is_one_kernel_and_one_collective(method: Any, after: list[str], missing: bool) -> None:
    """Tests of the emulator count the two launches of that kernel; what half precision does afterwards is the same."""
    noted: list[str] = []
    with pytest.MonkeyPatch.context() as context, Communicator(timeout=20) as communicator:

        def noting(name: str, function: Any) -> Any:
            def call(*args: Any, **options: Any) -> Any:
                noted.append(name)
                return function(*args, **options)

            return call

        for name in ("pack", "pack_flagged", "absmax", "unpack"):
            context.setattr(kernels, name, noting(name, getattr(kernels, name)))
        context.setattr(communicator, "all_reduce", noting("all_reduce", communicator.all_reduce))
        context.setattr("pycomm.collectives.bucket.on_gpu", lambda _: True)
        bucket = Bucket(["a", "b", "c"], [torch.zeros(9, 7 + j) for j in range(3)], communicator)
        exchange = method.make(bucket, communicator)
        grads: list[torch.Tensor | None] = [torch.ones_like(view) for view in bucket.views]
        grads[0] = bucket.views[0].fill_(1.0)  # accumulated in the bucket
        if missing:
            grads[1] = None
        bits = torch.arange(FINGERPRINT_BITS) % 3 == 0
        with torch.no_grad(), Operations() as operations:
            exchange.pack(grads, Scaling(communicator.size, fingerprint=bits))
            exchange.send()
        assert noted + operations.names == ["pack_flagged", "all_reduce", *after]
        assert exchange.used() == [True, not missing, True]
        assert bool(exchange.finite())
        assert not exchange.differing().any()
        assert [float(view.mean()) for view in bucket.views] == [1.0, 0.0 if missing else 1.0, 1.0]


@pytest.mark.parametrize("method", [method for method in ALL_METHODS if method != "none"])
@on_ranks(2)
def test_messages_are_whole_symmetric_tensors(method: str) -> None:
    with Communicator(timeout=20) as communicator, pytest.MonkeyPatch.context() as context:
        symmetric: set[tuple[int, int]] = set()
        sent: set[tuple[int, int]] = set()

        plain = communicator.empty

        def empty(*args: Any, **options: Any) -> torch.Tensor:
            made = plain(*args, **options)
            if options.get("symmetric"):
                symmetric.add((made.data_ptr(), made.nbytes))
            return made

        def noting(function: Any) -> Any:
            def call(*args: Any) -> Any:
                x = [arg for arg in args if isinstance(arg, torch.Tensor)][-1]
                sent.add((x.data_ptr(), x.nbytes))
                return function(*args)

            return call

        context.setattr("pycomm.collectives.bucket.on_gpu", lambda _: True)
        context.setattr(communicator, "empty", empty)
        for name in ("all_reduce", "all_gather"):
            context.setattr(communicator, name, noting(getattr(communicator, name)))
        params = [torch.zeros(9, 7 + j) for j in range(3)]
        bucket = Bucket(["a", "b", "c"], params, communicator)
        compression: Any = ALL_METHODS[method]
        exchange = compression.make(bucket, communicator)
        with torch.no_grad():
            exchange.pack([torch.randn_like(p) for p in params], Scaling(communicator.size))
            exchange.send()
        assert {each for each in sent if each[1] > 8} <= symmetric
        assert sent & symmetric


@on_ranks(1, 2)
def test_a_mean_on_a_gpu_is_a_sum_of_shares() -> None:
    """NVLink's switches, and NCCL in registered memory, make sums only; of one rank NCCL does nothing for a sum."""
    with Communicator(timeout=20) as communicator, pytest.MonkeyPatch.context() as context:
        sent: list[tuple[str, float]] = []
        context.setattr(communicator, "all_reduce", lambda x, op, *_: sent.append((op, float(x[0]))))
        context.setattr("pycomm.collectives.bucket.on_gpu", lambda _: True)
        bucket = Bucket(["a"], [torch.zeros(9)], communicator)
        exchange = pycomm.NoCompression().make(bucket, communicator)
        exchange.pack([torch.ones(9)], Scaling(communicator.size))
        exchange.send()
        exchange.pack([torch.ones(9)], Scaling(communicator.size, average=False))
        exchange.send()
        assert sent == [("sum", 1 / communicator.size), ("sum", 1.0)]


def test_the_step_above_can_tell() -> None:
    with Operations() as operations:
        (torch.ones(3) * math.pi).view(3, 1)
    assert operations.names == ["ones", "mul"]
