"""Small problems that between them launch every kernel instance that the networks suite launches.

For each instance, a problem of the suite that launches it is shrunk for as long as it still does.
Needs no GPU.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from convgrad.contract import OPERATIONS
from convgrad.contract.base import validate
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.families import Families
from convgrad_service.plans.cuda.planner import plan_for
from convgrad_service.plans.cuda.program import Instance, Launch
from convgrad_service.problems import problem_from
from tests.support.kernels.covering import Covered, merged
from tests.support.numerics.arrays import DTYPES
from tests.support.numerics.cases import FROM_CONV, Case
from tests.support.numerics.geometries import Conv

__all__ = ["SuiteCovering", "suite_covering", "suite_layers"]

SUITE = Path(__file__).resolve().parents[2] / "perf" / "suite" / "networks.json"
BATCHES = (1, 8, 32, 128)
GRADIENTS = ("conv_bwd_data", "grouped_conv_bwd_weight")
CHANNELS_LAST = {1: "NWC", 2: "NHWC", 3: "NDHWC"}
PARTS = 16

# Tensor elements of a problem that is not shrunk further.
SMALL = 2**16

Layer = Mapping[str, Any]
Work = tuple[str, Conv]
"""An operation and its geometry."""


def suite_layers() -> list[Layer]:
    """The convolutions of the networks suite."""
    layers: list[Layer] = json.loads(SUITE.read_text(encoding="utf-8"))
    return [layer for layer in layers if layer["kind"] == "conv"]


@dataclass(frozen=True)
class SuiteCovering:
    """Finds the problems for a device; all operations are channels last."""

    device: CudaDevice
    families: Families
    operations: Sequence[str] = GRADIENTS
    batches: Sequence[int] = BATCHES
    dtype: str = "bfloat16"

    def launching(self, layers: Iterable[Layer]) -> dict[Instance, Work]:
        """For each instance that the layers launch at any batch, the least work that does."""
        least: dict[Instance, Work] = {}
        for operation, layer, batch in product(self.operations, layers, self.batches):
            work = operation, _conv(layer, batch)
            for instance in self._launched(work):
                least[instance] = min(work, least.get(instance, work), key=_elements)
        return least

    def shrunk(self, found: tuple[Instance, Work]) -> Covered:
        """Halve sizes for as long as the instance is launched and the work is not small."""
        instance, (operation, conv) = found
        while _elements((operation, conv)) > SMALL:
            smaller = (
                one for one in _smaller(conv) if instance in self._launched((operation, one))
            )
            if (one := next(smaller, None)) is None:
                break
            conv = one
        launched = self._launched((operation, conv))
        return Covered(_case(operation, conv), self.dtype, CHANNELS_LAST[conv.ndim], launched)

    def _launched(self, work: Work) -> frozenset[Instance]:
        case, layout = _case(*work), CHANNELS_LAST[work[1].ndim]
        # Without memory, since the suite's tensors are large.
        arrays = {
            name: np.broadcast_to(np.empty((), DTYPES[self.dtype]), (n, *sizes, channels))
            for name, (n, channels, *sizes) in case.shapes.items()
        }
        fields = {**case.params, **arrays, "layout": layout}
        request = validate(OPERATIONS[case.operation].request, fields)
        plan = plan_for(problem_from(case.operation, request), self.device, self.families)
        return frozenset(step.instance for step in plan.steps if isinstance(step, Launch))


def suite_covering(covering: SuiteCovering, layers: Sequence[Layer]) -> list[Covered]:
    """Problems that launch all that the layers do; planned in processes side by side."""
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        least: dict[Instance, Work] = {}
        for part in pool.map(covering.launching, (layers[i::PARTS] for i in range(PARTS))):
            for instance, work in part.items():
                least[instance] = min(work, least.get(instance, work), key=_elements)
        return merged(pool.map(covering.shrunk, least.items(), chunksize=4))


def _conv(layer: Layer, batch: int) -> Conv:
    size, kernel, stride, padding, dilation = (
        tuple(layer[name])
        for name in ("input_size", "kernel_size", "stride", "padding", "dilation")
    )
    groups = layer["groups"]
    return Conv(batch, layer["C"], layer["K"], size, kernel, stride, padding, dilation, groups)


def _case(operation: str, conv: Conv) -> Case:
    """Without a bias and its gradient, named after all of its geometry."""
    size, kernel = ("x".join(map(str, each)) for each in (conv.size, conv.kernel))
    name = f"suite-{conv.n}x{conv.c}>{conv.k}g{conv.groups}_{size}_k{kernel}"
    name += f"_s{conv.stride}_p{conv.padding}_d{conv.dilation}".replace(" ", "")
    case = FROM_CONV[operation](name, conv)
    shapes = {key: shape for key, shape in case.shapes.items() if key != "bias"}
    params = {key: value for key, value in case.params.items() if key != "outputs"}
    return replace(case, shapes=shapes, params=params)


def _elements(work: Work) -> int:
    conv = work[1]
    return prod(conv.input_shape) + prod(conv.output_shape) + prod(conv.weight_shape)


def _smaller(conv: Conv) -> Iterator[Conv]:
    """The same layer with a half of one of its sizes, the batch first."""
    if conv.n > 1:
        yield replace(conv, n=conv.n // 2)
    for axis, extent in enumerate(conv.size):
        size = (*conv.size[:axis], extent // 2, *conv.size[axis + 1 :])
        one = replace(conv, size=size)
        if extent > 1 and min(one.output_size) > 0:
            yield one
    groups, c, k = conv.groups, conv.c // conv.groups, conv.k // conv.groups
    if groups > 1 and groups % 2 == 0:
        yield replace(conv, groups=groups // 2, c=conv.c // 2, k=conv.k // 2)
    if c > 1 and c % 2 == 0:
        yield replace(conv, c=conv.c // 2)
    if k > 1 and k % 2 == 0:
        yield replace(conv, k=conv.k // 2)
