"""Planning in a separate process.

Planning takes one to hundreds of milliseconds of Python. In a worker's own process it would hold
the interpreter lock, for which a thread that computes waits again after each call of the driver.
"""

from __future__ import annotations

import json
import pickle
import signal
import subprocess
import sys
import threading
import weakref
from pathlib import Path

from convgrad_service.backends.cuda.compile_process import end_all, pipes_of
from convgrad_service.backends.cuda.families import FAMILIES
from convgrad_service.backends.cuda.kernels.conv import pointwise_gemm_model
from convgrad_service.backends.cuda.tuning.tuned import use_table
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.planner import plan_for
from convgrad_service.plans.cuda.program import CudaPlan
from convgrad_service.problems.base import Problem
from convgrad_service.process import lower_priority

__all__ = ["PlanProcess", "main"]

# Passes on sys.path, so that the child imports the same code.
_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from convgrad_service.backends.cuda.plan_process import main; main()"
)


class PlanProcess:
    """Plans problems for a device, one at a time, in a process of its own. Thread-safe.

    ``tuning`` is the user's table of tuned layers. The process ends with this one and with this
    object; one that has been killed is replaced.
    """

    def __init__(self, device: CudaDevice, tuning: Path | None = None) -> None:
        self._first = device, tuning
        self._lock = threading.Lock()
        self._running: list[subprocess.Popen[bytes]] = []
        self._start()
        weakref.finalize(self, end_all, self._running)

    def plan(self, problem: Problem) -> CudaPlan:
        """Return what `plan_for` returns, or raise what it raises."""
        with self._lock:
            try:
                answer = self._answer(problem)
            except (OSError, EOFError, pickle.UnpicklingError):  # the process has been killed
                end_all(self._running)
                answer = self._answer(problem)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _answer(self, problem: Problem) -> CudaPlan | Exception:
        if not self._running:
            self._start()
        requests, answers = pipes_of(self._running[0])
        pickle.dump(problem, requests)
        requests.flush()
        answer: CudaPlan | Exception = pickle.load(answers)  # noqa: S301 - our own child's
        return answer

    def _start(self) -> None:
        process = subprocess.Popen(  # noqa: S603 - this interpreter, our own code
            [sys.executable, "-P", "-c", _BOOT, json.dumps(sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._running.append(process)
        requests, _ = pipes_of(process)
        # It reads this, and the first problems, once it has imported the planner.
        pickle.dump(self._first, requests)
        requests.flush()


def main() -> None:
    """Plan one problem after another from standard input, until it is closed."""
    # Terminals and service managers send them to every process; only the parent handles them.
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    lower_priority()
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    device, tuning = pickle.load(requests)  # noqa: S301 - our parent's
    use_table(tuning)
    # Now rather than for the first problem.
    pointwise_gemm_model.prepare()
    while True:
        try:
            problem = pickle.load(requests)  # noqa: S301 - our parent's
        except EOFError:
            return
        answer: CudaPlan | Exception
        try:
            answer = plan_for(problem, device, FAMILIES)
        except Exception as error:  # noqa: BLE001 - raised again where the plan is wanted
            answer = error
        pickle.dump(answer, answers)
        answers.flush()
