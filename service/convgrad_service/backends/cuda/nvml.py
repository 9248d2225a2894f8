"""A GPU's clocks, power and temperature, from NVIDIA's management library (NVML)."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

from convgrad.contract.timing import Clocks

__all__ = ["clocks_of"]

_SM, _MEMORY = 1, 2
_REASONS = {
    0x2: "application clocks setting",
    0x4: "software power cap",
    0x8: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
}


@lru_cache(maxsize=1)
def _library() -> Any:
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    return library if library.nvmlInit_v2() == 0 else None


def clocks_of(uuid: str) -> Clocks | None:
    """Return the current clocks of a GPU; None if NVML is missing or does not know it."""
    library = _library()
    if library is None:
        return None
    device = ctypes.c_void_p()
    if library.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(device)) != 0:
        return None

    def number(function: str, *arguments: int, kind: Any = ctypes.c_uint) -> int | None:
        found = kind()
        failed = getattr(library, function)(device, *arguments, ctypes.byref(found))
        return None if failed else int(found.value)

    def scaled(value: int | None, factor: float) -> float | None:
        return None if value is None else value * factor

    reasons = number("nvmlDeviceGetCurrentClocksThrottleReasons", kind=ctypes.c_ulonglong) or 0
    temperature = number("nvmlDeviceGetTemperature", 0)
    return Clocks(
        sm_hz=scaled(number("nvmlDeviceGetClockInfo", _SM), 1e6),
        sm_max_hz=scaled(number("nvmlDeviceGetMaxClockInfo", _SM), 1e6),
        memory_hz=scaled(number("nvmlDeviceGetClockInfo", _MEMORY), 1e6),
        power_w=scaled(number("nvmlDeviceGetPowerUsage"), 1e-3),
        power_limit_w=scaled(number("nvmlDeviceGetEnforcedPowerLimit"), 1e-3),
        temperature_c=None if temperature is None else float(temperature),
        throttled=tuple(words for bit, words in _REASONS.items() if reasons & bit),
    )
