"""Layer of experts over ranks, with limited capacity: each token goes to the few experts that a gate chooses for it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd import Function

from pycomm.checks import bounded, count, flag
from pycomm.collectives.transport.own_group import found_group, group_of
from pycomm.errors import attempt
from pycomm.parallel.functional import all_to_all
from pycomm.parallel.functional.moves import agreed_rows, fail_together, require_tensor
from pycomm.parallel.mesh import GroupLike, agree


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


class ExpertsOutput(NamedTuple):
    """Result of a layer of experts.

    Attributes:
        output: of the input's shape, but for the last dimension if experts change it.
        auxiliary_loss: this rank's part of the loss that balances the experts; its mean over the ranks of the group is
            the loss over all of their tokens. Add a small multiple, such as 0.01, to the rank's own loss.
        dropped: number of this rank's choices that found no room.
    """

    output: torch.Tensor
    auxiliary_loss: torch.Tensor
    dropped: int


class Experts(nn.Module):
    """Mixture of experts, split evenly over the ranks of a group.

    The layer of Shazeer et al. (arXiv:1701.06538) with the gate of Lepikhin et al., "GShard" (arXiv:2006.16668, section
    2.2): a softmax over all experts; each token goes to the best ``top_k``. An expert takes at most ``capacity_factor``
    times its fair share of all ranks' tokens, in the order of choices, ranks and tokens; the other tokens contribute
    zero. The auxiliary loss is as in Fedus et al., "Switch Transformers" (arXiv:2101.03961, section 2.2): experts x
    sum over experts of (fraction of first choices x mean probability), which is 1 for an even distribution. Tokens
    travel by two uneven all-to-alls; each rank may have any number of them.

    The result equals one process with all experts and all tokens, for any number of ranks. Construction and calls
    are collective over the group. The ranks of the group have different data. So average the gradients of experts over
    the ranks with the same experts, and all other gradients over all ranks::

        mesh = pycomm.parallel.mesh(dp=2, ep=2)
        dense, experts = pycomm.parallel.parameters_by_group(model)        # names and parameters
        everyone = pycomm.parallel.group_over(mesh, "dp", "ep")
        first = torch.optim.AdamW([param for _, param in dense])
        second = torch.optim.AdamW([param for _, param in experts])
        pycomm.attach(first, dense, process_group=everyone)                # not `model`: it has other experts there
        pycomm.attach(second, experts, process_group=mesh["dp"])

    Args:
        make_expert: returns a new expert, which maps ``(tokens, width)`` to ``(tokens, features)``, each token
            independently; there may be no tokens. Every rank makes all experts in order and keeps its own, so that
            equal seeds give the same experts on any number of ranks.
        experts: number of experts of all ranks together, a multiple of the number of ranks.
        width: features of a token.
        group: a group, a one-dimensional ``DeviceMesh`` (``mesh["ep"]``), or ``None`` for the default group.
        top_k: number of experts for each token.
        capacity_factor: limit of an expert's tokens, in multiples of its fair share; ``None`` for no limit.
        average: whether experts' gradients are divided by the number of ranks of the group, as averaging does
            for other parameters. Otherwise they are gradients of the sum of the ranks' losses.

    Attributes:
        gate: Linear without bias that gives the logits; must be equal on all ranks (``attach`` ensures this).
        own: this rank's experts, by their numbers among all.

    Raises:
        TypeError, ValueError: an argument is wrong, or the ranks' differ (on every rank).
    """

    def __init__(
        self,
        make_expert: Callable[[], nn.Module],
        experts: int,
        width: int,
        group: GroupLike = None,
        *,
        top_k: int = 2,
        capacity_factor: float | None = 1.25,
        average: bool = True,
    ) -> None:
        super().__init__()
        self._group, problem = found_group(lambda: group_of(group))  # not part of the state
        size, rank = self._group.size(), self._group.rank()
        given = _ExpertsSettings(experts, width, top_k, capacity_factor, average)
        settings = agree(
            self._group,
            attempt(lambda: given.checked(size), problem),
            "make this layer of experts",
            _ExpertsSettings.lines,
        )
        self.num_experts, self.width, self.top_k, self.capacity_factor, self.average = settings
        share = self.num_experts // size
        made = attempt(lambda: _made(make_expert, settings))
        self.gate, modules = agree(self._group, made, "make its experts")
        self.own = nn.ModuleDict({str(n): each for n, each in enumerate(modules) if n // share == rank})

    def forward(self, x: torch.Tensor) -> ExpertsOutput:
        """Send the tokens ``x`` of shape ``(..., width)`` through their experts.

        Raises:
            TypeError, ValueError: ``x`` is no floating-point tensor of this width and the gate's dtype, or an expert
                fails, here or on another rank (on every rank; here that is the expert's own error).
        """
        size, rank, device = self._group.size(), self._group.rank(), self.gate.weight.device
        tokens, chosen, rows = self._exchange_counts(attempt(lambda: self._chosen(x)), device)
        all_counts = torch.tensor([row[1:] for row in rows]).view(size, self.top_k, self.num_experts)
        total = sum(row[0] for row in rows)
        capacity = capacity_of(total, self.top_k, self.num_experts, self.capacity_factor)
        way = route(chosen.experts.cpu(), all_counts, rank, capacity)
        places = way.places.to(tokens.device)
        sources = places % max(tokens.shape[0], 1)
        received = all_to_all(tokens.index_select(0, sources), way.sends, self._group)
        computed = attempt(lambda: self._compute(received, way))
        if isinstance(computed, Exception):
            fail_together("all_to_all", computed, self._group, device)
        returned = all_to_all(computed, way.receives, self._group)
        weights = chosen.weights.t().reshape(-1).index_select(0, places)
        out = returned.new_zeros(tokens.shape[0], returned.shape[-1])
        out = out.index_add(0, sources, returned * weights.unsqueeze(1))
        first_choices = all_counts[:, 0].sum(0).to(tokens)
        mean = chosen.probabilities.sum(0) * size / max(total, 1)
        auxiliary = self.num_experts * (first_choices / max(total, 1) * mean).sum()
        dropped = tokens.shape[0] * self.top_k - places.numel()
        return ExpertsOutput(out.view(*x.shape[:-1], out.shape[-1]), auxiliary, dropped)

    def extra_repr(self) -> str:
        """Return the settings, for ``print(model)``."""
        return f"experts={self.num_experts}, top_k={self.top_k}, capacity_factor={self.capacity_factor}"

    def _chosen(self, x: Any) -> tuple[torch.Tensor, Choices, list[int]]:
        """Return the tokens in ``x``, the gate's choices, and the numbers of tokens: of all, and of each expert."""
        if not isinstance(x, torch.Tensor) or not x.is_floating_point():
            kind = x.dtype if isinstance(x, torch.Tensor) else type(x).__name__
            raise TypeError(f"x is a {kind}, wanted a floating-point tensor")
        require_tensor(x)
        if x.dim() == 0 or x.shape[-1] != self.width:
            raise ValueError(f"x has the shape {list(x.shape)}, wanted (..., {self.width})")
        tokens = x.reshape(-1, self.width)
        chosen = choose(self.gate(tokens), self.top_k)
        counts = counts_of(chosen.experts.cpu(), self.num_experts)
        return tokens, chosen, [tokens.shape[0], *counts.flatten().tolist()]

    def _exchange_counts(
        self, made: tuple[torch.Tensor, Choices, list[int]] | Exception, device: torch.device
    ) -> tuple[torch.Tensor, Choices, list[list[int]]]:
        """Return what :meth:`_chosen` does, with the counts of all ranks in the place of this one's."""
        counts = made if isinstance(made, Exception) else made[2]
        form = "" if isinstance(made, Exception) else f"tokens of {made[0].dtype}"
        width = 1 + self.top_k * self.num_experts
        rows = agreed_rows(self._group, counts, width, "send its tokens to experts", device, form)
        assert not isinstance(made, Exception)
        return made[0], made[1], rows

    def _compute(self, received: torch.Tensor, way: TokenRoute) -> torch.Tensor:
        """Return the outputs of this rank's experts for the received tokens, in their order."""
        by_expert = way.by_expert.to(received.device)
        size = self._group.size() if self.average else 1
        # The gradients are of the sum of all ranks' losses: they are divided for the experts' own parameters, and
        # multiplied again on their way to the tokens.
        parts = torch.split(_scale_gradient(received.index_select(0, by_expert), size), way.rows)
        made = [expert(part) for expert, part in zip(self.own.values(), parts, strict=True)]
        for number, each, part in zip(self.own, made, parts, strict=True):
            require_tensor(each)
            if each.dim() != 2 or each.shape[0] != part.shape[0]:
                raise ValueError(
                    f"expert {number} returned the shape {list(each.shape)} for {part.shape[0]} tokens, wanted "
                    "(tokens, features)"
                )
        return _scale_gradient(torch.cat(made), 1 / size).index_select(0, by_expert.argsort())


def parameters_by_group(
    model: nn.Module,
) -> tuple[list[tuple[str, nn.Parameter]], list[tuple[str, nn.Parameter]]]:
    """Return the parameters of ``model`` with their names: the ones that all ranks have, then the experts'.

    The recipe for the two optimizers and averages is in :class:`Experts`.
    """
    owned = {
        id(param) for module in model.modules() if isinstance(module, Experts) for param in module.own.parameters()
    }
    named = list(model.named_parameters())
    return [each for each in named if id(each[1]) not in owned], [each for each in named if id(each[1]) in owned]


class _ScaleGradient(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad * ctx.factor, None


def _scale_gradient(x: torch.Tensor, factor: float) -> torch.Tensor:
    """Return ``x``, whose gradient will be multiplied by ``factor``."""
    if factor == 1:
        return x
    out: torch.Tensor = _ScaleGradient.apply(x, factor)  # type: ignore[no-untyped-call]
    return out


class _ExpertsSettings(NamedTuple):
    """Arguments of a layer, which must be equal on all ranks."""

    experts: Any
    width: Any
    top_k: Any
    capacity_factor: Any
    average: Any

    def checked(self, ranks: int) -> _ExpertsSettings:
        """Return them as plain numbers. Raises TypeError or ValueError if they are wrong."""
        experts = count("experts", self.experts, 1)
        if experts % ranks:
            raise ValueError(f"experts is {experts}, which {ranks} ranks cannot share evenly")
        top_k, factor = count("top_k", self.top_k, 1), self.capacity_factor
        if top_k > experts:
            raise ValueError(f"top_k is {top_k}, wanted at most the {experts} experts")
        if factor is not None:
            factor = bounded("capacity_factor", factor, "a number above 0 and below 1e6", lambda f: 1e-6 <= f < 1e6)
        flag("average", self.average)
        return _ExpertsSettings(experts, count("width", self.width, 1), top_k, factor, self.average)

    def lines(self) -> list[str]:
        """Return a line for each."""
        return [f"{name} = {value}" for name, value in self._asdict().items()]


def _made(make_expert: Callable[[], nn.Module], settings: _ExpertsSettings) -> tuple[nn.Linear, list[nn.Module]]:
    """Return the gate and all experts."""
    gate = nn.Linear(settings.width, settings.experts, bias=False)
    made = [make_expert() for _ in range(settings.experts)]
    for each in made:
        if not isinstance(each, nn.Module):
            raise TypeError(f"make_expert made a {type(each).__name__}, wanted a torch.nn.Module")
    return gate, made
