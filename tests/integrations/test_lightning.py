"""pycomm.integrations.lightning with the real library: manual optimization, checkpoints, Fabric, mistakes."""

from __future__ import annotations

import re
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import pycomm
from tests.ranks import RankPool
from tests.reducer.attaching import assert_replicas_equal
from tests.reducer.models import make_model, sgd

pytest.importorskip("lightning")

METHOD = pycomm.TopK(0.2)
BATCH, BATCHES = 4, 5


def data(ranks: list[int]) -> DataLoader[Any]:
    """Return the batches of ``ranks`` of two, put together."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, BATCHES, BATCH, 12, generator=generator, dtype=torch.float64)[ranks].transpose(0, 1)
    y = torch.randn(2, BATCHES, BATCH, 5, generator=generator, dtype=torch.float64)[ranks].transpose(0, 1)
    size = BATCH * len(ranks)
    return DataLoader(TensorDataset(x.reshape(-1, 12), y.reshape(-1, 5)), size)


def module_of(manual: bool, adafactor: bool = False) -> Any:
    """Return a model with one optimizer, or two models that a step trains in turn, with windows of two passes."""
    import lightning

    class Automatic(lightning.LightningModule):  # type: ignore[misc, unused-ignore]
        def __init__(self) -> None:
            super().__init__()
            self.layers = make_model()

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            x, y = batch
            return ((self.layers(x) - y) ** 2).mean()

        def configure_optimizers(self) -> Any:
            own = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
            optimizer = torch.optim.Adafactor(self.parameters(), lr=0.02) if adafactor else own
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

    class Manual(lightning.LightningModule):  # type: ignore[misc, unused-ignore]
        """Generator and discriminator, as it were: each loss goes through both models, each step is one's."""

        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.first, self.second = nn.Linear(12, 12).double(), make_model(1)

        def training_step(self, batch: Any, index: int) -> None:
            x, y = batch
            for number, optimizer in enumerate(self.optimizers()):
                self.toggle_optimizer(optimizer)
                loss = (self.second(self.first(x)) - y).abs().pow(number + 1).mean()
                self.manual_backward(loss / 2)
                if index % 2 == 1:
                    self.clip_gradients(optimizer, 0.2, "norm")
                    optimizer.step()
                    optimizer.zero_grad()
                self.untoggle_optimizer(optimizer)

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(part.parameters(), lr=0.1, momentum=0.9) for part in (self.first, self.second)]

    torch.manual_seed(0)
    return Manual() if manual else Automatic()


def fitted(
    folder: str, manual: bool, strategy: Any, epochs: int, ckpt: str | None = None, adafactor: bool = False
) -> list[torch.Tensor]:
    """Return the parameters after training, on two ranks or, without a strategy, alone on both ranks' data."""
    import lightning
    from lightning.fabric.plugins.environments import LightningEnvironment

    module = module_of(manual, adafactor)
    alone = strategy is None
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1 if alone else 2,
        strategy="auto" if alone else strategy,
        plugins=[LightningEnvironment()] if alone else None,
        max_epochs=epochs,
        **({} if manual else {"accumulate_grad_batches": 2, "gradient_clip_val": 0.2}),
        default_root_dir=folder,
        callbacks=[lightning.pytorch.callbacks.ModelCheckpoint(folder, "{epoch}", save_top_k=1, monitor=None)],
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_train_batches=4 if manual else 1.0,
        use_distributed_sampler=False,
        logger=False,
    )
    trainer.fit(module, data([0, 1] if alone else [dist.get_rank()]), ckpt_path=ckpt)
    return [p.detach().clone() for p in module.parameters()]


def strategy_of(manual: bool, compression: Any, **options: Any) -> Any:
    from pycomm.integrations.lightning import PycommStrategy

    return PycommStrategy(compression=compression, accumulate=2 if manual else None, **options)


