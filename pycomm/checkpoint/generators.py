"""Random generators of a rank: Python's, numpy's, torch's on the CPU, and that of its GPU."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def generators_state(device: torch.device) -> dict[str, Any]:
    """Return the state of all generators of this process; of GPUs, that of ``device`` only."""
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def check_generators(state: dict[str, Any]) -> None:
    """Raise ValueError if :func:`restore_generators` would fail."""
    saved, here = state["numpy"]["bit_generator"], np.random.get_state(legacy=False)["bit_generator"]
    if saved != here:
        raise ValueError(f"numpy's generator was a {saved} when it was saved, and is a {here} now")
    random.Random().setstate(state["python"])
    torch.Generator().set_state(state["torch"])


def restore_generators(state: dict[str, Any], device: torch.device) -> None:
    """Set all generators to ``state``, which :func:`generators_state` has returned."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
