"""Styles: how one layer is split over the ranks of a one-dimensional mesh, with torch's ParallelStyle."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel
from torch.nn.utils import parametrize

from pycomm.parallel.functional import copy_to_group, gather_from_group, reduce_from_group, scatter_to_group
from pycomm.parallel.mesh import reporting
from pycomm.torch_internals import children_of, convolve

STYLES = ("columns", "rows", "vocabulary", "sequence")
"""Ways to split an operator over the ranks of "tp"; see :func:`pycomm.parallel.split`."""

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


NORMS = (nn.LayerNorm, nn.RMSNorm)
_FIT: dict[str, tuple[type[nn.Module], ...]] = {
    "columns": (nn.Linear, nn.Embedding, *CONVOLUTIONS),
    "rows": (nn.Linear, *CONVOLUTIONS),
    "vocabulary": (nn.Embedding, nn.Linear),
    "sequence": NORMS,
}


def parallel_style(module: nn.Module, style: str, layout: str, devices: int) -> ParallelStyle:
    """Return what splits ``module``, of a type that ``style`` fits, in this layout (:mod:`pycomm.parallel.auto`).

    Embeddings, heads that ``devices`` do not divide, and subclasses of Linear are split by torch's own styles.
    """
    if style == "sequence":
        return _Sequence()
    if type(module) in _KINDS and (style != "vocabulary" or outputs(module) % devices == 0):
        return _Split(style, layout)
    if style == "rows":
        return RowwiseParallel(input_layouts=Shard(-1) if layout == PART else Replicate())
    if style == "vocabulary" and isinstance(module, nn.Embedding):
        return RowwiseParallel(input_layouts=Replicate())
    if layout == PART:
        return ColwiseParallel(output_layouts=Shard(-1))
    if layout == SHARDED:
        return ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    return ColwiseParallel(output_layouts=Replicate())


def _distribute(module: nn.Module, mesh: DeviceMesh, placements: dict[str, Placement]) -> None:
    """Put DTensors in the place of parameters; the first rank's values are copied to the whole group."""
    for name, placement in placements.items():
        param = cast(nn.Parameter | None, getattr(module, name))
        if param is not None:
            made = distribute_tensor(param.detach(), mesh, [placement])
            module.register_parameter(name, nn.Parameter(made, requires_grad=param.requires_grad))


def _local(param: Any) -> torch.Tensor | None:
    if param is None:
        return None
    local: torch.Tensor = param.to_local()
    return local


class _Split(ParallelStyle):
    """Style of Linear and convolutions: outputs over the ranks ("columns"), or inputs ("rows").

    torch's own styles take Linear through DTensors from its input to its output, which costs about 1 ms a layer and
    step on the CPU. Here only parameters are DTensors, and what :data:`SHARDED` layers hand to each other.
    """

    def __init__(self, style: str, layout: str) -> None:
        super().__init__()
        self.style, self.layout = style, layout

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        columns = self.style != "rows"
        _distribute(
            module,
            device_mesh,
            {"weight": Shard(0), "bias": Shard(0)} if columns else {"weight": Shard(1), "bias": Replicate()},
        )
        kinds = _COLUMNS if columns else _ROWS
        module.__class__ = kinds[type(module)]  # parameters, hooks and names stay as they are
        cast("_Columns | _Rows", module).layout = self.layout
        return module


class _Columns:
    """Layer that computes this rank's part of the outputs."""

    layout: str
    """Layout of the output."""
    weight: Any
    bias: Any

    def forward(self, x: Any) -> Any:
        """Return this rank's outputs, or all, of the replicated ``x``."""
        mesh = self.weight.device_mesh
        whole = x.full_tensor() if isinstance(x, DTensor) else x
        group = mesh.get_group()
        own = reporting(
            group, lambda: _computed(self, copy_to_group(whole, group), self.weight.to_local(), _local(self.bias))
        )
        if self.layout == PART:
            return own
        if self.layout == SHARDED:
            return DTensor.from_local(own, mesh, [Shard(own.dim() - 1)], run_check=False)
        return gather_from_group(own, _dim(self), group, even=True)