def equals_one_process(folder: str, manual: bool, options: dict[str, Any], adafactor: bool = False) -> None:
    strategy = strategy_of(manual, **options)
    ours = fitted(folder, manual, strategy, epochs=2, adafactor=adafactor)
    assert not strategy.reducers, "detached when training ended"
    wanted = fitted(f"{folder}/alone-{dist.get_rank()}", manual, None, epochs=2, adafactor=adafactor)
    tolerance = 1e-9 if adafactor else 1e-12
    for mine, theirs in zip(ours, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)
    assert_replicas_equal(nn.ParameterList(ours))


@pytest.mark.parametrize(
    ("manual", "options"),
    [
        (False, {"compression": pycomm.TopK(1.0)}),
        (True, {"compression": pycomm.TopK(1.0), "bucket_mb": 0.001}),
    ],
    ids=["automatic", "manual, two optimizers"],
)
def test_training_equals_one_process(trainers: RankPool, tmp_path: Path, manual: bool, options: dict[str, Any]) -> None:
    """Windows of two passes, of which automatic optimization has a ragged one, as there are five batches."""
    trainers.run(equals_one_process, str(tmp_path), manual, options)


def test_adafactor(trainers: RankPool, tmp_path: Path) -> None:
    trainers.run(equals_one_process, str(tmp_path), False, {"compression": None}, True)


def stop(folder: str) -> None:
    """A request of one rank: all end after the same step."""
    strategy, steps = strategy_of(False, None), list[Any]()
    step = strategy.optimizer_step

    def counted(*args: Any, **kwargs: Any) -> Any:
        if dist.get_rank() == 1 and len(steps) == 1:
            strategy.reducers[0].request_stop("enough")
        steps.append(step(*args, **kwargs))

    strategy.optimizer_step = counted
    fitted(folder, False, strategy, epochs=5)
    assert len(steps) == 2


def test_a_request_stops_all_ranks_together(trainers: RankPool, tmp_path: Path) -> None:
    trainers.run(stop, str(tmp_path))


def resume(folder: str, manual: bool) -> None:
    whole = fitted(f"{folder}/whole", manual, strategy_of(manual, METHOD), epochs=4)
    fitted(f"{folder}/first", manual, strategy_of(manual, METHOD), epochs=2)
    dist.barrier()
    checkpoint = Path(folder, "first", "epoch=1.ckpt")
    files = sorted(path.name.removeprefix("epoch=1.ckpt") for path in checkpoint.parent.iterdir())
    prefixes = ["pycomm", "pycomm1"] if manual else ["pycomm"]
    assert files == ["", *(f".{prefix}-{rank}-of-2.pt" for prefix in prefixes for rank in range(2))], (
        "and none of epoch 0"
    )
    linked = Path(folder, f"last-{dist.get_rank()}.ckpt")
    linked.symlink_to(checkpoint)
    second = fitted(f"{folder}/second", manual, strategy_of(manual, METHOD), epochs=4, ckpt=str(linked))
    assert all(map(torch.equal, whole, second))
    dist.barrier()
    for path in checkpoint.parent.glob("*.pt"):
        path.unlink(missing_ok=True)
    dist.barrier()
    forgetful = fitted(f"{folder}/third", manual, strategy_of(manual, METHOD), epochs=4, ckpt=str(checkpoint))
    assert not all(map(torch.equal, whole, forgetful)), "the state made no difference"


def test_training_resumes_to_the_bit(trainers: RankPool, tmp_path: Path) -> None:
    """A checkpoint that is removed takes the files beside it along."""
    trainers.run(resume, str(tmp_path), False)


