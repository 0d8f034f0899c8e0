"""Float32 masters of half-precision parameters, and their form in saved state."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from pycomm.collectives.layout import require_dense
from pycomm.collectives.tensor_memory import overlapping
from pycomm.optim.parameters import optimizer_parameters
from pycomm.optim.partition import Partition, Span
from pycomm.optim.plans import Rule
from pycomm.optim.step_override import HALF, Factor
from pycomm.torch_internals import dtensor_around, is_dtensor, local_of, version_of

KEY = "master_weight"
"""Key of the master in a parameter's entry of ``state_dict()``."""


def without_masters(
    saved: Mapping[str, Any], params: Sequence[torch.Tensor], masters: Mapping[torch.Tensor, torch.Tensor]
) -> tuple[list[int], dict[int, Any], dict[torch.Tensor, torch.Tensor]]:
    """Return the numbers of saved parameters, their state without masters, and the masters by parameter."""
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    found: dict[torch.Tensor, torch.Tensor] = {}
    state = dict(saved["state"])
    for number, param in zip(numbers, params, strict=False):  # torch itself raises if the lengths differ
        if param not in masters:
            continue
        entry = dict(state.get(number, {}))
        if KEY not in entry:
            raise ValueError(
                f"the state of parameter {number} has no {KEY!r}: it was saved without master_weights; load it "
                "before calling master_weights, which then copies the masters from the model's parameters"
            )
        found[param] = entry.pop(KEY)
        if not isinstance(found[param], torch.Tensor):
            raise ValueError(f"the master weight of parameter {number} is a {type(found[param]).__name__}")
        if found[param].shape != param.shape:
            raise ValueError(
                f"the master weight of parameter {number} has shape {list(found[param].shape)}, wanted "
                f"{list(param.shape)}"
            )
        state.pop(number, None)
        if entry:
            state[number] = entry
    return numbers, state, found


def cast_state(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, list):  # LBFGS keeps its history in lists
        return [cast_state(item, dtype) for item in value]
    if isinstance(value, torch.Tensor) and value.dtype in (torch.float32, *HALF):
        return value.to(dtype)
    return value


