"""Starts a server, loads it with Locust, and says whether it kept its objectives.

    python -m tests.load.run --locust build/load-tools/bin/locust [--seconds 20] [--only ramp]

Each mix is run by itself: no request may fail, and p99 must stay under the objective. Then a ramp:
past the knee, goodput holds and what is accepted stays fast. Reports go to build/load, as HTML and
data. `--only soak --seconds 3600` runs the realistic mixes for as long as is asked and looks at
the server's memory.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HERE = ROOT / "tests" / "load"
OUT = ROOT / "build" / "load"


@dataclass(frozen=True)
class Objective:
    """How many users send a mix, and the p99 that they may expect, on two cores."""

    users: int
    p99_s: float


# A step of either network is tens of milliseconds of arithmetic a layer at most; the rest of the
# objective is waiting behind the other users on two cores.
OBJECTIVES: Mapping[str, Objective] = {
    "resnet50": Objective(users=4, p99_s=1.0),
    "mobilenet": Objective(users=4, p99_s=0.5),
    "small": Objective(users=16, p99_s=0.25),
    "huge": Objective(users=2, p99_s=20.0),
}
# Of the ramp: goodput past the knee against the best step's, and the p99 of what is accepted
# against what a full queue explains.
LEAST_GOODPUT = 0.8
RAMP_P99_S = 1.0
RAMP_SETTINGS = {"CONVGRAD_MAX_QUEUE": "8"}
# A soak may leave the server this much larger than after its first minute.
MOST_GROWTH_BYTES = 64 * 2**20


@contextmanager
def server(**settings: str) -> Iterator[tuple[str, int]]:
    """URL and process id of a server of its own."""
    OUT.mkdir(parents=True, exist_ok=True)
    port_file = OUT / "port"
    port_file.unlink(missing_ok=True)
    command = [sys.executable, "-m", "convgrad", "serve", "--port", "0"]
    command += ["--port-file", str(port_file)]
    environment = {**os.environ, "CONVGRAD_GRPC_PORT": "0", "CONVGRAD_LOG_LEVEL": "warning"}
    process = subprocess.Popen(command, env={**environment, **settings}, stdout=subprocess.DEVNULL)
    try:
        while not port_file.exists():
            if process.poll() is not None:
                raise SystemExit("the server did not start")
            time.sleep(0.05)
        yield f"http://127.0.0.1:{int(port_file.read_text())}", process.pid
    finally:
        process.terminate()
        process.wait(timeout=60)


def locust(program: Path, url: str, name: str, *more: str, files: str = "locustfile.py") -> None:
    """Run Locust; its HTML report and its CSV go to build/load under this name."""
    paths = ",".join(str(HERE / file) for file in files.split(","))
    command = [str(program), "-f", paths, "--headless", "--host", url, "--only-summary"]
    command += ["--html", str(OUT / f"{name}.html"), "--csv", str(OUT / name), *more]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'client'}:{ROOT}"}
    # Its exit status says that requests failed, which is judged here from the figures.
    done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True)
    if not (OUT / f"{name}_stats.csv").exists():
        raise SystemExit(f"locust did not run:\n{done.stderr[-3000:]}")


def totals(name: str) -> dict[str, float]:
    """Of all requests: how many, how many failed, p99."""
    with (OUT / f"{name}_stats.csv").open(newline="") as file:
        (row,) = (row for row in csv.DictReader(file) if row["Name"] == "Aggregated")
    return {
        "requests": float(row["Request Count"]),
        "failures": float(row["Failure Count"]),
        "per_s": float(row["Requests/s"]),
        "p99_s": float(row["99%"]) / 1e3,
    }


def mixes(program: Path, seconds: float) -> list[str]:
    """Every mix against its objective; what was missed."""
    missed = []
    print(
        f"{'mix':10} {'users':>5} {'requests':>8} {'failed':>6} {'per s':>7} {'p99 s':>7}  may be"
    )
    with server() as (url, _):
        for mix, objective in OBJECTIVES.items():
            users = str(objective.users)
            length = f"{seconds:.0f}s"
            locust(program, url, mix, "--mix", mix, "-u", users, "-r", users, "-t", length)
            found = totals(mix)
            print(
                f"{mix:10} {users:>5} {found['requests']:8.0f} {found['failures']:6.0f} "
                f"{found['per_s']:7.1f} {found['p99_s']:7.3f}  {objective.p99_s:g}",
                flush=True,
            )
            if found["failures"] or not found["requests"]:
                missed.append(f"{mix}: {found['failures']:.0f} requests failed")
            if found["p99_s"] > objective.p99_s:
                missed.append(f"{mix}: p99 is {found['p99_s']:.3f} s")
    return missed


def ramp(program: Path, seconds: float) -> list[str]:
    """Ever more users; what was missed."""
    out = OUT / "ramp.json"
    step = ["--step", str(max(3.0, seconds / 4)), "--ramp-out", str(out)]
    with server(**RAMP_SETTINGS) as (url, _):
        locust(program, url, "ramp", "--mix", "resnet50", *step, files="locustfile.py,ramp.py")
    steps = json.loads(out.read_text())
    print(
        f"{'users':>5} {'answered/s':>10} {'refused/s':>10} {'failed':>6} {'p50 s':>7} {'p99 s':>7}"
    )
    for one in steps:
        print(
            f"{one['users']:5} {one['answered_per_s']:10.1f} {one['refused_per_s']:10.1f} "
            f"{one['failed']:6.0f} {one['p50_s']:7.3f} {one['p99_s']:7.3f}"
        )
    best = max(one["answered_per_s"] for one in steps)
    last = steps[-1]
    missed = [
        f"{one['failed']:.0f} failed at {one['users']} users" for one in steps if one["failed"]
    ]
    if last["refused_per_s"] == 0:
        missed.append("nothing was refused at the end of the ramp: it never met the limit")
    if last["answered_per_s"] < LEAST_GOODPUT * best:
        missed.append(f"goodput fell from {best:.1f} to {last['answered_per_s']:.1f} a second")
    if last["p99_s"] > RAMP_P99_S:
        missed.append(f"p99 of what was accepted rose to {last['p99_s']:.3f} s")
    return missed


def soak(program: Path, seconds: float) -> list[str]:
    """The realistic mixes in turns for a long time; what was missed."""
    missed = []
    with server() as (url, process):
        first = None
        until = time.monotonic() + seconds
        while time.monotonic() < until or first is None:
            for mix in ("resnet50", "mobilenet", "small"):
                users = str(OBJECTIVES[mix].users)
                locust(program, url, "soak", "--mix", mix, "-u", users, "-r", users, "-t", "20s")
                if totals("soak")["failures"]:
                    missed.append(f"{mix}: {totals('soak')['failures']:.0f} requests failed")
            held = resident_bytes(process)
            first = first or held
            print(f"{held / 2**20:7.0f} MiB resident", flush=True)
        if held - first > MOST_GROWTH_BYTES:
            missed.append(f"the server grew by {(held - first) / 2**20:.0f} MiB")
    return missed


def resident_bytes(process: int) -> int:
    """Of a process and all that it started."""
    listed = subprocess.run(
        ["ps", "-e", "-o", "pid=,ppid=,rss="], capture_output=True, text=True, check=True
    ).stdout
    rows = [tuple(map(int, line.split())) for line in listed.splitlines()]
    family = {process}
    while more := {pid for pid, parent, _ in rows if parent in family} - family:
        family |= more
    return sum(rss * 1024 for pid, _, rss in rows if pid in family)


RUNS = {"mixes": mixes, "ramp": ramp, "soak": soak}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--locust", type=Path, required=True, help="the program")
    parser.add_argument("--seconds", type=float, default=20.0, help="for each mix, or the soak")
    parser.add_argument("--only", choices=RUNS, help="one of them; without it, mixes and ramp")
    options = parser.parse_args()
    chosen = [options.only] if options.only else ["mixes", "ramp"]
    missed = [one for name in chosen for one in RUNS[name](options.locust, options.seconds)]
    print(f"reports: {OUT.relative_to(ROOT)}")
    for one in missed:
        print(f"missed: {one}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
