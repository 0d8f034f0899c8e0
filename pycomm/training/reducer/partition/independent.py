"""Optimizers that step each parameter by its own gradient and state alone, as steps of whole parameters require.

Whether an optimizer does so cannot be seen from outside, so there is a written list. For any other optimizer the user
declares it: ``Sharding("optimizer", independent=True)``. Those that are known to do otherwise are refused by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from pycomm.training.reducer.settings import Sharding

_INDEPENDENT: Mapping[str, str] = {
    # torch's documentation states each for one parameter; norms (Adafactor, Muon) are of it alone.
    "torch.optim": "ASGD Adadelta Adafactor Adagrad Adam AdamW Adamax Muon NAdam RAdam RMSprop Rprop SGD",
    # You et al. 2017 and 2020: the trust ratio of each layer is made of its own norms.
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
"""Classes, and why none of their steps can be shared out. So may none of their subclasses."""

_CLIPS = {"Adan": ("max_grad_norm",), "Lamb": ("pre_norm",)}
"""Options of classes of pytorch_optimizer that clip the norm of all gradients together."""


def require_independent(optimizer: torch.optim.Optimizer, shard: Sharding, name: str) -> None:
    """Raise ValueError if the step of ``optimizer`` is known to couple parameters, or not known to treat each alone.

    ``name``: that of a parameter.
    """
    kind = type(optimizer)
    for each in kind.__mro__:
        why = _REFUSED.get(_package_of(each, _REFUSED), {}).get(each.__name__)
        if why is not None:
            raise ValueError(f'shard="{shard.kind}" does not go with {each.__name__}: {why}')
    package = _package_of(kind, _INDEPENDENT)
    is_known = kind.__name__ in _INDEPENDENT.get(package, "").split()
    if is_known and package == "pytorch_optimizer":
        for option in _CLIPS.get(kind.__name__, ()):
            if getattr(optimizer, option, None):
                raise ValueError(
                    f'shard="{shard.kind}" does not go with {kind.__name__}({option}={getattr(optimizer, option)}): '
                    f"{_TOGETHER}; clip by reducer.clip_grad_norm()"
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
