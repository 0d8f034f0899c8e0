"""Settings of a Reducer: the arguments of ``attach``, and the options that belong together."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, fields
from datetime import timedelta
from typing import Any

import torch

from pycomm.checks import count, positive, shown
from pycomm.compression.base import Compression
from pycomm.optim.loss_scaler import checked_scaler
from pycomm.training.cost.named import checked_method
from pycomm.training.reducer.module_buffers import BUFFERS

OPTIMIZER_STATE = "optimizer state"
"""Word in ``ignore`` that stands for the optimizer's state; no parameter has this name."""


@dataclass(frozen=True)
class Survive:
    """Continue when ranks are lost: those that die, are stopped, miss the timeout, or raise in ``backward()``.

    The remaining ranks agree on who they are and reduce the step again from the gradients that they have;
    ``backward()`` returns the mean over them. See ``Reducer.world``, ``Reducer.on_change`` and docs/survival.md. In CPU
    memory only, and not with DTensors.

    Args:
        min_ranks: fewest ranks that continue; if fewer remain, each of them gets the same CommError.
        carry: objects with ``state_dict`` and ``load_state_dict``, by name, whose state newcomers get as well:
            learning-rate schedules, samplers. Equal names on all ranks.

    Raises:
        TypeError, ValueError: an argument is wrong.
    """

    min_ranks: int = 1
    carry: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "min_ranks", count("min_ranks", self.min_ranks, 1))
        object.__setattr__(self, "carry", _carry(self.carry))

    def __repr__(self) -> str:
        return _written(self, carry=sorted(self.carry or ()))


@dataclass(frozen=True)
class Sharding:
    """Divide the optimizer's step among the ranks (ZeRO, Rajbhandari et al., 2020); see docs/sharding.md.

    Args:
        kind: "optimizer": each rank steps its own part of the parameters, and keeps only that part of the optimizer's
            state.
        grads: content of ``.grad`` after ``backward()``. "part": the average in this rank's own part, elsewhere its
            local gradient (zeros, if a method with state sends gradients); "full": the whole average on every rank.
        independent: declare that the optimizer steps each parameter by its own gradient and state alone, keeps that
            state in ``optimizer.state``, and leaves parameters without a gradient alone. Needed for optimizers that
            pycomm does not know (docs/sharding.md, "Any optimizer"). If it is untrue, training goes on wrongly.

    Raises:
        ValueError, TypeError: an argument is wrong.
    """

    kind: str
    grads: str = "part"
    _: KW_ONLY
    independent: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.independent, bool):
            raise TypeError(f"independent is {shown(self.independent)}, wanted True or False")
        if self.kind != "optimizer":
            raise ValueError(f'kind is {self.kind!r}, wanted "optimizer"')
        if self.grads not in ("part", "full"):
            raise ValueError(f'grads is {self.grads!r}, wanted "part" or "full"')

    def __repr__(self) -> str:
        grads = "" if self.grads == "part" else f", grads={self.grads!r}"
        independent = ", independent=True" if self.independent else ""
        return f"Sharding({self.kind!r}{grads}{independent})"


