"""Lightning: strategies for its Trainer and for Fabric that let pycomm average gradients.

The classes derive from classes of ``lightning``, or of ``pytorch_lightning`` and ``lightning_fabric`` if the script has
imported only these, or only these are installed.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from pycomm.checks import seconds_of
from pycomm.integrations.averaging import ATTACH_OPTIONS, Averaging, check_options, for_attach, library
from pycomm.optim.parameters import optimizer_parameters, unwrapped
from pycomm.training.reducer import Reducer, attach


def _strategies(new: str, old: str) -> Any:
    """Return the strategies of package ``new``, or of ``old`` if only that is imported or installed."""
    older = sys.modules.get(old) is not None and sys.modules.get(new) is None
    names = (old, new) if older else (new, old)
    return library(*(f"{name}.strategies" for name in names), whose="pycomm.integrations.lightning")


_TrainerStrategy: Any = _strategies("lightning.pytorch", "pytorch_lightning").DDPStrategy
_FabricStrategy: Any = _strategies("lightning.fabric", "lightning_fabric").DDPStrategy

_OPTIONS = ATTACH_OPTIONS - {"timeout"}
"""Arguments of ``attach`` alone; ``timeout`` is for both sides."""

_WRAPPERS_OWN = ("ddp_comm_state", "ddp_comm_hook", "ddp_comm_wrapper", "model_averaging_period", "kwargs")


def _split(base: Any, arguments: Mapping[str, Any], whose: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arguments for Lightning's strategy ``base``, and those for ``attach``."""
    lightnings = set(inspect.signature(base.__init__).parameters) - {"self", *_WRAPPERS_OWN}
    check_options(arguments, lightnings | _OPTIONS | {"accumulate"}, whose)
    theirs = {name: value for name, value in arguments.items() if name in lightnings}
    if theirs.pop("timeout", None) is not None:  # Lightning makes the process group with it, and takes no number
        theirs["timeout"] = timedelta(seconds=seconds_of(arguments["timeout"]))
    ours = {name: value for name, value in arguments.items() if name in _OPTIONS | {"accumulate", "timeout"}}
    return theirs, ours


def _beside(path: str | os.PathLike[str], reducers: Sequence[Reducer]) -> Iterator[tuple[Averaging, Path, str]]:
    """Yield the state of each Reducer, and the folder and prefix of its files beside the checkpoint ``path``."""
    for number, reducer in enumerate(reducers):
        if "://" in str(path):
            if Averaging(reducer).carries_state:
                raise ValueError(
                    f"checkpoint {path} is not in a file system, which is where each rank keeps what compression "
                    "carries: save to a local folder, or train with a method without state"
                )
            continue
        file = Path(path)
        yield Averaging(reducer), file.parent, f"{file.name}.pycomm{number or ''}"


class PycommStrategy(_TrainerStrategy):
    """Strategy of Lightning's Trainer in which pycomm averages gradients: ``Trainer(strategy=PycommStrategy())``.

    It is Lightning's ``DDPStrategy`` without the wrapper around the model: every optimizer is attached
    (:func:`pycomm.attach`), in automatic and in manual optimization. ``accumulate_grad_batches`` (ragged last windows
    included), clipping, precision and checkpoints work as Lightning describes them. What compression carries from step
    to step is kept beside each checkpoint, in one file per rank and optimizer, and comes back with ``ckpt_path``, also
    into another number of ranks.

    Args:
        compression: as for :func:`pycomm.attach`.
        accumulate: in manual optimization, number of backward passes per optimizer step, if above 1; in automatic
            optimization, leave it out.
        options: further arguments of :func:`pycomm.attach`, except ``process_group``, ``loss_scaler``, ``join`` and
            ``shard``; and of ``DDPStrategy``, except DistributedDataParallel's: ``process_group_backend``,
            ``cluster_environment``, ``checkpoint_io``, ``start_method`` and so on. ``timeout``, in seconds or as
            a ``timedelta``, is for both.

    ``request_stop`` of one of the ``reducers``, on any rank, sets the Trainer's ``should_stop`` on all ranks after the
    same step.

    Attributes:
        reducers: the :class:`pycomm.Reducer` of each optimizer while the model is fitted, in their order.

    Raises:
        TypeError: an argument is unknown.
        ValueError: ``shard`` is given; or, when fitting begins, as from :func:`pycomm.attach`.
    """

    def __init__(self, *, compression: Any = None, accumulate: int | None = None, **options: Any) -> None:
        theirs, self._attach_options = _split(_TrainerStrategy, options, type(self).__name__)
        if options.get("shard") is not None:
            raise ValueError(
                f"shard is {options['shard']!r}, which Lightning's Trainer cannot use: its optimizers step with "
                "closures, for which ranks that step together would wait; use Fabric, or leave shard out"
            )
        self._attach_options["compression"] = compression
        self._accumulate = accumulate
        self._blocked = False
        self._resumed_from: str | os.PathLike[str] | None = None
        self.reducers: list[Reducer] = []
        super().__init__(**theirs)

    def configure_ddp(self) -> None:
        """Leave the model as it is."""

    def setup(self, trainer: Any) -> None:
        """Set up as Lightning does; then attach the optimizers, if there are any to step."""
        super().setup(trainer)
        if trainer.state.fn != "fit":
            return
        scaler = getattr(self.precision_plugin, "scaler", None)
        accumulate: Any = self._accumulate or self._is_last
        for optimizer in self.optimizers:
            options = {**self._attach_options, "loss_scaler": scaler, "accumulate": accumulate}
            self.reducers.append(attach(unwrapped(optimizer), self.lightning_module, **for_attach(options)))

    def _is_last(self) -> bool:
        return not self._blocked

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Accumulate gradients of passes in the block; the last pass of the window averages them."""
        self._blocked = True
        try:
            yield
        finally:
            self._blocked = False

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        """Step as Lightning does; stop the Trainer on all ranks if any rank has requested it."""
        result = super().optimizer_step(*args, **kwargs)
        if any(reducer.stop_requested for reducer in self.reducers):
            self.lightning_module.trainer.should_stop = True
        return result

    def save_checkpoint(self, checkpoint: Any, filepath: Any, storage_options: Any = None) -> None:
        """Save a checkpoint as Lightning does, and each rank's state beside it. Collective."""
        files = list(_beside(filepath, self.reducers))
        super().save_checkpoint(checkpoint, filepath, storage_options)
        for state, folder, prefix in files:
            state.save(folder, prefix)

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint, and this rank's state beside it."""
        files = list(_beside(filepath, self.reducers))
        super().remove_checkpoint(filepath)
        for state, folder, prefix in files:
            state.remove(folder, prefix)

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Load a checkpoint, and remember its path: compression state is loaded with the optimizers' state."""
        self._resumed_from = checkpoint_path
        return super().load_checkpoint(checkpoint_path, *args, **kwargs)

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        """Load the state of the optimizers and of compression. Collective."""
        super().load_optimizer_state_dict(checkpoint)
        if self._resumed_from is not None:
            linked = os.path.realpath(self._resumed_from) if os.path.islink(self._resumed_from) else self._resumed_from
            for state, folder, prefix in _beside(linked, self.reducers):  # ModelCheckpoint(save_last="link")
                state.load(folder, prefix)

    def teardown(self) -> None:
        """Detach the optimizers, and tear down as Lightning does."""
        while self.reducers:
            self.reducers.pop().detach()
        super().teardown()


