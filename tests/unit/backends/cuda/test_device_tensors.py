"""Tensors in a GPU's memory: cut as arrays are, and copied row by row. Needs no GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from convgrad.contract import OPERATIONS, validate
from convgrad.dtypes import DType
from convgrad_service.backends.cuda.device_tensors import (
    CudaTensor,
    on_the_host,
    read_in_place,
    write_in_place,
)
from convgrad_service.backends.cuda.residents import Mirrored, Residents, mirrored, places_of
from convgrad_service.problems import problem_from
from convgrad_service.problems.base import TensorSpec

SHAPE = (4, 3, 6, 5)
BASE = 1 << 20


def whole(shape: tuple[int, ...] = SHAPE, address: int = BASE) -> CudaTensor:
    return CudaTensor.whole(address, TensorSpec(shape, DType.BFLOAT16), None)


def elements(found: CudaTensor, data: NDArray[Any]) -> NDArray[Any]:
    """What the rows of a tensor hold, in an allocation that holds ``data`` at BASE."""
    count, pitch, width = found.rows
    flat = data.reshape(-1).view(np.uint8)
    starts = [found.address - BASE + row * pitch for row in range(count)]
    rows = [flat[start : start + width] for start in starts]
    return np.concatenate(rows).view(data.dtype).reshape(found.shape)


CUTS = [
    (slice(None),) * 4,
    (slice(1, 3),),
    (slice(2, 3), slice(None), slice(1, 4)),
    (slice(None), slice(None), slice(1, 4), slice(None)),
    (slice(0, 2), slice(None), slice(5, 6)),
    (slice(None), slice(1, 2)),
]


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_a_part_is_the_part_that_arrays_have(cut: tuple[slice, ...]) -> None:
    data = np.arange(np.prod(SHAPE), dtype=np.int16).reshape(SHAPE)
    found = whole()[cut]
    assert found.shape == data[cut].shape
    assert found.nbytes == data[cut].nbytes
    assert (elements(found, data) == data[cut]).all()


def test_every_piece_of_a_problem_is_a_set_of_rows() -> None:
    for layout in ("NCHW", "NHWC", "NGCHW", "NHWGC", "GNHWC"):
        shape = {"N": 2, "G": 2, "C": 3, "H": 8, "W": 5}
        sizes = tuple(shape[each] for each in layout)
        weight = {"NCHW": (4, 3, 3, 3), "NHWC": (4, 3, 3, 3)}.get(layout, (2, 4, 3, 3, 3))
        images = np.zeros(sizes, np.float32)
        fields: dict[str, Any] = {"input": images, "weight": np.zeros(weight, np.float32)}
        if "G" in layout:
            fields["groups"] = 2
        request = validate(OPERATIONS["conv_fwd"].request, {**fields, "layout": layout})
        problem = problem_from("conv_fwd", request)
        for parts in (2, 5, 8):
            for piece in problem.split(parts):
                for name, cut in (*piece.inputs.items(), *piece.outputs.items()):
                    spec = {**problem.inputs, **problem.outputs}[name]
                    found = CudaTensor.whole(BASE, spec, None)[cut]
                    count, _, width = found.rows
                    assert count * width == found.nbytes


def test_what_is_no_set_of_rows_is_an_error() -> None:
    with pytest.raises(ValueError, match="no set of rows"):
        _ = whole()[slice(None), slice(0, 2), slice(0, 2), slice(0, 2)].rows


def test_kernels_use_what_suits_them_where_it_lies() -> None:
    here, odd = whole(), whole(address=BASE + 2)
    array = np.zeros(3)
    copied: list[tuple[int, Any]] = []
    addresses = {"a": 1, "b": 2, "c": 3}

    class Odd(CudaTensor):
        def copy_to(self, address: int, stream: Any) -> None:
            copied.append((address, stream))

    strange = Odd(odd.address, odd.shape, odd.strides, odd.dtype, None)
    given = {"a": here, "b": strange, "c": array}
    assert read_in_place(given, addresses, "stream") == {"c": array}
    assert addresses == {"a": BASE, "b": 2, "c": 3}
    assert copied == [(2, "stream")]
    addresses = {"a": 1, "b": 2, "c": 3}
    assert write_in_place(given, addresses) == {"b": strange}
    assert addresses == {"a": BASE, "b": 2, "c": 3}
    assert on_the_host(given) == {"c": array}


def test_a_stored_tensor_is_uploaded_once_and_again_when_forgotten() -> None:
    uploads: list[Any] = []
    room = [True]

    def upload(array: NDArray[Any]) -> CudaTensor | None:
        uploads.append(array)
        return whole() if room[0] else None

    residents, array = Residents(upload, upload), np.zeros(SHAPE)
    first = residents.of(7, 0, array)
    assert isinstance(first, CudaTensor)
    assert residents.of(7, 0, array) is first
    assert len(uploads) == 1
    residents.of(8, 0, array)
    residents.forget(7)
    assert residents.of(7, 0, array) is not first
    second = residents.of(7, 1, array)  # what is stored there now
    assert residents.of(7, 1, array) is second
    residents.clear()
    room[0] = False
    assert residents.of(8, 0, array) is array  # computed from the host, as without all this
    room[0] = True
    assert residents.of(8, 0, array) is not array
    assert len(uploads) == 6


def test_a_result_that_stays_is_there_once_all_of_it_is_written() -> None:
    uploads: list[Any] = []

    def upload(array: NDArray[Any]) -> CudaTensor:
        uploads.append(array)
        return whole()

    array = np.zeros(SHAPE, np.int16)
    residents = Residents(upload, lambda like: whole(like.shape))
    place = residents.place(7, 0, array)
    assert isinstance(place, Mirrored)
    for start in range(4):
        assert start == 0 or residents.place(7, 0, array).device is place.device
        place[slice(start, start + 1),].written()
    assert residents.of(7, 0, array) is place.device
    assert not uploads
    # Of one that was not written to its end, and of another version, nothing counts.
    residents.place(8, 0, array)[slice(0, 3),].written()
    residents.of(8, 0, array)
    assert len(uploads) == 1
    late = residents.place(7, 1, array)
    residents.clear()
    late.written()  # nobody knows it any more
    residents.of(7, 1, array)
    assert len(uploads) == 2
    residents.forget(7)
    residents.forget(8)
    assert len(residents) == 0
    assert Residents(upload, lambda like: None).place(7, 0, array) is array


def test_kernels_write_to_what_stays_where_one_copy_brings_it_to_the_host() -> None:
    request = validate(
        OPERATIONS["conv_fwd"].request,
        {"input": np.zeros((4, 3, 6, 5), np.float32), "weight": np.zeros((3, 3, 1, 1), np.float32)},
    )
    problem = problem_from("conv_fwd", request)
    host, counted = np.zeros(SHAPE, np.float32), [0]

    def count(size: int) -> None:
        counted[0] += size

    spec = TensorSpec(SHAPE, DType.FLOAT32)
    kept = Mirrored(CudaTensor.whole(BASE, spec, None), host, count)
    places = places_of(problem, {"output": kept})
    assert places == {"output": kept}
    assert mirrored(places) == [kept]
    addresses = {"output": 1}
    assert write_in_place(places, addresses) == {}
    assert addresses == {"output": BASE}
    (copy,) = on_the_host(places).values()
    assert copy is host
    odd = kept[slice(1, 2),]  # 360 bytes from the start, which suits no kernel
    addresses = {"output": 1}
    assert write_in_place({"output": odd}, addresses) == {"output": odd.device}
    assert addresses == {"output": 1}
    rows = kept[slice(None), slice(None), slice(0, 2)]
    (place,) = places_of(problem, {"output": rows}).values()
    assert isinstance(place, np.ndarray)
    assert isinstance(places_of(problem, {})["output"], np.ndarray)

    class Recorded(CudaTensor):
        def fill(self, array: NDArray[Any]) -> None:
            counted.append(array.nbytes)

    device = kept.device
    again = Mirrored(
        Recorded(device.address, device.shape, device.strides, device.dtype, None), host, count
    )
    again.fill(np.ones(SHAPE, np.float32))
    assert host.all()
    assert counted == [host.nbytes, host.nbytes]
