"""Modules under Horovod's names, so that scripts and libraries that import Horovod get pycomm."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType

VERSION = "0.28.1"
"""Version of Horovod whose interface this is."""

_MODULES = {
    "horovod": "",
    "horovod.common": "",
    "horovod.common.basics": "pycomm.horovod.basics",
    "horovod.common.elastic": "pycomm.horovod.elastic",
    "horovod.common.exceptions": "pycomm.horovod.names",
    "horovod.common.process_sets": "pycomm.horovod.process_sets",
    "horovod.common.util": "pycomm.horovod.util",
    "horovod.torch": "pycomm.horovod",
    "horovod.torch.compression": "pycomm.horovod.names",
    "horovod.torch.elastic": "pycomm.horovod.elastic",
    "horovod.torch.elastic.sampler": "pycomm.horovod.elastic",
    "horovod.torch.elastic.state": "pycomm.horovod.elastic",
    "horovod.torch.functions": "pycomm.horovod.functions",
    "horovod.torch.mpi_ops": "pycomm.horovod",
    "horovod.torch.optimizer": "pycomm.horovod.optimizer",
    "horovod.torch.sync_batch_norm": "pycomm.horovod.sync_batch_norm",
}
"""Module that stands for each of Horovod's; empty for packages without content."""


def install() -> None:
    """Make ``import horovod.torch``, and its submodules, import :mod:`pycomm.horovod`.

    Horovod's modules for other frameworks and clusters (``horovod.tensorflow``, ``horovod.spark``, ``horovod.runner``)
    do not exist: importing them raises ``ModuleNotFoundError``. Installing twice changes nothing.

    Raises:
        RuntimeError: Horovod itself has been imported already.
    """
    known = sys.modules.get("horovod")
    if known is not None:
        if getattr(known, "__pycomm__", False):
            return
        raise RuntimeError(
            f"horovod has been imported already, from {getattr(known, '__file__', None)}: call "
            "pycomm.horovod.install() before that, or uninstall Horovod"
        )
    for name, behind in _MODULES.items():
        module = import_module(behind) if behind else _package(name)
        sys.modules[name] = module
        parent, _, own = name.rpartition(".")
        if parent and not hasattr(sys.modules[parent], own):  # otherwise pycomm's attribute is the same, or better
            setattr(sys.modules[parent], own, module)


def _package(name: str) -> ModuleType:
    made = ModuleType(name, "Horovod's interface, by pycomm.")
    made.__path__ = []  # a package with nothing on disk
    made.__spec__ = ModuleSpec(name, None, is_package=True)
    made.__dict__.update(__version__=VERSION, __pycomm__=True)
    return made
