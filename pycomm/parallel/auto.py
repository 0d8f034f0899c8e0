"""Automatic choice of styles: for transformer blocks, and for stacks of Linear and convolutions.

The structure alone shows that a split is right: for layers in a chain of a plain ``nn.Sequential``, for pairs that pass
DTensors to each other, and for layers whose outputs are gathered. If the code between a pair cannot handle DTensors,
the first forward raises; a result is never wrong silently. Attention that mixes its heads with other tensors stays
whole.
"""

from __future__ import annotations

import inspect
import re
from collections import Counter

from torch import nn

from pycomm.checks import count
from pycomm.parallel.styles import CONVOLUTIONS, Chain, chains, inputs, outputs, passes, unfit

_FEWEST = 2**16
"""Fewest parameters of a layer without a partner for which gathering its output pays."""
_HEADS = ("num_heads", "n_heads", "nheads", "n_head", "nhead", "heads", "num_attention_heads")
_KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head", "kv_heads")
_ROLE = re.compile(r"(?:to_|linear_|w)?(q|k|v)(?:uery|ey|alue)?s?(?:_?(?:proj|projection|lin|linear))?", re.IGNORECASE)
_FUSED = re.compile(r"qkv|query_key_value|^c_attn$|^in_proj$", re.IGNORECASE)
_SPLITTABLE = (nn.Linear, *CONVOLUTIONS)


def explain(model: nn.Module, devices: int) -> dict[str, str]:
    """Return for each layer with parameters that could be split over ``devices`` its style or why it stays whole.

    The names are those in ``model``. Works on the meta device too; nothing is communicated or changed.
    """
    search = _SplitSearch(model, devices)
    return {**{name: f"stays whole: {why}" for name, why in search.reasons.items()}, **search.styles}


