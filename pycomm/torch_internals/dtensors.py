"""DTensors and their local parts."""

from __future__ import annotations

import sys
from typing import Any, TypeGuard

import torch
from torch.distributed.device_mesh import DeviceMesh


class Sharded(torch.Tensor):
    """Type of what :func:`is_dtensor` finds: the attributes of torch's DTensor that pycomm uses."""

    device_mesh: DeviceMesh
    placements: tuple[Any, ...]


def is_dtensor(tensor: Any) -> TypeGuard[Sharded]:
    """Return whether ``tensor`` is a DTensor; imports nothing, as none can exist before torch's module is imported."""
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)  # torch 2.4 has another one there
    return kind is not None and isinstance(tensor, kind)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a DTensor, not copied and without a graph; any other tensor itself."""
    if not is_dtensor(tensor):
        return tensor
    with torch.no_grad():
        local: torch.Tensor = tensor.to_local()  # type: ignore[attr-defined]  # waits, if it is still on its way
    return local


def dtensor_around(local: torch.Tensor, like: Sharded) -> torch.Tensor:
    """Return a DTensor whose part on this rank is the very object ``local``, sharded as ``like`` is.

    ``DTensor.from_local`` would make a view of ``local``: another object, so that a gradient's memory could not be
    identified.
    """
    module: Any = sys.modules["torch.distributed.tensor"]
    whole: Any = like
    spec = whole._spec
    if local.dtype != spec.tensor_meta.dtype:
        with torch.no_grad():
            made: torch.Tensor = module.DTensor.from_local(
                local, spec.mesh, spec.placements, run_check=False, shape=like.shape, stride=like.stride()
            )
            return made
    around: torch.Tensor = module.DTensor(local, spec, requires_grad=False)
    return around
