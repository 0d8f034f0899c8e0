"""Unscaled gradients of half-precision parameters, in float32, which steps use in place of the scaled ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from pycomm import kernels
from pycomm.collectives.layout import flat_alias, on_gpu
from pycomm.optim.stamps import Stamp
from pycomm.torch_internals import local_of

_LEAST_AS_WORDS = 4096  # elements; below that, hashing costs less than a look at the layout


@dataclass(frozen=True)
class _Unscaled:
    """Unscaled float32 gradient of a master, ``own``, and the scaled one it was computed from, as they were then."""

    master: torch.Tensor
    own: Stamp
    source: torch.Tensor
    scaled: Stamp


class UnscaledGradients:
    """Unscaled gradients by parameter, valid as long as the scaled ones are still what they were computed from."""

    def __init__(self) -> None:
        self._entries: dict[torch.Tensor, _Unscaled] = {}
        self._hashes: dict[torch.Tensor, int] = {}

    def put(self, param: torch.Tensor, master: torch.Tensor, grad: torch.Tensor, source: torch.Tensor) -> None:
        """Set the gradient of ``master`` to ``grad``, computed from ``source``; :meth:`seal` after the last one."""
        master.grad = grad
        self._entries[param] = _Unscaled(master, Stamp([grad]), source, Stamp([source]))

    def seal(self) -> None:
        """Note what the scaled gradients are now."""
        self._hashes = _hashes_of(self._entries)

    def current(self, *, by_value: bool = False) -> dict[torch.Tensor, torch.Tensor]:
        """Return the unscaled gradients by parameter, of parameters whose ``.grad`` is still the one unscaled.

        Args:
            by_value: compare the values, too, as writes through ``.data`` and numpy's views do not change the version.
                Not on a GPU, for which the host would wait.
        """
        found = {param: entry for param, entry in self._entries.items() if entry.source is param.grad}
        is_written = any(entry.scaled.changed() for entry in found.values())
        if by_value and not is_written:
            is_written = any(value != self._hashes[param] for param, value in _hashes_of(found).items())
        if is_written:
            raise RuntimeError(
                "the gradient of a half-precision parameter was written to after unscale_(): steps use the "
                "gradient of its master, in MasterWeights.parameters()"
            )
        grads = {param: grad for param, entry in found.items() if (grad := entry.master.grad) is not None}
        if len(grads) < len(found):
            raise RuntimeError(
                "the gradient of a master was removed after unscale_(): to leave a parameter out, remove the "
                "gradient of the half-precision parameter, too"
            )
        return grads

    def are_written(self) -> bool:
        """Return whether an unscaled gradient was written to, or replaced, since :meth:`put`."""
        return any(entry.own.changed([entry.master.grad]) for entry in self._entries.values())

    def clear(self) -> None:
        self._entries.clear()
        self._hashes = {}


def _hashes_of(entries: Mapping[torch.Tensor, _Unscaled]) -> dict[torch.Tensor, int]:
    """Return hashes of the scaled gradients in CPU memory."""
    sources = {param: _words(local_of(entry.source)) for param, entry in entries.items() if not on_gpu(entry.source)}
    return dict(zip(sources, kernels.hashes(list(sources.values())).tolist(), strict=True)) if sources else {}


def _words(half: torch.Tensor) -> torch.Tensor:
    """Return ``half`` as int64, four elements in one, if its memory permits: the cost of a hash is per element."""
    flat = flat_alias(half, half) if half.numel() >= _LEAST_AS_WORDS else None
    if flat is None or flat.numel() % 4 != 0 or flat.storage_offset() % 4 != 0:
        return half
    return flat.view(-1).view(torch.int64)
