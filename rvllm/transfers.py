"""Between host and device without waiting: letters there, chosen tokens back, through pinned memory.

Generated from notebooks/15_device_resident_step.ipynb; edit there, then run: python tools/nb.py export
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rvllm.runtime import Array, Runtime

Ints = NDArray[np.int32]
TURNS = 4  # buffers used in turns: more than there are steps under way


def new_stream(rt: Runtime) -> AbstractContextManager[Any]:
    """A queue of its own on the device; inside the `with`, launches and copies go there. Nothing on the emulator."""
    if not rt.is_cuda:
        return nullcontext()
    with rt.on_device():
        stream: AbstractContextManager[Any] = import_module("cupy").cuda.Stream(non_blocking=True)
        return stream


def pinned(rt: Runtime, size: int) -> Ints:
    """Host memory for int32 that a GPU can reach by itself: pages that stay where they are."""
    if not rt.is_cuda:
        return np.zeros(size, np.int32)
    memory = import_module("cupy").cuda.alloc_pinned_memory(4 * size)
    return np.frombuffer(memory, np.int32, size)


def on_device(rt: Runtime, host: Ints) -> Array:
    """Pinned memory as an array of the device: its kernels reach it over PCIe."""
    if not rt.is_cuda:
        return host
    cupy = import_module("cupy")
    with rt.on_device():
        memory = cupy.cuda.UnownedMemory(host.ctypes.data, host.nbytes, host)
        return cupy.ndarray(host.shape, np.int32, cupy.cuda.MemoryPointer(memory, 0))


class Mailbox:
    """Letters to the device: int32 values in host memory, which a kernel takes out by itself. Notebook 15, section 4.

    A buffer may be used again once its letter was read: at most TURNS - 1 steps are under way.
    """

    def __init__(self, rt: Runtime, size: int, targets: list[Array]) -> None:
        self._rt, self._turn = rt, 0
        self._letters = [pinned(rt, size) for _ in range(TURNS)]
        launches = [[on_device(rt, letter), *targets] for letter in self._letters]
        self._receive = [rt.prepare("receive", 16, 256, arguments) for arguments in launches]

    def send(self, values: Ints) -> None:
        """The device has them when the current stream gets there; the host does not wait."""
        self._turn = (self._turn + 1) % TURNS
        letter = self._letters[self._turn][: values.size]
        letter[...] = values
        self._rt.submit(self._receive[self._turn], reads=letter)


class Uplink:
    """Copies int32 values to a fixed array on the device; the host does not wait."""

    def __init__(self, rt: Runtime, target: Array) -> None:
        self._rt, self._target, self._turn = rt, target, 0
        self._buffers = [pinned(rt, target.size) for _ in range(TURNS)]

    def send(self, values: Ints) -> None:
        """The first len(values) elements of the target become `values`, when the current stream gets there."""
        self._turn = (self._turn + 1) % TURNS
        buffer = self._buffers[self._turn][: values.size]
        buffer[...] = values
        self._rt.submit(partial(self._copy, buffer), reads=buffer)

    def _copy(self, buffer: Ints) -> None:
        if self._rt.is_cuda:
            stream = import_module("cupy").cuda.get_current_stream()
            self._target.data.copy_from_host_async(buffer.ctypes.data, buffer.nbytes, stream)
        else:
            self._target[: buffer.size] = buffer


class Ticket:
    """The tokens of a step that was started."""

    def __init__(self, values: Ints, event: Any, arrived: Callable[[Ints], None]) -> None:
        self._values, self._event, self._arrived = values, event, arrived

    def token_ids(self) -> Ints:
        """Wait for them, int32 [B]. -1 stands for a row of logits without a finite maximum."""
        self._event.synchronize()
        values = self._values.copy()
        self._arrived(values)
        return values


class Delivery:
    """Host memory that kernels write tokens into: no copy stands between two steps. Notebook 15, section 4.

    delivered: the same memory as an array of the device, int32 [TURNS, rows]; see deliver.cuh.
    """

    def __init__(self, rt: Runtime, rows: int) -> None:
        self._rt = rt
        self._host = pinned(rt, TURNS * rows).reshape(TURNS, rows)
        self.delivered = on_device(rt, self._host)

    def ticket(self, turn: int, count: int, arrived: Callable[[Ints], None]) -> Ticket:
        """For the first `count` tokens of the step whose turn it was, once the current stream gets there."""
        return Ticket(self._host[turn % TURNS, :count], self._rt.event(), arrived)
