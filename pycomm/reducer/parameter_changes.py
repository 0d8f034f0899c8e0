"""Parameters that are added, unfrozen or replaced while they are attached."""

from __future__ import annotations

import contextlib
import itertools
import json
import weakref
from collections.abc import Callable, Iterable, Iterator

from pycomm.reducer.buckets import Slot
from pycomm.reducer.engine import Engine
from pycomm.reducer.provenance import ParameterPlaces
from pycomm.reducer.rank_report import raise_different_new

_numbers = itertools.count()
"""Of the attaches of this process, which are made in the same order on all ranks."""


class ParameterChanges:
    """Follower of the changes of an optimizer's and a module's parameters, which all ranks have to make alike.

    Ranks meet about them before the next forward. Where no forward of the module is seen, they tell one another of
    them with the gradients that they have, and meet when these are there.

    Args:
        engine: engine of the attach.
        listen_to: method that has hooks put on the parameters of slots.
        stop: method that ends this rank's part, and tells the other ranks why.
    """

    def __init__(
        self, engine: Engine, listen_to: Callable[[Iterable[Slot]], None], stop: Callable[[Exception], None]
    ) -> None:
        self._engine, self._table, self._communicator = engine, engine.table, engine.communicator
        self._listen_to, self._stop = weakref.WeakMethod(listen_to), weakref.WeakMethod(stop)
        self._places = ParameterPlaces(engine.table, self._refuse)
        self._number = next(_numbers)
        engine.admit_new = self._admit

    def hook(self, slots: list[Slot]) -> None:
        """Give ``slots`` buckets, and listen to their gradients."""
        self._table.make_buckets(slots, self._engine.lanes, self._engine.settings)
        self._listen(slots)
        self._places.find(self._table)

    def _listen(self, slots: list[Slot]) -> None:
        listen_to = self._listen_to()
        assert listen_to is not None
        listen_to(slots)

    def find_new(self) -> None:
        """Admit parameters that were added or unfrozen. Collective, if there are any."""
        if not self._table.has_new():
            return
        self._engine.policy.stand_down()
        self._require_replaceable()
        with self._telling():
            try:
                self._admit()
            except ValueError as error:
                raise self.explained(error) from error
        if not self._engine.is_waited_for():
            self.drop_replaced()

    def _admit(self) -> None:
        self._table.find_new(self._communicator)
        self.hook(self._table.admit())

    def _require_replaceable(self) -> None:
        """Raise RuntimeError if a parameter has been replaced where ranks write to one another's."""
        replaced = self._table.replaced() if self._table.partition is not None else []
        if replaced:
            raise RuntimeError(
                f"parameter {replaced[0].name!r} of the optimizer has been replaced, which shard="
                f"{self._engine.settings.shard!r} does not go with: detach() before, and attach() afterwards"
            )

    def drop_replaced(self) -> None:
        """Forget parameters that others have taken the place of, and go on in buckets without them."""
        replaced = self._table.replaced()
        if replaced and self._table.partition is None:
            self._table.drop(replaced)
            self._table.rebuild(self._engine.lanes, self._engine.settings, adopt=True)
            self._engine.hash_state()
            self._listen(self._table.slots())

    # Errors of ranks that do not make the same changes.

    @contextlib.contextmanager
    def _telling(self) -> Iterator[None]:
        """Note in the store, until the ranks have met, that this one meets them about new parameters."""
        store, key = self._communicator.place.store, self._key(self._communicator.rank)
        with contextlib.suppress(RuntimeError):  # of the store, without which an error is less clear
            store.set(key, json.dumps(self._table.new_names()))
        yield
        with contextlib.suppress(RuntimeError):
            store.delete_key(key)

    def _key(self, rank: int) -> str:
        reductions = self._engine.progress.num_reductions
        return f"pycomm/new/{self._communicator.place.name}/{self._number}/{reductions}/{rank}"

    def explained(self, error: ValueError) -> Exception:
        """Return ``error``, or the one behind it: some ranks have met about new parameters, and others have not."""
        names = {}
        with contextlib.suppress(RuntimeError, ValueError):
            store = self._communicator.place.store
            for rank in range(self._communicator.size):
                key = self._key(rank)
                names[rank] = json.loads(store.get(key)) if store.check([key]) else []
        try:
            raise_different_new({rank: {"new": new} for rank, new in names.items()})
        except RuntimeError as found:
            return found
        return error

    # A module that has other parameters than the optimizer.

    def look_at_module(self) -> bool:
        """Watch parameters in the place of others in the module, before a forward; return whether any came beside."""
        return self._places.look(self._table)

    def _refuse(self, name: str) -> None:
        """Raise RuntimeError: the parameter ``name`` of the module is not the one that is averaged, and is trained."""
        error = RuntimeError(
            f"rank {self._communicator.rank}: parameter {name!r} of the module is another object than the one that was "
            "attached (load_state_dict(assign=True), a layer or a parametrization that was exchanged), and nothing "
            "averages its gradient. "
            "detach(), then attach() the optimizer that has the module's parameters now; or put the new parameter into "
            "the attached optimizer's groups, on all ranks"
        )
        stop = self._stop()
        if stop is not None:
            stop(error)
        raise error
