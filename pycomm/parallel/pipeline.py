"""Pipelines: stages of a model on different ranks, run by torch's runtime in the order of a verified table."""

from __future__ import annotations

import contextlib
import secrets
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from pycomm.collectives.backend.process_group import PycommProcessGroup
from pycomm.collectives.transport.own_group import OWN, PYCOMM, found_group
from pycomm.collectives.transport.torch_group import destroy_group
from pycomm.descriptions import counted, tensors_text
from pycomm.errors import attempt, text_of
from pycomm.optim.attached import attached_to
from pycomm.optim.shards import note_stages
from pycomm.parallel.cut import Route, Routed, Skip, chain, require_parameters_apart
from pycomm.parallel.mesh import agree, all_gather_text, cpu_or, group_along
from pycomm.schedule import pipeline as tables
from pycomm.schedule.pipeline.table import LETTERS
from pycomm.torch_internals import backend_of, make_process_group, number_process_group, store_of, timeout_of
from pycomm.torch_internals.pipelines import QuietStage, forget_shapes, pipeline_runtime, run_forward


class Pipeline:
    """Pipeline of a model's stages on the ranks of a group, which process microbatches in the order of a table.

        stages = [nn.Sequential(...), nn.Sequential(...)]
        pipeline = pycomm.parallel.Pipeline(stages, mesh["pp"], "one_f_one_b", microbatches=8, loss=loss_fn)
        optimizer = torch.optim.SGD(pipeline.module.parameters(), lr=0.1)
        pycomm.attach(optimizer, pipeline.module, process_group=mesh["dp"])     # with data parallelism
        loss = pipeline.step(x, target=y)                  # forward and backward, on every rank
        optimizer.step()
        if loss is not None:                               # this rank has the last stage
            print(loss.item())

    Before anything is sent, the table is proven on every rank (:func:`pycomm.schedule.pipeline.verify`): every
    microbatch passes every stage once, in order, and the sends and receives cannot wait for each other in a circle.
    torch's runtime executes it. Messages have tags, so that they may arrive in any order, and the backend "pycomm"
    buffers them: a rank that sends continues at once.

    Gradients are taken of the mean of the microbatches' losses. With :func:`pycomm.attach` they are averaged over the
    data-parallel group once, after all microbatches; ``Reducer.clip_grad_norm`` clips by the norm over all stages, and
    if a gradient is not finite on one of them, scalers skip the step on all. Apply a loss scale inside ``loss``, whose
    result is then scaled, too.

    Args:
        stages: modules of all stages, of which this rank keeps its own; or a mapping with this rank's modules by stage
            number. The input of a module is the output of the one before it.
        mesh: mesh with a dimension "pp", or of one dimension; a process group; ``None`` for the default group.
        schedule: name of a table in :mod:`pycomm.schedule.pipeline`, or a table.
        microbatches: number of parts of a batch; the batch must divide by it. Not needed with a table.
        loss: function of the last stage's output and the targets of a microbatch; its result is the mean loss.
            ``None``: only :meth:`evaluate` can be used.
        skips: skip connections to later stages than the next: ``("features", 0, 3)``. The module of stage 0 then
            returns ``(output, {"features": tensor})``, and stage 3's module is called with ``features=tensor``.

    Attributes:
        table: the table.
        stages: modules of this rank's stages, by number.
        module: the same as one module, for the optimizer, ``attach`` and checkpoints.

    Raises:
        ValueError: on every rank: the ranks' arguments differ; the table is wrong or does not exist for this number of
            stages; a stage has no parameters, shares one with another stage, or is missing; a skip goes backward, or
            two stages give the same tensor.
        TypeError: on every rank: a stage is not a module, ``schedule`` neither a name nor a table, or ``loss`` not a
            function.
        RuntimeError: torch.distributed is not initialized.
    """

    def __init__(
        self,
        stages: Sequence[nn.Module] | Mapping[int, nn.Module],
        mesh: DeviceMesh | dist.ProcessGroup | None = None,
        schedule: str | tables.Pipeline = "one_f_one_b",
        *,
        microbatches: int | None = None,
        loss: Callable[..., torch.Tensor] | None = None,
        skips: Iterable[Skip] = (),
    ) -> None:
        group, problem = found_group(lambda: group_along(mesh, "pp"))
        made = attempt(lambda: _Prepared(stages, group, schedule, microbatches, list(skips), loss), problem)
        self._prepared = agree(group, made, "make this pipeline", _Prepared.lines)
        self.table, self.stages = self._prepared.table, self._prepared.mine
        self.module = nn.ModuleDict({str(number): module for number, module in self.stages.items()})
        note_stages(self.module, group)
        self._group = group
        self._first, self._last = 0 in self.stages, self.table.num_stages - 1 in self.stages
        self._device = next(self.module.parameters()).device
        self._flags = cpu_or(group, self._device)
        self._ended_by = ""
        self._begin()

    def __repr__(self) -> str:
        table, mine = self.table, ", ".join(map(str, self.stages))
        what = [
            table.name,
            f"{counted(table.num_stages, 'stage')} on {counted(table.num_ranks, 'rank')}",
            counted(table.num_microbatches, "microbatch", "microbatches"),
            f"this rank has {'stage' if len(self.stages) == 1 else 'stages'} {mine}" if mine else "this rank has none",
            tensors_text(self.module.parameters()),
        ]
        return f"Pipeline({', '.join(what)})"

    def _begin(self) -> None:
        """Make the runtime, and a group for its messages. Collective."""
        self._messages = _OwnMessages(self._group)
        self._shapes: list[torch.Size] | None = None  # of the last batch
        made = attempt(self._make_runtime)
        self._runtime = agree(self._group, made, "run this pipeline")
        self._ended_by = ""

    def _make_runtime(self) -> Any:
        prepared, table = self._prepared, self.table
        wrapped = [
            _TaggedStage(prepared.routed(number), number, table.num_stages, self._device, group=self._messages.group)
            for number in sorted(self.stages)
        ]
        rows = {rank: _cells_of(table, rank) for rank in range(table.num_ranks)}
        return pipeline_runtime(wrapped, rows, table.num_microbatches, prepared.loss)

    def step(self, *inputs: torch.Tensor, target: torch.Tensor | None = None) -> torch.Tensor | None:
        """Run a batch forward and backward; gradients are in ``.grad`` when this returns.

        Every rank calls it for every batch, then ``optimizer.step()``, in place of ``model(x)``, ``loss(...)`` and
        ``loss.backward()``. Only the rank with the last stage knows the loss; to share it, call a collective. The
        returned loss has no graph.

        Args:
            inputs: the batch, ``[batch, ...]``, used by the rank with the first stage; other ranks may leave it out.
            target: its targets, ``[batch, ...]``, used by the rank with the last stage; other ranks may leave it out.

        Returns:
            The mean loss over the microbatches, detached, on the rank with the last stage; ``None`` on the others.

        Raises:
            ValueError: on every rank: a batch does not divide by the microbatches, is no tensor, or is missing where it
                is needed; inputs and targets differ in length; an averaged gradient of the last step is still there.
            RuntimeError: the pipeline has no loss.
            CommError: another rank has failed. Ranks that had already ended the step get no error. The next call
                restarts the pipeline on all ranks; gradients are as before this call.
        """
        if self._prepared.loss is None:
            raise RuntimeError("this pipeline has no loss, wanted one for step(): Pipeline(..., loss=function)")
        targets = () if target is None else (target,)
        self._agree_on(lambda: self._problem_of_step(inputs, targets), inputs)
        losses: list[torch.Tensor] = []
        with self._ending(), _averaged_once(self.module):
            self._runtime.step(
                *(inputs if self._first else ()),
                target=target if self._last else None,
                losses=losses if self._last else None,
                return_outputs=False,
            )
        return torch.stack([loss.detach() for loss in losses]).mean() if self._last else None

    @torch.no_grad()
    def evaluate(self, *inputs: torch.Tensor) -> Any:
        """Run a batch forward only, in microbatches; return the model's output on the rank with the last stage.

        Raises:
            ValueError: on every rank: a batch does not divide by the microbatches, or the first stage's rank has none;
                or another rank has failed.
            CommError: another rank is lost.
        """
        self._agree_on(lambda: self._problem("inputs", inputs, self._first), inputs)
        outcome: Any
        try:
            with self._ending():
                outcome = run_forward(self._runtime, *(inputs if self._first else ()))
        except Exception as error:
            outcome = error
        (failed,) = self._any(isinstance(outcome, Exception))
        if failed:  # also on ranks whose own stages succeeded
            agree(self._group, outcome, "evaluate this batch")
        return outcome

    def _problem_of_step(self, inputs: tuple[torch.Tensor, ...], targets: tuple[torch.Tensor, ...]) -> str:
        """Return what is wrong with this rank's part of a batch, or with gradients that are left; "" if nothing is."""
        problem = self._problem("inputs", inputs, self._first) or self._problem("target", targets, self._last)
        if not problem and inputs and targets and len(inputs[0]) != len(targets[0]):
            problem = f"inputs has a batch of {len(inputs[0])}, target one of {len(targets[0])}"
        return problem or _left_over(self.module)

    def _problem(self, what: str, tensors: tuple[Any, ...], wanted: bool) -> str:
        """Return what is wrong with a part of a batch that this rank has; "" if nothing is."""
        count = self.table.num_microbatches
        if wanted and not tensors:
            return f"{what} is missing on the rank with the {'first' if what == 'inputs' else 'last'} stage"
        for tensor in tensors:
            if not isinstance(tensor, torch.Tensor):
                return f"{what} is {type(tensor).__name__}, wanted a tensor"
            if tensor.layout != torch.strided or tensor.is_nested or tensor.is_meta:
                form = "nested" if tensor.is_nested else f"in layout {tensor.layout}, on {tensor.device}"
                return f"{what} is {form}, wanted a dense tensor that has values"
            size = tensor.shape[0] if tensor.dim() else 0
            if size % count or size == 0:
                return f"{what} has a batch of {size}, wanted one that divides into {count} microbatches"
        return ""

    def _agree_on(self, problem_of: Callable[[], str], inputs: tuple[torch.Tensor, ...]) -> None:
        """Raise ValueError on every rank if one has a problem, as the others would wait for its messages.

        Otherwise restart if a step of any rank has failed, or reset the shapes if they have changed on any rank.
        """
        if self._ended_by and not self._messages.can_end:
            raise RuntimeError(
                f"an earlier step of this pipeline ended with an error, make a new one: {self._ended_by}"
            )
        text = attempt(problem_of)
        problem = text if isinstance(text, Exception) else ValueError(text) if text else None
        shapes = None if problem else [each.shape for each in inputs]
        changed = bool(shapes) and self._shapes is not None and shapes != self._shapes
        failed, has_changed, has_ended = self._any(problem is not None, changed, bool(self._ended_by))
        if failed:
            agree(self._group, problem, "take this batch")
        if has_ended:
            self._messages.end("a step of its pipeline ended with an error")
            self._begin()
        elif has_changed:
            forget_shapes(self._runtime)
        self._shapes = shapes or self._shapes

    def _any(self, *flags: bool) -> list[bool]:
        """Return which of ``flags`` are true on any rank. Collective."""
        numbers = torch.tensor(flags, dtype=torch.int32, device=self._flags)
        dist.all_reduce(numbers, dist.ReduceOp.MAX, group=self._group)
        return [bool(number) for number in numbers.tolist()]

    @contextlib.contextmanager
    def _ending(self) -> Iterator[None]:
        """Report an error in the block to the other ranks. Messages of the step may still be under way then."""
        try:
            yield
        except BaseException as error:
            self._ended_by = text_of(error)
            self._messages.end(f"its step of the pipeline failed: {self._ended_by}")
            raise


