"""NVML without a GPU: the part of pynvml that the topology check uses, over a recorded topology."""

# The fakes have the names of what they stand for.
# ruff: noqa: N802

from __future__ import annotations


class FakeNvml:
    """The part of pynvml that is used, over a recorded topology."""

    NVML_P2P_CAPS_INDEX_NVLINK = 2
    NVML_P2P_STATUS_OK = 0
    NVML_P2P_STATUS_UNKNOWN = 6

    class NVMLError(Exception):
        pass

    def __init__(
        self, recorded: list[str], *, broken: bool = False, hidden: tuple[int, ...] = ()
    ) -> None:
        self.recorded = recorded
        self.broken = broken
        self.hidden = hidden
        self.initialised = 0

    def nvmlInit(self) -> None:
        if self.broken:
            raise self.NVMLError("driver not loaded")
        self.initialised += 1

    def nvmlShutdown(self) -> None:
        self.initialised -= 1

    def nvmlDeviceGetHandleByUUID(self, name: str) -> int:
        assert name.startswith("GPU-00000000-0000-0000-0000-")
        index = int(name[-12:], 16)
        if index in self.hidden:
            raise self.NVMLError("not found")
        return index

    def nvmlDeviceGetP2PStatus(self, one: int, other: int, capability: int) -> int:
        assert self.initialised > 0
        assert capability == 2
        return {"N": 0, "P": 5, "?": 6}[self.recorded[one][other]]
