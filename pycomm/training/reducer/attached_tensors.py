"""Tensors that ``attach`` sends, compares or refuses.

| tensor | treatment |
|---|---|
| averaged parameter | rank 0's is sent; an error unless it is dense and of a dtype with gradients |
| frozen parameter, buffer | rank 0's is sent, whatever its dtype; of an expanded one, the memory behind it |
| sparse, quantised or composite frozen parameter or buffer | compared if its bytes are accessible; never changed |
| trainable parameter of other optimizers | compared; on a difference each rank keeps its own, with a warning |
| named by ``ignore`` | none |
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch

from pycomm.agreement import check_same_lines, exchanged, require_same
from pycomm.collectives import broadcasting
from pycomm.collectives.communicator import Communicator
from pycomm.collectives.tensor_memory import look_at
from pycomm.descriptions import first_names
from pycomm.torch_internals import by_plain_names
from pycomm.training.reducer.parameters import ParameterTable


class AttachedTensors:
    """Tensors of an optimizer and its module, as one rank sees them before the ranks meet.

    Raises:
        TypeError: one of them can be neither sent nor compared yet; it is named.
    """

    def __init__(self, table: ParameterTable) -> None:
        self._table = table
        averaged = dict(table.named())
        known = {id(param) for param in averaged.values()}
        others = {name: t for name, t in module_tensors(table).items() if id(t) not in known}
        self._own = [name for name, t in others.items() if isinstance(t, torch.nn.Parameter) and t.requires_grad]
        self._memories = {name: look_at(name, t) for name, t in [*averaged.items(), *others.items()]}
        self._averaged = [broadcasting.line_of(name, param, self._memories[name]) for name, param in averaged.items()]
        self._order = broadcasting.names_in_order(table.optimizer, averaged, table.ignored.covers)
        self._others = [broadcasting.line_of(name, tensor, self._memories[name]) for name, tensor in others.items()]

    def make_equal(self, communicator: Communicator) -> None:
        """Send rank 0's tensors to all ranks, and compare what cannot be sent. Collective."""
        gather = communicator.channel.all_gather_bytes
        lines = {"parameter": self._averaged, broadcasting.ORDER: self._order}
        require_same(exchanged(gather, lines, "compare"), "compare")
        check_same_lines(gather, self._others, "parameter or buffer outside the optimizer", f"; {broadcasting.OWN}")
        own = dict.fromkeys(self._own)
        compared = [name for name, m in self._memories.items() if name in own or (m.parts and not m.writable)]
        differing = broadcasting.differing_memories(communicator, {name: self._memories[name] for name in compared})
        odd = [name for name in differing if name not in own]
        if odd:
            raise ValueError(f"{broadcasting.describe_difference(odd, differing[odd[0]])}; {broadcasting.OWN}")
        if differing:
            self._table.rank_local = frozenset(differing)
            _warn_of(list(differing))
        stepper = self._table.stepper
        masters = stepper.masters(self._table.ignored.covers)
        parts = [part for name, m in self._memories.items() if m.writable and name not in own for part in m.parts]
        broadcasting.broadcast_parts(communicator, parts, src=0)
        broadcasting.broadcast_tensors(communicator, masters, src=0)
        stepper.restore()


def module_tensors(table: ParameterTable) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers of the module, without what is ignored or has been found to be rank-local."""
    if table.module is None:
        return {}
    named = by_plain_names(table.module, dict([*table.module.named_parameters(), *table.module.named_buffers()]))
    return {name: t for name, t in named.items() if name not in table.rank_local and not table.ignores(name, t)}


def _warn_of(names: Sequence[str]) -> None:
    warnings.warn(
        "parameters of the module that this optimizer does not have differ between the ranks: "
        f"{first_names(names)}. Each rank keeps its own. If they are meant to differ, write "
        "tuning=pycomm.Tuning(ignore=[names or patterns]); if not, give them to the optimizer, attach theirs too, or "
        "make the model from the same seed on all ranks",
        RuntimeWarning,
        stacklevel=5,
    )
