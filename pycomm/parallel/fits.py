"""Fits: which modules can be split in which style, and by how many devices."""

from __future__ import annotations

from torch import nn
from torch.nn.utils import parametrize

from pycomm.parallel.chains import CONVOLUTIONS
from pycomm.parallel.styles import NORMS

_FIT: dict[str, tuple[type[nn.Module], ...]] = {
    "columns": (nn.Linear, nn.Embedding, *CONVOLUTIONS),
    "rows": (nn.Linear, *CONVOLUTIONS),
    "vocabulary": (nn.Embedding, nn.Linear),
    "sequence": NORMS,
}


def check_module(model: nn.Module, name: str, style: str, devices: int) -> None:
    """Raise ValueError, naming the module, unless it can be split in this style over so many devices."""
    module = model.get_submodule(name)
    owner = _owner(model, name)
    if owner is not None:
        raise ValueError(f"module {name!r} is run by {owner}, which takes its weights apart: it stays whole")
    kind = type(module).__name__
    if not isinstance(module, _FIT[style]):
        wanted = ", ".join(each.__name__ for each in _FIT[style])
        raise ValueError(f"module {name!r} is a {kind}, which {style!r} does not fit: wanted one of {wanted}")
    if isinstance(module, CONVOLUTIONS + NORMS) and type(module) not in CONVOLUTIONS + NORMS:
        raise ValueError(f"module {name!r} is a {kind} with a forward of its own, which is not split")
    if parametrize.is_parametrized(module):
        raise ValueError(f"module {name!r} is parametrized: what its parameters become is not split")
    _check_sizes(name, module, style, devices)


def unfit(model: nn.Module, name: str, style: str, devices: int) -> str:
    """Return why a module cannot be split so; an empty text if it can."""
    try:
        check_module(model, name, style, devices)
    except ValueError as error:
        return str(error)
    return ""


def padding(module: nn.Module, style: str, devices: int) -> str:
    """Return what torch pads where the sizes of a vocabulary do not divide; an empty text if nothing."""
    if style != "vocabulary" or _divided(module, style)[1] % devices == 0:
        return ""
    what, size = _divided(module, style)
    return f"{size} {what} on {devices} devices, padded to {-(-size // devices)} on each while they travel"


def _owner(model: nn.Module, name: str) -> str | None:
    parts = name.split(".")
    for end in range(len(parts)):
        if isinstance(model.get_submodule(".".join(parts[:end])), nn.MultiheadAttention):
            return "nn.MultiheadAttention"
    return None


def _check_sizes(name: str, module: nn.Module, style: str, devices: int) -> None:
    if isinstance(module, CONVOLUTIONS) and module.groups != 1:
        raise ValueError(f"module {name!r} has {module.groups} groups, wanted a convolution with one")
    if style == "sequence":
        if len(module.normalized_shape) != 1 or module.weight is None:  # type: ignore[arg-type]
            raise ValueError(f"module {name!r} is {module}, wanted a norm with a weight, over the last dimension alone")
        return
    if style == "vocabulary" and isinstance(module, nn.Embedding) and _looks_entries_up_otherwise(module):
        raise ValueError(f"module {name!r} has a padding_idx, max_norm or sparse gradients, which is not split")
    what, size = _divided(module, style)
    if style != "vocabulary" and size % devices:
        raise ValueError(f"module {name!r} has {size} {what}, which {devices} devices cannot share evenly")


def _looks_entries_up_otherwise(module: nn.Embedding) -> bool:
    return module.padding_idx is not None or module.max_norm is not None or module.sparse


def _divided(module: nn.Module, style: str) -> tuple[str, int]:
    if isinstance(module, nn.Embedding):
        vocabulary = style == "vocabulary"
        return ("entries", module.num_embeddings) if vocabulary else ("features", module.embedding_dim)
    kind = "channels" if isinstance(module, CONVOLUTIONS) else "features"
    which = "in" if style == "rows" else "out"
    return f"{which}put {kind}", int(getattr(module, f"{which}_{kind}"))
