"""Pipelines: torch's runtime for tables of actions, whose names begin with an underscore."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.pipelining import PipelineStage

Cell = tuple[int, str, int] | None
"""What a rank does in one slot: a stage, one of "F", "B" (whole backward), "I" (of the input only) and "W" (of the
weights), and a microbatch; ``None`` for nothing."""


class QuietStage(PipelineStage):
    """Stage whose shape inference has no side effects.

    Before the first step, and between training and evaluation, torch runs a stage's module on uninitialized tensors to
    infer shapes. Running statistics would record them, and an embedding would look up arbitrary indices: so the tensors
    are zeros, and buffers are restored.
    """

    _kept: tuple[tuple[torch.Tensor, torch.Tensor], ...] = ()

    def _to_tensor(self, arg: Any) -> Any:
        made: Any = super()._to_tensor(arg)
        if not isinstance(arg, torch.Tensor):
            with torch.no_grad():
                made.zero_()
        return made

    def _forward_metadata_inference(self, *args: Any, **kwargs: Any) -> Any:
        self._kept = tuple((buffer, buffer.clone()) for buffer in self.submod.buffers())
        return super()._forward_metadata_inference(*args, **kwargs)

    def _post_metadata_inference_cleanup(self) -> None:  # only now: a batch norm's backward looks at its buffers
        super()._post_metadata_inference_cleanup()
        with torch.no_grad():
            for buffer, old in self._kept:
                buffer.copy_(old)
        self._kept = ()


_FORWARD = ("F", "SEND_F", "RECV_F", "UNSHARD", "RESHARD")


def pipeline_runtime(
    stages: Sequence[PipelineStage],
    rows: Mapping[int, Sequence[Cell]],
    microbatches: int,
    loss: Callable[..., torch.Tensor] | None,
) -> Any:
    """Return torch's runtime for the table ``rows``, whose ``step`` and ``eval`` run this rank's row.

    The public schedule classes each generate a table of their own; this is the class beneath them, which takes any.
    It adds the sends and receives itself.

    Args:
        rows: what each rank of the pipeline does, by rank.
        loss: function of outputs and targets of a microbatch; its mean is what is differentiated.
    """
    from torch.distributed.pipelining import schedules  # here, as older releases lack them

    runtime: Any = schedules._PipelineScheduleRuntime
    made = runtime(list(stages), microbatches, loss_fn=loss)
    kinds = {name: schedules._ComputationType.from_str(name) for name in ("F", "B", "I", "W")}
    actions = {
        rank: [None if cell is None else schedules._Action(cell[0], kinds[cell[1]], cell[2]) for cell in row]
        for rank, row in rows.items()
    }
    made._prepare_schedule_with_comms(actions)
    return made


def run_forward(runtime: Any, *inputs: torch.Tensor) -> Any:
    """Run only the forward actions of ``runtime``, without its loss.

    Its ``eval`` goes through the backward actions as well, and fails where a rank has two neighboring stages.
    """
    whole, loss = runtime.pipeline_order_with_comms, runtime._loss_fn
    forward = {rank: [each for each in row if each.computation_type.value in _FORWARD] for rank, row in whole.items()}
    runtime.pipeline_order_with_comms, runtime._loss_fn = forward, None
    try:
        return runtime.eval(*inputs)
    finally:
        runtime.pipeline_order_with_comms, runtime._loss_fn = whole, loss


def forget_shapes(runtime: Any) -> None:
    """Have ``runtime`` learn the shapes of what its stages pass on again, in its next step. On all ranks, or none."""
    runtime._stages_forward_initialized = runtime._stages_backward_initialized = False
