"""Factor that the next fused step multiplies the gradients by, and what the gradients were when it was left."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping

import torch

from pycomm.optim.attached import reducer_of
from pycomm.optim.parameters import optimizer_parameters
from pycomm.optim.stamps import Stamp
from pycomm.optim.step_override import Factor, StepOverride

_GRAD_OF = operator.attrgetter("grad")


class PendingFactor:
    """Product of the factors that were left to the next step.

    It is only for the gradients that were there when it was left.

    Args:
        masters: masters by parameter, which may have gradients of their own.

    Attributes:
        value: the product; 1.0 if no factor was left.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, masters: Mapping[torch.Tensor, torch.Tensor]) -> None:
        self._optimizer, self._masters = optimizer, masters
        self._seen, self._grads = list[torch.Tensor](), Stamp()  # parameters and masters, and their gradients
        self.value: Factor = 1.0

    def leave(self, factor: Factor) -> None:
        """Multiply by ``factor``; raise RuntimeError if a gradient has changed since an earlier factor was left."""
        self._require_unwritten()
        self.value = self.value * factor
        self._seen = [*optimizer_parameters(self._optimizer), *self._masters.values()]
        self._grads = Stamp(map(_GRAD_OF, self._seen))

    def take(self) -> Factor:
        """Return the product, and drop it; raise RuntimeError if a gradient has changed since it was left."""
        self._require_unwritten()
        value = self.value
        self.drop()
        return value

    def drop(self) -> None:
        self.value = 1.0
        self._seen, self._grads = [], Stamp()

    def _require_unwritten(self) -> None:
        found = list(map(_GRAD_OF, self._seen))
        for index in self._grads.changed(found):
            p, now = self._seen[index], found[index]
            if now is None:
                continue
            how = "written to" if self._grads.has(index, now) else "replaced"
            problem = (
                f"was {how} between clip_grad_norm(), or LossScaler.step(), and the fused step, whose factor would "
                "scale that, too: change gradients before clip_grad_norm(), and with a LossScaler after its unscale_()"
            )
            reducer = reducer_of(self._optimizer)
            if reducer is not None:
                param = next((param for param, master in self._masters.items() if master is p), p)
                reducer.attached.refuse_gradient(param, problem)
            raise RuntimeError(f"the gradient of a parameter of shape {list(p.shape)} {problem}")


class FactorStep(StepOverride):
    """Step that multiplies the gradients by the factors that were left to it."""

    def __init__(self, optimizer: torch.optim.Optimizer, masters: Mapping[torch.Tensor, torch.Tensor] = {}) -> None:
        super().__init__(optimizer)
        self._pending = PendingFactor(optimizer, masters)

    def leave_factor(self, factor: Factor) -> bool:
        self._pending.leave(factor)
        return True

    def factor_left(self) -> Factor:
        return self._pending.value

    def drop_factor(self) -> None:
        self._pending.drop()

    def forget(self) -> None:
        self.drop_factor()


def refuse_closure(closure: Callable[[], object] | None) -> None:
    """Raise ValueError if a step that ranks take together has got a closure."""
    if closure is not None:
        raise ValueError(
            "step(closure) with attach(shard=...): the ranks step each other's parameters, and would have to wait for "
            "each other's closures; call backward() before step()"
        )