@dataclass(frozen=True)
class Tuning:
    """Settings that most scripts leave alone.

    Args:
        bucket_mb: approximate size of a bucket in MiB; a bucket's gradients are sent while backward computes the
            next bucket's. ``None``: 25. On one host a model below 100 MiB then gets four equal buckets, of at least 1
            MiB, if gradients are sent unchanged or in half precision. On a GPU it is the size of what ``TopK`` and
            ``DGC`` send, for up to eight times as many bytes of gradients.
        algorithm: name of the algorithm that sums dense buckets; see ``Communicator.all_reduce``.
        check_replicas: compare all ranks' parameters after the first step and then once in this many reductions (by
            hashes, which read them once), and in CPU memory 1/64 of them in each of the others; 0: never. A difference
            is an error. It is a :class:`pycomm.CommError` if a majority agrees (``peer`` is then the other rank), or if
            only a few elements differ, as after a flipped bit.
            Residuals and velocities are compared with their values after the previous step; a change on one rank is an
            error on all. Buffers that differ are only logged.
        timeout: limit of every wait for a peer; seconds or ``timedelta``. ``None``: the process group's own.
        transport: of gradients in CPU memory, see :class:`pycomm.Communicator`.
        ignore: tensors private to each rank: names of parameters and buffers, shell patterns of names
            ("experts.*"), parameters, or modules. They are not sent, averaged, compared or warned of, and may have
            different shapes on different ranks. Patterns must be equal on all ranks. Other trainable parameters of the
            module that this optimizer does not have stay as they are if they differ, with a RuntimeWarning that names
            them; everything else becomes rank 0's. "optimizer state": each rank keeps its own, for an optimizer that
            divides its state among ranks, and only hyperparameters become rank 0's; otherwise all ranks get rank 0's,
            and state that rank 0 does not have is an error.
        per_rank: keys of ``optimizer.param_groups``, such as "lr", whose numbers may differ between ranks. All others
            are compared in every reduction, and a difference is an error that names group, key and values. "training":
            modules may be in training mode on some ranks only.
        all_parameters: average the gradients of all named parameters, whether or not they belong to the optimizer.
            Otherwise a parameter of the module that gets a gradient without being covered by any attach is reported,
            once, by a warning.

    Raises:
        TypeError, ValueError: an argument is wrong.
    """

    _: KW_ONLY
    bucket_mb: float | None = None
    algorithm: str = "auto"
    check_replicas: int = 1000
    timeout: timedelta | float | None = None
    transport: str = "auto"
    ignore: Iterable[Any] = ()
    per_rank: Iterable[str] = ()
    all_parameters: bool = False

    def __post_init__(self) -> None:
        if self.bucket_mb is not None:
            object.__setattr__(self, "bucket_mb", float(positive("bucket_mb", self.bucket_mb)))
        if not isinstance(self.algorithm, str):
            raise TypeError(f"algorithm is {self.algorithm!r}, wanted a name")
        object.__setattr__(self, "check_replicas", count("check_replicas", self.check_replicas, 0))
        object.__setattr__(self, "per_rank", _per_rank(self.per_rank))
        if not isinstance(self.all_parameters, bool):
            raise TypeError(f"all_parameters is {shown(self.all_parameters)}, wanted True or False")

    def __repr__(self) -> str:
        return _written(self)

    @property
    def bucket_bytes(self) -> int | None:
        """Size of a bucket in bytes, if it is given."""
        return None if self.bucket_mb is None else int(self.bucket_mb * 2**20)


def checked_option(name: str, value: Any, kind: type, example: str) -> Any:
    """Return ``value``, an option of ``kind`` or ``None``; raise TypeError otherwise."""
    if value is not None and not isinstance(value, kind):
        raise TypeError(f"{name} is {shown(value)}, wanted {example} or None")
    return value


def _written(option: Any, **texts: object) -> str:
    """Return the expression that makes ``option``, with the arguments that are not defaults."""
    given = {field.name: getattr(option, field.name) for field in fields(option)}
    changed = {f.name: given[f.name] for f in fields(option) if given[f.name] != f.default}
    written = ", ".join(f"{name}={texts.get(name, value)!r}" for name, value in changed.items())
    return f"{type(option).__name__}({written})"


def _per_rank(value: Any) -> tuple[str, ...]:
    keys = list(value) if isinstance(value, Iterable) and not isinstance(value, str) else None
    if keys is None or not all(isinstance(key, str) for key in keys):
        raise TypeError(f'per_rank is {value!r}, wanted names of hyperparameters, such as ("lr",)')
    return tuple(sorted(set(keys)))


def _carry(carry: Any) -> dict[str, Any] | None:
    if carry is None:
        return None
    if not isinstance(carry, Mapping):
        raise TypeError(f"carry is {shown(carry)}, wanted a mapping of names to objects with state_dict()")
    for name, value in carry.items():
        if not isinstance(name, str):
            raise TypeError(f"carry has the name {shown(name)}, wanted strings")
        if not all(callable(getattr(value, method, None)) for method in ("state_dict", "load_state_dict")):
            raise TypeError(
                f"carry[{name!r}] is {shown(value)}, wanted an object with state_dict() and load_state_dict()"
            )
    return dict(carry)


