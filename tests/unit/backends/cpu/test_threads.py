"""The CPU backend's threads, work memory and libraries."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from convgrad.contract import ConvBwdDataRequest
from convgrad.errors import DeadlineExceeded, DeviceUnavailable
from convgrad_service.backends.cpu import CpuBackend, library
from convgrad_service.backends.cpu.arguments import Control, ConvArgs
from convgrad_service.backends.cpu.threads import Workers, Workspaces
from convgrad_service.problems import problem_from
from convgrad_service.process import usable_cores


def test_a_workspace_is_aligned_and_used_again() -> None:
    spaces = Workspaces(keep_bytes=1 << 20)
    first = spaces.take(1000)
    address = first.address
    assert first.size_bytes >= 1000
    assert address % 64 == 0
    spaces.give(first)
    assert spaces.take(500).address == address


def test_no_more_is_kept_than_allowed() -> None:
    spaces = Workspaces(keep_bytes=100_000)
    for buffer in [spaces.take(size) for size in (90_000, 50_000, 40_000, 30_000, 500_000)]:
        spaces.give(buffer)
    kept = sum(buffer.size_bytes for buffer in spaces._free)
    assert 0 < kept <= 100_000


def _counting(total: int, pause_s: float = 0.0) -> library.Kernel:
    """A kernel in Python: takes tasks as the native ones do."""
    lock = threading.Lock()

    def kernel(args: int, control_at: int, scratch: int) -> None:
        control = Control.from_address(control_at)
        while not control.cancelled:
            with lock:
                if control.next[0][0] >= total:
                    return
                control.next[0][0] += 1
            time.sleep(pause_s)

    entry: library.Kernel = ctypes.CFUNCTYPE(None, *(ctypes.c_void_p,) * 3)(kernel)
    return entry


@pytest.mark.skipif(sys.platform != "linux", reason="threads have affinities on Linux")
@pytest.mark.skipif(usable_cores() < 2, reason="needs a core beside the caller's")
def test_helpers_are_kept_off_their_callers_core() -> None:
    """Woken on the caller's core, a helper would wait there until the launch is over."""
    workers = Workers(2, 0)
    (helper,) = workers._helpers
    until = time.monotonic() + 60
    # The first launch may come before the helper has begun.
    while len(os.sched_getaffinity(0) - os.sched_getaffinity(helper.native_id or 0)) != 1:
        assert time.monotonic() < until
        workers.launch(_counting(4), ConvArgs())
    workers.close()


@pytest.mark.skipif(sys.platform != "linux", reason="threads have priorities on Linux")
def test_helpers_give_way_to_the_event_loop() -> None:
    workers = Workers(2, 0)
    workers.launch(_counting(4), ConvArgs())
    (helper,) = workers._helpers
    until = time.monotonic() + 60
    while os.getpriority(os.PRIO_PROCESS, helper.native_id or 0) == os.getpriority(
        os.PRIO_PROCESS, threading.get_native_id()
    ):
        assert time.monotonic() < until
        time.sleep(0.001)
    workers.close()


@pytest.mark.skipif(sys.platform != "linux", reason="timers have slack on Linux")
def test_threads_that_wait_for_the_interpreter_are_woken_on_time() -> None:
    code = (
        "import ctypes, sys\n"
        "from concurrent.futures import ThreadPoolExecutor\n"
        "from convgrad_service.process import set_switch_interval\n"
        "set_switch_interval(5e-5)\n"
        "slack = ThreadPoolExecutor(1).submit(ctypes.CDLL(None).prctl, 30, 0, 0, 0, 0).result()\n"
        "print(slack, round(sys.getswitchinterval() * 1e6))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1000", "50"]


def test_every_task_is_taken_once() -> None:
    workers = Workers(3, 0)
    assert workers.launch(_counting(100), ConvArgs()).next[0][0] == 100
    workers.close()


def test_launches_side_by_side_share_the_threads() -> None:
    workers = Workers(2, 0)
    with ThreadPoolExecutor(8) as callers:
        launched = [
            callers.submit(workers.launch, _counting(20, 0.001), ConvArgs()) for _ in range(16)
        ]
        assert [one.result(timeout=120).next[0][0] for one in launched] == [20] * 16
    workers.close()


def test_a_cancelled_launch_stops_between_tasks() -> None:
    workers = Workers(2, 0)
    cancelled = threading.Event()
    threading.Timer(0.05, cancelled.set).start()
    began_s = time.perf_counter()
    with pytest.raises(DeadlineExceeded):
        workers.launch(_counting(10**9, 0.001), ConvArgs(), cancelled=cancelled)
    assert time.perf_counter() - began_s < 60
    workers.close()


def test_helpers_end_with_their_workers() -> None:
    def helpers() -> int:
        return sum(thread.name == "convgrad-cpu" for thread in threading.enumerate())

    before = helpers()
    workers = Workers(4, 0)
    assert helpers() == before + 3
    workers.close()
    assert helpers() == before
    forgotten = Workers(4, 0)
    del forgotten
    deadline_s = time.monotonic() + 60
    while helpers() > before and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert helpers() == before


def test_a_problem_cancelled_before_it_begins_is_not_computed() -> None:
    request = ConvBwdDataRequest(
        grad_output=np.ones((1, 1, 4, 4), np.float32), weight=np.ones((1, 1, 3, 3), np.float32)
    )
    cancelled = threading.Event()
    cancelled.set()
    with pytest.raises(DeadlineExceeded):
        CpuBackend(threads=1).run(
            problem_from("conv_bwd_data", request), request.tensors(), cancelled
        )


def test_a_long_problem_ends_soon_after_it_is_cancelled() -> None:
    request = ConvBwdDataRequest(
        grad_output=np.ones((16, 256, 128, 128), np.float32),
        weight=np.ones((256, 256, 3, 3), np.float32),
    )
    problem, tensors = problem_from("conv_bwd_data", request), request.tensors()
    cancelled = threading.Event()
    timer = threading.Timer(0.05, cancelled.set)
    timer.start()
    with pytest.raises(DeadlineExceeded):
        CpuBackend().run(problem, tensors, cancelled)


def test_an_unknown_level_names_those_there_are() -> None:
    with pytest.raises(DeviceUnavailable, match="x86_64_v9"):
        library.load("x86_64_v9")


def test_missing_libraries_say_how_to_build_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(library, "NATIVE", tmp_path)
    library._open.cache_clear()
    library.load.cache_clear()
    try:
        with pytest.raises(DeviceUnavailable, match=r"compile\.py"):
            library.load()
    finally:
        library._open.cache_clear()
        library.load.cache_clear()


def test_a_kernel_that_an_older_library_lacks_is_told() -> None:
    with pytest.raises(DeviceUnavailable, match="no kernel 'unheard_of'"):
        library.load().kernel("unheard_of")


def test_a_launch_with_too_little_scratch_is_refused_by_the_kernel() -> None:
    args = ConvArgs()
    args.batch = args.groups = args.in_channels = args.out_channels = 1
    for name in ("input", "kernel", "output", "stride", "dilation"):
        getattr(args, name)[:] = (1, 1, 1)
    args.dtype = args.result_dtype = 2
    args.block[:5] = (1, 1, 1, 1, 1)
    control = Control.of(1)
    library.load().kernel("dense_fwd")(ctypes.addressof(args), ctypes.addressof(control), 0)
    assert control.error == 1
