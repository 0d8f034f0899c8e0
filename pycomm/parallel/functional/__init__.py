"""Differentiable collectives, each with another collective as its backward.

    y = functional.all_gather(x, dim=1, group=mesh["tp"])
    loss_of(y).backward()                     # x.grad: of the sum of all ranks' losses

There are two ways to think of a loss that several ranks compute, and a function for each.

*The ranks' losses add up*: every rank computes a loss of its own, and gradients are taken of the sum of
all of them. Its functions are ``all_reduce``, ``all_gather``, ``reduce_scatter``, ``all_to_all``, ``broadcast``,
``reduce``, and the messages ``send`` and ``recv``. Each one's backward is the transposed operation, itself one of
these functions, so that gradients can be differentiated again:

    all_reduce - all_reduce    all_gather - reduce_scatter    all_to_all - all_to_all
    broadcast - reduce         send - recv

*All ranks have the same loss*, computed from replicated tensors, as in a model whose layers are split (Shoeybi et
al., "Megatron-LM", arXiv:1909.08053, section 3). Its functions are ``copy_to_group`` (the paper's f),
``reduce_from_group`` (g), ``scatter_to_group`` and ``gather_from_group``, in two pairs.

All ranks of the group have to call the same functions in the same order, forward and backward: autograd walks a
graph backwards in one order, so that equal graphs on the ranks are enough. Each collective of the first family
announces what it was given (one small message) before it moves anything: where the ranks differ, all of them get a
ValueError, on any backend.
Where ``torch.distributed.nn.functional`` has such functions, they are deprecated, require equal sizes, do not
compare, and some work on NCCL only; ``torch.distributed._functional_collectives`` has no backward for most.
"""

from pycomm.parallel.functional.collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    copy_to_group,
    gather_from_group,
    reduce,
    reduce_from_group,
    reduce_scatter,
    scatter_to_group,
)
from pycomm.parallel.functional.messages import recv, send, tie

__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "copy_to_group",
    "gather_from_group",
    "recv",
    "reduce",
    "reduce_from_group",
    "reduce_scatter",
    "scatter_to_group",
    "send",
    "tie",
]
