"""What is left when ranks fail in the middle of a step: parameters of which nobody knows what they are."""

from __future__ import annotations

from typing import Any

import torch

from pycomm.optim.module_hooks import BeforeForward

_TEXT = (
    "a rank was lost in the middle of optimizer.step(), while the ranks wrote to each other's parameters: those here "
    "may be a mixture of old and new ones. Load a checkpoint (model.load_state_dict) before they are used. The cause: "
)


class Aftermath:
    """Guard that makes every forward of ``module`` and every step of ``optimizer`` raise, until the module is loaded.

    It stays when the Reducer is detached.
    """

    def __init__(self, module: torch.nn.Module | None, optimizer: torch.optim.Optimizer, cause: BaseException) -> None:
        self._text = _TEXT + str(cause)
        self._handles: list[Any] = [optimizer.register_step_pre_hook(lambda *_: self._raise())]
        if module is not None:
            self._handles.append(module.register_forward_pre_hook(BeforeForward(self._raise)))
            register: Any = module.register_load_state_dict_post_hook
            self._handles.append(register(lambda *_: self._loaded()))

    def _raise(self) -> None:
        raise RuntimeError(self._text)

    def _loaded(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
