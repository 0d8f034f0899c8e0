"""Layouts: whether what goes from one split layer to another stays split in between."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

from torch import nn

from pycomm.parallel.chains import chains, inputs, outputs, passes

WHOLE = "whole"
"""Plain tensors with everything in them, equal on all ranks."""
PART = "part"
"""Plain tensors with this rank's features or channels: only where the structure proves what becomes of them."""
SHARDED = "sharded"
"""DTensors, which know how they are split: operations on them mean what they mean on the whole tensor, or raise."""


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
