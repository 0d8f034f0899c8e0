"""What the package promises: names, signatures, errors, and what it is built from."""

from __future__ import annotations

import inspect
import pickle
import subprocess
import sys
from importlib import metadata, resources
from types import ModuleType
from typing import Any

import pytest
import torch

import pycomm
from pycomm.collectives.transport.nccl import build_info
from pycomm.errors import DamageError
from pycomm.parallel import functional
from pycomm.schedule import pipeline as pipelines


def test_names_that_scripts_rely_on() -> None:
    signature = inspect.signature(pycomm.attach)
    assert list(signature.parameters)[:2] == ["optimizer", "model"]
    keywords = {name: p.default for name, p in signature.parameters.items() if p.kind is p.KEYWORD_ONLY}
    assert keywords == {
        "compression": None,
        "process_group": None,
        "accumulate": 1,
        "loss_scaler": None,
        "average": True,
        "buffers": "local",
        "survive": None,
        "shard": None,
        "tuning": None,
    }
    methods = "state_dict load_state_dict stats flush detach set_weight clip_grad_norm paused skip_step"
    for name in methods.split():
        assert callable(getattr(pycomm.Reducer, name))
    for name in ("empty", "all_reduce", "reduce_scatter", "all_gather", "broadcast", "barrier", "close"):
        assert callable(getattr(pycomm.Communicator, name))
    for name in ("pack", "unpack", "reduce", "topk", "scatter_add"):
        assert callable(getattr(pycomm.kernels, name))
    assert pycomm.TopK(0.01) == pycomm.TopK(ratio=0.01, error_feedback=True)
    assert all(hasattr(pycomm, name) for name in pycomm.__all__)


def test_dir_has_what_is_for_users() -> None:
    names = {name for name in dir(pycomm) if not name.startswith("__")}
    assert names == set(pycomm.__all__)
    assert not names & {"Any", "importlib", "warnings", "TYPE_CHECKING"}
    with pytest.raises(AttributeError, match="module 'pycomm' has no attribute 'attached'"):
        pycomm.attached  # noqa: B018


_LATER = (
    *("collectives.communicator", "compression", "ddp", "horovod", "kernels", "optim", "parallel", "schedule", "tools"),
    "training",
)
"""Parts of pycomm that are imported when they are first asked for."""


def test_import_takes_little() -> None:
    """``import pycomm`` imports no part of pycomm that is loaded on demand, and nothing more of torch."""
    code = "import sys, torch; before = set(sys.modules); import pycomm; print(*(set(sys.modules) - before))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True, cwd="/"
    )
    found = done.stdout.split()
    assert "pycomm.collectives.backend" in found
    assert not {name for name in found if name.startswith(tuple(f"pycomm.{part}" for part in _LATER))}
    heavy = (
        "numpy",
        "torch.distributed.tensor",
        "torch.distributed.fsdp",
        "torch.distributed.algorithms",
        "torch._dynamo",
        *("rich", "matplotlib", "cupy", "transformers"),
    )
    assert not {name for name in found if name.startswith(heavy)}
    assert len(found) < 30


@pytest.mark.parametrize("before", ["enable", "disable"])
def test_the_first_use_leaves_garbage_collection_as_it_was(before: str) -> None:
    code = f"import gc, pycomm; gc.{before}(); pycomm.attach; print(gc.isenabled())"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True, cwd="/"
    )
    assert done.stdout.split() == [str(before == "enable")]


def test_names_that_never_were() -> None:
    with pytest.raises(AttributeError, match="module 'pycomm' has no attribute 'nonsense'"):
        _ = pycomm.nonsense


def test_names_are_few() -> None:
    """What calls return is documented where it is returned, and has no name here."""
    assert len(pycomm.__all__) <= 50
    for name in ("Work", "GpuWork", "MasterWeights", "FusedStep", "ParameterServer", "build_info", "progress"):
        with pytest.raises(AttributeError):
            getattr(pycomm, name)


def test_build_info() -> None:
    info = build_info()
    assert info.keys() == {"version", "cuda", "cuda_architectures", "nccl", "simd", "compiler"}
    assert info["version"] == pycomm.__version__ == metadata.version("pycomm-torch")
    assert resources.files("pycomm").joinpath("py.typed").is_file()


def test_comm_error_carries_what_happened_and_travels() -> None:
    error = pycomm.CommError("text", rank=1, peer=None, operation="barrier", elapsed=0.5)
    twin = pickle.loads(pickle.dumps(error))
    assert (str(twin), twin.rank, twin.peer, twin.operation, twin.elapsed) == ("text", 1, None, "barrier", 0.5)
    with pytest.raises(RuntimeError):
        raise twin


def test_a_damage_error_travels_with_the_ranks_that_it_accuses() -> None:
    error = DamageError.of([2, 3], "text", rank=1)
    twin = pickle.loads(pickle.dumps(error))
    assert (type(twin), str(twin), twin.ranks, twin.peer) == (DamageError, str(error), (2, 3), 2)


def test_all_of_a_package_is_what_it_lists() -> None:
    """And none of its modules, whose names users have for variables: `optimizer`, `names`, `plans`."""
    for package in ("compression", "horovod", "optim", "parallel", "schedule", "training.checkpoint"):
        taken: dict[str, object] = {}
        exec(f"from pycomm.{package} import *", taken)
        modules = {name for name, value in taken.items() if isinstance(value, ModuleType)}
        assert modules <= {"auto", "elastic", "functional", "pipeline"}
        assert len(taken) > 3


def calls_with_a_wrong_argument() -> list[tuple[Any, str, dict[str, Any]]]:
    """Functions, the argument that is wrong, and all arguments."""
    layer = torch.nn.Linear(2, 2)
    sgd = torch.optim.SGD(layer.parameters(), 0.1)
    return [
        (pycomm.Sharding, "kind", {"kind": "model"}),
        (pycomm.attach, "shard", {"optimizer": sgd, "model": layer, "shard": "model"}),
        (pycomm.attach, "process_group", {"optimizer": sgd, "model": layer, "process_group": "dp"}),
        (pycomm.Communicator, "process_group", {"process_group": "dp"}),
        (pycomm.schedule.by_name, "algorithm", {"algorithm": "rong", "num_ranks": 2}),
        (pipelines.by_name, "schedule", {"schedule": "rong", "ranks": 2, "microbatches": 2}),
        (functional.all_reduce, "group", {"x": torch.ones(2), "group": "tp"}),
        (pycomm.parallel.Pipeline, "mesh", {"stages": [layer], "mesh": "pp"}),
        (pycomm.parallel.split, "mesh", {"model": layer, "mesh": "tp", "plan": {}}),
    ]


@pytest.mark.parametrize("number", range(9))
def test_errors_call_an_argument_by_its_name_in_the_signature(number: int, one_rank_group: None) -> None:
    function, name, arguments = calls_with_a_wrong_argument()[number]
    assert arguments.keys() <= inspect.signature(function).parameters.keys()
    with pytest.raises((TypeError, ValueError), match=rf"^{name} is "):
        function(**arguments)
