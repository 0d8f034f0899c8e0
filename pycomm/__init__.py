"""pycomm: fast data-parallel training for PyTorch.

    dist.init_process_group("gloo")                                      # yours
    reducer = pycomm.attach(optimizer, model)                            # gradients are averaged
    loss.backward()                                                      # ... when this returns

See :func:`attach` for training, :class:`Communicator` for collectives, :mod:`pycomm.kernels` for
the kernels under both.
"""

import gc
import importlib.util
import logging
import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # imported at first use: see _HOMES
    from pycomm import compression as compression
    from pycomm import ddp as ddp
    from pycomm import kernels as kernels
    from pycomm import optim as optim
    from pycomm import parallel as parallel
    from pycomm import schedule as schedule
    from pycomm.collectives.communicator import Communicator as Communicator
    from pycomm.compression import BF16 as BF16
    from pycomm.compression import DGC as DGC
    from pycomm.compression import FP8 as FP8
    from pycomm.compression import FP16 as FP16
    from pycomm.compression import QSGD as QSGD
    from pycomm.compression import ChunkTopK as ChunkTopK
    from pycomm.compression import Int4 as Int4
    from pycomm.compression import Int8 as Int8
    from pycomm.compression import NoCompression as NoCompression
    from pycomm.compression import OneBit as OneBit
    from pycomm.compression import PowerSGD as PowerSGD
    from pycomm.compression import RandomK as RandomK
    from pycomm.compression import TernGrad as TernGrad
    from pycomm.compression import TopK as TopK
    from pycomm.optim import LAMB as LAMB
    from pycomm.optim import LARS as LARS
    from pycomm.optim import LossScaler as LossScaler
    from pycomm.optim import fuse as fuse
    from pycomm.optim.masters import master_weights as master_weights
    from pycomm.tools.launching import RankError as RankError
    from pycomm.tools.launching import launch as launch
    from pycomm.tools.monitoring.monitor import monitor as monitor
    from pycomm.training import checkpoint as checkpoint
    from pycomm.training.asynchronous.averaging import local_sgd as local_sgd
    from pycomm.training.asynchronous.fragment import Elastic as Elastic
    from pycomm.training.asynchronous.fragment import Nesterov as Nesterov
    from pycomm.training.asynchronous.gossip import gossip as gossip
    from pycomm.training.asynchronous.modes import Async as Async
    from pycomm.training.asynchronous.modes import StaleSynchronous as StaleSynchronous
    from pycomm.training.asynchronous.modes import Sync as Sync
    from pycomm.training.asynchronous.parameter_server import parameter_server as parameter_server
    from pycomm.training.checkpoint import load as load
    from pycomm.training.checkpoint import save as save
    from pycomm.training.cost.auto import Auto as Auto
    from pycomm.training.reducer import Reducer as Reducer
    from pycomm.training.reducer import Sharding as Sharding
    from pycomm.training.reducer import Survive as Survive
    from pycomm.training.reducer import Tuning as Tuning
    from pycomm.training.reducer.attach import attach as attach
    from pycomm.training.reducer.join import join as join
    from pycomm.training.reductions.requests import stop_on_signal as stop_on_signal


def _installed() -> ModuleSpec:
    """Return how to import the first pycomm on ``sys.path`` that has its compiled extension.

    The source tree has none, and stands first on ``sys.path`` for a script in the checkout.
    """
    for entry in sys.path:
        spec = PathFinder.find_spec("pycomm", [entry])
        folders = None if spec is None else spec.submodule_search_locations
        if spec is not None and folders and PathFinder.find_spec("pycomm._native", list(folders)) is not None:
            return spec
    raise ModuleNotFoundError(
        f"pycomm's compiled extension is not beside {__file__}, and no other pycomm on sys.path has one. The source "
        "tree does not contain it: run `pip install .`"
    )


def _run_installed() -> None:
    """Import the installed package in place of this one: all of it, as the two may be of different versions."""
    spec = _installed()
    module = sys.modules["pycomm"] = importlib.util.module_from_spec(spec)
    assert spec.loader is not None
    spec.loader.exec_module(module)
    if os.environ.get("LOCAL_RANK", "0") == "0":  # one line, not one per rank
        text = "imported from %s: %s has no compiled extension"
        logging.getLogger("pycomm").warning(text, os.path.dirname(str(spec.origin)), os.path.dirname(__file__))


if importlib.util.find_spec("pycomm._native") is None:
    _run_installed()
else:
    import pycomm._native as _native
    from pycomm import logs as _logs  # noqa: F401  # prefixes log lines with the rank
    from pycomm.collectives import backend as backend
    from pycomm.errors import CommError as CommError

    __version__: str = _native.build_info()["version"]
    backend.register()

_HOMES = {
    "training.asynchronous.averaging": ("local_sgd",),
    "training.asynchronous.gossip": ("gossip",),
    "training.asynchronous.modes": ("Async", "StaleSynchronous", "Sync"),
    "training.asynchronous.fragment": ("Elastic", "Nesterov"),
    "training.asynchronous.parameter_server": ("parameter_server",),
    "training.checkpoint": ("load", "save"),
    "collectives.communicator": ("Communicator",),
    "compression": (
        *("BF16", "ChunkTopK", "DGC", "FP16", "FP8", "Int4", "Int8", "NoCompression", "OneBit"),
        *("PowerSGD", "QSGD", "RandomK", "TernGrad", "TopK"),
    ),
    "training.cost.auto": ("Auto",),
    "tools.launching": ("RankError", "launch"),
    "tools.monitoring": ("monitor",),
    "optim": ("LAMB", "LARS", "LossScaler", "fuse", "master_weights"),
    "training.reducer.join": ("join",),
    "training.reducer": ("Reducer", "Sharding", "Survive", "Tuning", "attach"),
    "training.reductions.requests": ("stop_on_signal",),
}
"""Module of each name, imported at its first use: so ``import pycomm`` adds little to ``import torch``."""
_PACKAGES = {
    "backend": "collectives.backend",
    "checkpoint": "training.checkpoint",
    **{name: name for name in ("compression", "ddp", "kernels", "optim", "parallel", "schedule")},
}
"""Packages that scripts use by name, and where they are."""
__all__ = sorted(["CommError", *_PACKAGES, *(name for names in _HOMES.values() for name in names)])


def _imported(name: str) -> Any:
    """Return the module ``pycomm.<name>``, imported without garbage collection.

    Where torch is loaded, a full collection takes about as long as all of pycomm's imports.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        return importlib.import_module(f"pycomm.{name}")
    finally:
        if was_on:
            gc.enable()


def __getattr__(name: str) -> Any:
    home = next((module for module, names in _HOMES.items() if name in names), None)
    if home is not None:
        globals()[name] = found = getattr(_imported(home), name)
        return found
    if name in _PACKAGES:
        return _imported(_PACKAGES[name])
    if name.isidentifier() and not name.startswith("_") and importlib.util.find_spec(f"pycomm.{name}") is not None:
        return _imported(name)
    raise AttributeError(f"module 'pycomm' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__doc__", "__file__", "__name__", "__path__", "__version__"])
