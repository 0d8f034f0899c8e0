"""``pycomm info`` and the parser around it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import pycomm
from pycomm import kernels
from pycomm.collectives.transport.nccl import build_info, why_not_registered
from pycomm.tools.cli import info
from pycomm.tools.cli.main import main


def test_info_says_what_runs_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info"]) == 0
    facts = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert facts["pycomm"] == build_info()["version"]
    assert facts["simd"] == build_info()["simd"]
    assert facts["torch"] == torch.__version__
    assert facts["numpy"] == np.__version__
    assert "shared_memory" in facts["transports"]
    assert "gloo" in facts["transports"]
    assert "hierarchical" in facts["transports"]
    assert "gpus" in facts
    assert facts["nccl"].split()[0] == (build_info()["nccl"] or "none")
    assert facts["registered"].startswith("no memory with NCCL: ") == bool(why_not_registered())


@pytest.mark.parametrize(
    ("cuda", "architectures", "says"),
    [
        (None, None, "none (built without)"),
        ("13.0", "80-real,90-virtual", "13.0, for 80-real, 90-virtual"),
        (
            *("13.0", "75-virtual"),
            "13.0, for 75-virtual (the driver of a newer GPU compiles the kernels when they are first used)",
        ),
    ],
)
def test_info_names_the_architectures_of_the_build(
    cuda: str | None, architectures: str | None, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = {**build_info(), "cuda": cuda, "cuda_architectures": architectures}
    monkeypatch.setattr(info, "build_info", lambda: build)
    assert info.collect()["cuda"] == says


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (None, "2, and kernels run"),
        ("the driver supports CUDA 12.4", "2, and no kernel runs: the driver supports CUDA 12.4"),
    ],
)
def test_info_runs_a_kernel_where_there_is_a_gpu(error: str | None, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def absmax(_: object) -> None:
        if error is not None:
            raise RuntimeError(error)

    monkeypatch.setattr(info, "cuda_devices", lambda: (2, ""))
    monkeypatch.setattr(torch, "ones", lambda *_, **__: torch.zeros(1))
    monkeypatch.setattr(kernels, "absmax", absmax)
    assert info.collect()["gpus"] == says


def test_no_command_is_a_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([])
    assert caught.value.code == 2
    assert "required: COMMAND" in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"pycomm {pycomm.__version__}\n"
