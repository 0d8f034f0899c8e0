"""What the examples share: scikit-learn's digits, a net for them, and one line that says what is missing."""

from __future__ import annotations

import os
import socket
import sys
from importlib.util import find_spec
from itertools import pairwise

import torch
from torch import nn
from torch.utils.data import TensorDataset

NUM_TEST = 360


def need_ranks(least: int) -> None:
    """End the script, with a line that says what to do, unless torchrun or the like has started enough ranks."""
    script = os.path.relpath(sys.argv[0])
    command = f"torchrun --nproc-per-node {least} {script}"
    variables = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    if missing := [name for name in variables if name not in os.environ]:
        sys.exit(f"{script} needs torchrun, {missing[0]} is not set: {command}")
    if (started := int(os.environ["WORLD_SIZE"])) < least:
        sys.exit(f"{script} needs {least} ranks or more, not {started}: {command}")
    if os.environ["RANK"] == "0" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        need_port(int(os.environ["MASTER_PORT"]))


def need_port(port: int) -> None:
    """End the script, with a line that says so, if another process listens on ``port``."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # one that was in use until a moment ago is free
        try:
            probe.bind(("", port))
        except OSError as error:
            sys.exit(f"{os.path.relpath(sys.argv[0])} needs port {port}: {error.strerror}")


def load_digits() -> tuple[TensorDataset, TensorDataset]:
    """Return 1437 pictures of 8 x 8 pixels to train with and 360 to test with, the same in every process."""
    if find_spec("sklearn") is None:
        sys.exit(f"{os.path.relpath(sys.argv[0])} needs scikit-learn: pip install scikit-learn")
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    x, y = torch.tensor(pixels / 16.0, dtype=torch.float32)[order], torch.tensor(labels)[order]
    return TensorDataset(x[NUM_TEST:], y[NUM_TEST:]), TensorDataset(x[:NUM_TEST], y[:NUM_TEST])


def make_net(hidden: int = 2) -> nn.Sequential:
    """Return a perceptron for the digits with ``hidden`` layers of 256 units, the same in every process."""
    torch.manual_seed(0)
    widths = [64, *[256] * hidden]
    layers = [layer for pair in pairwise(widths) for layer in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(256, 10))


@torch.no_grad()
def accuracy(model: nn.Module, data: TensorDataset) -> float:
    """Return the share of pictures that the model classifies correctly."""
    x, y = data.tensors
    return float((model(x).argmax(1) == y).float().mean())
