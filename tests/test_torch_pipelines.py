"""Private names of torch for pipelines: each does what pycomm needs of it; see test_torch_internals.py."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.models import mean_square


def test_the_runtime_of_pipelines(one_rank_group: None) -> None:
    pipelines = pytest.importorskip("pycomm.torch_internals.pipelines")
    torch.manual_seed(0)
    layers = [nn.Linear(3, 3), nn.Linear(3, 3)]
    stages = [pipelines.QuietStage(layers[i], i, 2, torch.device("cpu")) for i in range(2)]
    row = [(0, "F", 0), (1, "F", 0), None, (1, "I", 0), (0, "B", 0), (1, "W", 0)]
    row += [(0, "F", 1), (1, "F", 1), (1, "B", 1), (0, "B", 1)]
    runtime = pipelines.pipeline_runtime(stages, {0: row}, 2, mean_square)
    x, target = torch.randn(2, 4, 3).unbind()
    runtime.step(x, target=target)
    found = [param.grad for layer in layers for param in layer.parameters()]
    for layer in layers:
        layer.zero_grad()
    mean_square(nn.Sequential(*layers)(x), target).backward()
    torch.testing.assert_close(found, [param.grad for layer in layers for param in layer.parameters()])
    with torch.no_grad():
        torch.testing.assert_close(pipelines.run_forward(runtime, x), nn.Sequential(*layers)(x))
    pipelines.forget_shapes(runtime)
    runtime.step(x[:2], target=target[:2])  # its loss is there again
