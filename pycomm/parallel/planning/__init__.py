"""Planning: how to split a model over devices, by memory and time, before anything runs.

    made = profile(make_model, make_batch, loss)               # bytes and FLOPs by layer, without memory
    task = Task(devices=8, memory=10e9, batch=64, device=Device(flops=1e13))
    ranking = choose(task, model, profile_of, styles_of)       # what fits, fastest first, and why the rest was refused
    ranking.options[0].plan()                                  # what split() and Pipeline() take

``sizes`` uses only the layers' sizes. ``scaling`` predicts the throughput of more devices: T = S N e.
"""

from pycomm.parallel.planning.candidates import (
    OPTIMIZERS,
    Candidate,
    Device,
    Layer,
    Part,
    Profile,
    Task,
    measure_device,
    with_seconds,
)
from pycomm.parallel.planning.choose import Option, Ranking, Refusal, choose
from pycomm.parallel.planning.price import Memory, Price, Pricer, Times
from pycomm.parallel.planning.profile import make_without_memory, profile
from pycomm.parallel.planning.sizes import Layout, place

__all__ = [
    "OPTIMIZERS",
    "Candidate",
    "Device",
    "Layer",
    "Layout",
    "Memory",
    "Option",
    "Part",
    "Price",
    "Pricer",
    "Profile",
    "Ranking",
    "Refusal",
    "Task",
    "Times",
    "choose",
    "make_without_memory",
    "measure_device",
    "place",
    "profile",
    "with_seconds",
]
