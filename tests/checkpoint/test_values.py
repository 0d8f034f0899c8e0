"""What a file says is checked, even where its checksum is right: nothing in it is trusted to be what it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pycomm.training.checkpoint.files import DamagedError, Reserve, read_report
from pycomm.training.checkpoint.torch_files import read_tensors, write_tensors
from pycomm.training.checkpoint.values import check_node, decode, encode, lines_of, positions_in


def test_there_and_back() -> None:
    tensors: list[torch.Tensor] = []
    value = {"a": [torch.ones(2), (1, None)], 3: {"b": np.arange(3), "c": b"x"}, "size": torch.Size([1, 2])}
    node = encode(value, tensors, "it")
    assert positions_in(node) == [0, 1]
    found = decode(node, tensors, "it")
    assert torch.equal(found["a"][0], torch.ones(2))
    assert found["a"][1] == (1, None)
    assert found[3]["b"].tolist() == [0, 1, 2]
    assert found[3]["c"] == b"x"
    assert found["size"] == (1, 2)
    assert list(lines_of(node, tensors, "it"))[:3] == [
        "it: 3 values",
        "it['a']: 2 values",
        "it['a'][0]: [2] torch.float32 []",
    ]


@pytest.mark.parametrize(
    ("node", "says"),
    [
        (["array", 0, "O", [1]], "it has dtype 'O', wanted one of numbers"),
        (["dtype", "save"], "it has dtype 'save', which torch does not have"),
        (["list", [["own", "a.b"]]], r"it\[0\] was a a.b, which is not saved"),
    ],
)
def test_nodes_that_are_wrong(node: list[Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        decode(node, [torch.zeros(8, dtype=torch.uint8)], "it")


def deep(levels: int) -> list[Any]:
    node: list[Any] = ["value", 1]
    for _ in range(levels):
        node = ["list", [node]]
    return node


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("node", "says"),
    [
        ([], "is no value"),
        (["list"], "is no value"),
        (["value", 1, 2], "is no value"),
        (["list", [["value", []]]], "value is malformed"),
        (["tuple", {}], "it is an object, wanted a list"),
        (["dict", [[{}, ["value", 1]]]], "an object, wanted null or"),
        (["dict", [[10**30 + i, ["value", 1]] for i in range(2000)]], "keys beyond 64 bits"),
        (["list", [["tensor", 0], ["tensor", 0]]], "its tensors are not numbered"),
        (["tensor", 10**9], "its tensors are not numbered"),
        (["array", 0, 3, [1]], "array is malformed"),
        (["bytes", "a"], "it is malformed"),
        (deep(5000), "it is nested too deeply"),
    ],
)
def test_nodes_that_nobody_has_written(node: list[Any], says: str) -> None:
    check_node(deep(50), "it")
    with pytest.raises(DamagedError, match=says):
        check_node(node, "it")


def test_an_index_of_other_files(tmp_path: Path) -> None:
    index = write_tensors(tmp_path / "own", {"x": torch.ones(3)})
    assert torch.equal(read_tensors(tmp_path / "own", index, ["x"])["x"], torch.ones(3))
    index["tensors"]["x"]["file"] = "../elsewhere"
    with pytest.raises(DamagedError, match="no checksum of the file of x"):
        read_tensors(tmp_path / "own", index, ["x"])


def test_a_pickle_in_a_file_is_not_run(tmp_path: Path) -> None:
    index = write_tensors(tmp_path / "own", {"x": torch.ones(3)})
    (name,) = index["files"]

    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (tmp_path / "run",)

    torch.save(Evil(), tmp_path / "own" / name)
    index["tensors"]["x"].update(offset=0, length=(tmp_path / "own" / name).stat().st_size)
    with pytest.raises(DamagedError, match="holds more than plain values"):
        read_tensors(tmp_path / "own", index, ["x"])
    assert not (tmp_path / "run").exists()


def test_every_dtype(tmp_path: Path) -> None:
    dtypes = [torch.bool, torch.int16, torch.uint8, torch.complex64, torch.float16, torch.bfloat16, torch.float8_e5m2]
    tensors = {str(dtype): torch.tensor([1, 0, 1]).to(dtype) for dtype in dtypes}
    tensors |= {"scalar": torch.tensor(3.0), "empty": torch.empty(0, 2), "strided": torch.rand(3, 4).T}
    index = write_tensors(tmp_path / "own", tensors)
    found = read_tensors(tmp_path / "own", index, list(tensors))
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].stride() == tensor.stride()
        assert found[name].tolist() == tensor.tolist(), name


def test_a_reserve_tells(tmp_path: Path) -> None:
    reserve = Reserve(tmp_path / "writing")
    assert read_report(tmp_path / "failed") is None
    reserve.report("OSError", "é" * 5000, "failed")
    kind, text = read_report(tmp_path / "failed") or ("", "")
    assert kind == "OSError"
    assert text.startswith("éé")
    assert not (tmp_path / "writing").exists()
