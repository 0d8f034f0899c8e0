"""Progress of training on this rank: reductions, and the steps that used them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pycomm.compression.base import Flag


class HostCopy:
    """Copy of flags from a device to the host, which waits for them only when it reads them."""

    def __init__(self, num_flags: int, device: torch.device) -> None:
        pinned = device.type == "cuda" and torch.cuda.is_available()
        self._host = torch.zeros(num_flags, dtype=torch.bool, pin_memory=pinned)
        self._array = self._host.numpy()  # read instead of the tensor, as torch would wait for the whole device
        self._event: torch.cuda.Event | None = None

    @staticmethod
    def impossible() -> bool:
        """Return whether torch's current stream is being captured into a CUDA graph.

        Then the host cannot wait for flags, and those of the graph come whenever it is launched.
        """
        initialized: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        return initialized and torch.cuda.is_current_stream_capturing()

    def put(self, flags: torch.Tensor) -> None:
        """Begin to copy ``flags``, on the current stream."""
        self._host.copy_(flags, non_blocking=True)
        if flags.is_cuda:
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(flags.device))

    def get(self) -> list[bool]:
        """Wait for the flags that were put last, and return them."""
        if self._event is not None:
            self._event.synchronize()
        flags: list[bool] = self._array.tolist()
        return flags


class Progress:
    """Counters of reductions and steps.

    Args:
        device: device on which it is computed whether compression has committed its state; ``None`` if
            the host knows.

    Attributes:
        num_reductions: number of reductions that have been handed out.
        num_steps: number of those that ``optimizer.step()`` has used.
    """

    def __init__(self, device: torch.device | None) -> None:
        self.num_reductions = 0
        self.num_steps = 0
        self._used = True
        self._step_depth = 0  # of step() calls inside one another
        self._had_averages = False  # when the step began whose closure runs
        # Whether compression committed state in the last reduction; None if only the device knows.
        self._committed: bool | None = False
        self._on_device = None if device is None else HostCopy(1, device)

    def resume(self, num_reductions: int, num_steps: int) -> None:
        """Go on as a rank with these counts does."""
        self.num_reductions, self.num_steps = num_reductions, num_steps

    def reduced(self, committed: Flag) -> None:
        """Note that averages have been handed out, and whether compression ``committed`` state with them."""
        self.num_reductions += 1
        self._used = False
        self._step_depth = 0  # a step that raised has left it
        if isinstance(committed, torch.Tensor) and HostCopy.impossible():
            self._committed = False  # what launches of the graph commit, and which steps use it, the host does not see
        elif isinstance(committed, torch.Tensor):
            assert self._on_device is not None
            self._on_device.put(committed)
            self._committed = None
        else:
            self._committed = committed

    @property
    def is_used(self) -> bool:
        """Return whether no averages wait for a ``step()``."""
        return self._used

    @property
    def has_averages(self) -> bool:
        """Return whether there was a reduction since the last step, or, in a closure, since that before this one."""
        return self._had_averages or not self._used

    def enter_step(self) -> bool:
        """Note that ``step()`` begins; return whether it is no step inside another one."""
        self._step_depth += 1
        if self._step_depth == 1:
            self._had_averages = not self._used
        return self._step_depth == 1

    def leave_step(self) -> bool:
        """Note that ``step()`` has returned; return whether it was no step inside another one."""
        self._step_depth = max(self._step_depth - 1, 0)
        return self._step_depth == 0

    def run_closure(self, closure: Callable[[], Any]) -> Any:
        """Return the result of a step's ``closure``: reductions in it do not mean that the step has failed."""
        depth = self._step_depth
        result = closure()
        self._step_depth = depth
        return result

    def stepped(self) -> None:
        """Note that ``step()`` uses the last averages."""
        if not self._used:
            self._used = True
            self.num_steps += 1

    def skipped(self) -> None:
        """Note that the step for the last averages is left out on purpose."""
        self._used = True

    def require_used(self) -> None:
        """Raise RuntimeError if compression has counted the last gradients as applied, but no step has applied them.

        Never raises before the first step, as some loops update parameters without ``step()``. Waits for a
        GPU if the last step was left out, as a loss scaler may have done.
        """
        if self._used or self.num_steps == 0:
            return
        committed = self._committed
        if committed is None:
            assert self._on_device is not None
            committed = self._on_device.get()[0]
        if not committed:
            return
        raise RuntimeError(
            "optimizer.step() has not used the last averaged gradients: their pass is in the residuals and velocities "
            "of compression, but in no parameter. A backward() that is not a step of this optimizer (a generator's "
            "through its discriminator, a penalty, a saliency map) belongs in `with reducer.paused():`; several "
            "passes of one step need attach(..., accumulate=n); a step that is left out on purpose needs "
            "reducer.skip_step()"
        )
