"""StepPartition: a sharded step, in which each rank steps its own part of every bucket.

Optimizers that orthogonalize or precondition matrices (Muon, SOAP, Shampoo) cannot step a part of one. With those each
rank owns whole parameters: it gets the average of their gradients, keeps their state, and steps them alone by the
optimizer's own code; then all ranks get the new values (Rajbhandari et al., ZeRO, 2020, section 5.1, by parameters in
place of equal parts). An optimizer may do so if it steps each parameter by its own gradient and state alone: see
:mod:`independent`.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pycomm.agreement import exchanged
from pycomm.collectives.broadcasting import broadcast_tensors, decode, encode
from pycomm.collectives.bucket import Bucket
from pycomm.collectives.communicator import Communicator
from pycomm.collectives.layout import is_capturing, view_like
from pycomm.errors import CommError, DamageError, attempt
from pycomm.optim.fused import FusedStep, KernelStep, has_rule
from pycomm.optim.masters import MasterWeights, WholeMasters
from pycomm.optim.module_hooks import BeforeForward, hook_forward
from pycomm.optim.parameters import gradients_of, optimizer_parameters
from pycomm.optim.partition import Partition, Span
from pycomm.optim.pending_factor import FactorStep, refuse_closure
from pycomm.optim.step_override import Factor, own_step, stepper_of
from pycomm.torch_internals import version_of
from pycomm.training.reducer.buckets import SentBucket, Slot
from pycomm.training.reducer.partition.comparison import CompareReplicas, StepComparison, has_written_unscaled
from pycomm.training.reducer.partition.spans import SpanTable
from pycomm.training.reducer.settings import Options

_LOG = logging.getLogger("pycomm")

_TEXT = (
    "a rank was lost in the middle of optimizer.step(), while the ranks wrote to each other's parameters: those here "
    "may be a mixture of old and new ones. Load a checkpoint (model.load_state_dict) before they are used. The cause: "
)

_WRITTEN = (
    "was written to after backward(), and each rank has only its own part of the average: clip by "
    'reducer.clip_grad_norm(), or pass Sharding(grads="full"); gradients are unscaled by pycomm.LossScaler or a '
    "torch.amp.GradScaler, given to attach as loss_scaler"
)


class Aftermath:
    """Guard that makes every forward of ``module`` and step of ``optimizer`` raise until the module is loaded.

    It outlives the Reducer.
    """

    def __init__(self, module: torch.nn.Module | None, optimizer: torch.optim.Optimizer, cause: BaseException) -> None:
        self._text = _TEXT + str(cause)
        self._handles: list[Any] = [optimizer.register_step_pre_hook(lambda *_: self._raise())]
        if module is not None:
            self._handles.append(hook_forward(module, BeforeForward(self._raise)))
            register: Any = module.register_load_state_dict_post_hook
            self._handles.append(register(lambda *_: self._loaded()))

    def _raise(self) -> None:
        raise RuntimeError(self._text)

    def _loaded(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


class StepPartition:
    """Partition of the parameters of an attached optimizer; see :class:`pycomm.optim.partition.Partition`.

    Gradients are reduced before the step, and all parameters have arrived when it ends.

    Args:
        optimizer: the attached optimizer. If kernels step it, ranks have equal parts of every bucket; otherwise,
            and on GPUs, whole parameters (see :class:`WholeStep`).
        compare: see :class:`StepComparison`.
        order: ranks in the order in which their parts of a bucket lie.

    Attributes:
        is_shared: whether ranks share the state's memory.
        has_full_grad: whether every rank gets all averages.
        spans: which elements each rank steps.
        whole: step of whole parameters; ``None`` if kernels step.
        comparison: what ranks compare before each step.
    """

    is_shared = False

    def __init__(
        self,
        communicator: Communicator,
        optimizer: torch.optim.Optimizer,
        module: torch.nn.Module | None,
        settings: Options,
        compare: CompareReplicas,
        order: Sequence[int],
        on_gpu: bool = False,
    ) -> None:
        assert settings.shard is not None
        self.has_full_grad = settings.shard.grads == "full"
        self._communicator, self._module = communicator, module
        self.comparison = StepComparison(communicator, optimizer, self.has_full_grad, compare)
        stepper = stepper_of(optimizer)
        self._was_fused_here = not isinstance(stepper, KernelStep)
        stepping = _whole_steps_of(optimizer, stepper, on_gpu)
        self.spans = SpanTable(optimizer, communicator.rank, order, whole=stepping is not None)
        self.whole = None if stepping is None else WholeStep(optimizer, stepping, self.spans, communicator)
        self._stepper = self.whole or (stepper if isinstance(stepper, KernelStep) else FusedStep(optimizer))
        self._buckets: list[SentBucket] = []
        self._places: dict[torch.Tensor, tuple[Segment, int]] = {}
        self._num_steps = 0
        self._stepper.share(self)

    def divide(self, bucket: Bucket, slots: Sequence[Slot]) -> None:
        """Let each rank reduce only its own share of ``bucket``, which has the parameters of ``slots``, if it may."""
        if not self.has_full_grad:
            bucket.reduce_part_only(self.spans.shares(slots), self._communicator.rank)

    def reduction_failed(self, error: BaseException) -> None:
        """Note that gradients could not be reduced."""

    def release(self) -> None:
        """Release the memory, once the communicator is closed."""

    # Parameters.

    def adopt(self, buckets: Sequence[SentBucket]) -> None:
        """Move the parameters of ``buckets`` to memory of the partition. Collective."""
        self._adopt(buckets)
        if self.whole is not None:
            self.whole.note_places(buckets)

    def _adopt(self, buckets: Sequence[SentBucket]) -> None:
        raise NotImplementedError

    def _move_in(self, sent: SentBucket, segment: Segment) -> None:
        for index, slot in enumerate(sent.slots):
            param, place = slot.param, segment.places[index]
            self._places[param] = segment, index
            with torch.no_grad():
                place.copy_(param.detach())
            param.data = place
        self._buckets.append(sent)

    def has(self, param: torch.Tensor) -> bool:
        return param in self._places

    def span_of(self, param: torch.Tensor) -> Span:
        segment, index = self._places[param]
        return segment.spans[index]

    def mirrors_of(self, param: torch.Tensor) -> list[torch.Tensor]:
        segment, index = self._places[param]
        return segment.mirrors_of(index)

    def home(self, param: torch.Tensor, key: str, dtype: torch.dtype) -> torch.Tensor:
        segment, index = self._places[param]
        return segment.home(index, param, key, dtype)

    def own_part(self, param: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        """Return this rank's own elements of ``grad``, which is laid out as ``param`` is, flat."""
        return self.span_of(param).of(grad)

    def move_out(self) -> None:
        """Move parameters and state to this rank's own memory, and let it step alone."""
        for param in self._places:
            param.data = param.detach().clone(memory_format=torch.preserve_format)
        self._stepper.step_alone()
        if self._was_fused_here:
            self._stepper.detach()
        self.comparison.remove()
        self._places.clear()
        self._buckets.clear()

    # Sums over ranks.

    def add_up(self, values: torch.Tensor) -> torch.Tensor:
        everyone = torch.empty(self._communicator.size * values.numel(), dtype=torch.float64, device=values.device)
        self._communicator.all_gather(everyone, values)
        return everyone.view(self._communicator.size, -1).sum(0)

    def first_of(self, number: int) -> int:
        """Return the smallest ``number`` of all ranks. Collective."""
        first = torch.tensor([number], dtype=torch.int64)
        self._communicator.all_reduce(first, "min")
        return int(first)

    # Steps.

    @contextlib.contextmanager
    def step(self, optimizer: torch.optim.Optimizer, factor: Factor, *, is_skipped: bool) -> Iterator[bool]:
        try:
            self._prepare(optimizer)
        except (RuntimeError, ValueError) as error:
            self._communicator.refuse(str(error))  # the others are about to vote on the step
            raise
        try:
            is_taken = self.comparison.agree(self._buckets, is_skipped=is_skipped, factor=factor)
        except CommError as error:
            if not isinstance(error, DamageError):
                self._lost(optimizer, error)  # others may have completed the vote
            raise
        if not is_taken:
            yield False
            return
        with self.writing(optimizer):
            yield True

    @contextlib.contextmanager
    def writing(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Return a context in which each rank writes to its own parameters; then all get the new values. Collective."""
        self._num_steps += 1
        try:
            yield
            self.comparison.note_step(self._places)
            self._hand_out()
        except BaseException as error:
            if not isinstance(error, CommError):
                self._communicator.close(f"its optimizer.step() failed: {error}")
            if not self._is_complete():
                self._lost(optimizer, error)
            raise

    def _hand_out(self) -> None:
        """Make this rank's new parameters available to all ranks. Collective."""
        raise NotImplementedError

    def _is_complete(self) -> bool:
        """Return whether the last step is complete on this rank, though it ended with an error."""
        raise NotImplementedError

    def _lost(self, optimizer: torch.optim.Optimizer, error: BaseException) -> None:
        Aftermath(self._module, optimizer, error)

    def _prepare(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise RuntimeError or ValueError if parameters were moved, or gradients written to, or in a CUDA graph."""
        if is_capturing():
            raise RuntimeError(
                "optimizer.step() with attach(shard=...) is being captured into a CUDA graph, and the ranks agree on "
                "each step on the host: capture forward and backward, and keep step() outside the graph"
            )
        for param, (segment, index) in self._places.items():
            if param.data_ptr() != segment.places[index].data_ptr() and param.numel() > 0:
                raise RuntimeError(
                    f"the memory of a parameter of shape {list(param.shape)} has been replaced (param.data = ..., or a "
                    "conversion), and the other ranks write to the old one: use param.copy_(), or detach() first"
                )
        if self.has_full_grad:
            return
        for sent in self._buckets:
            for slot, view in zip(sent.slots, sent.bucket.views, strict=True):
                grad = slot.param.grad
                is_written = grad is view and version_of(view) != slot.version
                # A step of the distributed checkpoint has zeros.
                if is_written or (grad is not None and grad is not view and bool(grad.any())):
                    raise ValueError(f"the gradient of {slot.name!r} {_WRITTEN}")
        if has_written_unscaled(optimizer):
            raise ValueError(f"a gradient of MasterWeights.parameters() {_WRITTEN}")


def _whole_steps_of(optimizer: torch.optim.Optimizer, stepper: Any, on_gpu: bool) -> OwnSteps | WholeMasters | None:
    """Return steps of whole parameters of ``optimizer``; ``None`` if kernels step it, as they do in CPU memory."""
    if isinstance(stepper, MasterWeights) and (on_gpu or not stepper.has_kernels):
        return stepper.whole_steps()
    return OwnSteps(optimizer) if on_gpu or not has_rule(optimizer) else None


class Segment(ABC):
    """Parameters of ``bucket``, laid out as the gradients are.

    Args:
        alignment: number of elements of which each parameter begins at a multiple; other than 1 only if ``shares`` cut
            no parameter.

    Attributes:
        shares: the part of each rank in memory that is laid out so.
        spans: this rank's own elements of each.
    """

    def __init__(
        self,
        bucket: Bucket,
        params: Sequence[torch.Tensor],
        shares: Sequence[slice],
        rank: int,
        own: Memory,
        alignment: int = 1,
    ) -> None:
        self.bucket, self._rank, self.own, self.dtype = bucket, rank, own, bucket.dtype
        self._begins = begins_of(bucket.numels, alignment)
        self.num_elements = self._begins[-1]
        moved = dict(zip(begins_of(bucket.numels), self._begins, strict=True))
        self.shares = [slice(moved.get(s.start, s.start), moved.get(s.stop, s.stop)) for s in shares]
        self._states: dict[tuple[str, torch.dtype], Memory] = {}
        self.places = [self.like(p, i, own, self.dtype) for i, p in enumerate(params)]
        self.spans = [self._span(i) for i in range(len(params))]

    def _span(self, index: int) -> Span:
        first = self._begins[index]
        last, share = first + self.bucket.numels[index], self.shares[self._rank]
        if share.stop <= first or share.start >= last:
            return Span(0, 0)
        return Span(max(share.start - first, 0), min(share.stop, last) - first)

    def part_in(self, memory: Memory, index: int) -> torch.Tensor:
        """Return this rank's own elements of the ``index``-th parameter in memory that is laid out as the bucket."""
        begin, end = (self._begins[index] + at for at in self.spans[index])
        return tensor_in(memory, self.dtype, begin, end)

    def like(self, param: torch.Tensor, index: int, memory: Memory, dtype: torch.dtype) -> torch.Tensor:
        """Return the place of the ``index``-th parameter, which is ``param``, in memory laid out so."""
        begin = self._begins[index]
        return view_like(tensor_in(memory, dtype, begin, begin + param.numel()), param)

    def parts_in(self, memory: Memory, dtype: torch.dtype) -> list[torch.Tensor]:
        """Return the parts of the ranks in memory that is laid out as the bucket."""
        return [tensor_in(memory, dtype, share.start, share.stop) for share in self.shares]

    @abstractmethod
    def mirrors_of(self, index: int) -> list[torch.Tensor]:
        """Return the other ranks' memory of this rank's own elements of the ``index``-th parameter."""

    def home(self, index: int, param: torch.Tensor, key: str, dtype: torch.dtype) -> torch.Tensor:
        """Return memory for the state ``key`` of the ``index``-th parameter, initially zeros.

        Collective, where ranks share it, the first time for a key.
        """
        if (key, dtype) not in self._states:
            self._states[key, dtype] = self._zeros(self.num_elements * dtype.itemsize)
        return self.like(param, index, self._states[key, dtype], dtype)

    def is_home(self, index: int, key: str, tensor: torch.Tensor) -> bool:
        """Return whether ``tensor`` lies at the home of the state ``key`` of the ``index``-th parameter."""
        memory = self._states.get((key, tensor.dtype))
        if memory is None or tensor.numel() == 0:
            return False
        home = tensor_in(memory, tensor.dtype, self._begins[index], self._begins[index + 1])
        return tensor.data_ptr() == home.data_ptr()

    @abstractmethod
    def _zeros(self, num_bytes: int) -> Memory: ...


def begins_of(numels: Sequence[int], alignment: int = 1) -> list[int]:
    """Return where arrays of ``numels`` elements begin, one after the other and aligned, and where the next would."""
    return list(itertools.accumulate((-(-numel // alignment) * alignment for numel in numels), initial=0))


@dataclass(frozen=True)
class GpuMemory:
    """Bytes ``begin`` to ``end`` of ``owner``, bytes on a GPU, which lives as long as the tensors made of this."""

    owner: torch.Tensor
    begin: int
    end: int

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        data = {"data": (self.owner.data_ptr() + self.begin, False), "shape": (self.end - self.begin,)}
        return {**data, "typestr": "|u1", "strides": None, "version": 3}


Memory = Any
"""Object with the buffer protocol, or :class:`GpuMemory`."""


def tensor_in(memory: Memory, dtype: torch.dtype, begin: int, end: int) -> torch.Tensor:
    """Return elements ``begin`` to ``end`` of ``memory`` as a tensor with a storage of its own.

    So it can be saved alone, and code that looks for tensors with a common storage finds none.
    """
    if isinstance(memory, GpuMemory):
        device, first = memory.owner.device, memory.begin
        if begin == end:
            return torch.empty(0, dtype=dtype, device=device)
        part = GpuMemory(memory.owner, first + begin * dtype.itemsize, first + end * dtype.itemsize)
        return torch.as_tensor(part, device=device).view(dtype)
    if begin == end:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=end - begin, offset=begin * dtype.itemsize)


class OwnSteps(FactorStep):
    """Override for parameters that the optimizer steps as they are; has the same interface as WholeMasters."""

    _take: Callable[[Factor, bool], None] | None = None

    def run(self, closure: Callable[[], Any] | None) -> Any:
        refuse_closure(closure)
        assert self._take is not None
        self._take(self._pending.take(), False)

    def take_together(self, take: Callable[[Factor, bool], None] | None) -> None:
        """Let each step call ``take`` with the factor of the gradients, and whether the step is to be skipped."""
        self._take = take

    @contextlib.contextmanager
    def stepped(self, factor: Factor) -> Iterator[None]:
        """Return a context for the optimizer's own step, in which the gradients are multiplied by ``factor``."""
        grads = gradients_of(self.optimizer)
        if grads and not (isinstance(factor, float) and factor == 1.0):
            torch._foreach_mul_(grads, factor)
        yield

    def entry_of(self, param: torch.Tensor) -> dict[str, Any]:
        """Return the state of ``param``, with its master if there is one."""
        entry: dict[str, Any] = self.optimizer.state.get(param, {})
        return entry

    def keep_only(self, is_kept: Callable[[torch.Tensor], bool]) -> None:
        """Keep only masters for which the function returns true."""

    def add_entries(self, entries: Mapping[torch.Tensor, dict[str, Any]]) -> None:
        """Add such state of more parameters."""
        self.optimizer.state.update(entries)


class WholeStep:
    """Step of ``optimizer`` by its own class, on each rank for the parameters that it owns.

    Attributes:
        is_divided: whether a step has been divided: this rank then has the state of its own parameters only.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        stepping: OwnSteps | WholeMasters,
        spans: SpanTable,
        communicator: Communicator,
    ) -> None:
        self.optimizer, self._stepping, self._communicator = optimizer, stepping, communicator
        self._partition: Partition | None = None
        self._places: dict[torch.Tensor, torch.Tensor] = {}
        self._spans, self.is_divided = spans, False
        self._hook = optimizer.register_state_dict_post_hook(self._complete)
        self._methods = {name: getattr(optimizer, name, None) for name in ("train", "eval")}  # of schedule-free ones

    def note_places(self, buckets: Iterable[SentBucket]) -> None:
        """Note where the parameters of ``buckets`` lie: in memory that others read or get values from."""
        self._places.update({slot.param: slot.param.detach() for sent in buckets for slot in sent.slots})
        if self.is_divided:  # new parameters have owners now
            self._stepping.keep_only(self._spans.is_own)

    # Steps.

    def take(self, factor: Factor, is_skipped: bool) -> None:
        """Take a step with gradients times ``factor``, unless it is skipped. Collective."""
        assert self._partition is not None
        with self._partition.step(self.optimizer, factor, is_skipped=is_skipped) as is_taken:
            if is_taken:
                self._step_own(factor)

    def _step_own(self, factor: Factor) -> None:
        """Step this rank's own parameters."""
        if not self.is_divided:
            self.is_divided = True
            self._stepping.keep_only(self._spans.is_own)
        state, others = self.optimizer.state, [(param, param.grad) for param in self._spans.others()]
        for param, _ in others:
            state.pop(param, None)  # from before attach, or a checkpoint
            param.grad = None
        try:
            with self._stepping.stepped(factor):
                own_step(self.optimizer, None)
        finally:
            for param, grad in others:
                param.grad = grad
        self._bring_back()

    def _bring_back(self) -> None:
        """Copy parameters that the optimizer has replaced (``param.data = ...``) to their places."""
        for param in self._spans.own():
            place = self._places.get(param)
            if place is not None and param.data_ptr() != place.data_ptr():
                place.copy_(param.detach())
                param.data = place

    # The same methods as of steps by kernels.

    def share(self, partition: Partition) -> None:
        """Take later steps in the context of ``partition``."""
        self._partition = partition
        self._stepping.take_together(self.take)
        for name, method in self._methods.items():
            if callable(method):
                vars(self.optimizer)[name] = functools.partial(self.call, method)

    def take_whole(self, completed: object) -> None:
        """Do nothing: :meth:`step_alone` has gathered the state."""

    def detach(self) -> None:
        self._stepping.detach()

    def step_alone(self) -> None:
        """Gather the state, and step all parameters on this rank from now on. Collective."""
        self._partition = None
        self._stepping.take_together(None)
        self._stepping.keep_only(lambda _: True)
        self._hook.remove()
        for name in self._methods:
            if isinstance(vars(self.optimizer).get(name), functools.partial):
                del vars(self.optimizer)[name]
        if not self.is_divided:
            return
        self.is_divided = False
        try:
            params = list(optimizer_parameters(self.optimizer))
            self._stepping.add_entries({params[index]: entry for index, entry in self._others_states().items()})
        except (CommError, ValueError) as error:
            _LOG.warning(
                "each rank kept the optimizer state of its own parameters, and other ranks' state is lost (%s): it is "
                "reset; load a checkpoint",
                error,
            )

    def call(self, method: Callable[[], Any]) -> Any:
        """Call ``method`` of the optimizer, which changes its parameters; all ranks get the new values. Collective."""
        if self._partition is None or not self.is_divided:
            return method()
        groups, own = self.optimizer.param_groups, set(self._spans.own())
        whole = [group["params"] for group in groups]
        self._communicator.barrier()  # until all have read the old ones
        with self._partition.writing(self.optimizer):
            try:
                for group, params in zip(groups, whole, strict=True):
                    group["params"] = [param for param in params if param in own]
                result = method()
            finally:
                for group, params in zip(groups, whole, strict=True):
                    group["params"] = params
            self._bring_back()
        return result

    # State.

    def _others_states(self) -> dict[int, dict[str, Any]]:
        """Return the state of other ranks' parameters, in new memory, by index. Collective.

        Raises:
            ValueError: on every rank: an owner has state that cannot be sent.
        """
        params, rank = list(optimizer_parameters(self.optimizer)), self._communicator.rank
        gather = self._communicator.channel.all_gather_bytes
        sent: list[torch.Tensor] = []

        def encoded() -> list[Any]:
            mine = set(self._spans.own())
            own = [(index, self._stepping.entry_of(param)) for index, param in enumerate(params) if param in mine]
            return [[index, encoded_state(entry, sent)] for index, entry in own if entry != {}]

        everyones = exchanged(gather, attempt(encoded), "gather the optimizer's state")
        found: dict[int, dict[str, Any]] = {}
        for source, nodes in enumerate(everyones):
            tensors = sent if source == rank else []
            if source != rank:
                found.update((index, decode(node, {}, params[index], tensors)) for index, node in nodes)
            broadcast_tensors(self._communicator, tensors, source)
        return found

    def _complete(self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        """Add the state of other ranks' parameters. Collective."""
        if self.is_divided:
            state_dict["state"].update(self._others_states())


def encoded_state(entry: Any, tensors: list[torch.Tensor]) -> Any:
    """Return the state ``entry`` of a parameter, encoded for other ranks; its tensors are appended to ``tensors``."""
    if not isinstance(entry, dict):
        raise ValueError(f"its state of a parameter is a {type(entry).__name__}, wanted a dict")
    for key, value in entry.items():
        if '["own",' in json.dumps(encode(value, []), separators=(",", ":")):
            raise ValueError(f"its state {key!r} of a parameter has a {type(value).__name__}, which cannot be sent")
    return encode(dict(entry), tensors)
