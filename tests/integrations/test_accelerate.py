"""pycomm.integrations.accelerate with the real library: checkpoints, precision, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import pycomm
from tests.ranks import RankPool
from tests.reducer.attaching import assert_replicas_equal
from tests.reducer.models import average_gradients, batch_of, losses_at, make_model

pytest.importorskip("accelerate")

METHOD = pycomm.TopK(0.1)


def accelerator(**options: Any) -> Any:
    """Return an Accelerator that knows nothing of the one before."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    return Accelerator(cpu=True, **options)


class Training:
    """A model with momentum on an Accelerator, wrapped or not; a step has two passes."""

    def __init__(self, wrapped: bool, compression: Any, number: int = 1, **options: Any) -> None:
        from pycomm.integrations.accelerate import attach

        self.accelerator = accelerator(gradient_accumulation_steps=2)
        self.models, self.optimizers, self.averagings = [], [], []
        for seed in range(number):
            model: Any = make_model(seed)
            optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            optimizer = self.accelerator.prepare(optimizer)
            model = self.accelerator.prepare(model) if wrapped else model
            options = {"compression": compression, "timeout": 30, **options}
            self.averagings.append(attach(self.accelerator, model, optimizer, **options))
            self.models.append(model)
            self.optimizers.append(optimizer)

    def run(self, steps: range) -> None:
        for step in range(2 * steps.start, 2 * steps.stop):
            x, y = batch_of(dist.get_rank(), step)
            for model, optimizer in zip(self.models, self.optimizers, strict=True):
                with self.accelerator.accumulate(model):
                    self.accelerator.backward(((model(x) - y) ** 2).mean())
                    if self.accelerator.sync_gradients:
                        self.accelerator.clip_grad_norm_(model.parameters(), 0.05)
                    optimizer.step()
                    optimizer.zero_grad()
                if model is not self.models[-1]:  # windows are counted by the Accelerator, for one model
                    self.accelerator.step -= 1

    def parameters(self) -> list[torch.Tensor]:
        return [p.detach().clone() for model in self.models for p in model.parameters()]


def resume(folder: str, wrapped: bool) -> None:
    from pycomm.ddp import HookHandle

    whole = Training(wrapped, METHOD, number=2)
    assert all(isinstance(each.inner, HookHandle if wrapped else pycomm.Reducer) for each in whole.averagings)
    whole.run(range(6))
    first = Training(wrapped, METHOD, number=2)
    first.run(range(3))
    first.accelerator.save_state(folder)
    dist.barrier()
    names = {path.name for path in Path(folder).glob("*.pt")}
    assert names == {f"pycomm{number}-{rank}-of-2.pt" for number in ("", "1") for rank in range(2)}
    second = Training(wrapped, METHOD, number=2)
    second.accelerator.load_state(folder)
    second.run(range(3, 6))
    assert all(map(torch.equal, whole.parameters(), second.parameters()))
    forgetful = Training(wrapped, METHOD, number=2)
    for path in Path(folder).glob("pycomm*.pt"):
        path.unlink(missing_ok=True)
    dist.barrier()
    forgetful.accelerator.load_state(folder)
    forgetful.run(range(3, 6))
    assert not all(map(torch.equal, whole.parameters(), forgetful.parameters())), "the state made no difference"


@pytest.mark.parametrize("wrapped", [True, False], ids=["prepared", "unwrapped"])
def test_training_resumes_to_the_bit(trainers: RankPool, tmp_path: Path, wrapped: bool) -> None:
    """Two models, with state of their own beside the same checkpoint."""
    trainers.run(resume, str(tmp_path), wrapped)


def autocast() -> None:
    """A model that was not prepared is under autocast all the same, and part of a checkpoint."""
    from pycomm.integrations.accelerate import attach

    acc = accelerator(mixed_precision="bf16")
    model = make_model(dtype=torch.float32)
    optimizer = acc.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    attach(acc, model, optimizer, timeout=30)
    seen: list[torch.dtype] = []
    model[0].register_forward_hook(lambda _module, _args, out: seen.append(out.dtype))
    x, y = batch_of(dist.get_rank(), 0, torch.float32)
    acc.backward(((model(x) - y) ** 2).mean())
    optimizer.step()
    assert seen == [torch.bfloat16]
    assert model[0].weight.dtype == torch.float32
    gathered = acc.gather(model[0].weight.detach()[None])
    assert torch.equal(gathered[0], gathered[1])


