"""What steps that the ranks take together want, and how they begin."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pycomm.communicator import Communicator
from pycomm.layout import require_dense
from pycomm.optim.fused import FusedStep, KernelStep, rule_of
from pycomm.optim.master_weights import MasterWeights
from pycomm.optim.step_override import HALF
from pycomm.reducer.options import Sharding
from pycomm.reducer.partition.common_memory import memory_of_all
from pycomm.reducer.partition.on_host import HostPartition
from pycomm.reducer.partition.partition import StepPartition, Terms, settings_of
from pycomm.reducer.partition.spread import SpreadPartition
from pycomm.reducer.settings import Settings
from pycomm.torch_internals import is_dtensor

if TYPE_CHECKING:
    from pycomm.reducer.parameters import ParameterTable


def require_shardable(table: ParameterTable, shard: str) -> None:
    """Raise ValueError if kernels do not step the optimizer of ``table``, or its parameters cannot be shared."""
    name, optimizer = f'shard="{shard}"', table.optimizer
    try:
        rule_of(optimizer)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} requires an optimizer that pycomm's kernels step: {error}") from None
    stepper = table.stepper
    if isinstance(stepper, MasterWeights) and not stepper.has_kernels:
        raise ValueError(
            f"{name} requires masters that pycomm's kernels step; {type(optimizer).__name__} steps its own"
        )
    for label, param in table.named():
        if param.device.type != "cpu":
            raise ValueError(f"{name} requires parameters in CPU memory, and {label!r} is on {param.device}")
        if is_dtensor(param):
            raise ValueError(
                f"{name} requires ordinary parameters, and {label!r} is a DTensor, which is sharded already"
            )
        if param.dtype in HALF and not stepper.has_masters:
            raise ValueError(
                f"{name}: parameter {label!r} has dtype {param.dtype}, which kernels step by float32 masters only: "
                "call pycomm.master_weights(optimizer) before attach"
            )
        require_dense(param)


def require_reachable(communicator: Communicator, shard: Sharding) -> None:
    """Raise ValueError if ``shard`` requires all ranks of ``communicator`` to reach one memory, and they do not."""
    if memory_of_all(communicator) is not None:
        return
    if shard.kind == "parameters" or shard.grads == "local":
        raise ValueError(
            f"shard={shard} requires all ranks on one host, where they reach each other's memory; these travel by "
            f'{communicator.transport!r}, over which Sharding("optimizer", grads="part" or "full") works'
        )


def open_partition(
    communicator: Communicator, table: ParameterTable, settings: Settings, shard: Sharding
) -> StepPartition:
    """Return a partition of the parameters that ``table`` is about to sort into buckets. Collective."""
    there = table.stepper
    is_there = isinstance(there, KernelStep)
    terms = Terms(
        communicator,
        there if isinstance(there, KernelStep) else FusedStep(table.optimizer),
        table.module,
        grads=shard.grads,
        average=settings.average,
        most_writes=0 if settings.loss_scaler is None else 1,  # by unscale_()
        was_fused_here=not is_there,
    )
    if memory_of_all(communicator) is None:
        return SpreadPartition(terms)
    return HostPartition(terms, shares_parameters=shard.kind == "parameters")


def settings_lines(optimizer: torch.optim.Optimizer) -> list[str]:
    """Return a line for each parameter group, to be compared between ranks."""
    return settings_of(optimizer).decode().splitlines()
