"""Entry point ``split``: the layers of a model, over the ranks of one dimension of a mesh."""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from pycomm.agreement import agreed
from pycomm.collectives.broadcasting import broadcast_tensors
from pycomm.collectives.communicator import Communicator
from pycomm.collectives.transport.own_group import found_group, group_of
from pycomm.errors import attempt
from pycomm.parallel import auto
from pycomm.parallel.styles import (
    STYLES,
    WHOLE,
    check_module,
    layouts_of,
    let_attention_be_split,
    padding,
    parallel_style,
)

_LOG = logging.getLogger("pycomm")
_Model = TypeVar("_Model", bound=nn.Module)
Styles = dict[str, "str | ParallelStyle"]


def split(model: _Model, mesh: DeviceMesh, plan: Mapping[str, str | ParallelStyle] | str = "auto") -> _Model:
    """Split layers of ``model`` over the ranks of ``mesh["tp"]``, in place, and return it.

    Collective over these ranks, whose models must have the same structure. All get the first rank's parameters and
    buffers; split parameters become DTensors with this rank's part. The model takes and returns the same plain tensors
    as before, equal on all of these ranks, and computes the same. Layers that are not split run on all of these ranks
    (so dropout requires equal random seeds there).

        pycomm.parallel.split(model, mesh, {"blocks.*.up": "columns", "blocks.*.down": "rows"})

    The styles, of Shoeybi et al., "Megatron-LM" (arXiv:1909.08053, section 3), for n ranks:

    - "columns" (Linear, Conv1d, Conv2d, Conv3d, Embedding): each rank computes 1/n of the output features or channels.
      The output is gathered, unless it goes to a "rows" layer that takes it split
      (:func:`pycomm.parallel.styles.layouts_of` has the rule).
    - "rows" (Linear, Conv1d, Conv2d, Conv3d): each rank computes what 1/n of the input features or channels
      contributes; the contributions are added up.
    - "vocabulary" (Embedding, Linear): each rank has 1/n of the entries of an embedding, or of the outputs of the head;
      the only style for sizes that n does not divide, since torch pads. Embedding and head may share a weight.
    - "sequence" (LayerNorm, RMSNorm): each rank norms 1/n of the positions (arXiv:2205.05198).

    Args:
        model: the model, on the CPU, a GPU or the meta device, before ``attach`` and before its optimizer is made:
            split parameters are new objects.
        mesh: mesh with a dimension "tp", or of one dimension.
        plan: style by name of a module, in which ``*`` stands for one part of a dotted name, or for some of its
            letters; "" is the model itself, if it is a single layer. A style is one of the four, or a ``ParallelStyle``
            of torch's, applied as it is. Or "auto" for the styles that :func:`pycomm.parallel.auto.explain` returns.

    Raises:
        TypeError, ValueError: an argument is wrong, a pattern matches nothing, a style does not fit its module,
            sizes do not divide, or the ranks differ (on every rank, with the model untouched).
    """
    ranks, problem = found_group(lambda: group_of(_dimension(mesh), "mesh"))
    with Communicator(ranks) as communicator:
        checked = attempt(lambda: _checked(model, ranks.size(), plan), problem)
        gather = communicator.channel.all_gather_bytes
        styles = agreed(gather, checked, "split the model", lambda styles: _lines(model, styles))
        whole = [t for t in _left_whole(model, styles) if not t.is_meta]
        broadcast_tensors(communicator, whole, 0)
    let_attention_be_split()
    tp = _dimension(mesh)
    names = {name: style for name, style in styles.items() if isinstance(style, str)}
    layouts = layouts_of(model, names)
    shared = _shared(model)
    for name, style in styles.items():
        module = model.get_submodule(name)
        if isinstance(style, str):
            padded = padding(module, style, tp.size())
            if padded:
                _LOG.info("split: %s: %s", name, padded)
            style = parallel_style(module, style, layouts.get(name, WHOLE), tp.size())
        parallelize_module(module, tp, style)
    for first, *others in shared:
        _tie(model, first, others)
    return model


def _lines(model: nn.Module, styles: Styles) -> dict[str, list[str]]:
    """Return what must be the same on all ranks."""
    params = [*model.named_parameters(), *model.named_buffers()]
    return {
        "style": [f"{name}: {style}" for name, style in sorted(styles.items())],
        "parameter": [f"{name}: {list(t.shape)} {t.dtype}" for name, t in params],
    }


