"""Parameters of a module that get gradients without any attach averaging them."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch

from pycomm.optim.attached import is_covered


class Uncovered:
    """Watch over the parameters of ``module`` that no Reducer covers; warns once if one of them gets a gradient.

    Args:
        module: the module whose parameters are watched.
        covers: returns whether the Reducer that is being made averages a parameter, or is to leave it alone.
    """

    def __init__(self, module: torch.nn.Module, covers: Callable[[torch.Tensor], bool]) -> None:
        self._covers = covers
        self._names: list[str] = []
        self._handles: dict[int, Any] = {}  # by id of the parameter
        self.watch(module)

    def watch(self, module: torch.nn.Module) -> None:
        """Hook the trainable parameters that are neither covered nor hooked yet."""
        for name, param in module.named_parameters():
            is_trained = param.requires_grad and param.is_leaf
            if is_trained and id(param) not in self._handles and not self._is_covered(param):
                register: Any = param.register_post_accumulate_grad_hook
                self._handles[id(param)] = register(_Note(self, name))

    def note(self, name: str, param: torch.Tensor) -> None:
        """Note that ``param`` has got a gradient."""
        if self._is_covered(param):  # by an attach that came later
            self._handles[id(param)].remove()
        else:
            self._names.append(name)

    def _is_covered(self, param: torch.Tensor) -> bool:
        return self._covers(param) or is_covered(param)

    def warn(self) -> None:
        """Warn of the parameters noted so far; only once. Called at the end of a pass."""
        if not self._names:
            return
        names = list(dict.fromkeys(self._names))
        self.close()
        shown = ", ".join(map(repr, names[:5])) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        warnings.warn(
            "these parameters of the module get gradients, but are no parameters of the optimizer, and nothing "
            f"averages them: {shown}. Anything computed from them differs between the ranks, for example "
            "clip_grad_norm_(model.parameters()). Attach the optimizer that has them too, or write "
            "attach(..., all_parameters=True), or requires_grad_(False)",
            RuntimeWarning,
            stacklevel=2,
        )

    def close(self) -> None:
        """Remove all hooks, and forget what was noted."""
        for handle in self._handles.values():
            handle.remove()
        self._names.clear()


class _Note:
    """Hook of a parameter that does not keep its owner alive."""

    def __init__(self, owner: Uncovered, name: str) -> None:
        self._owner, self._name = weakref.ref(owner), name

    def __call__(self, param: torch.Tensor) -> None:
        owner = self._owner()
        if owner is not None:
            owner.note(self._name, param)
