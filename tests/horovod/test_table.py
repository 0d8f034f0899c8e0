"""Functions that are made from a table are like functions that are written down."""

from __future__ import annotations

import inspect
import pickle
import typing
from pathlib import Path

import pytest

import pycomm.horovod as hvd

ROOT = Path(__file__).parents[2]
REDUCTION = "average name op prescale_factor postscale_factor process_set"
COMPRESSED = "average name compression op prescale_factor postscale_factor process_set"
SCATTER = "name op process_set prescale_factor postscale_factor"
COMPRESSED_SCATTER = "name compression op process_set prescale_factor postscale_factor"
PARAMETERS = {
    "allreduce": f"tensor {COMPRESSED}",
    "allreduce_": f"tensor {REDUCTION}",
    "allreduce_async": f"tensor {REDUCTION}",
    "allreduce_async_": f"tensor {REDUCTION}",
    "grouped_allreduce": f"tensors {COMPRESSED}",
    "grouped_allreduce_": f"tensors {REDUCTION}",
    "grouped_allreduce_async": f"tensors {REDUCTION}",
    "grouped_allreduce_async_": f"tensors {REDUCTION}",
    "allgather": "tensor name process_set",
    "allgather_async": "tensor name process_set",
    "grouped_allgather": "tensors name process_set",
    "grouped_allgather_async": "tensors name process_set",
    "broadcast": "tensor root_rank name process_set",
    "broadcast_": "tensor root_rank name process_set",
    "broadcast_async": "tensor root_rank name process_set",
    "broadcast_async_": "tensor root_rank name process_set",
    "alltoall": "tensor splits name process_set",
    "alltoall_async": "tensor splits name process_set",
    "reducescatter": f"tensor {COMPRESSED_SCATTER}",
    "reducescatter_async": f"tensor {SCATTER}",
    "grouped_reducescatter": f"tensors {COMPRESSED_SCATTER}",
    "grouped_reducescatter_async": f"tensors {SCATTER}",
}
"""Arguments in Horovod's order, by function."""


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_function_of_the_table_is_like_any_other(name: str) -> None:
    function = getattr(hvd, name)
    assert (function.__name__, function.__qualname__, function.__module__) == (name, name, "pycomm.horovod.operations")
    assert inspect.getdoc(function)
    assert " ".join(inspect.signature(function).parameters) == PARAMETERS[name]
    begins = "_async" in name
    assert (typing.get_type_hints(function)["return"] is int) == begins
    assert pickle.loads(pickle.dumps(function)) is function


def test_a_wrong_argument_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match=r"^allreduce_\(\) got an unexpected keyword argument 'tensors'"):
        hvd.allreduce_(tensors=[])  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"^grouped_allreduce_async\(\) got an unexpected keyword argument 'tensor'"):
        hvd.grouped_allreduce_async(tensor=[])  # type: ignore[call-arg]


def test_the_reference_shows_functions_of_the_table() -> None:
    griffe = pytest.importorskip("griffe")  # the extra [docs]
    hooks = griffe.load_extensions(str(ROOT / "docs/hooks/docstrings.py"))
    module = griffe.load("pycomm", search_paths=[ROOT], extensions=hooks)["horovod.operations"]
    for name, parameters in PARAMETERS.items():
        shown = module[name]
        assert shown.is_function
        assert [each.name for each in shown.parameters] == parameters.split()
        assert (str(shown.returns) == "int") == ("_async" in name)
        assert shown.docstring.value.splitlines()[0].endswith(".")
