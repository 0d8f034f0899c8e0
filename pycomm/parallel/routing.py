"""Routing of tokens to experts with limited capacity: arithmetic on counts, without communication."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch


class Choices(NamedTuple):
    """The gate's choices for this rank's T tokens.

    Attributes:
        experts: int64 of shape (T, k): each token's experts, the most probable first; of equals the lowest.
        weights: of shape (T, k): what their outputs count.
        probabilities: of shape (T, experts).
    """

    experts: torch.Tensor
    weights: torch.Tensor
    probabilities: torch.Tensor


def choose(logits: torch.Tensor, top_k: int) -> Choices:
    """Return the ``top_k`` experts of each token by ``logits`` of shape (T, experts).

    With several, their probabilities are scaled to the sum 1 (Lepikhin et al., "GShard", arXiv:2006.16668, algorithm
    1); a single one counts with its probability, so that the gate gets a gradient (Fedus et al., "Switch
    Transformers", arXiv:2101.03961, section 2.1).
    """
    probabilities = logits.softmax(-1)
    experts = probabilities.argsort(dim=-1, descending=True, stable=True)[:, :top_k]
    weights = probabilities.gather(-1, experts)
    if top_k > 1:
        weights = weights / weights.sum(-1, keepdim=True)
    return Choices(experts, weights, probabilities)


def counts_of(experts: torch.Tensor, number: int) -> torch.Tensor:
    """Return how many tokens have each expert as their first, second, ... choice: int64 of shape (k, ``number``)."""
    return torch.stack([torch.bincount(column, minlength=number) for column in experts.unbind(1)])


def capacity_of(tokens: int, top_k: int, experts: int, factor: float | None) -> int:
    """Return how many tokens each expert takes; as many as come if ``factor`` is ``None``."""
    return tokens * top_k if factor is None else math.ceil(factor * tokens * top_k / experts)


@dataclass(frozen=True)
class TokenRoute:
    """Route of this rank's tokens to the experts' ranks, and of other ranks' tokens to its own experts.

    Attributes:
        places: indices of accepted choices in this rank's choices, flattened choice by choice, in the order in which
            they are sent: by expert.
        sends: number of rows for each rank.
        receives: number of rows from each rank.
        by_expert: order that puts the received rows (by source, then by expert) by expert.
        rows: number of received rows for each of this rank's experts.
    """

    places: torch.Tensor
    sends: list[int]
    receives: list[int]
    by_expert: torch.Tensor
    rows: list[int]


def route(experts: torch.Tensor, counts: torch.Tensor, rank: int, capacity: int) -> TokenRoute:
    """Return the route of this rank's choices ``experts`` of shape (T, k).

    An expert takes the first ``capacity`` of its tokens: all first choices before all second ones, and among those by
    the token's place on its rank and by rank. So the result does not depend on how many ranks share the tokens.

    Args:
        experts: see :class:`Choices`.
        counts: :func:`counts_of` of every rank, of shape (ranks, k, experts).
        rank: this rank.
        capacity: number of tokens that an expert takes.
    """
    ranks, _, number = counts.shape
    # Those before a rank's own, for the same expert: earlier choices of all ranks, the same choice of lower ranks.
    earlier_choices = counts.sum(0).cumsum(0) - counts.sum(0)
    before = earlier_choices + counts.cumsum(0) - counts
    kept = (capacity - before).clamp(min=0).minimum(counts)  # (ranks, k, experts)
    flat = experts.t().reshape(-1)  # choice by choice
    order = flat.argsort(stable=True)
    choice = torch.arange(experts.shape[1]).repeat_interleave(experts.shape[0])
    first = counts[rank].cumsum(0) - counts[rank]  # in ``order``, within its expert, where a choice begins
    starts = counts[rank].sum(0).cumsum(0) - counts[rank].sum(0)
    position = torch.empty_like(flat)
    position[order] = torch.arange(flat.numel()) - starts[flat[order]]
    has_room = position - first[choice, flat] < kept[rank][choice, flat]
    places = order[has_room[order]]
    own = number // ranks
    kept_by_rank = kept.sum(1)  # (ranks, experts)
    sends = kept_by_rank[rank].view(ranks, own).sum(1).tolist()
    received = kept_by_rank[:, rank * own : (rank + 1) * own]  # (sources, own experts)
    labels = torch.arange(own).repeat(ranks).repeat_interleave(received.reshape(-1))
    return TokenRoute(places, sends, received.sum(1).tolist(), labels.argsort(stable=True), received.sum(0).tolist())
