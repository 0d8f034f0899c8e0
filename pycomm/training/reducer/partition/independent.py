"""Optimizers that step each parameter by its own gradient and state alone, as steps of whole parameters require.

Whether an optimizer does so cannot be seen from outside, so there is a written list. For any other optimizer the user
declares it: ``Sharding("optimizer", independent=True)``. Those that are known to do otherwise are refused by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from pycomm.collectives.layout import require_dense
from pycomm.compression import BF16, FP16, NoCompression
from pycomm.compression.base import Compression
from pycomm.optim.fused import FusedStep, has_rule, rule_of
from pycomm.optim.masters import MasterWeights
from pycomm.optim.step_override import HALF, Stepper, stepper_of
from pycomm.torch_internals import is_dtensor
from pycomm.training.reducer.settings import Sharding

_INDEPENDENT: Mapping[str, str] = {
    # torch's documentation states each for one parameter; norms (Adafactor, Muon) are of it alone.
    "torch.optim": "ASGD Adadelta Adafactor Adagrad Adam AdamW Adamax Muon NAdam RAdam RMSprop Rprop SGD",
    # You et al. 2017 and 2020: the trust ratio of each layer is computed from its own norms.
    "pycomm.optim": "LAMB LARS",
    # Defazio et al. 2024, algorithm 1: the weights of the average depend on the step and the rate alone.
    "schedulefree": "AdamWScheduleFree RAdamScheduleFree SGDScheduleFree",
    # Chen et al. 2023, algorithm 2: elementwise.
    "lion_pytorch": "Lion",
    # docs/tested_optimizers.md: 12 steps on two ranks with and without shard="optimizer" gave equal parameters. And 60
    # steps of some parameters, with weight decay and without, did not change with the gradients of the others.
    "pytorch_optimizer": """
        A2Grad ADOPT APOLLO AccSGD AdEMAMix AdaBelief AdaBound AdaDelta AdaFactor AdaGO AdaMax AdaMod AdaMuon AdaNorm
        AdaPNM AdaSmooth AdaTAM Adalite AdamC AdamG AdamMini AdamP AdamWSN Adan AggMo Aida Alice Amos Ano ApolloDQN BCOS
        CAME DASH DiffGrad DualAdam EXAdam EmoFact EmoLynx EmoNavi FAdam FOCUS FTRL Fira FlashAdamW Fromage GaLore Grams
        GrokFastAdamW Kate LARS LaProp Lamb Lion MADGRAD MARS MSVAG Muon MuonClip Nero NorMuon NovoGrad PAdam PID PNM
        QHAdam QHM RACS RAdam ROSE Ranger SCION SCIONLight SGDP SGDSaI SGDW SM3 SOAP SPAM SPlus SRMM SWATS SaRA
        ScheduleFreeAdamW ScheduleFreeRAdam ScheduleFreeSGD Shampoo SignSGD SimplifiedAdEMAMix SpectralSphere
        StableAdamW StableSPAM TAM Tiger VSGD Yogi
    """,
}
"""Names of classes by the package that defines them, which need not be installed. A subclass may do otherwise."""

_TOGETHER = "its step depends on all gradients together"
_NOT_SENT = "it keeps state of a kind that cannot be sent to other ranks"
_CLOSURE = "its step calls a closure, and ranks that step each other's parameters would have to wait for each other's"
_DISTANCES = ("DAdaptAdaGrad", "DAdaptAdam", "DAdaptAdan", "DAdaptLion", "DAdaptSGD", "Prodigy")
"""Classes that estimate one distance from all parameters together."""
_REFUSED: Mapping[str, Mapping[str, str]] = {
    "torch.optim": {"LBFGS": _TOGETHER},
    "schedulefree": {"AdamWScheduleFreeClosure": _CLOSURE, "SGDScheduleFreeClosure": _CLOSURE},
    "prodigyopt": {"Prodigy": _TOGETHER},
    "dadaptation": dict.fromkeys((*_DISTANCES, "DAdaptAdamPreprint"), _TOGETHER),
    "pytorch_optimizer": {
        **dict.fromkeys(_DISTANCES, _TOGETHER),
        **dict.fromkeys(("ASGD", "AdaGC", "Adai", "AdamS", "AvaGrad", "Gravity", "Kron", "LoRARite"), _TOGETHER),
        "Ranger21": _TOGETHER,  # its weight decay is divided by the variance of all gradients
        **dict.fromkeys(("AdaShift", "Conda", "ScalableShampoo"), _NOT_SENT),
        "AliG": _CLOSURE,
    },
}
"""Classes whose steps cannot be divided, with the reason; it holds for their subclasses, too."""

_CLIPS = {"Adan": ("max_grad_norm",), "Lamb": ("pre_norm",)}
"""Options of classes of pytorch_optimizer that clip the norm of all gradients together."""


def require_independent(optimizer: torch.optim.Optimizer, shard: Sharding, name: str) -> None:
    """Raise ValueError if the step of ``optimizer`` is known to couple parameters, or not known to treat each alone.

    ``name``: name of a parameter, for the error.
    """
    kind = type(optimizer)
    for each in kind.__mro__:
        why = _REFUSED.get(_package_of(each, _REFUSED), {}).get(each.__name__)
        if why is not None:
            raise ValueError(f'shard="{shard.kind}" cannot be combined with {each.__name__}: {why}')
    package = _package_of(kind, _INDEPENDENT)
    is_known = kind.__name__ in _INDEPENDENT.get(package, "").split()
    if is_known and package == "pytorch_optimizer":
        for option in _CLIPS.get(kind.__name__, ()):
            if getattr(optimizer, option, None):
                raise ValueError(
                    f'shard="{shard.kind}" cannot be combined with {kind.__name__}({option}='
                    f"{getattr(optimizer, option)}): {_TOGETHER}; clip by reducer.clip_grad_norm()"
                )
    if not is_known and not shard.independent:
        raise ValueError(
            f'shard="{shard.kind}" gives each rank whole parameters to step, such as {name!r}, and '
            f"{kind.__module__}.{kind.__qualname__} is not among the optimizers that are known to step each parameter "
            "by its own gradient and state alone (not by a norm of several, nor by random numbers, which one process "
            f'would draw in another order). If it does, write shard=pycomm.Sharding("{shard.kind}", independent=True); '
            'see docs/sharding.md, "Any optimizer"'
        )


def _package_of(kind: type, packages: Iterable[str]) -> str:
    """Return which of ``packages`` defines ``kind``; empty if none does."""
    return next((name for name in packages if f"{kind.__module__}.".startswith(f"{name}.")), "")


def require_shardable(
    optimizer: torch.optim.Optimizer,
    named: Mapping[str, torch.Tensor],
    shard: Sharding,
    compression: Compression,
    *,
    on_gpu: bool,
) -> None:
    """Raise ValueError if the step of ``optimizer``, which has the ``named`` parameters, cannot be divided."""
    name, stepper = f'shard="{shard.kind}"', stepper_of(optimizer)
    own_masters = isinstance(stepper, MasterWeights) and (on_gpu or not stepper.has_kernels)
    if on_gpu:
        _require_whole_steps(shard, stepper, compression)
    if on_gpu or own_masters or not has_rule(optimizer):
        require_independent(optimizer, shard, next(iter(named), ""))
    else:
        try:
            rule_of(optimizer)
        except ValueError as error:
            raise ValueError(f"{name} requires options that pycomm's kernels take: {error}") from None
    for label, param in named.items():
        if is_dtensor(param):
            raise ValueError(
                f"{name} requires ordinary parameters, and {label!r} is a DTensor, which is sharded already"
            )
        if param.dtype in HALF and not stepper.has_masters:
            raise ValueError(
                f"{name}: parameter {label!r} has dtype {param.dtype}, whose steps are divided only with float32 "
                "masters: call pycomm.master_weights(optimizer) before attach"
            )
        require_dense(param)


def _require_whole_steps(shard: Sharding, stepper: Stepper, compression: Compression) -> None:
    """Raise ValueError if ``shard`` requires more than steps of whole parameters, the only kind that GPUs support."""
    if shard.grads == "part" and not isinstance(compression, (NoCompression, FP16, BF16)):
        raise ValueError(
            f"shard={shard} with compression={type(compression).__name__} requires gradients in CPU memory; "
            'grads="full", FP16 and BF16 also work between GPUs'
        )
    if isinstance(stepper, FusedStep):
        raise ValueError(
            f"shard={shard} on a GPU assigns whole parameters to ranks, which step them by the optimizer's own step(): "
            "leave pycomm.fuse out"
        )