class _Rows:
    """Layer that computes the contribution of this rank's part of the inputs to all outputs."""

    layout: str
    """Layout of the input."""
    weight: Any
    bias: Any

    def forward(self, x: Any) -> torch.Tensor:
        """Return all outputs."""
        mesh = self.weight.device_mesh
        group = mesh.get_group()
        if isinstance(x, DTensor):
            wanted = (Shard(x.dim() - 1),)
            part = (x if x.placements == wanted else x.redistribute(mesh, wanted)).to_local()
        else:
            part = x if self.layout == PART else reporting(group, lambda: scatter_to_group(x, _dim(self), group))
        whole = reduce_from_group(reporting(group, lambda: _computed(self, part, self.weight.to_local(), None)), group)
        bias = _local(self.bias)  # added once, not by every rank
        return whole if bias is None else whole + bias.view(-1, *(1,) * (-1 - _dim(self)))


def _dim(module: Any) -> int:
    """Return the dimension, counted from the end, in which the features or channels lie."""
    return -1 if isinstance(module, nn.Linear) else -1 - len(module.kernel_size)


def _computed(module: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    if isinstance(module, nn.Linear):
        return nn.functional.linear(x, weight, bias)
    return convolve(module, x, weight, bias)


class ColumnLinear(_Columns, nn.Linear):
    """Linear split by output features."""


class ColumnConv1d(_Columns, nn.Conv1d):
    """Conv1d split by output channels."""


class ColumnConv2d(_Columns, nn.Conv2d):
    """Conv2d split by output channels."""


class ColumnConv3d(_Columns, nn.Conv3d):
    """Conv3d split by output channels."""


class RowLinear(_Rows, nn.Linear):
    """Linear split by input features."""


class RowConv1d(_Rows, nn.Conv1d):
    """Conv1d split by input channels."""


class RowConv2d(_Rows, nn.Conv2d):
    """Conv2d split by input channels."""


class RowConv3d(_Rows, nn.Conv3d):
    """Conv3d split by input channels."""


_KINDS = (nn.Linear, *CONVOLUTIONS)
_COLUMNS: dict[type, Any] = dict(zip(_KINDS, (ColumnLinear, ColumnConv1d, ColumnConv2d, ColumnConv3d), strict=True))
_ROWS: dict[type, Any] = dict(zip(_KINDS, (RowLinear, RowConv1d, RowConv2d, RowConv3d), strict=True))


class _Sequence(ParallelStyle):
    """Style of norms over the last dimension: each rank norms its part of the sequence, the dimension before that.

    Sequence parallelism (Korthikanti et al., arXiv:2205.05198, section 4.2.2). torch's SequenceParallel takes a plain
    tensor for this rank's part; here plain tensors are replicated, before and after, so that the style is right
    on its own.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        names = [name for name, param in module.named_parameters(recurse=False) if param is not None]
        _distribute(module, device_mesh, dict.fromkeys(names, Replicate()))
        module.__class__ = _SEQUENCE[type(module)]
        return module


class _SequenceNorm:
    weight: Any

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the norm of the replicated ``x``, of shape ``(..., sequence, features)``."""
        group = self.weight.device_mesh.get_group()
        whole: Any = x.full_tensor() if isinstance(x, DTensor) else x
        normed = reporting(group, lambda: self._own_part(whole, group))
        return gather_from_group(normed, -2, group, even=whole.shape[-2] % group.size() == 0)

    def _own_part(self, whole: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        """Return the norm of this rank's part."""
        if whole.dim() < 2:
            raise ValueError(f"x has the shape {list(whole.shape)}, wanted (..., sequence, features)")
        part = scatter_to_group(whole, -2, group)
        # The gradients of the parameters are sums over all parts.
        own = {
            name: copy_to_group(cast(DTensor, param).to_local(), group)
            for name, param in cast(nn.Module, self).named_parameters(recurse=False)
        }
        return self._norm(part, own)

    def _norm(self, x: torch.Tensor, own: dict[str, torch.Tensor]) -> torch.Tensor:
        raise NotImplementedError


class SequenceLayerNorm(_SequenceNorm, nn.LayerNorm):
    """LayerNorm split by positions of the sequence."""

    def _norm(self, x: torch.Tensor, own: dict[str, torch.Tensor]) -> torch.Tensor:
        return nn.functional.layer_norm(x, self.normalized_shape, own["weight"], own.get("bias"), self.eps)


class SequenceRMSNorm(_SequenceNorm, nn.RMSNorm):
    """RMSNorm split by positions of the sequence."""

    def _norm(self, x: torch.Tensor, own: dict[str, torch.Tensor]) -> torch.Tensor:
        return nn.functional.rms_norm(x, self.normalized_shape, own["weight"], self.eps)


_SEQUENCE: dict[type, Any] = {nn.LayerNorm: SequenceLayerNorm, nn.RMSNorm: SequenceRMSNorm}


# Fits: which modules can be split in which style, and by how many devices.


def check_module(model: nn.Module, name: str, style: str, devices: int) -> None:
    """Raise ValueError, naming the module, unless it can be split in this style over this number of devices."""
    module = model.get_submodule(name)
    owner = _owner(model, name)
    if owner is not None:
        raise ValueError(f"module {name!r} is run by {owner}, which takes its weights apart: it stays whole")
    kind = type(module).__name__
    if not isinstance(module, _FIT[style]):
        wanted = ", ".join(each.__name__ for each in _FIT[style])
        raise ValueError(f"module {name!r} is a {kind}, which {style!r} does not fit: wanted one of {wanted}")
    if isinstance(module, CONVOLUTIONS + NORMS) and type(module) not in CONVOLUTIONS + NORMS:
        raise ValueError(f"module {name!r} is a {kind} with a forward of its own: it cannot be split")
    if parametrize.is_parametrized(module):
        raise ValueError(f"module {name!r} is parametrized: it cannot be split")
    _check_sizes(name, module, style, devices)


def unfit(model: nn.Module, name: str, style: str, devices: int) -> str:
    """Return why :func:`check_module` refuses a module; an empty text if it does not."""
    try:
        check_module(model, name, style, devices)
    except ValueError as error:
        return str(error)
    return ""


def padding(module: nn.Module, style: str, devices: int) -> str:
    """Describe the padding of a vocabulary whose size does not divide; "" if there is none."""
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
        raise ValueError(f"module {name!r} has a padding_idx, max_norm or sparse gradients: it cannot be split")
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


# Attention on DTensors split by heads: what torch knows for GPUs, for the CPU.


@functools.cache
def let_attention_be_split() -> None:
    """Register with DTensor that ``scaled_dot_product_attention`` on the CPU may be split by heads or by samples.

    Does nothing if this torch has no such registration or no such operator.
    """
    try:
        from torch.distributed.tensor.experimental import register_sharding
    except ImportError:  # torch < 2.6: attention over heads then says that it has no sharding strategy
        return
    forward: Any = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
    backward: Any = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu_backward", None)
    if forward is not None and backward is not None:
        register_sharding(forward.default)(_forward)
        register_sharding(backward.default)(_backward)


_PLACEMENTS = (Shard(1), Shard(0), Replicate())  # tensors are (samples, heads, positions, features)


def _forward(
    query: Any,
    key: Any,
    value: Any,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    attn_mask: Any = None,
    scale: float | None = None,
) -> list[Any]:
    mask = None if attn_mask is None else Replicate()
    return [([each] * 2, [*[each] * 3, None, None, mask, None]) for each in _PLACEMENTS]


def _backward(
    grad: Any,
    query: Any,
    key: Any,
    value: Any,
    out: Any,
    logsumexp: Any,
    dropout_p: float,
    is_causal: bool,
    attn_mask: Any = None,
    scale: float | None = None,
) -> list[Any]:
    mask = None if attn_mask is None else Replicate()
    return [([each] * 3, [*[each] * 6, None, None, mask, None]) for each in _PLACEMENTS]
