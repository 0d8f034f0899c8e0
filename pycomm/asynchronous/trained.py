"""What a worker of a parameter server trains: the parameters that were given, with the numbers that servers have."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from pycomm.asynchronous.loop import Known
from pycomm.optim.attached import forget_averaged, register_averaged
from pycomm.optim.hyperparameters import Hyperparameters, first_difference
from pycomm.optim.module_hooks import watch_copies


class Trained:
    """Parameters of a worker, looked after from pull to push. Copies of ``model`` refuse to be trained.

    Args:
        model, optimizer: those of the worker, which never steps.
        named: the parameters.
    """

    def __init__(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, named: Mapping[str, torch.Tensor]
    ) -> None:
        self._known = Known(model, optimizer, named, "parameter_server()")
        self._reader = Hyperparameters(optimizer)
        self._copies = watch_copies(model)
        register_averaged(self._known)
        self.remember_numbers()

    def remember_numbers(self) -> None:
        """Take the numbers of the parameter groups for those of the servers."""
        self._numbers = self._reader.groups()

    def require_known(self) -> None:
        """Raise ValueError if the parameters are no longer those of module and optimizer."""
        if problem := self._known.problem():
            raise ValueError(problem)

    def require_same(self) -> None:
        """Raise ValueError if parameters are other ones, or have numbers that the servers do not know of."""
        self.require_known()
        found = first_difference([self._numbers, self._reader.groups()])
        if found is not None:
            index, key, (before, now) = found
            raise ValueError(
                f"{key!r} of parameter group {index} was changed on this worker, from {before!r} to {now!r}, and the "
                "servers step: a schedule belongs in server.schedule(). Nothing was pushed"
            )

    def close(self) -> None:
        """Let copies be trained, and the parameters be averaged by something else."""
        forget_averaged(self._known)
        self._copies.remove()
