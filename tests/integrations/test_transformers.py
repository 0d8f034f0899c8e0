"""pycomm.integrations.transformers with the real Trainer: checkpoints, LoRA, models without a wrapper, mistakes."""

from __future__ import annotations

import os
import re
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import pycomm
from tests.ranks import RankPool
from tests.reducer.attaching import assert_replicas_equal

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

METHOD = pycomm.TopK(0.2)


class Regression(nn.Module):
    """A model as the Trainer wants it, in float64."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2)).double()

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": ((self.layers(x) - labels) ** 2).mean()}


def data(count: int = 40) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, 6, generator=generator, dtype=torch.float64)
    y = torch.randn(count, 2, generator=generator, dtype=torch.float64)
    return [{"x": a, "labels": b} for a, b in zip(x, y, strict=True)]


def trainer_of(
    folder: str,
    callbacks: list[Any],
    base: Any = None,
    model: nn.Module | None = None,
    optimizers: tuple[Any, Any] = (None, None),
    **more: Any,
) -> Any:
    """Return a Trainer with windows of two passes, of which the last one of an epoch is ragged."""
    from accelerate.state import AcceleratorState, GradientState
    from transformers import Trainer, TrainingArguments

    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    settings: dict[str, Any] = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": 6}
    settings |= {"learning_rate": 0.05, "max_grad_norm": 0.3, "save_steps": 3, "optim": "sgd", "logging_steps": 1}
    settings |= {"lr_scheduler_type": "linear", "report_to": "none", "disable_tqdm": True, "use_cpu": True}
    arguments = TrainingArguments(output_dir=folder, **{**settings, **more})
    kind = Trainer if base is None else base
    own = model or Regression()
    return kind(model=own, args=arguments, train_dataset=data(), callbacks=callbacks, optimizers=optimizers)


def parameters(trainer: Any) -> list[torch.Tensor]:
    return [p.detach().clone() for p in trainer.model.parameters()]


def callback(compression: Any = METHOD) -> Any:
    from pycomm.integrations.transformers import PycommCallback

    return PycommCallback(compression=compression, timeout=30)


def resume(folder: str, resume_from: str) -> None:
    ours = callback()
    whole = trainer_of(folder, [ours])
    whole.train()
    assert ours.averaging.stats()["steps"] == 6
    again = callback()
    second = trainer_of(folder, [again])
    second.train(resume_from_checkpoint=True if resume_from == "last" else f"{folder}/checkpoint-3")
    assert again.averaging.stats()["steps"] == (0 if resume_from == "last" else 3)
    assert all(map(torch.equal, parameters(whole), parameters(second)))
    if resume_from == "last":
        return
    dist.barrier()
    for path in Path(folder, "checkpoint-3").glob("pycomm-*"):
        path.unlink(missing_ok=True)
    dist.barrier()
    forgetful = trainer_of(folder, [callback()])
    forgetful.train(resume_from_checkpoint=f"{folder}/checkpoint-3")
    assert not all(map(torch.equal, parameters(whole), parameters(forgetful))), "the state made no difference"


@pytest.mark.parametrize("resume_from", ["a path", "last"])
def test_training_resumes_to_the_bit(trainers: RankPool, tmp_path: Path, resume_from: str) -> None:
    trainers.run(resume, str(tmp_path), resume_from)


def stop(folder: str) -> None:
    """A signal to one rank: all save and end at the same step."""
    from transformers import TrainerCallback

    from pycomm.integrations.transformers import PycommCallback

    class Signalled(TrainerCallback):  # type: ignore[misc, unused-ignore]
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if dist.get_rank() == 1 and state.global_step == 2:
                os.kill(os.getpid(), signal.SIGUSR1)

    before = signal.getsignal(signal.SIGUSR1)
    ours = PycommCallback(timeout=30, stop_on=(signal.SIGUSR1,))
    trainer = trainer_of(folder, [ours, Signalled()], save_steps=100)
    trainer.train()
    assert trainer.state.global_step == 3
    assert ours.averaging is not None
    assert (ours.averaging.stop_requested.rank, ours.averaging.stop_requested.reason) == (1, "signal SIGUSR1")
    assert Path(folder, "checkpoint-3").is_dir()
    assert signal.getsignal(signal.SIGUSR1) == before


def test_a_signal_stops_all_ranks_together(trainers: RankPool, tmp_path: Path) -> None:
    trainers.run(stop, str(tmp_path))


def train_twice(folder: str) -> None:
    """The second training, by the same Trainer, is averaged as the first; between the two the hook is gone."""
    ours = callback(None)
    trainer = trainer_of(folder, [ours], max_steps=2, save_strategy="no")
    for _ in range(2):
        trainer.train()
        assert ours.averaging.stats()["steps"] == 2
        trainer.args.max_steps = 2
    own = torch.cat([p.reshape(-1) for p in parameters(trainer)])
    everyone = [torch.empty_like(own) for _ in range(2)]
    dist.all_gather(everyone, own)
    assert torch.equal(*everyone)


def test_training_twice(trainers: RankPool, tmp_path: Path) -> None:
    trainers.run(train_twice, str(tmp_path))


class Noting(Regression):
    """Notes its batches."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        self.seen.append(torch.cat([x, labels], 1).detach().clone())
        return super().forward(x, labels)


