"""After loads of any kind, every rank's state is that of ranks which each take the whole step."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import pycomm
from tests.hosts import on_hosts
from tests.on_ranks import on_ranks
from tests.reducer.attaching import assert_replicas_equal, grouped
from tests.reducer.partition.stepping import OPTIMIZERS, assert_same, rank, values_of

OTHERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "NAdam": lambda params: torch.optim.NAdam(params, lr=0.01),
    "Adafactor": lambda params: torch.optim.Adafactor(params, lr=0.01),
}
SCRIPTS = {
    "rollback": "step step step step save step step load show step show",
    "at the start": "save step load show step save step load show step step show",
    "twice": "step save step step load load show step load show step show",
    "its own": "step own show step own step show",
    "one without the other": "step save step load_model show step load_state show step write show load_model step show",
    "that fail": "step fail step fail show step show",
    "new parameters": "step step add show step save step load show step add load_model step show",
    "inside a step": "step save step load_inside show step show",
    "before detach": "step step save step load detach show step load_model detach show step show",
    "checkpoints": "step checkpoint step resume show step checkpoint step step resume step show",
    "by hand": "step step replace step show forget show step step show",
}


class Net(nn.Module):
    """Layers, most of whose parameters are whole on one rank."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.outer = nn.Linear(4, 40), nn.Linear(40, 2)
        self.scale, self.late = nn.Parameter(torch.ones(())), nn.ParameterList()
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.to(dtype)

    def forward(self, x: torch.Tensor) -> Any:
        return sum((p.sum() for p in self.late), self.outer(torch.tanh(self.inner(x))) * self.scale + self.frozen)


class Run:
    """Training by the words of a script, which name methods; ``seen`` has what each "show" has shown."""

    def __init__(self, name: str, dtype: torch.dtype, folder: Path, shard: str | None) -> None:
        self.model, self.folder, self.shard, self.has_masters = Net(dtype), folder, shard, dtype is not torch.float32
        self.optimizer = {**OPTIMIZERS, **OTHERS}[name]([{"params": [p]} for p in self.model.parameters()])
        if self.has_masters:
            pycomm.master_weights(self.optimizer)
        elif shard is None and name in OPTIMIZERS:
            pycomm.fuse(self.optimizer)
        self.saved: list[Any] = []
        self.seen: list[Any] = []
        self.num_steps = 0
        self.attach()

    def attach(self) -> None:
        self.reducer = pycomm.attach(self.optimizer, self.model, **grouped(timeout=30, shard=self.shard))

    def play(self, script: str) -> list[Any]:
        for word in script.split():
            dist.barrier()  # a rank may load only when no other one still looks at the state
            getattr(self, word)()
        self.reducer.detach()
        self.show()
        assert_replicas_equal(self.model)
        return self.seen

    def step(self, inside: Callable[[], None] = lambda: None) -> None:
        self.num_steps += 1
        self.optimizer.zero_grad()
        generator = torch.Generator().manual_seed(100 * self.num_steps + rank())
        x = torch.randn(8, 4, generator=generator).to(self.model.scale.dtype)
        (self.model(x) - 1).float().square().mean().backward()
        inside()
        self.optimizer.step()

    def show(self) -> None:
        """Note the parameters and the state, and that torch.save writes the same state."""
        self.seen.append(values_of(self.optimizer))
        file = io.BytesIO()
        torch.save(self.optimizer.state_dict(), file)
        file.seek(0)
        read = torch.load(file, weights_only=True)["state"]
        state = {i: {k: torch.as_tensor(v) for k, v in e.items() if v is not None} for i, e in read.items()}
        assert_same([[], state], [[], self.seen[-1][1]])

    def save(self) -> None:
        self.saved.append(copy.deepcopy([self.model.state_dict(), self.optimizer.state_dict()]))

    def load(self) -> None:
        self.load_model()
        self.load_state()

    def load_model(self) -> None:
        self.model.load_state_dict(self.saved[-1][0], strict=False)

    def load_state(self) -> None:
        self.optimizer.load_state_dict(copy.deepcopy(self.saved[-1][1]))

    def load_inside(self) -> None:
        self.step(self.load_state if not self.has_masters else lambda: None)

    def own(self) -> None:
        self.optimizer.load_state_dict(self.optimizer.state_dict())

    def fail(self) -> None:
        state = self.optimizer.state_dict()
        dist.barrier()
        for wrong in ({**state, "param_groups": state["param_groups"][1:]}, {"state": state["state"]}):
            with pytest.raises((ValueError, KeyError)):
                self.optimizer.load_state_dict(wrong)

    @torch.no_grad()
    def write(self) -> None:
        for p in self.model.parameters():
            p[..., :1].mul_(0.5) if p.dim() > 0 else p.mul_(0.5)

    def replace(self) -> None:
        for entry in self.optimizer.state.values():
            for key in entry.keys() & {"exp_avg", "exp_avg_sq", "momentum_buffer", "sum"}:
                entry[key] = torch.full_like(entry[key], 0.5)

    def forget(self) -> None:
        self.optimizer.state.clear()

    def add(self) -> None:
        late = nn.Parameter(torch.full((3,), 0.25, dtype=self.model.scale.dtype))
        self.model.late.append(late)
        self.optimizer.add_param_group({"params": [late]})
        with torch.no_grad():
            late.fill_(0.5)

    def detach(self) -> None:
        self.reducer.detach()
        self.show()
        self.attach()

    def checkpoint(self) -> None:
        pycomm.save(self.folder, self.reducer).wait()

    def resume(self) -> None:
        pycomm.load(self.folder, self.reducer)


def assert_follows(name: str, dtype: torch.dtype, folder: Path) -> None:
    """Compare runs with and without ``shard``, to the bit, wherever a script shows them."""
    for number, script in enumerate(SCRIPTS.values()):
        place = folder / f"{name} {number}"
        wanted, found = (Run(name, dtype, place / str(shard), shard).play(script) for shard in (None, "optimizer"))
        for one, other in zip(found, wanted, strict=True):
            assert_same(one, other)


@on_ranks(2, timeout=120)
def test_state_of_which_a_rank_owns_nothing(tmp_path: Path) -> None:
    assert_follows("Adam", torch.float32, tmp_path)
    assert_follows("SGD", torch.bfloat16, tmp_path)
    assert_follows("NAdam", torch.bfloat16, tmp_path)


HALF, SINGLE = torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("AdamW", SINGLE), ("LAMB", SINGLE), ("Adafactor", SINGLE), ("RMSprop", HALF), ("LARS", HALF), ("NAdam", HALF)],
)
@on_ranks(3, timeout=120)
def test_every_optimizer(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    assert_follows(name, dtype, tmp_path)


@pytest.mark.parametrize(("name", "dtype"), [("Adam", SINGLE), ("SGD", HALF), ("Adafactor", HALF)])
@on_ranks(3, timeout=120)
def test_hosts(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    with on_hosts("aab"):
        assert_follows(name, dtype, tmp_path)


@on_ranks(2)
def test_what_one_rank_loads_stays_on_it(tmp_path: Path) -> None:
    """Though ranks share the state's memory: that the others have not loaded it is found out later."""
    run = Run("Adam", HALF, tmp_path, "optimizer")
    run.step()
    run.save()
    run.step()
    before = values_of(run.optimizer)
    dist.barrier()
    if rank() == 0:
        run.load_state()
    dist.barrier()
    if rank() == 1:
        assert_same(values_of(run.optimizer), before)
    with pytest.raises(RuntimeError, match="the replicas differ"):
        run.step()
    run.reducer.detach()
