"""Tensors that belong to one rank alone, which ``attach(..., ignore=)`` names."""

from __future__ import annotations

import fnmatch
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch


class Ignored:
    """What ``ignore`` means for one module.

    Args:
        patterns: names, and patterns as of a shell, of parameters and buffers.
        tensors: those of the module that they match, by name.

    Attributes:
        patterns: what was given, tensors by their names; to be compared between the ranks.
    """

    def __init__(self, patterns: Sequence[str] = (), tensors: Mapping[str, torch.Tensor] | None = None) -> None:
        self.patterns = tuple(dict.fromkeys(patterns))
        self._names: dict[int, tuple[str, weakref.ref[torch.Tensor]]] = {}
        for name, tensor in (tensors or {}).items():
            self.add(name, tensor)

    def __bool__(self) -> bool:
        return bool(self.patterns)

    def matches(self, name: str) -> bool:
        """Return whether the parameter or buffer called ``name`` is ignored."""
        return any(_is_match(name, pattern) for pattern in self.patterns)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Note that ``tensor`` is one of those that are ignored, as is one that has come into the place of another."""
        self._names[id(tensor)] = name, weakref.ref(tensor)

    def covers(self, tensor: torch.Tensor) -> bool:
        """Return whether ``tensor`` is known to be ignored."""
        return self.name_of(tensor) is not None

    def finds(self, param: torch.Tensor, module: torch.nn.Module | None) -> bool:
        """Return whether ``param``, which may be new, is ignored, by the name that ``module`` has for it now."""
        if self and not self.covers(param) and module is not None:
            name = next((name for name, p in module.named_parameters() if p is param), None)
            if name is not None and self.matches(name):
                self.add(name, param)
        return self.covers(param)

    def name_of(self, tensor: torch.Tensor) -> str | None:
        """Return the name of ``tensor`` if it is ignored."""
        name, reference = self._names.get(id(tensor), ("", None))
        return name if reference is not None and reference() is tensor else None


def ignored_of(
    ignore: Any, pairs: Sequence[tuple[str, torch.Tensor]], buffers: Sequence[tuple[str, torch.Tensor]]
) -> Ignored:
    """Return what ``ignore`` means among the named parameters ``pairs`` and ``buffers``.

    Raises:
        TypeError: it is no iterable of names, patterns, tensors and modules.
        ValueError: one of them matches nothing; it is named.
    """
    named = dict([*pairs, *buffers])
    names = {id(tensor): name for name, tensor in reversed([*pairs, *buffers])}
    patterns: list[str] = []
    for item in _items(ignore):
        if isinstance(item, str):
            if not any(_is_match(name, item) for name in named):
                raise ValueError(f"ignore has {item!r}, which matches {_nothing_of(named, item)}")
            patterns.append(item)
        elif isinstance(item, torch.Tensor):
            if id(item) not in names:
                raise ValueError(f"ignore has a tensor of shape {list(item.shape)}, which is none of the model's")
            patterns.append(names[id(item)])
        else:
            raise TypeError(
                f"ignore has {item!r}, wanted names of parameters, patterns such as 'experts.*', parameters or modules"
            )
    tensors = {name: tensor for name, tensor in named.items() if any(_is_match(name, p) for p in patterns)}
    return Ignored(patterns, tensors)


def _items(ignore: Any) -> list[Any]:
    """Return what is in ``ignore``, with the parameters and buffers of modules instead of them."""
    if isinstance(ignore, torch.nn.Module):
        ignore = [ignore]
    if isinstance(ignore, (str, torch.Tensor)) or not isinstance(ignore, Iterable):
        shown = repr(ignore) if isinstance(ignore, str) else f"a {type(ignore).__name__}"
        raise TypeError(f"ignore is {shown}, wanted a list of names, patterns, parameters or modules")
    items: list[Any] = []
    for item in ignore:
        own = [*item.parameters(), *item.buffers()] if isinstance(item, torch.nn.Module) else [item]
        if not own:
            raise ValueError(f"ignore has a {type(item).__name__} without parameters and buffers")
        items += own
    return items


def _is_match(name: str, pattern: str) -> bool:
    return name == pattern or fnmatch.fnmatchcase(name, pattern)


def _nothing_of(named: Mapping[str, object], pattern: str) -> str:
    if any(name.startswith(f"{pattern}.") for name in named):
        return f"no parameter or buffer: for all of that module write {pattern + '.*'!r}"
    return f"none of the {len(named)} parameters and buffers, {', '.join(map(repr, list(named)[:3]))} ..."


NONE_IGNORED = Ignored()
"""What is ignored by default."""