class _Prepared:
    """Arguments of a pipeline, checked on this rank, before the ranks agree."""

    def __init__(
        self,
        stages: Sequence[nn.Module] | Mapping[int, nn.Module],
        group: dist.ProcessGroup,
        schedule: str | tables.Pipeline,
        microbatches: int | None,
        skips: Sequence[Skip],
        loss: Callable[..., torch.Tensor] | None,
    ) -> None:
        if loss is not None and not callable(loss):
            raise TypeError(f"loss is {loss!r}, wanted a function of the output and the targets, or None")
        given = dict(stages) if isinstance(stages, Mapping) else dict(enumerate(stages))
        for number, module in given.items():
            if not isinstance(module, nn.Module):
                raise TypeError(f"stage {number} is {type(module).__name__}, wanted a torch.nn.Module")
        self._whole = None if isinstance(stages, Mapping) else len(given)
        self.table = self._table_for(dist.get_world_size(group), schedule, microbatches)
        tables.verify(self.table)
        owners = self.table.rank_of_stage.tolist()
        mine = [number for number, owner in enumerate(owners) if owner == dist.get_rank(group)]
        missing = [number for number in mine if number not in given]
        if missing:
            raise ValueError(f"stages has no module for stage {missing[0]}, which the table gives to this rank")
        require_parameters_apart(given)
        self.mine = {number: given[number] for number in mine}
        self._skips, self.loss = list(skips), loss
        self._routes: list[Route] | None = chain(self.table.num_stages, skips) if skips else None

    def _table_for(self, ranks: int, schedule: str | tables.Pipeline, microbatches: int | None) -> tables.Pipeline:
        if isinstance(schedule, str):
            if microbatches is None:
                raise ValueError("microbatches is missing, wanted the number of parts of a batch")
            if schedule == "interleaved" and self._whole is not None:
                schedule = f"interleaved({self._whole // ranks})"
            table = tables.by_name(schedule, ranks, microbatches)
        else:
            if not isinstance(schedule, tables.Pipeline):
                raise TypeError(
                    f"schedule is {type(schedule).__name__}, wanted a name or a pycomm.schedule.pipeline.Pipeline"
                )
            table = schedule
            if microbatches not in (None, table.num_microbatches):
                raise ValueError(f"microbatches is {microbatches}, the table has {table.num_microbatches}")
        if table.num_ranks != ranks:
            raise ValueError(f"the table {table.name} is for {table.num_ranks} ranks, the group has {ranks}")
        if self._whole is not None and self._whole != table.num_stages:
            raise ValueError(f"stages has {self._whole} modules, the table {table.name} has {table.num_stages} stages")
        return table

    def routed(self, number: int) -> nn.Module:
        """Return the module that torch runs as stage ``number``."""
        module = self.mine[number]
        return module if self._routes is None else Routed(module, self._routes[number], number)

    def lines(self) -> list[str]:
        """Return what must be the same on all ranks."""
        return [*tables.to_csv(self.table).splitlines(), f"skips: {self._skips}", f"loss: {self.loss is not None}"]


