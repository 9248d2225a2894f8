"""Problems whose sum over the batch is split."""

from __future__ import annotations

from typing import Any

import numpy as np

from convgrad.contract import OPERATIONS
from convgrad.contract.base import validate
from convgrad_service.problems import Problem, problem_from

IMAGES = np.random.default_rng(0).standard_normal((24, 3, 14, 14), np.float32)
GRAD = np.random.default_rng(1).standard_normal((24, 4, 14, 14), np.float32)
WEIGHT = np.random.default_rng(2).standard_normal((4, 3, 3, 3), np.float32)
FIELDS = {"input": IMAGES, "grad_output": GRAD, "weight_size": (3, 3), "padding": 1}
BACKWARD = {"input": IMAGES, "grad_output": GRAD, "weight": WEIGHT, "padding": 1}


def problem(operation: str = "grouped_conv_bwd_weight", **fields: Any) -> Problem:
    return problem_from(operation, validate(OPERATIONS[operation].request, fields or FIELDS))
