"""Detection of copies of attached modules: training one is an error, as its gradients are not averaged."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from pycomm.optim.attached import is_covered
from pycomm.optim.wrappers import is_wrapped

_paused = [0]
"""Number of open contexts in which gradients stay local to this rank."""


@contextlib.contextmanager
def training_alone() -> Iterator[None]:
    """Permit gradients of copies inside the context."""
    _paused[0] += 1
    try:
        yield
    finally:
        _paused[0] -= 1


class CopyWatch:
    """Watches the parameters of a copy from its first forward in training mode.

    A copy may exist (a moving average, a teacher, a target network), but must not get gradients. With a single rank
    anything is allowed.
    """

    def __init__(self) -> None:
        self._hooked: set[int] = set()

    def before_forward(self, module: torch.nn.Module) -> None:
        """Hook the parameters of the copy ``module``, if it is about to be trained."""
        if not (module.training and torch.is_grad_enabled()) or not _has_others():
            return
        for name, param in module.named_parameters():
            if param.requires_grad and id(param) not in self._hooked:
                self._hooked.add(id(param))
                register: Any = param.register_post_accumulate_grad_hook
                register(_Refusal(name))


class _Refusal:
    """Hook of a parameter of a copy: raises RuntimeError when it gets a gradient that nothing averages."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._is_averaged = False

    def __call__(self, param: torch.Tensor) -> None:
        if self._is_averaged or _paused[0] > 0:
            return
        self._is_averaged = is_covered(param) or is_wrapped(self._name, param)
        if not self._is_averaged:
            raise RuntimeError(
                f"parameter {self._name!r} belongs to a copy (deepcopy, pickle) of a module that was attached, and "
                "nothing averages the copy: call attach() (or local_sgd() and the like) for the copy with its own "
                "optimizer. If each rank is to train it alone, copy the module before that, or run backward() inside "
                "`with reducer.paused():`"
            )

    def __deepcopy__(self, memo: object) -> _Refusal:
        return _Refusal(self._name)


def _has_others() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
