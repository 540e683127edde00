"""Times launches as a GPU sees them: CUDA graphs of them, on operands that are not in its L2, between two events."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from typing import Any

from ..errors import DeviceUnavailableError
from .devices import Device

L2_TIMES = 4
"""As much as all sets of operands together: what a launch reads has left L2 since that set's last one."""
SETS = range(3, 65)

_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


def cold_sets(size: int, device: Device, upload: Callable[[], dict[str, Any]]) -> list[dict[str, Any]]:
    """As many copies of operands of this many bytes on the GPU as exceed L2 several times over."""
    count = min(max(math.ceil(L2_TIMES * device.l2_bytes / size), SETS[0]), SETS[-1])
    return [upload() for _ in range(max(1, min(count, device.memory_bytes // 4 // size)))]


class Clock:
    """Times launches on a stream of its own, as CUDA graphs, between two events."""

    def __init__(self, device: Device) -> None:
        self._driver = ctypes.CDLL("libcuda.so.1")  # which is loaded by now: there is a GPU
        self._device = device.index
        context = self._made("cuDevicePrimaryCtxRetain", device.index)
        self._call("cuCtxPushCurrent_v2", context)
        self.stream = self._made("cuStreamCreate", _NON_BLOCKING)
        self._begin, self._end = (self._made("cuEventCreate", 0) for _ in range(2))

    def replay(self, launch: Callable[[dict[str, Any], int], None], sets: Sequence[dict[str, Any]]) -> Replay:
        """A graph of one launch on each set of operands."""
        stream = int(self.stream.value or 0)
        launch(sets[0], stream)  # a first launch loads and asks for things, which no capture takes
        self._call("cuStreamSynchronize", self.stream)
        self._call("cuStreamBeginCapture_v2", self.stream, _RELAXED)
        graph = ctypes.c_void_p()
        try:
            for views in sets:
                launch(views, stream)
        finally:
            self._call("cuStreamEndCapture", self.stream, ctypes.byref(graph))
        made = ctypes.c_void_p()
        self._call("cuGraphInstantiateWithFlags", ctypes.byref(made), graph, ctypes.c_ulonglong(0))
        self._call("cuGraphDestroy", graph)
        self._call("cuGraphLaunch", made, self.stream)
        return Replay(self, made, len(sets))

    def seconds(self, graph: ctypes.c_void_p) -> float:
        """How long a graph takes."""
        self._call("cuEventRecord", self._begin, self.stream)
        self._call("cuGraphLaunch", graph, self.stream)
        self._call("cuEventRecord", self._end, self.stream)
        self._call("cuEventSynchronize", self._end)
        elapsed = ctypes.c_float()
        self._call("cuEventElapsedTime", ctypes.byref(elapsed), self._begin, self._end)
        return elapsed.value / 1e3

    def drop(self, graph: ctypes.c_void_p) -> None:
        """Gives a graph back."""
        self._driver.cuGraphExecDestroy(graph)

    def close(self) -> None:
        """Gives back everything else."""
        for event in (self._begin, self._end):
            self._call("cuEventDestroy_v2", event)
        self._call("cuStreamDestroy_v2", self.stream)
        self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))
        self._call("cuDevicePrimaryCtxRelease_v2", self._device)

    def _made(self, function: str, argument: int) -> ctypes.c_void_p:
        handle = ctypes.c_void_p()
        self._call(function, ctypes.byref(handle), argument)
        return handle

    def _call(self, function: str, *arguments: Any) -> None:
        status = getattr(self._driver, function)(*arguments)
        if status != 0:
            raise DeviceUnavailableError(f"{function} of the driver failed with CUDA error {status} while tuning")


class Replay:
    """A graph of launches. Their plan must live as long, which has the workspace that they write to."""

    def __init__(self, clock: Clock, graph: ctypes.c_void_p, launches: int) -> None:
        self._clock, self._graph, self._launches = clock, graph, launches

    def seconds(self) -> float:
        """Of one launch."""
        return self._clock.seconds(self._graph) / self._launches

    def __del__(self) -> None:
        self._clock.drop(self._graph)