class Masters(dict[torch.Tensor, torch.Tensor]):
    """Masters by parameter, which follow what is written to the parameters.

    In a step that ranks take together, masters lie where all have agreed to write. What is written to them before the
    ranks agree, on this rank alone for all that it knows, is kept in this rank's own memory until then.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, rule: Rule | None) -> None:
        super().__init__()
        self.optimizer, self._rule = optimizer, rule
        self._is_kept: Callable[[torch.Tensor], bool] = lambda _: True
        self._stamps: dict[torch.Tensor, tuple[int, int, int]] = {}
        self._away: set[torch.Tensor] = set()  # parameters whose masters lie in this rank's own memory

    def stamp_all(self) -> None:
        """Note the parameters' present values as the values of their masters."""
        for param in self:
            self._stamps[param] = _stamp(param)

    def add(self, params: Iterable[torch.Tensor]) -> None:
        new = [p for p in params if p not in self and p.dtype in HALF and self._is_kept(p)]
        for param in new:
            check_half(param, self.optimizer, self._rule)
            self.put(param, param.detach().float())
            self._stamps[param] = _stamp(param)
            self.cast_state(param, torch.float32)  # if the optimizer already has state
        if new:
            self._tie()

    def _tie(self) -> None:
        """Let the masters of parameters that share memory share theirs in the same way."""
        params = [param for param in self if not is_dtensor(param)]
        memories: dict[int, torch.Tensor] = {}
        for param in {params[i] for pair in overlapping(params) for i in pair}:
            storage = param.untyped_storage()
            if (memory := memories.get(storage.data_ptr())) is None:
                memory = self[param].new_empty(storage.nbytes() // param.itemsize)
                memories[storage.data_ptr()] = memory
            master = memory.as_strided(param.shape, param.stride(), param.storage_offset())
            self[param] = master.copy_(self[param])

    def keep_only(self, is_kept: Callable[[torch.Tensor], bool]) -> None:
        """Keep and make only masters for which the function returns true: another rank has the others."""
        self._is_kept = is_kept
        for param in [param for param in self if not is_kept(param)]:
            del self[param], self._stamps[param]

    def put(self, param: torch.Tensor, master: torch.Tensor) -> None:
        """Use ``master``, in this rank's own memory, as master of ``param``, which may have been written to since."""
        self[param], self._stamps[param] = master, (-1, -1, -1)
        self._away.add(param)

    def refresh(self, partition: Partition | None) -> None:
        """Add masters of new parameters, and copy values that something else has written to known ones."""
        self.add(optimizer_parameters(self.optimizer))
        for param in self:
            if _stamp(param) == self._stamps[param]:
                continue
            local, master = local_of(param), local_of(self[param])
            require_dense(local)
            if (master.shape, master.stride(), master.device) != (local.shape, local.stride(), local.device):
                # The model was moved, or its memory order changed: kernels need both to be the same.
                master.data = torch.empty_like(local, dtype=master.dtype).copy_(master)
                if is_dtensor(param):
                    self[param] = dtensor_around(master, param)
            ranks = partition if partition is not None and partition.has(param) and param not in self._away else None
            span = Span(0, local.numel()) if ranks is None or ranks.is_shared else ranks.span_of(param)
            mine, written = span.of(master), span.of(local)
            differ = mine.to(local.dtype) != written  # by element: so it does not matter how parameters are divided
            if bool(differ.any()):
                if ranks is not None and ranks.is_shared:
                    self._move_away(param, master.clone(memory_format=torch.preserve_format))
                    mine = span.of(self[param])
                mine[differ] = written[differ].float()
            self._stamps[param] = _stamp(param)

    def _move_away(self, param: torch.Tensor, own: torch.Tensor) -> None:
        self[param].data = own
        self._away.add(param)

    def move_home(self, partition: Partition) -> None:
        """Move this rank's elements to memory that the ranks share, in a step that all have agreed to take."""
        for param in [param for param in self if param in self._away and partition.has(param)]:
            home, span = partition.home(param, KEY, torch.float32), partition.span_of(param)
            span.of(home).copy_(span.of(self[param]))
            self[param].data = home
            self._away.remove(param)

    def restore(self) -> None:
        """Cast all masters back to their parameters, after the masters were written to."""
        with torch.no_grad():
            for param, master in self.items():
                param.copy_(master)
                self._stamps[param] = _stamp(param)

    def load(
        self,
        state_dict: Mapping[str, Any],
        partition: Partition | None,
        unscaled: Mapping[torch.Tensor, torch.Tensor],
        done: Callable[[], None],
    ) -> None:
        """Load by torch's method with masters in place of parameters, so that nothing is cast to half precision.

        Args:
            state_dict: the optimizer's, with masters.
            partition: ranks that step the masters together.
            unscaled, done: as for :meth:`widened`.
        """
        if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= state_dict.keys():
            raise ValueError("state_dict is not of an optimizer: it has no 'state' and 'param_groups'")
        optimizer, saved, is_kept = self.optimizer, dict(state_dict), self._is_kept
        params = list(optimizer_parameters(optimizer))
        self.keep_only(lambda _: True)  # all ranks load the same, whoever steps a parameter
        self.add(params)
        homes: dict[torch.Tensor, torch.Tensor] = {}
        try:
            numbers, saved["state"], found = without_masters(saved, params, self)
            if partition is not None:
                found = {param: master.detach() for param, master in found.items()}  # perhaps those that move
                homes = {param: master.data for param, master in self.items() if partition.has(param)}
                for param in homes:
                    self._move_away(param, param.detach().float())
            with self.widened(unscaled, 1.0, done):
                type(optimizer).load_state_dict(optimizer, saved)
            for number, param in zip(numbers, params, strict=True):
                if param in found and is_dtensor(param):  # which cannot be widened: torch has cast its state
                    for key, value in saved["state"].get(number, {}).items():
                        if key != "step" and isinstance(value, torch.Tensor) and value.is_floating_point():
                            optimizer.state[param][key] = value.to(param.device, torch.float32, copy=True)
            with torch.no_grad():
                for param, master in found.items():
                    self[param].copy_(master)
            self.restore()
        except BaseException:
            for param, home in homes.items():
                self[param].data = home
            raise
        finally:
            self.keep_only(is_kept)

    def cast_state(self, param: torch.Tensor, dtype: torch.dtype) -> None:
        """Cast ``param``'s float32 and half-precision state, except the step count, as torch does when it loads."""
        entry = self.optimizer.state.get(param, {})
        for key, value in entry.items():
            if key != "step":
                entry[key] = cast_state(value, dtype)

    @contextlib.contextmanager
    def widened(
        self, unscaled: Mapping[torch.Tensor, torch.Tensor], factor: Factor, done: Callable[[], None]
    ) -> Iterator[Callable[[bool], None]]:
        """Replace parameters by their masters, and gradients by float32 ones times ``factor``, inside the context.

        Yields a function that undoes this (``False``) and does it again (``True``). Calls ``done`` at the end.
        """
        narrow: dict[torch.Tensor, tuple[torch.Tensor, torch.Tensor | None]] = {}

        def widen(wide: bool) -> None:
            for param in optimizer_parameters(self.optimizer):
                if is_dtensor(param):
                    continue
                if wide and param not in narrow:
                    narrow[param] = param.data, param.grad
                    grad = unscaled.get(param, param.grad)
                    _set_data(param, self.get(param, param.data), self._wide_grad(param, grad, factor))
                elif not wide and param in narrow:
                    data, grad = narrow.pop(param)
                    if param in self and param.data_ptr() != self[param].data_ptr():  # the optimizer has replaced it
                        self[param].copy_(param.detach())
                    if param in self:
                        data.copy_(self[param])
                    _set_data(param, data, grad)
                    if param in self:
                        self._stamps[param] = _stamp(param)

        try:
            widen(True)
            yield widen
        finally:
            widen(False)
            done()

    def _wide_grad(self, param: torch.Tensor, grad: torch.Tensor | None, factor: Factor) -> torch.Tensor | None:
        if grad is None or (param not in self and isinstance(factor, float) and factor == 1.0):
            return grad
        dtype = self[param].dtype if param in self else param.dtype
        return grad.to(dtype) * factor


def _stamp(param: torch.Tensor) -> tuple[int, int, int]:
    """Return a value that changes when ``param`` is written to or moved in memory."""
    local = local_of(param)  # writes through a DTensor do not count there
    return version_of(param), version_of(local), local.data_ptr()


def check_half(param: torch.Tensor, optimizer: torch.optim.Optimizer, rule: Rule | None) -> None:
    """Raise ValueError if ``param`` has gaps in memory, TypeError if it is a DTensor and no kernels step it."""
    require_dense(local_of(param))
    if rule is None and is_dtensor(param):
        raise TypeError(
            f"a half-precision parameter is a DTensor, and {type(optimizer).__name__} is none of the optimizers that "
            "pycomm's kernels step: wanted SGD, Adam, AdamW, RMSprop, LARS or LAMB"
        )


def _set_data(param: torch.Tensor, data: torch.Tensor, grad: torch.Tensor | None) -> None:
    param.grad = None  # first, as a gradient must have the dtype of its parameter at all times
    param.data = data
    param.grad = grad