def adafactor(folder: str) -> None:
    """As one process makes it of the batches that both ranks have got; windows of two passes."""

    def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adafactor(model.parameters(), lr=0.02)

    model, ours = Noting(), callback(None)
    plain = {"lr_scheduler_type": "constant", "max_grad_norm": 0.0, "save_strategy": "no", "max_steps": 4}
    plain |= {"per_device_train_batch_size": 5}  # four batches of each rank, so that all windows are full
    trainer = trainer_of(folder, [ours], model=model, optimizers=(optimizer_of(model), None), **plain)
    trainer.train()
    assert ours.averaging.stats()["steps"] == 4
    assert_replicas_equal(model)
    mine = torch.stack(model.seen)
    everyones = [torch.empty_like(mine) for _ in range(2)]
    dist.all_gather(everyones, mine)
    assert not torch.equal(*everyones)
    alone = Regression()
    optimizer = optimizer_of(alone)
    for step in range(4):
        optimizer.zero_grad()
        for rows in (batches[2 * step + number] for batches in everyones for number in range(2)):
            (alone(rows[:, :6], rows[:, 6:])["loss"] / 4).backward()
        optimizer.step()
    for p, q, begun in zip(model.parameters(), alone.parameters(), Regression().parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-9)
        assert not torch.equal(p, begun)


def test_adafactor(trainers: RankPool, tmp_path: Path) -> None:
    trainers.run(adafactor, str(tmp_path))


def unwrapped(folder: str) -> None:
    """A Trainer that leaves the model alone: gradients are averaged by attach, once, in ragged windows too."""
    from transformers import Trainer

    class Unwrapped(Trainer):  # type: ignore[misc, unused-ignore]
        def create_accelerator_and_postprocess(self) -> None:
            super().create_accelerator_and_postprocess()
            self.accelerator.prepare_model = partial(self.accelerator.prepare_model, evaluation_mode=True)

    ours = callback(None)
    bare = trainer_of(folder, [ours], Unwrapped)
    bare.train()
    assert isinstance(ours.averaging.inner, pycomm.Reducer)
    assert ours.averaging.stats()["steps"] == 6
    wrapped = trainer_of(folder, [callback(None)])
    wrapped.train()
    for mine, theirs in zip(parameters(bare), parameters(wrapped), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-13, atol=1e-13)


def test_models_without_a_wrapper(trainers: RankPool, tmp_path: Path) -> None:
    trainers.run(unwrapped, str(tmp_path))


def compiled(folder: str) -> None:
    ours = callback(None)
    fast = trainer_of(folder, [ours], torch_compile=True, torch_compile_backend="aot_eager", save_strategy="no")
    fast.train()
    assert ours.averaging.stats()["steps"] == 6
    plain = trainer_of(folder, [], save_strategy="no")
    plain.train()
    for mine, theirs in zip(parameters(fast), parameters(plain), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)