def _cells_of(table: tables.Pipeline, rank: int) -> list[tuple[int, str, int]]:
    """Return the actions of ``rank``, in order, in the form of torch's runtime."""
    return [(action.stage, LETTERS[action.kind], action.microbatch) for action in table.program(rank)]


class _TaggedStage(QuietStage):
    """Stage whose messages have a tag for their direction, the stage they are for, and the microbatch.

    torch matches messages between two ranks by their order alone. Without tags, a table that sends and receives in
    different orders would give a stage another one's tensor.
    """

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._tagged(super().get_fwd_recv_ops(fwd_chunk_id), 0, self.stage_index, fwd_chunk_id)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._tagged(super().get_fwd_send_ops(fwd_chunk_id), 0, self.stage_index + 1, fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._tagged(super().get_bwd_recv_ops(bwd_chunk_id), 1, self.stage_index, bwd_chunk_id)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._tagged(super().get_bwd_send_ops(bwd_chunk_id), 1, self.stage_index - 1, bwd_chunk_id)

    def _tagged(self, operations: list[dist.P2POp], way: int, stage: int, microbatch: int) -> list[dist.P2POp]:
        # Tensors of the same message keep their order: tags are matched first come, first served.
        for operation in operations:
            operation.tag = 1 + way + 2 * (stage + self.num_stages * microbatch)
        return operations


class _OwnMessages:
    """Group for messages between the ranks of the user's group. Collective.

    On the backend "pycomm" it is a new group: ending it after a failed step drops unreceived messages, and raises an
    error on ranks that wait. On other backends it is the user's group.

    Attributes:
        group: the group.
        can_end: whether it is a new group, which :meth:`end` ends.
    """

    def __init__(self, users: dist.ProcessGroup) -> None:
        self.group, self.can_end = users, isinstance(backend_of(users, torch.device("cpu")), PycommProcessGroup)
        if not self.can_end:
            return
        name = f"{users.group_name}{OWN}pipeline/{all_gather_text(secrets.token_hex(8), users)[0]}"
        ranks = dist.get_process_group_ranks(users)
        seconds = timeout_of(users).total_seconds()
        self.group = make_process_group(store_of(users), users.rank(), ranks, PYCOMM, name, seconds, seconds)
        number_process_group(self.group, ranks)
        self._finalizer = weakref.finalize(self, _destroy, self.group)

    def end(self, reason: str) -> None:
        """End the messages, and report the ``reason`` to ranks that wait for this one."""
        if self.can_end:
            backend = backend_of(self.group, torch.device("cpu"))
            backend.abort(reason)
            self._finalizer()


def _destroy(group: dist.ProcessGroup) -> None:
    with contextlib.suppress(RuntimeError, ValueError):  # torch's own groups are destroyed already
        destroy_group(group)


def _left_over(module: nn.Module) -> str:
    """Return why the gradients of ``module`` cannot be averaged now; "" if they can."""
    parameters = [p for p in module.parameters() if p.requires_grad and p.grad is not None]
    if not attached_to(parameters):
        return ""
    return (
        "a parameter has a gradient from an earlier step: call optimizer.zero_grad() first, with set_to_none=True. "
        "attach(accumulate=...) is not for pipelines, which accumulate over microbatches"
    )


@contextlib.contextmanager
def _averaged_once(module: nn.Module) -> Iterator[None]:
    """Average the gradients of ``module`` once, at the end, for any number of backward passes inside.

    A pipeline runs a backward pass per stage and microbatch. Tables that compute weights' gradients separately even
    bypass autograd's hooks. So averaging is paused inside; at the end the resulting gradients go through autograd in
    one pass, which :func:`pycomm.attach` sees as any other. Earlier gradients are set aside meanwhile, as torch divides
    all gradients by the number of microbatches. After an error they are restored.
    """
    parameters = [p for p in module.parameters() if p.requires_grad]
    reducers = attached_to(parameters)
    before = [(p, p.grad) for p in parameters if p.grad is not None]
    for p, _ in before:
        p.grad = None
    try:
        with contextlib.ExitStack() as stack:
            for reducer in reducers:
                stack.enter_context(reducer.paused())
            yield
    except BaseException:
        for p in parameters:
            p.grad = None
        for p, grad in before:
            p.grad = grad
        raise
    averaged = {id(p) for p in parameters if any(reducer.knows(p) for reducer in reducers)}
    arrived = [(p, p.grad) for p in parameters if p.grad is not None and id(p) in averaged]
    for p, _ in arrived:
        p.grad = None
    if arrived:
        torch.autograd.backward([p for p, _ in arrived], [grad for _, grad in arrived])
    for p, grad in before:
        p.grad = grad if p.grad is None else grad + p.grad
