"""The instruction-set levels of the CPU kernels that this CPU supports."""

from __future__ import annotations

from convgrad_service.backends.cpu.library import LEVEL_NAMES, load

BEST = load().level
# A CPU runs every level below its own; a higher one would crash the process.
LEVELS = [
    name
    for names in LEVEL_NAMES.values()
    if BEST in names.values()
    for name in list(names.values())[: list(names.values()).index(BEST)]
]