def test_compiled_models(trainers: RankPool, tmp_path: Path) -> None:
    """The hook goes into the DistributedDataParallel that was compiled."""
    trainers.run(compiled, str(tmp_path))


def lora(folder: str) -> None:
    """Adapters of a frozen model: they are all that is sent, and come to what DistributedDataParallel makes."""
    import peft

    def adapted() -> Any:
        torch.manual_seed(0)
        return peft.get_peft_model(Regression(), peft.LoraConfig(r=2, target_modules=["layers.0", "layers.2"])).double()

    ours = callback(None)
    trainer = trainer_of(folder, [ours], model=adapted(), save_strategy="no", max_grad_norm=0.0)
    trainer.train()
    ends = dict(trainer.model.named_parameters())
    begins = dict(adapted().named_parameters())
    trained = [name for name, p in ends.items() if p.requires_grad]
    assert len(trained) == 4
    assert all("lora_" in name for name in trained)
    assert ours.averaging.stats()["bytes_sent"] < 6 * 8 * 3 * sum(ends[name].numel() for name in trained) + 4096
    plain = trainer_of(folder, [], model=adapted(), save_strategy="no", max_grad_norm=0.0)
    plain.train()  # DistributedDataParallel's own averages
    for name, p in plain.model.named_parameters():
        torch.testing.assert_close(ends[name], p, rtol=1e-13, atol=1e-13)
        assert torch.equal(p, begins[name]) == (name not in trained), name


def test_lora(trainers: RankPool, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    trainers.run(lora, str(tmp_path))


def refused(case: str, folder: str) -> str:
    from transformers import Trainer, TrainerCallback

    class Late(TrainerCallback):  # type: ignore[misc, unused-ignore]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            trainer.add_callback(callback())

    class Elsewhere(Trainer):  # type: ignore[misc, unused-ignore]
        def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
            prepared = super()._prepare_for_training(*args, **kwargs)
            setattr(self, case, True)
            return prepared

    class OwnTrain(Trainer):  # type: ignore[misc, unused-ignore]
        def train(self, *args: Any, **kwargs: Any) -> None:
            self.callback_handler.on_train_begin(self.args, self.state, self.control)

    model = Regression()
    kept = []
    base = OwnTrain if case == "own train" else Elsewhere if case.startswith("is_") else None
    try:
        if case == "unknown argument":
            callback().__class__(compress=METHOD)
        if case == "no method":
            callback("topk")
        trainer = trainer_of(folder, [Late()] if case == "late" else [callback()], base, model, save_strategy="no")
        if case == "attached":
            kept.append(
                pycomm.attach(torch.optim.SGD(model.parameters(), lr=0.1), model, tuning=pycomm.Tuning(timeout=30))
            )
        trainer.train()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        for reducer in kept:
            reducer.detach()
    return "nothing"


@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("unknown argument", r"TypeError: .*unexpected keyword argument 'compress'"),
        ("no method", "ValueError: compression is 'topk', wanted one of 'auto'"),
        ("late", "RuntimeError: PycommCallback was added after training had begun"),
        ("own train", r"RuntimeError: PycommCallback works with Trainer.train, .* call pycomm.ddp.register\(model\)"),
        ("attached", "ValueError: parameter 'layers.0.weight' belongs to a DistributedDataParallel, which averages"),
        (
            "is_deepspeed_enabled",
            "ValueError: PycommCallback cannot be combined with DeepSpeed, which averages gradients itself",
        ),
        ("is_fsdp_enabled", "ValueError: PycommCallback cannot be combined with FSDP, .*init_process_group"),
    ],
)
def test_mistakes(trainers: RankPool, tmp_path: Path, case: str, says: str) -> None:
    for said in trainers.run(refused, case, str(tmp_path)):
        assert re.match(says, said), said
