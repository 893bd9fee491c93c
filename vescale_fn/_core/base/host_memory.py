"""Values that wait in the memory of the host: copied there, and back, while the device computes other things.

Each way has a stream of its own on each device. The stream that computes waits for a copy at two places: where a value's
memory on the device is let go, and where what has come back is used. Nothing else is needed for memory to be free to be used
again, and all that is copied is joined to what computes, as the capture of a CUDA graph asks for.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from typing import Any

import torch

Tensor = torch.Tensor


class HostMemory:
    """Pinned memory for the copies of one value: one for each that is there at the same time, used again by later ones."""

    def __init__(self) -> None:
        self._free: dict[Any, list[Tensor]] = defaultdict(list)  # by stream: what is done on one follows each other
        self._in_graphs: list[Tensor] = []  # what a CUDA graph uses in each replay

    def offload(self, x: Tensor) -> OnHost:
        """Begin to copy a value. It must stay as it is until `OnHost.left`."""
        if x.device.type == "cpu" or x.is_meta:  # there is nothing to copy, or nowhere to
            return OnHost(self, x, x.clone(), None, None)
        device, copies = _device(x.device), _streams(x.device)[0]
        now = device.current_stream(x.device)
        host = self._take(x, now)
        copies.wait_stream(now)
        with device.stream(copies):
            host.copy_(x, non_blocking=True)
            done = copies.record_event()
        return OnHost(self, x, host, now, done)

    def _take(self, x: Tensor, now: Any) -> Tensor:
        free = [self._free[now]] if not _capturing(x.device) else list(self._free.values())
        found = next((some.pop() for some in free if some), None)
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, pin_memory=True) if found is None else found

    def give_back(self, host: Tensor, now: Any, device: torch.device) -> None:
        """Say that nothing needs it that runs later on this stream."""
        (self._in_graphs if _capturing(device) else self._free[now]).append(host)


class OnHost:
    """A value that waits in the memory of the host.

    Args:
        memory: where `host` comes from.
        x: the value.
        host: its copy.
        now: the stream that computes.
        done: when it is copied.
    """

    def __init__(self, memory: HostMemory, x: Tensor, host: Tensor, now: Any, done: Any) -> None:
        self.memory, self.device, self.host, self.now, self._done = memory, x.device, host, now, done

    def left(self) -> OnHost:
        """The same, after which the value's own memory may be used for something else."""
        if self._done is not None:
            self.now.wait_event(self._done)
        return self

    def fetch(self) -> Arriving:
        """Begin to copy it back."""
        host = self.host
        if self._done is None:
            return Arriving(self, host.clone(), None)
        device, copies = _device(self.device), _streams(self.device)[1]
        x = torch.empty_strided(host.shape, host.stride(), dtype=host.dtype, device=self.device)
        copies.wait_stream(self.now)  # what had this memory before, and the copy to the host
        with device.stream(copies):
            x.copy_(host, non_blocking=True)
            done = copies.record_event()
        return Arriving(self, x, done)


class Arriving:
    """A value that is on its way from the memory of the host.

    Args:
        sent: where it waited.
        x: what will hold it.
        done: when it is there.
    """

    def __init__(self, sent: OnHost, x: Tensor, done: Any) -> None:
        self._sent, self._x, self._done, self._waited = sent, x, done, False

    def fetched(self) -> Tensor:
        """The value."""
        self._wait()
        self._sent.memory.give_back(self._sent.host, self._sent.now, self._x.device)
        return self._x

    def _wait(self) -> None:
        if self._done is not None and not self._waited:
            self._sent.now.wait_event(self._done)
        self._waited = True

    def __del__(self) -> None:
        self._wait()  # where an error came between: what is let go here is still being written


def _device(device: torch.device) -> Any:
    return torch.get_device_module(device)


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


@functools.lru_cache
def _streams(device: torch.device) -> tuple[Any, Any]:
    """The streams that copy to the host, and from it."""
    return _device(device).Stream(device), _device(device).Stream(device)
