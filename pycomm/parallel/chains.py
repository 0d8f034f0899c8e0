"""Chains of layers whose order the model's structure proves, and layouts of tensors between split layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import pairwise

from torch import nn

from pycomm.torch_internals import children_of

Chain = list[tuple[str, nn.Module]]
"""Modules with their names. The output of each goes to the next module, and nowhere else."""

ELEMENTWISE = (
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.CELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish, nn.Tanh, nn.Sigmoid),
    *(nn.LogSigmoid, nn.Softplus, nn.Softsign, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid, nn.Tanhshrink),
    *(nn.Threshold, nn.Softshrink, nn.Hardshrink, nn.Identity, nn.Dropout, nn.AlphaDropout),
)
"""Modules that compute each element from that element alone."""

CHANNELWISE = (
    *(nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d),
    *(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d),
    *(nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d),
    *(nn.Dropout1d, nn.Dropout2d, nn.Dropout3d),
)
"""Modules that compute each channel of images from that channel alone."""

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)

WHOLE = "whole"
"""Plain tensors with everything in them, equal on all ranks."""
PART = "part"
"""Plain tensors with this rank's features or channels, used only where the structure proves their next use."""
SHARDED = "sharded"
"""DTensors: operations on them compute the same as on the whole tensor, or raise."""


def chains(model: nn.Module) -> list[Chain]:
    """Return the chains of ``model``: its outermost plain ``nn.Sequential`` containers, with those inside flattened.

    Containers of other classes, or used twice, may run their parts in any order: they are single links of a chain, and
    may hold chains of their own.
    """
    uses = Counter(id(module) for _, module in model.named_modules(remove_duplicate=False))
    found: list[Chain] = []
    inside: set[str] = set()
    for name, module in model.named_modules():
        if name not in inside and _is_plain(module) and uses[id(module)] == 1:
            chain: Chain = []
            _flatten(name, module, uses, chain, inside)
            found.append(chain)
    return found


def passes(between: Chain, first: nn.Module, second: nn.Module) -> bool:
    """Return whether parts of the output of ``first`` go through ``between`` to become parts of ``second``'s input.

    ``first`` and ``second`` are Linear or convolutions; parts are contiguous features, or channels.
    """
    flattened = False
    images = isinstance(first, CONVOLUTIONS)
    for _, module in between:
        if module.__class__ in CHANNELWISE and images and not flattened:
            if getattr(module, "return_indices", False):
                return False
        elif module.__class__ is nn.Flatten and images and not flattened:
            if (module.start_dim, module.end_dim) != (1, -1):
                return False
            flattened = True
        elif module.__class__ not in ELEMENTWISE:
            return False
    if flattened:
        return isinstance(second, nn.Linear) and second.in_features % outputs(first) == 0
    return images == isinstance(second, CONVOLUTIONS) and outputs(first) == inputs(second)


def inputs(module: nn.Module) -> int:
    """Return the number of input features, or channels, of a Linear or convolution."""
    return int(module.in_features if isinstance(module, nn.Linear) else module.in_channels)  # type: ignore[arg-type]


def outputs(module: nn.Module) -> int:
    """Return the number of output features, or channels, of a Linear or convolution."""
    return int(module.out_features if isinstance(module, nn.Linear) else module.out_channels)  # type: ignore[arg-type]


def _is_plain(module: nn.Module) -> bool:
    return module.__class__ is nn.Sequential


def _flatten(name: str, module: nn.Module, uses: Counter[int], chain: Chain, inside: set[str]) -> None:
    for key, child in children_of(module).items():  # one that is used twice is there twice
        where = f"{name}.{key}" if name else key
        assert child is not None, "nn.Sequential calls all its children"
        if _is_plain(child) and uses[id(child)] == 1:
            inside.add(where)
            _flatten(where, child, uses, chain, inside)
        else:
            chain.append((where, child))


def layouts_of(model: nn.Module, styles: Mapping[str, str]) -> dict[str, str]:
    """Return the layout of the output of each module with the style "columns", and of the input of each with "rows".

    The rule:

    1. In a chain of a plain ``nn.Sequential``, a "columns" layer hands ``PART`` to the "rows" layer that follows it
       with nothing but elementwise modules in between (for convolutions pooling too, and one Flatten).
    2. In another module, consider its own children Linear in the order in which they were registered. A "rows" one
       with as many inputs as the widest of the "columns" ones right before it has outputs is their partner (up and
       down; gate, up and down; query, key, value and out): they hand on ``SHARDED``. No norm, nor any other
       module with parameters, may be registered between them.
    3. All others hand on, and take, ``WHOLE``.
    """
    found = {name: WHOLE for name, style in styles.items() if style in ("columns", "rows")}
    in_chains: set[str] = set()
    for chain in chains(model):
        in_chains.update(name for name, _ in chain)
        places = [place for place, (name, _) in enumerate(chain) if styles.get(name) in ("columns", "rows")]
        for start, end in pairwise(places):
            (first, up), (second, down) = chain[start], chain[end]
            are_partners = (styles[first], styles[second]) == ("columns", "rows") and not isinstance(up, nn.Embedding)
            if are_partners and passes(chain[start + 1 : end], up, down):
                found[first] = found[second] = PART
    for parent_name, parent in model.named_modules():
        _pair_children(parent_name, parent, styles, found, in_chains)
    return found


def _pair_children(
    parent_name: str, parent: nn.Module, styles: Mapping[str, str], found: dict[str, str], in_chains: set[str]
) -> None:
    run: list[str] = []
    widest = 0
    for key, child in parent.named_children():
        name = f"{parent_name}.{key}" if parent_name else key
        style = styles.get(name)
        if style == "columns" and isinstance(child, nn.Linear) and name not in in_chains:
            run.append(name)
            widest = max(widest, outputs(child))
            continue
        if style == "rows" and isinstance(child, nn.Linear) and run and inputs(child) == widest:
            found.update(dict.fromkeys([*run, name], SHARDED))
        if style is not None or any(True for _ in child.parameters()):
            run, widest = [], 0