class _SplitSearch:
    """Search through a model, chains first, then other containers, vocabularies, and what is left."""

    def __init__(self, model: nn.Module, devices: int) -> None:
        self.model, self.devices = model, count("devices", devices, 1)
        self.styles: dict[str, str] = {}
        self.reasons: dict[str, str] = {}
        self._kept: set[str] = set()
        self._uses = Counter(id(module) for _, module in model.named_modules(remove_duplicate=False))
        self._owners = Counter(id(param) for _, param in model.named_parameters(remove_duplicate=False))
        if self.devices == 1:
            return
        for chain in chains(model):
            self._pairs_of_chain(chain)
        for name, module in model.named_modules():
            if type(module) is not nn.Sequential:
                self._pairs_of_children(name, module)
        self._vocabularies()
        self._single_layers()

    def _can(self, name: str, style: str) -> bool:
        """Return whether the module can be split so; otherwise note why not."""
        module = self.model.get_submodule(name)
        why = unfit(self.model, name, style, self.devices)
        if self._uses[id(module)] > 1:
            why = f"module {name!r} is used several times"
        elif style != "vocabulary" and any(self._owners[id(param)] > 1 for param in module.parameters()):
            why = f"module {name!r} shares a parameter with another"
        if why:
            self.reasons[name] = why
        return not why and name not in self.styles

    def _pair(self, ups: list[str], down: str) -> bool:
        if not all([self._can(name, "columns") for name in ups] + [self._can(down, "rows")]):
            return False
        self.styles.update({**dict.fromkeys(ups, "columns"), down: "rows"})
        return True

    def _pairs_of_chain(self, chain: Chain) -> None:
        places = [place for place, (_, module) in enumerate(chain) if type(module) in _SPLITTABLE]
        i = 0
        while i + 1 < len(places):
            start, end = places[i], places[i + 1]
            (up, first), (down, second) = chain[start], chain[end]
            i += 2 if passes(chain[start + 1 : end], first, second) and self._pair([up], down) else 1

    def _pairs_of_children(self, where: str, parent: nn.Module) -> None:
        """Pair a parent's own Linear children: attention by their names, perceptrons by their shapes."""
        if isinstance(parent, nn.MultiheadAttention):
            self.reasons[where] = "nn.MultiheadAttention computes with its weights directly"
            return
        prefix = f"{where}." if where else ""
        run: list[tuple[str, nn.Linear]] = []
        for key, child in parent.named_children():
            if type(child) is not nn.Linear:
                if any(True for _ in child.parameters()):
                    run = []
                continue
            widest = max((layer.out_features for _, layer in run), default=0)
            if run and child.in_features == widest and self._is_down(parent, run, child):
                self._pair([prefix + name for name, _ in run], prefix + key)
                run = []
                continue
            if _FUSED.search(key):  # query, key and value are stacked, so a split would not divide each by heads
                self.reasons[prefix + key] = "projects to query, key and value at once"
                run = []
                continue
            if run and (child.in_features != run[0][1].in_features or bool(_role(run[0][0])) != bool(_role(key))):
                run = []
            run.append((key, child))

    def _is_down(self, parent: nn.Module, run: list[tuple[str, nn.Linear]], child: nn.Linear) -> bool:
        """Return whether ``child`` projects the outputs of the layers in ``run`` back to their input width."""
        roles = sorted(_role(key) for key, _ in run)
        if any(roles):
            return roles == ["k", "q", "v"] and self._heads_divide(parent, [key for key, _ in run])
        same = all(layer.out_features == run[0][1].out_features for _, layer in run)
        return same and len(run) <= 2 and child.out_features == run[0][1].in_features != child.in_features

    def _heads_divide(self, parent: nn.Module, keys: list[str]) -> bool:
        """Return whether the attention's heads divide; otherwise note why it stays whole."""
        heads = next((getattr(parent, name) for name in _HEADS if isinstance(getattr(parent, name, None), int)), None)
        key_heads = next((getattr(parent, name) for name in _KEY_HEADS if hasattr(parent, name)), heads)
        why = ""
        others = _other_tensors(parent)
        if any(True for _ in parent.buffers()):
            why = "its attention has buffers, such as a mask, which torch does not mix with parts of tensors"
        elif others:
            why = f"its attention may be given {', '.join(others)}, which torch does not mix with parts of tensors"
        elif heads is None:
            why = f"no attribute of its attention ({', '.join(_HEADS)}) tells the number of heads"
        elif heads % self.devices or not isinstance(key_heads, int) or key_heads % self.devices:
            why = f"{heads} heads ({key_heads} of keys) do not divide by {self.devices} devices"
        where = next(name for name, module in self.model.named_modules() if module is parent)
        if why:
            names = [f"{where}.{key}" if where else key for key in keys]
            self.reasons.update(dict.fromkeys(names, why))
            self._kept.update(names)
        return not why

    def _vocabularies(self) -> None:
        """Split embeddings whose entries a head predicts, and those heads."""
        modules = [(n, m) for n, m in self.model.named_modules() if n not in self.styles]
        heads = [(n, m) for n, m in modules if type(m) is nn.Linear]
        for name, module in modules:
            if type(module) is not nn.Embedding:
                continue
            size = (module.embedding_dim, module.num_embeddings)
            partners = [n for n, head in heads if (head.in_features, head.out_features) == size]
            if "pos" in name.lower() or not partners:
                self.reasons[name] = "no head predicts its entries"
            elif self._can(name, "vocabulary"):
                self.styles[name] = "vocabulary"
                for partner in partners:
                    if partner not in self.styles and self._can(partner, "vocabulary"):
                        self.styles[partner] = "vocabulary"

    def _single_layers(self) -> None:
        """Split large layers that have no partner: outputs are gathered, inputs cut."""
        for name, module in self.model.named_modules():
            if type(module) not in _SPLITTABLE or name in self.styles or name in self._kept:
                continue
            parameters = sum(param.numel() for param in module.parameters())
            if parameters < _FEWEST and not self._beside_fused(name):
                self.reasons.setdefault(name, f"has no partner, and only {parameters} parameters")
            elif outputs(module) >= inputs(module) and self._can(name, "columns"):
                self.styles[name] = "columns"
            elif self._can(name, "rows"):
                self.styles[name] = "rows"

    def _beside_fused(self, name: str) -> bool:
        """Return whether the layer projects to query, key and value at once, or comes right after one that does."""
        where, _, key = name.rpartition(".")
        keys = [k for k, child in self.model.get_submodule(where).named_children() if type(child) is nn.Linear]
        before = keys[keys.index(key) - 1] if key in keys and keys.index(key) else ""
        return bool(_FUSED.search(key) or _FUSED.search(before))


def _role(key: str) -> str:
    """Return "q", "k" or "v" for the name of a projection to query, key or value, otherwise an empty text."""
    match = _ROLE.fullmatch(key)
    return match[1].lower() if match else ""


def _other_tensors(module: nn.Module) -> list[str]:
    """Return the parameters of a module's forward, after the first, that may be tensors: masks and the like."""
    parameters = list(inspect.signature(type(module).forward).parameters.values())[2:]  # without self
    return [each.name for each in parameters if each.default in (None, inspect.Parameter.empty) and each.kind < 4]
