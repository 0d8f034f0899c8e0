"""Random generators of a rank: Python's, numpy's, torch's on the CPU, and that of its GPU."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from pycomm.checkpoint.files import DamagedError, checked
from pycomm.untrusted import ANYTHING, MapOf

_SHAPE = {
    "python": tuple,
    "numpy": {"bit_generator": str, "state": MapOf(ANYTHING)},
    "torch": torch.Tensor,
    "cuda?": torch.Tensor,
}
_LAST_POSITION = 624  # of MT19937; numpy believes what it is told


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
    """Raise ValueError if :func:`restore_generators` would fail; DamagedError if ``state`` is none of generators."""
    checked(state, _SHAPE, "the state of generators")
    saved, here = state["numpy"]["bit_generator"], np.random.get_state(legacy=False)["bit_generator"]
    if saved != here:
        raise ValueError(f"numpy's generator was a {saved} when it was saved, and is a {here} now")
    try:
        random.Random().setstate(state["python"])
        torch.Generator().set_state(state["torch"])
        _check_numpy(state["numpy"])
    except Exception as error:  # of what a state may make them raise there is no list
        raise DamagedError(f"the state of generators is malformed: {type(error).__name__}: {error}") from error


def _check_numpy(state: dict[str, Any]) -> None:
    """Raise an error if numpy's generator of that kind does not take ``state``, or would read beyond its memory."""
    position = state["state"].get("pos", 0), state.get("buffer_pos", 0)
    if not all(type(number) is int and 0 <= number <= _LAST_POSITION for number in position):
        raise ValueError(f"numpy's generator is at {position}")
    kind: Any = getattr(np.random, state["bit_generator"])
    np.random.RandomState(kind()).set_state(state)


def restore_generators(state: dict[str, Any], device: torch.device) -> None:
    """Set all generators to ``state``, which :func:`generators_state` has returned."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
