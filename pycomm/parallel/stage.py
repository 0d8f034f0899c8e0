"""Stage of a pipeline whose messages carry tags."""

from __future__ import annotations

import torch.distributed as dist

from pycomm.torch_internals.pipelines import QuietStage


class TaggedStage(QuietStage):
    """Stage whose messages say what they are: which way they go, the stage they are for, and the microbatch.

    torch tells messages between two ranks apart by their order alone, so that a table whose sends and receives are
    not in the same order hands a stage another one's tensor. With tags the order does not matter.
    """

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the receives of the activations of a microbatch."""
        return self._tagged(super().get_fwd_recv_ops(fwd_chunk_id), 0, self.stage_index, fwd_chunk_id)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the sends of the activations of a microbatch."""
        return self._tagged(super().get_fwd_send_ops(fwd_chunk_id), 0, self.stage_index + 1, fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the receives of the gradients of a microbatch."""
        return self._tagged(super().get_bwd_recv_ops(bwd_chunk_id), 1, self.stage_index, bwd_chunk_id)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the sends of the gradients of a microbatch."""
        return self._tagged(super().get_bwd_send_ops(bwd_chunk_id), 1, self.stage_index - 1, bwd_chunk_id)

    def _tagged(self, operations: list[dist.P2POp], way: int, stage: int, microbatch: int) -> list[dist.P2POp]:
        # Tensors of the same message keep their order: tags are matched first come, first served.
        for operation in operations:
            operation.tag = 1 + way + 2 * (stage + self.num_stages * microbatch)
        return operations