def _dimension(mesh: DeviceMesh) -> DeviceMesh:
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh is a {type(mesh).__name__}, wanted a DeviceMesh")
    if "tp" in (mesh.mesh_dim_names or ()):
        return mesh["tp"]
    if mesh.ndim != 1:
        raise ValueError(f"mesh has the dimensions {mesh.mesh_dim_names}, wanted one of them to be 'tp'")
    return mesh


def _checked(model: Any, devices: int, plan: Any) -> Styles:
    """Return the style of each module. Raises TypeError or ValueError if an argument is wrong."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}, wanted a torch.nn.Module")
    styles = _resolved(model, _mapping(model, devices, plan))
    uses = Counter(id(module) for _, module in model.named_modules(remove_duplicate=False))
    for name, style in styles.items():
        module = model.get_submodule(name)
        if uses[id(module)] > 1:
            raise ValueError(f"module {name!r} is in the model {uses[id(module)]} times: it cannot be split")
        if any(isinstance(param, DTensor) for param in module.parameters()):
            raise ValueError(f"module {name!r} is split already")
        if isinstance(style, str):
            check_module(model, name, style, devices)
    _check_shared(model, styles)
    return styles


def _mapping(model: nn.Module, devices: int, plan: Any) -> Mapping[str, Any]:
    if isinstance(plan, str) and plan == "auto":
        reasons = auto.explain(model, devices)
        styles: Mapping[str, Any] = {name: style for name, style in reasons.items() if style in STYLES}
        for name, why in reasons.items():
            _LOG.info("split: %s: %s", name, why)
        if not styles and devices > 1:
            told = "; ".join(f"{name or 'the model'}: {why}" for name, why in list(reasons.items())[:3])
            alone = ': for the model itself write split(model, mesh, {"": "columns"})' if "" in reasons else ""
            raise ValueError(f"plan is 'auto', which finds no layer to split ({told or 'there is none'}){alone}")
        return styles
    if isinstance(plan, str):
        raise ValueError(f"plan is {plan!r}, wanted 'auto' or a mapping of names to styles")
    if not isinstance(plan, Mapping):
        raise TypeError(f"plan is a {type(plan).__name__}, wanted a mapping of names to styles, or 'auto'")
    return plan


def _resolved(model: nn.Module, plan: Mapping[str, Any]) -> Styles:
    names = [name for name, _ in model.named_modules()]
    found: Styles = {}
    for pattern, style in plan.items():
        if not isinstance(pattern, str):
            raise TypeError(f"plan has the key {pattern!r}, wanted a name of a module, or a pattern")
        if not isinstance(style, ParallelStyle) and style not in STYLES:
            raise ValueError(f"style of {pattern!r} is {style!r}, wanted one of {', '.join(STYLES)}, or torch's")
        matching = [name for name in names if _matches(name, pattern)]
        if not matching:
            there = ", ".join(names[1:9]) or 'none but the model itself, whose name is ""'
            raise ValueError(f"{pattern!r} matches no module; there are {there} ...")
        for name in matching:
            if found.get(name, style) != style:
                raise ValueError(f"module {name!r} is given two styles: {found[name]!r} and {style!r}")
            found[name] = style
    return found


def _matches(name: str, pattern: str) -> bool:
    if not name or not pattern:  # the model itself, which no "*" means
        return name == pattern
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def _left_whole(model: nn.Module, styles: Styles) -> list[torch.Tensor]:
    split_ones = {id(param) for name in styles for param in model.get_submodule(name).parameters()}
    return [each for each in [*model.parameters(), *model.buffers()] if id(each) not in split_ones]


def _shared(model: nn.Module) -> list[list[str]]:
    """Return the names of each parameter that has several."""
    names = defaultdict(list)
    for name, param in model.named_parameters(remove_duplicate=False):
        names[id(param)].append(name)
    return [each for each in names.values() if len(each) > 1]


def _check_shared(model: nn.Module, styles: Styles) -> None:
    for names in _shared(model):
        chosen = [styles.get(name.rpartition(".")[0]) for name in names]
        if any(style is not None for style in chosen) and any(style != "vocabulary" for style in chosen):
            told = ", ".join(f"{name} ({style or 'whole'})" for name, style in zip(names, chosen, strict=True))
            raise ValueError(f"{told} are one parameter, which is split only as 'vocabulary' in all its places")


def _tie(model: nn.Module, first: str, others: list[str]) -> None:
    """Make the parameters ``others`` the same object as ``first`` again."""
    for name in others:
        where, _, own = name.rpartition(".")
        model.get_submodule(where).register_parameter(own, model.get_parameter(first))
