"""Division by what a plan knows, as a multiplication: ``divider.cuh``."""

from __future__ import annotations

import ctypes

from convgrad_service.plans.cuda.program import ceil_div

__all__ = ["Divider"]


class Divider(ctypes.Structure):
    """By a positive number, of numbers from 0 to 2**31."""

    _fields_ = (("factor", ctypes.c_uint32), ("shift", ctypes.c_int32))

    @classmethod
    def of(cls, by: int) -> Divider:
        """With 2**l >= by, factor = ceil(2**(31 + l) / by) errs by less than 2**l / 2**(31 + l) of
        what is divided."""
        if by == 1:
            return cls(0, 0)
        log = (by - 1).bit_length()
        return cls(ceil_div(2 ** (31 + log), by), log - 1)
