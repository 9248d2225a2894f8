"""Kernels compile side by side, in processes that can be ended, each once on a host."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from convgrad_service.backends.cuda import compile as cuda_compile
from convgrad_service.backends.cuda.compile import Compiler
from convgrad_service.backends.cuda.compile_process import CompileProcesses, Request, exclusive
from convgrad_service.backends.cuda.families import FAMILIES
from convgrad_service.backends.cuda.nvrtc import CompileError, find_nvrtc
from tests.support.tree_server import alive, until

COPIES = [one for one in FAMILIES.instances() if one.source == "layout/strided_copy.cu"][:4]
# An ELF file without contents: what the cache returns must be whole.
CODE = b"\x7fELF".ljust(64, b"\0")
# Takes NVRTC minutes.
LONG = "".join(f"__global__ void f{n}(float* p) {{ p[{n}] = {n}; }}\n" for n in range(40_000))


class Gate:
    """In place of the compiler's processes: each compilation waits until it is let through."""

    def __init__(self, *, open_: bool = False) -> None:
        self.begun: Counter[str] = Counter()
        self.let = threading.Event()
        self.refusals = 0
        if open_:
            self.let.set()

    def compile(self, processes: CompileProcesses, request: Request) -> tuple[bytes, str]:
        self.begun["".join(request.options)] += 1
        assert self.let.wait(60)
        if self.refusals:
            self.refusals -= 1
            raise CompileError("refused")
        return CODE, ""


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Gate:
    made = Gate()
    monkeypatch.setattr(CompileProcesses, "compile", lambda *given: made.compile(*given))
    monkeypatch.setattr(cuda_compile, "DEFAULT_CACHE", tmp_path / "package")
    return made


@pytest.fixture
def compiler(tmp_path: Path) -> Callable[[], Compiler]:
    """One as each worker of a host has it; four compilations at a time."""
    return lambda: Compiler(find_nvrtc(), "sm_80", tmp_path / "cache", jobs=4)


def test_a_plans_kernels_compile_side_by_side(gate: Gate, compiler: Callable[[], Compiler]) -> None:
    one = compiler()
    done = one.compile_ahead(COPIES)
    assert done is not None
    until(lambda: gate.begun.total() == len(COPIES))
    assert not done.done()
    gate.let.set()
    assert done.result(60) is None
    assert one.compile_ahead(COPIES) is None
    assert [one.cubin(copy).code for copy in COPIES] == [CODE] * len(COPIES)
    assert gate.begun.total() == one.compiled == len(COPIES)


def test_the_workers_of_a_host_compile_a_cubin_once(
    gate: Gate, compiler: Callable[[], Compiler], tmp_path: Path
) -> None:
    workers = [compiler() for _ in range(3)]
    waiting = [worker.compile_ahead(COPIES) for worker in workers]
    until(lambda: gate.begun.total() == len(COPIES))
    time.sleep(0.1)  # for those that might begin although they must not
    gate.let.set()
    for each in waiting:
        assert each is not None
        each.result(60)
    assert set(gate.begun.values()) == {1}
    assert sum(worker.compiled for worker in workers) == len(COPIES)
    assert sum(worker.found for worker in workers) == 2 * len(COPIES)
    left = {path.suffix for path in (tmp_path / "cache").iterdir()}
    assert left == {".cubin", ""}, "locks are removed"