class Looped:
    """Two models on Fabric, with an optimizer each and windows of two passes."""

    def __init__(self, compression: Any, **options: Any) -> None:
        from lightning.fabric import Fabric

        from pycomm.integrations.lightning import PycommFabricStrategy

        self.strategy = PycommFabricStrategy(compression=compression, **options)
        self.fabric = Fabric(accelerator="cpu", devices=2, strategy=self.strategy)
        self.fabric.launch()
        pairs = []
        for seed in range(2):
            model = make_model(seed)
            pairs.append(self.fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)))
        self.parts = {f"{kind}{n}": part for n, pair in enumerate(pairs) for kind, part in zip("mo", pair, strict=True)}

    def run(self, batches: range) -> list[torch.Tensor]:
        for index, (x, y) in enumerate(data([dist.get_rank()])):
            if index not in batches:
                continue
            for number in range(2):
                model, optimizer = self.parts[f"m{number}"], self.parts[f"o{number}"]
                for is_last in (False, True):
                    with self.fabric.no_backward_sync(model, enabled=not is_last):
                        self.fabric.backward(((model(x) - y) ** 2).mean() / 2)
                self.fabric.clip_gradients(model, optimizer, max_norm=0.3)
                optimizer.step()
                optimizer.zero_grad()
        return [p.detach().clone() for number in range(2) for p in self.parts[f"m{number}"].parameters()]


def fabric_resumes(folder: str) -> None:
    whole = Looped(METHOD)
    whole.run(range(3))
    assert [reducer.stats()["steps"] for reducer in whole.strategy.reducers] == [3, 3]
    whole.fabric.save(f"{folder}/a.ckpt", dict(whole.parts))
    wanted = whole.run(range(3, 5))
    second = Looped(METHOD)
    second.fabric.load(f"{folder}/a.ckpt", dict(second.parts))
    assert all(map(torch.equal, wanted, second.run(range(3, 5))))
    forgetful = Looped(METHOD)
    forgetful.fabric.load(f"{folder}/a.ckpt", {"m0": forgetful.parts["m0"], "m1": forgetful.parts["m1"]}, strict=False)
    assert not forgetful.strategy.reducers[0].state_dict()["steps"], "without its optimizer nothing is loaded"