class PycommFabricStrategy(_FabricStrategy):
    """Strategy of Fabric in which pycomm averages gradients: ``Fabric(strategy=PycommFabricStrategy())``.

    It is Fabric's ``DDPStrategy`` without the wrapper around the model: ``fabric.setup(model, optimizer)``, or
    ``setup_module`` and then ``setup_optimizers``, attach each optimizer (:func:`pycomm.attach`).
    ``fabric.no_backward_sync``, ``clip_gradients``, precision, ``save`` and ``load`` work as Fabric describes them;
    what compression carries from step to step is kept beside each checkpoint, in one file per rank and optimizer.

    Args:
        compression: as for :func:`pycomm.attach`.
        options: as for :class:`PycommStrategy`.

    Attributes:
        reducers: the :class:`pycomm.Reducer` of each optimizer, in the order in which they were set up.

    Raises:
        TypeError: an argument is unknown.
        ValueError: (when an optimizer is set up) no module that was set up has its parameters; or as from
            :func:`pycomm.attach`.
    """

    def __init__(self, *, compression: Any = None, **options: Any) -> None:
        theirs, self._attach_options = _split(_FabricStrategy, options, type(self).__name__)
        self._attach_options["compression"] = compression
        self._modules: list[torch.nn.Module] = []
        self.reducers: list[Reducer] = []
        super().__init__(**theirs)
        self._backward_sync_control = _BackwardSyncControl()

    def setup_module(self, module: torch.nn.Module) -> torch.nn.Module:
        """Leave the model as it is."""
        self._modules.append(module)
        return module

    def setup_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Attach an optimizer whose model has been set up. Collective."""
        module = _owner(optimizer, self._modules)
        held: _BackwardSyncControl = self._backward_sync_control
        options = {"accumulate": lambda: not held.holds(module), **self._attach_options}
        scaler = getattr(self.precision, "scaler", None)
        self.reducers.append(attach(unwrapped(optimizer), module, loss_scaler=scaler, **for_attach(options)))
        return optimizer

    def save_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> None:
        """Save a checkpoint as Fabric does, and each rank's state beside it. Collective."""
        files = list(_beside(path, self.reducers))
        super().save_checkpoint(path, *args, **kwargs)
        for state, folder, prefix in files:
            state.save(folder, prefix)

    def load_checkpoint(self, path: Any, state: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Load a checkpoint, and the state of compression if an optimizer is among ``state``. Collective then."""
        rest = super().load_checkpoint(path, state, *args, **kwargs)
        wanted = state.values() if isinstance(state, dict) else [state]
        optimizers = [unwrapped(value) for value in wanted if isinstance(value, torch.optim.Optimizer)]
        for saved, folder, prefix in _beside(path, self.reducers):
            if any(optimizer is saved.optimizer for optimizer in optimizers):
                saved.load(folder, prefix)
        return rest


class _BackwardSyncControl:
    """Implements ``fabric.no_backward_sync``: records the modules whose gradients are only accumulated."""

    def __init__(self) -> None:
        self._held: list[torch.nn.Module] = []

    def holds(self, module: torch.nn.Module) -> bool:
        return any(held is module for held in self._held)

    @contextlib.contextmanager
    def no_backward_sync(self, module: torch.nn.Module, enabled: bool) -> Iterator[None]:
        if not enabled:
            yield
            return
        self._held.append(module)
        try:
            yield
        finally:
            self._held.pop()


def _owner(optimizer: torch.optim.Optimizer, modules: Iterable[torch.nn.Module]) -> torch.nn.Module:
    """Return the module among ``modules`` that has all parameters of ``optimizer``; raise ValueError if none has."""
    wanted = {id(param) for param in optimizer_parameters(optimizer)}
    for module in modules:
        if wanted <= {id(param) for param in module.parameters()}:
            return module
    raise ValueError(
        f"optimizer is a {type(optimizer).__name__} whose parameters do not belong to one module that was set up: "
        "call fabric.setup(model, optimizer), or fabric.setup_module(model) before fabric.setup_optimizers(optimizer)"
    )