def test_where_nothing_can_be_written_each_compiles_for_itself(gate: Gate, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    compiler = Compiler(find_nvrtc(), "sm_80", tmp_path / "file" / "cache")
    gate.let.set()
    done = compiler.compile_ahead(COPIES[:1])
    assert done is not None
    done.result(60)
    assert compiler.cubin(COPIES[0]).code == CODE
    assert gate.begun.total() == 1


def test_what_is_refused_fails_and_is_tried_again(
    gate: Gate, compiler: Callable[[], Compiler]
) -> None:
    gate.refusals = 1
    gate.let.set()
    one = compiler()
    done = one.compile_ahead(COPIES[:1])
    assert done is not None
    with pytest.raises(CompileError, match="refused"):
        done.result(60)
    assert one.cubin(COPIES[0]).code == CODE


def test_what_nobody_wants_any_more_is_not_begun(gate: Gate, tmp_path: Path) -> None:
    one = Compiler(find_nvrtc(), "sm_80", tmp_path, jobs=1)
    first, second = one.compile_ahead(COPIES[:2]), one.compile_ahead(COPIES[1:3])
    assert first is not None
    assert second is not None
    until(lambda: gate.begun.total() == 1)
    assert second.cancel()
    gate.let.set()
    first.result(60)
    # The one that the first wanted too was compiled, the other was not.
    assert gate.begun.total() == 2
    again = one.compile_ahead(COPIES[2:3])
    assert again is not None
    again.result(60)
    assert gate.begun.total() == 3


def test_a_lock_is_freed_by_its_holders_death(tmp_path: Path) -> None:
    path = tmp_path / "one.lock"
    program = (
        "import sys, threading, time, pathlib\n"
        "from convgrad_service.backends.cuda.compile_process import exclusive\n"
        "with exclusive(pathlib.Path(sys.argv[1]), threading.Event()):\n"
        "    print('held', flush=True)\n"
        "    time.sleep(60)\n"
    )
    command = [sys.executable, "-c", program, str(path)]
    given_up = threading.Event()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        entered = threading.Event()

        def enter() -> None:
            with exclusive(path, given_up):
                entered.set()

        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(enter)
            assert not entered.wait(0.2)
            holder.kill()
            assert entered.wait(60)
            waiting.result(60)
    assert not path.exists()


def test_whoever_gives_up_waits_no_longer_for_a_lock(tmp_path: Path) -> None:
    path, given_up = tmp_path / "one.lock", threading.Event()
    with exclusive(path, given_up):
        given_up.set()
        with pytest.raises(CompileError, match="closed"), exclusive(path, given_up):
            pytest.fail("two hold it")


def request(source: str) -> Request:
    return Request(source, "one.cu", ["--gpu-architecture=sm_80"])


def process_of(processes: CompileProcesses) -> int:
    until(lambda: bool(processes._running))
    return next(iter(processes._running)).pid


def test_a_compilation_can_be_ended(tmp_path: Path) -> None:
    processes = CompileProcesses(find_nvrtc().path)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(processes.compile, request(LONG))
        process = process_of(processes)
        processes.close()
        with pytest.raises(CompileError, match="SIGKILL"):
            running.result(30)
    assert not alive(process)
    with pytest.raises(CompileError, match="closed"):
        processes.compile(request(""))


def test_a_compiler_that_is_killed_or_takes_too_long_is_an_error() -> None:
    processes = CompileProcesses(find_nvrtc().path)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(processes.compile, request(LONG))
        os.kill(process_of(processes), signal.SIGKILL)
        with pytest.raises(CompileError, match="ended with signal SIGKILL"):
            running.result(30)
    with pytest.raises(CompileError, match=r"longer than 0\.1 s"):
        processes.compile(request(LONG), 0.1)
    code, _ = processes.compile(request("__global__ void f() {}"))
    assert code.startswith(b"\x7fELF")


def idle(processes: CompileProcesses) -> list[int]:
    return [each.pid for each in processes._idle]


def test_processes_are_started_ahead_and_used_again() -> None:
    processes = CompileProcesses(find_nvrtc().path, ahead=2)
    ahead = idle(processes)
    assert len(ahead) == 2
    processes.compile(request("__global__ void f() {}"))
    with pytest.raises(CompileError, match="no_such_thing"):
        processes.compile(request("no_such_thing;"))
    assert idle(processes) == ahead
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):  # to the whole service
        processes._idle[-1].send_signal(number)
    processes.compile(request("__global__ void f() {}"))
    assert idle(processes) == ahead
    # Someone else kills the one that would be next.
    processes._idle[-1].kill()
    processes._idle[-1].wait()
    processes.compile(request("__global__ void f() {}"))
    assert idle(processes) == ahead[:1]
    processes.close()
    assert not any(map(alive, ahead))


def test_idle_processes_end_with_what_would_use_them() -> None:
    processes = CompileProcesses(find_nvrtc().path, ahead=1)
    (process,) = idle(processes)
    del processes
    gc.collect()
    assert not alive(process)


def test_compilations_end_with_their_process(tmp_path: Path) -> None:
    program = (
        "import sys, threading\n"
        "from convgrad_service.backends.cuda.compile_process import CompileProcesses, Request\n"
        "processes = CompileProcesses(sys.argv[1], 2)\n"
        "given = Request(sys.stdin.read(), 'long.cu', ['--gpu-architecture=sm_80'])\n"
        "threading.Thread(target=processes.compile, args=(given,), daemon=True).start()\n"
        "while not processes._running: pass\n"
        "pids = [each.pid for each in (*processes._running, *processes._idle)]\n"
        "print(*pids, flush=True)\n"
        "threading.Event().wait()\n"
    )
    command = [sys.executable, "-c", program, find_nvrtc().path]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        parent.stdin.write(LONG)
        parent.stdin.close()
        process, ahead = map(int, parent.stdout.readline().split())
        assert alive(process)
        assert alive(ahead)
        parent.kill()
        until(lambda: not alive(process) and not alive(ahead))
