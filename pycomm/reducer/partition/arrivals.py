"""Parameters that are on their way from other ranks while a script goes on.

A step that ranks of several hosts have taken together ends with messages, which the next forward need not wait for at
its beginning: it uses one layer after the other. So that nobody reads a parameter before it is there, it is of the
class :class:`_Arriving` until then: whatever torch is to do with it waits first.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from pycomm.optim.module_hooks import BeforeForward
from pycomm.torch_internals import has_compiled, has_scripted, prepare_scripts, without_torch_function
from pycomm.worker import Work

_arrivals: dict[int, Arrival] = {}
"""By id of the parameter: its attributes would be saved with it."""

_Tensor: Any = torch.Tensor
_HARMLESS = {
    *(_Tensor.grad.__get__, _Tensor.grad.__set__, _Tensor.requires_grad.__get__, _Tensor.is_leaf.__get__),
    *(_Tensor.shape.__get__, _Tensor.dtype.__get__, _Tensor.device.__get__, _Tensor.numel),
}
"""What does not read a parameter's values, and is called between a step and the next forward (``zero_grad()``)."""


class _Arriving(torch.nn.Parameter):
    """Parameter whose values are on their way. It becomes an ordinary one again as soon as torch wants to use it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _HARMLESS:
            _await([args, kwargs])
            return func(*args, **kwargs)
        with without_torch_function():
            return func(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> Any:
        _await(self)
        return self.__deepcopy__(memo)  # which is another one now

    def __reduce_ex__(self, protocol: Any) -> Any:
        _await(self)
        return self.__reduce_ex__(protocol)


def _await(found: Any) -> None:
    """Wait for all parameters in nested sequences and dicts."""
    if isinstance(found, _Arriving):
        arrival = _arrivals.get(id(found))
        if arrival is not None:
            arrival.wait()
    elif isinstance(found, (list, tuple)):
        for item in found:
            _await(item)
    elif isinstance(found, dict):
        for item in found.values():
            _await(item)


def _await_module(module: torch.nn.Module) -> None:
    _await(list(module.parameters(recurse=False)))


prepare_scripts(_await_module)


class Arrival:
    """Parameters that arrive together, when ``work`` is done.

    Args:
        params: the parameters.
        work: operation on the communication thread.
        failed: called with the error if the operation fails, before :meth:`wait` raises it.
    """

    def __init__(
        self, params: Iterable[torch.nn.Parameter], work: Work, failed: Callable[[BaseException], None]
    ) -> None:
        self._params, self._work, self._failed = list(params), work, failed
        for param in self._params:
            _arrivals[id(param)] = self
            param.__class__ = _Arriving

    def wait(self) -> None:
        """Wait until they are there. They can be used then: if that fails, whoever does is told before."""
        if not self._params:
            return
        try:
            self._work.wait()
        except BaseException as error:
            self._failed(error)
            raise
        finally:
            self._make_ordinary()

    def abandon(self) -> None:
        """Wait until nothing is written any more, and let the parameters be used as they are then."""
        self._work.ends_within(None)
        self._make_ordinary()

    def _make_ordinary(self) -> None:
        for param in self._params:
            param.__class__ = torch.nn.Parameter
            _arrivals.pop(id(param), None)
        self._params.clear()


class Arrivals:
    """Arrivals between one step and the next backward, and the hooks of modules that wait for them.

    Args:
        module: the attached module; without one, nothing says what the next forward uses first.
    """

    def __init__(self, module: torch.nn.Module | None) -> None:
        self._module = module
        self._open: list[Arrival] = []
        self._hooks: dict[torch.nn.Module, Any] = {}
        if module is not None:
            self._hooks[module] = module.register_forward_pre_hook(BeforeForward(self._before_root))

    def expect(self, params: Iterable[torch.Tensor]) -> None:
        """Have the modules that own ``params`` wait for them before they run.

        For what torch does not see: extensions that are given a parameter by ``torch.autograd.Function``.
        """
        if self._module is None:
            return
        wanted = {id(param) for param in params}
        for module in self._module.modules():
            own = [p for p in module.parameters(recurse=False) if id(p) in wanted]
            if own and module not in self._hooks:
                hook = BeforeForward(functools.partial(_await_module, module))
                self._hooks[module] = module.register_forward_pre_hook(hook)

    def may_come_late(self, params: Iterable[torch.Tensor]) -> bool:
        """Return whether whoever reads ``params`` can be made to wait: not compiled code, nor TorchScript."""
        if self._module is None or has_compiled() or has_scripted():
            return False
        if any(isinstance(module, torch.jit.ScriptModule) for module in self._module.modules()):
            return False
        return all(type(param) is torch.nn.Parameter for param in params)

    def add(self, arrival: Arrival) -> None:
        """Note an arrival that :meth:`wait` is to wait for."""
        self._open.append(arrival)

    def wait(self) -> None:
        """Wait for all, in the order in which they were added; raise the first error."""
        for arrival in self._taken():
            arrival.wait()

    def abandon(self) -> None:
        """Let all parameters be used as they are, since one bucket of them has not come."""
        for arrival in self._taken():
            arrival.abandon()

    def _taken(self) -> Iterator[Arrival]:
        while self._open:
            yield self._open.pop(0)

    def _before_root(self) -> None:
        assert self._module is not None
        if not self._module.training:
            self.wait()  # torch's fast paths of evaluation look at the class

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._hooks.values():
            handle.remove()
        self._hooks.clear()
