"""Messages between two ranks that autograd differentiates: a gradient travels back where a tensor came from.

    token = functional.send(hidden, dst=1, group=group)               # rank 0
    reply = functional.recv(like, src=1, group=group, token=token)
    loss_of(reply).backward()

    hidden = functional.recv(like, src=0, group=group)                # rank 1
    token = functional.send(layer(hidden), dst=0, group=group)
    token.sum().backward()                                            # no loss here: waits for rank 0's gradient

A rank that sends has nothing left of the tensor that a loss could depend on, so ``send`` returns a *token*: an empty
tensor through which the backward pass reaches the message. It must become part of what the rank differentiates: hand
it to a later ``recv`` (which then is differentiated before it), tie it to the loss, or call ``token.sum().backward()``.
A message whose token is dropped gets no gradient, though the receiver sends one.

The backward pass does, in reverse order, the opposite of what the forward pass did. So if all messages of the
forward pass find their receivers, all messages of the backward pass do, too. Gradients have tags of their own, so
they are not confused with messages that the forward pass of another microbatch sends in the meantime.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import Function

from pycomm.checks import count
from pycomm.collectives.transport.own_group import group_of
from pycomm.parallel.functional.moves import require_tensor
from pycomm.parallel.mesh import GroupLike

_TAGS = 2**14
"""Tags of users are smaller; the gradient of a message has its tag plus this number."""


def send(x: torch.Tensor, dst: int, tag: int = 0, group: GroupLike = None) -> torch.Tensor:
    """Send ``x`` to rank ``dst``, and return a token, in whose backward the gradient is received.

    Args:
        x: tensor of any shape.
        dst: another rank, in the group.
        tag: number by which the receiver finds it; below 16,384.
        group: a group, a one-dimensional ``DeviceMesh``, or ``None`` for the default group.

    Returns:
        An empty tensor of the dtype of ``x``. Receiver and sender both differentiate, or neither: with gradients
        enabled and a floating-point or complex dtype, the receiver's backward sends a gradient, for which the
        token's waits.

    Raises:
        TypeError, ValueError: an argument is wrong (on this rank).
    """
    require_tensor(x)
    found = _checked("dst", dst, tag, group)
    return _result(_Send.apply(_tied(x), dst, tag, found))  # type: ignore[no-untyped-call]


def recv(
    like: torch.Tensor, src: int, tag: int = 0, group: GroupLike = None, *, token: torch.Tensor | None = None
) -> torch.Tensor:
    """Return a tensor that rank ``src`` sends; its backward sends the gradient there.

    Args:
        like: tensor with the shape, dtype and device of the message; only these are used ("meta" stands for the
            CPU).
        src: another rank, in the group.
        tag: as given to :func:`send`.
        group: as for :func:`send`.
        token: of a message that was sent before; its gradient is received after this message's gradient was sent.

    Raises:
        TypeError, ValueError: an argument is wrong (on this rank).
    """
    require_tensor(like, has_values=False)
    if token is not None:
        require_tensor(token)
    found = _checked("src", src, tag, group)
    device = torch.device("cpu") if like.is_meta else like.device
    anchor = torch.empty(0, dtype=like.dtype, device=device) if token is None else token
    return _result(_Recv.apply(_tied(anchor), like.shape, like.dtype, device, src, tag, found))  # type: ignore[no-untyped-call]


def tie(x: torch.Tensor, *tokens: torch.Tensor) -> torch.Tensor:
    """Return ``x``, whose backward also reaches ``tokens``, with zeros for their gradients.

    For tokens of messages, and for what :func:`reduce` returns where it is not wanted.
    """
    for each in (x, *tokens):
        require_tensor(each)
    return _result(_Tie.apply(x, *tokens))  # type: ignore[no-untyped-call]


class _Send(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dst: int, tag: int, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.x = x.shape, x.dtype, x.device
        ctx.given = dst, tag, group
        dist.send(x.contiguous(), dist.get_global_rank(group, dst), group=group, tag=tag)
        return x.new_empty(0)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        dst, tag, group = ctx.given
        return _Recv.apply(grad, *ctx.x, dst, tag ^ _TAGS, group), None, None, None  # type: ignore[no-untyped-call]


class _Recv(Function):
    @staticmethod
    def forward(
        ctx: Any, token: torch.Tensor, shape: Any, dtype: Any, device: Any, src: int, tag: int, group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.token = token.shape, token.dtype
        ctx.given = src, tag, group
        out = torch.empty(shape, dtype=dtype, device=device)
        dist.recv(out, dist.get_global_rank(group, src), group=group, tag=tag)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        src, tag, group = ctx.given
        token = _Send.apply(grad, src, tag ^ _TAGS, group)  # type: ignore[no-untyped-call]
        shape, dtype = ctx.token
        # What the token has is no value, but a place in the graph: of gradients, too.
        return token.to(dtype).sum().expand(shape), None, None, None, None, None, None


class _Tie(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *tokens: torch.Tensor) -> torch.Tensor:
        ctx.tokens = [(token.shape, token.dtype, token.device) for token in tokens]
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad, *(torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.tokens)


def _checked(name: str, rank: int, tag: int, group: GroupLike) -> dist.ProcessGroup:
    found = group_of(group)
    if count(name, rank, 0) >= found.size():
        raise ValueError(f"{name} is {rank}, wanted a rank below {found.size()}, in the group")
    if rank == found.rank():
        raise ValueError(f"{name} is {rank}, this rank itself")
    if count("tag", tag, 0) >= _TAGS:
        raise ValueError(f"tag is {tag}, wanted one below {_TAGS}")
    return found


def _tied(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` as part of a graph: the other rank cannot know whether this one's needs a gradient."""
    if torch.is_grad_enabled() and not x.requires_grad and (x.is_floating_point() or x.is_complex()):
        return x.detach().requires_grad_()
    return x


def _result(out: Any) -> torch.Tensor:
    assert isinstance(out, torch.Tensor)
    return out