def fabric_shards() -> None:
    together = Looped(None, shard=pycomm.Sharding("optimizer", grads="full")).run(range(BATCHES))
    apart = Looped(None).run(range(BATCHES))
    for mine, theirs in zip(together, apart, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def test_fabric_with_steps_that_ranks_take_together(trainers: RankPool) -> None:
    trainers.run(fabric_shards)


def test_fabric_resumes_to_the_bit(trainers: RankPool, tmp_path: Path) -> None:
    trainers.run(fabric_resumes, str(tmp_path))


def refused(case: str, folder: str) -> str:
    import lightning
    from lightning.fabric import Fabric

    from pycomm.integrations.lightning import PycommFabricStrategy, PycommStrategy

    class Attaches(lightning.LightningModule):  # type: ignore[misc, unused-ignore]
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            pycomm.attach(optimizer, self, tuning=pycomm.Tuning(timeout=30))
            return optimizer

    model, attached = make_model(), None
    try:
        if case == "argument of DDP":
            PycommStrategy(find_unused_parameters=True)
        if case == "unknown":
            PycommFabricStrategy(compress=METHOD)
        if case == "no method":
            fitted(folder, False, strategy_of(False, "topk"), epochs=1)
        if case == "closures":
            PycommStrategy(shard="optimizer")
        if case == "far away":
            strategy = strategy_of(False, METHOD)
            strategy.reducers.append(
                attached := pycomm.attach(sgd(model), model, compression=METHOD, tuning=pycomm.Tuning(timeout=30))
            )
            strategy.remove_checkpoint("s3://there/a.ckpt")
        if case == "both":
            module = module_of(False)
            module.configure_optimizers = Attaches.configure_optimizers.__get__(module)
            trainer = lightning.Trainer(
                accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, logger=False, enable_checkpointing=False
            )
            trainer.fit(module, data([0]))
        if case == "no module":
            fabric = Fabric(accelerator="cpu", devices=2, strategy=PycommFabricStrategy())
            fabric.launch()
            fabric.setup_optimizers(torch.optim.SGD(make_model().parameters(), lr=0.1))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        if attached is not None:
            attached.detach()
    return "nothing"


def with_timeout(folder: str, timeout: Any) -> None:
    """Both sides get it: Lightning's process group as a timedelta, and what averages."""
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    made: list[Any] = []

    def noted(group: Any, timeout: Any) -> pycomm.Communicator:
        made.append(timeout)
        return pycomm.Communicator(group, timeout)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(vars(sys.modules["pycomm.training.reducer.attach"]), "Communicator", noted)
        strategy = strategy_of(False, None, timeout=timeout)
        fitted(f"{folder}/{seconds}", False, strategy, epochs=1)
        looped = Looped(None, timeout=timeout)
        looped.run(range(1))
    assert made == [timeout] * 3
    for each in (strategy, looped.strategy):
        assert each._timeout == timedelta(seconds=seconds)


@pytest.mark.parametrize("timeout", [25, 25.5, timedelta(seconds=25)])
def test_timeouts_are_seconds_or_timedeltas(trainers: RankPool, tmp_path: Path, timeout: Any) -> None:
    trainers.run(with_timeout, str(tmp_path), timeout)


def without_timeout() -> None:
    from torch.distributed.constants import default_pg_timeout

    from pycomm.integrations.lightning import PycommFabricStrategy, PycommStrategy

    for wrong in ("soon", 0, timedelta(0)):
        for make in (PycommStrategy, PycommFabricStrategy):
            with pytest.raises((TypeError, ValueError), match="timeout is .*wanted a positive number of seconds"):
                make(timeout=wrong)
    for options in ({}, {"timeout": None}):
        for strategy in (PycommStrategy(**options), PycommFabricStrategy(**options)):
            assert strategy._timeout == default_pg_timeout
            assert strategy._attach_options.get("timeout") is None


def test_the_default_timeout_is_the_groups(trainers: RankPool) -> None:
    trainers.run(without_timeout)


@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("argument of DDP", "TypeError: PycommStrategy got an argument 'find_unused_parameters': wanted among accel"),
        ("unknown", "TypeError: PycommFabricStrategy got an argument 'compress': wanted among accelerator,"),
        (
            "closures",
            "ValueError: shard is 'optimizer', which Lightning's Trainer cannot use: its optimizers step",
        ),
        ("no method", "ValueError: compression is 'topk', wanted one of"),
        (
            "far away",
            "ValueError: checkpoint s3://there/a.ckpt is not in a file system, which is where each rank keeps",
        ),
        ("both", "ValueError: .*belongs to a DistributedDataParallel.*a strategy of pycomm.integrations.lightning"),
        ("no module", r"ValueError: optimizer is a SGD whose parameters do not .*fabric.setup\(model, optimizer\)"),
    ],
)
def test_mistakes(trainers: RankPool, tmp_path: Path, case: str, says: str) -> None:
    for said in trainers.run(refused, case, str(tmp_path)):
        assert re.match(says, said), said


OLDER_NAMES = """
import {imported}
from pycomm.integrations.lightning import PycommFabricStrategy, PycommStrategy
assert PycommStrategy.__mro__[1].__module__.split(".")[0] == {trainers!r}, PycommStrategy.__mro__
assert PycommFabricStrategy.__mro__[1].__module__.split(".")[0] == {fabrics!r}, PycommFabricStrategy.__mro__
"""


@pytest.mark.parametrize(
    ("imported", "trainers_from", "fabrics_from"),
    [("lightning", "lightning", "lightning"), ("pytorch_lightning", "pytorch_lightning", "lightning_fabric")],
)
def test_both_names_of_the_library(imported: str, trainers_from: str, fabrics_from: str) -> None:
    pytest.importorskip("lightning_fabric")
    code = OLDER_NAMES.format(imported=imported, trainers=trainers_from, fabrics=fabrics_from)
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=60, cwd="/")