@dataclass(frozen=True, kw_only=True)
class Options:
    """Arguments of ``attach``, equal on all ranks.

    Raises:
        TypeError, ValueError: an argument is wrong or excludes another one; the text names it.
    """

    compression: Compression
    accumulate: int | Callable[[], bool]
    loss_scaler: Any
    average: bool
    buffers: str
    survive: Survive | None
    shard: Sharding | None
    tuning: Tuning

    def __post_init__(self) -> None:
        shard: Any = self.shard
        if isinstance(shard, str) and shard != "optimizer":
            raise ValueError(f'shard is {shard!r}, wanted "optimizer" or None')
        shard = Sharding(shard) if isinstance(shard, str) else shard
        checked = {
            "tuning": checked_option("tuning", self.tuning, Tuning, "pycomm.Tuning(bucket_mb=...)") or Tuning(),
            "compression": checked_method(self.compression),
            "accumulate": self.accumulate if callable(self.accumulate) else count("accumulate", self.accumulate, 1),
            "loss_scaler": checked_scaler(self.loss_scaler),
            "survive": checked_option("survive", self.survive, Survive, "pycomm.Survive(min_ranks=...)"),
            "shard": checked_option("shard", shard, Sharding, '"optimizer", pycomm.Sharding(...)'),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        if self.shard is not None:
            _check_shard(self, self.shard)

    @property
    def has_parts(self) -> bool:
        """Whether each rank may get only its own part of an average."""
        return self.shard is not None and self.shard.grads != "full"

    @property
    def is_linear(self) -> bool:
        """Whether averaging an average again, plus a new gradient, is correct: the result is linear in its inputs.

        False if ranks get parts of an average, as ``.grad`` holds local gradients beside them.
        """
        return self.average and not self.has_parts and not self.compression.transactional

    @property
    def accumulates(self) -> bool:
        """Whether a step may have several backward passes."""
        return self.accumulate != 1

    @property
    def passes(self) -> str:
        """The number of backward passes per step, as text."""
        return "several (a function says)" if callable(self.accumulate) else str(self.accumulate)

    def is_last(self, num_passes: int) -> bool:
        """Return whether the pass that begins after ``num_passes`` others is the last one of its step."""
        if callable(self.accumulate):
            return bool(self.accumulate())
        return num_passes + 1 >= self.accumulate

    def lines(self) -> list[str]:
        """Return one line per setting, to be compared between the ranks."""
        texts = {"accumulate": self.passes, "loss_scaler": type(self.loss_scaler).__name__}
        return [f"{each.name}={texts.get(each.name, getattr(self, each.name))}" for each in fields(self)]


def _check_shard(settings: Options, shard: Sharding) -> None:
    """Raise ValueError if ``settings`` exclude sharded steps."""
    method = type(settings.compression).__name__
    unsuitable = {
        f'grads="part" and compression={method}': (
            shard.grads == "part" and not getattr(settings.compression, "reduces_parts", False),
            "a rank gets only the sum of its own part, which this method cannot send separately; FP16, BF16 and the "
            'quantizing methods can; grads="full" works with all',
        ),
        f"survive={settings.survive}": (
            settings.survive is not None,
            "a lost rank takes its part of the step with it; go on from a checkpoint",
        ),
        f'grads="part" and compression={method}(sum="float32")': (
            shard.grads == "part" and getattr(settings.compression, "sum", "native") == "float32",
            'parts are reduce-scattered, on GPUs in the half type; grads="full" has sums in float32',
        ),
        "all_parameters=True": (settings.tuning.all_parameters, "the optimizer steps its own parameters only"),
    }
    for what, (is_unsuitable, why) in unsuitable.items():
        if is_unsuitable:
            raise ValueError(f'shard="{shard.kind}" cannot be combined with {what}: {why}')


_ELSEWHERE = {
    **{field.name: f"write tuning=pycomm.Tuning({field.name}=...)" for field in fields(Tuning)},
    **{field.name: f"write survive=pycomm.Survive({field.name}=...)" for field in fields(Survive)},
    "grads": "write shard=pycomm.Sharding(kind, grads=...)",
    "clip_local_norm": "write compression=pycomm.DGC(clip_local_norm=...)",
    "optimizer_state": 'write tuning=pycomm.Tuning(ignore=["optimizer state"])',
    "broadcast_buffers": 'buffers="broadcast" does what it does in DistributedDataParallel',
    "find_unused_parameters": "leave it out, unused parameters are found automatically",
    "static_graph": "leave it out, no graph is assumed to stay the same",
    "gradient_as_bucket_view": "leave it out, .grad always is a view of the bucket",
    "device_ids": "leave it out, gradients are averaged where the parameters are",
}
"""What to write for arguments that ``attach`` does not have: fields of its options, and DistributedDataParallel's."""


def refuse_unknown(names: Iterable[str]) -> None:
    """Raise TypeError for the first of ``names``, none of which ``attach`` has, and suggest what may be meant."""
    own = [*(field.name for field in fields(Options)), "process_group"]
    for name in names:
        close = "".join(difflib.get_close_matches(name, [*own, *_ELSEWHERE], n=1))
        if name in _ELSEWHERE:
            meant = _ELSEWHERE[name]
        elif close:
            meant = f"did you mean {_ELSEWHERE.get(close, close).removeprefix('write ')}?"
        else:
            meant = f"wanted one of {', '.join(own)}"
        raise TypeError(f"attach got an unknown argument {name!r}: {meant}")


def checked_buffers(mode: Any, model: Any) -> str:
    """Return the ``buffers`` of ``attach``. Raise ValueError if there is no such mode, or it requires a module."""
    if mode not in BUFFERS:
        raise ValueError(f"buffers is {mode!r}, wanted one of {', '.join(BUFFERS)}")
    if mode != "local" and not isinstance(model, torch.nn.Module):
        raise ValueError(f"buffers={mode!r} requires the module itself, not its named_parameters()")
    return str(mode)