def shards() -> None:
    together = Training(False, None, shard=pycomm.Sharding("optimizer", grads="full"))
    together.run(range(4))
    apart = Training(True, None)
    apart.run(range(4))
    for mine, theirs in zip(together.parameters(), apart.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def test_steps_that_ranks_take_together(trainers: RankPool) -> None:
    """An argument of attach, where nothing wraps the model; windows and clipping as under DistributedDataParallel."""
    trainers.run(shards)


def adafactor(shard: str | None) -> None:
    """Prepared under DistributedDataParallel, or shared out by whole matrices, against one process with all samples."""
    from pycomm.integrations.accelerate import attach

    acc = accelerator()
    model: Any = make_model()
    optimizer = acc.prepare(torch.optim.Adafactor(model.parameters(), lr=0.02))
    module = acc.prepare(model) if shard is None else model
    averaging = attach(acc, module, optimizer, timeout=30, **({} if shard is None else {"shard": shard}))
    alone = make_model()
    other = torch.optim.Adafactor(alone.parameters(), lr=0.02)
    for step in range(8):
        x, y = batch_of(dist.get_rank(), step)
        acc.backward(((module(x) - y) ** 2).mean())
        optimizer.step()
        optimizer.zero_grad()
        for name, grad in average_gradients(alone, losses_at(step)).items():
            alone.get_parameter(name).grad = grad
        other.step()
    assert_replicas_equal(model)
    averaging.detach()
    for mine, theirs, begun in zip(model.parameters(), alone.parameters(), make_model().parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)
        assert not torch.equal(mine, begun)


@pytest.mark.parametrize("shard", [None, "optimizer"])
def test_adafactor(trainers: RankPool, shard: str | None) -> None:
    trainers.run(adafactor, shard)


def compiled() -> None:
    """A model that Accelerate has compiled is attached by the names that it had, and is in a checkpoint once."""
    from pycomm.integrations.accelerate import attach

    acc = accelerator(dynamo_backend="aot_eager")
    model, plain = make_model(), make_model()
    optimizer = acc.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    fast = acc.prepare_model(model, evaluation_mode=True)
    inner: Any = attach(acc, fast, optimizer, timeout=30).inner
    assert list(inner.named_parameters()) == [name for name, _ in model.named_parameters()]
    x, y = batch_of(dist.get_rank(), 0)
    acc.backward(((fast(x) - y) ** 2).mean())
    for name, wanted in average_gradients(plain, losses_at(0)).items():
        torch.testing.assert_close(model.get_parameter(name).grad, wanted, rtol=1e-9, atol=1e-9)
    assert len(acc._models) == 1


def test_compiled_models(trainers: RankPool) -> None:
    trainers.run(compiled)


def test_autocast(trainers: RankPool) -> None:
    trainers.run(autocast)


def pair(acc: Any, prepared: bool = False) -> tuple[Any, Any]:
    """Return a model, prepared or not, and its prepared optimizer."""
    model: Any = make_model()
    optimizer = acc.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    return acc.prepare(model) if prepared else model, optimizer


def elsewhere(acc: Any, attach: Any, kind: str) -> None:
    from accelerate.utils import DistributedType

    model, optimizer = pair(acc)
    acc.state.distributed_type = DistributedType(kind)
    attach(acc, model, optimizer)


def twice(acc: Any, attach: Any) -> None:
    model, optimizer = pair(acc, prepared=True)
    first = attach(acc, model, optimizer, timeout=30)
    try:
        attach(acc, model, optimizer, timeout=30)
    finally:
        first.detach()


def wrapped_later(acc: Any, attach: Any) -> None:
    model, optimizer = pair(acc)
    first = attach(acc, model, optimizer, timeout=30)
    try:
        DistributedDataParallel(model)(batch_of(0, 0, next(model.parameters()).dtype)[0])
    finally:
        first.detach()


def compiles(_: Any, attach: Any) -> None:
    acc = accelerator(dynamo_backend="aot_eager")
    model, optimizer = pair(acc)
    attach(acc, model, optimizer)


MISTAKES: dict[str, Any] = {
    "unprepared": lambda acc, attach: attach(acc, model := make_model(), torch.optim.SGD(model.parameters(), lr=0.1)),
    "other accelerator": lambda acc, attach: attach("accelerator", *pair(acc)),
    "other optimizer": lambda acc, attach: attach(acc, make_model(), "optimizer"),
    "other model": lambda acc, attach: attach(acc, make_model()[0].weight, pair(acc)[1]),
    "twice": twice,
    "outside": lambda acc, _: pycomm.attach(*reversed(pair(acc, prepared=True)), tuning=pycomm.Tuning(timeout=30)),
    "wrapped later": wrapped_later,
    "unknown option": lambda acc, attach: attach(acc, *pair(acc), compress=METHOD),
    "own option": lambda acc, attach: attach(acc, *pair(acc), accumulate=2),
    "option of attach": lambda acc, attach: attach(acc, *pair(acc, prepared=True), buffers="average"),
    "compiles": compiles,
    "FSDP": lambda acc, attach: elsewhere(acc, attach, "FSDP"),
    "DEEPSPEED": lambda acc, attach: elsewhere(acc, attach, "DEEPSPEED"),
}


def refused(case: str) -> str:
    """Return what the error says, after its kind."""
    from pycomm.integrations.accelerate import attach

    try:
        MISTAKES[case](accelerator(), attach)
    except (TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("unprepared", r"ValueError: optimizer is an unprepared SGD, wanted what accelerator.prepare\(optimizer\)"),
        ("other accelerator", "TypeError: accelerator is a str, wanted an accelerate.Accelerator"),
        ("other optimizer", "TypeError: optimizer is no optimizer but a str, wanted what accelerator.prepare"),
        ("other model", "TypeError: model is a Parameter, wanted a module"),
        ("twice", "ValueError: ddp_model already has a hook of pycomm's"),
        ("outside", "ValueError: parameter '0.weight' belongs to a Distributed.*pycomm.integrations.acc"),
        ("wrapped later", "ValueError: parameter '0.weight' belongs to a DistributedDataParallel"),
        ("unknown option", "TypeError: attach got an argument 'compress': wanted among algorithm,"),
        ("own option", "TypeError: attach got an argument 'accumulate': wanted among algorithm,"),
        ("option of attach", "TypeError: attach got an argument 'buffers': it is for models without Distributed"),
        ("compiles", r"ValueError: accelerator compiles models \(with AOT_EAGER\), but not this one: model is a Seq"),
        ("FSDP", r"ValueError: accelerator runs FSDP: .*register_hsdp"),
        ("DEEPSPEED", "ValueError: accelerator runs DEEPSPEED: DeepSpeed averages gradients itself: leave pycomm out"),
    ],
)
def test_mistakes(trainers: RankPool, case: str, says: str) -> None:
    for said in trainers.run(refused, case):
        assert re.match(says, said), said
