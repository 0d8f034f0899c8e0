"""Parameters of a module that get gradients which nobody averages."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch

from pycomm.optim.attached import is_covered


class Uncovered:
    """Watches the parameters of ``module`` that have no place in a Reducer, and warns once if one gets a gradient.

    Args:
        knows: whether a parameter has a place in the Reducer that is being made.
    """

    def __init__(self, module: torch.nn.Module, knows: Callable[[torch.Tensor], bool]) -> None:
        self._knows = knows
        self._names: list[str] = []
        self._handles: dict[int, Any] = {}  # by id of the parameter
        self.watch(module)

    def watch(self, module: torch.nn.Module) -> None:
        """Look again: others may learn by now."""
        for name, param in module.named_parameters():
            if param.requires_grad and id(param) not in self._handles and not self._is_covered(param):
                register: Any = param.register_post_accumulate_grad_hook
                self._handles[id(param)] = register(_Note(self, name))

    def note(self, name: str, param: torch.Tensor) -> None:
        """``param`` has got a gradient."""
        if self._is_covered(param):  # by an attach that came later
            self._handles[id(param)].remove()
        else:
            self._names.append(name)

    def _is_covered(self, param: torch.Tensor) -> bool:
        return self._knows(param) or is_covered(param)

    def warn(self) -> None:
        """At the end of a pass; once."""
        if not self._names:
            return
        names = list(dict.fromkeys(self._names))
        self.close()
        shown = ", ".join(map(repr, names[:5])) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        warnings.warn(
            "these parameters of the module get gradients, but are no parameters of the optimizer, and nothing "
            f"averages them: {shown}. What is computed from them differs between the ranks, "
            "clip_grad_norm_(model.parameters()) for one. attach the optimizer that has them too, or write "
            "attach(..., all_parameters=True), or requires_grad_(False)",
            RuntimeWarning,
            stacklevel=2,
        )

    def close(self) -> None:
        for handle in self._handles.values():
            handle.remove()
        self._names.clear()


class _Note:
    """A hook that keeps nothing alive."""

    def __init__(self, owner: Uncovered, name: str) -> None:
        self._owner, self._name = weakref.ref(owner), name

    def __call__(self, param: torch.Tensor) -> None:
        owner = self._owner()
        if owner is not None:
            owner.note(self._name, param)
