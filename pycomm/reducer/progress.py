"""How far training has come on this rank: reductions, and the steps that used them."""

from __future__ import annotations

import torch

from pycomm.compression.base import Flag


class HostCopy:
    """Flags that a device computes, on their way to the host, which waits for them only when it asks."""

    def __init__(self, num_flags: int, device: torch.device) -> None:
        pinned = device.type == "cuda" and torch.cuda.is_available()
        self._host = torch.zeros(num_flags, dtype=torch.bool, pin_memory=pinned)
        self._array = self._host.numpy()  # asked instead of torch, which would wait for everything
        self._event: torch.cuda.Event | None = None

    def put(self, flags: torch.Tensor) -> None:
        """On the current stream."""
        self._host.copy_(flags, non_blocking=True)
        if flags.is_cuda:
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(flags.device))

    def get(self) -> list[bool]:
        """What was put last; once it is there."""
        if self._event is not None:
            self._event.synchronize()
        flags: list[bool] = self._array.tolist()
        return flags


class Progress:
    """Counts.

    Attributes:
        num_reductions: that have been handed out.
        num_steps: of them, those that ``optimizer.step()`` has used.

    Args:
        device: where what compression does becomes known, if the host does not wait for that.
    """

    def __init__(self, device: torch.device | None) -> None:
        self.num_reductions = 0
        self.num_steps = 0
        self._used = True
        # Whether the last reduction has changed what compression keeps; None where only the device knows.
        self._committed: bool | None = False
        self._on_device = None if device is None else HostCopy(1, device)

    def reduced(self, committed: Flag) -> None:
        """Gradients have been handed out; ``committed``: state of compression has changed with them."""
        self.num_reductions += 1
        self._used = False
        if isinstance(committed, torch.Tensor):
            assert self._on_device is not None
            self._on_device.put(committed)
            self._committed = None
        else:
            self._committed = committed

    def stepped(self) -> None:
        """``step()`` has been called, or is about to do its work."""
        if not self._used:
            self._used = True
            self.num_steps += 1

    def left_out(self) -> None:
        """No step is to use the last averages, and that is meant."""
        self._used = True

    def require_used(self) -> None:
        """RuntimeError if what was sent of the last gradients counts as applied, and no step has applied it.

        Not before the first step: there are loops that update parameters without ``step()``. Waits for a GPU
        where the last step was left out, which a loss scaler may have done.
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
            "through its discriminator, a penalty, a saliency map) belongs into `with reducer.paused():`; several "
            "passes of one step want attach(..., accumulate=n); a step that is left out on purpose wants "
            "reducer.skip_step()"
        )
