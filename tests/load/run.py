"""Starts a server, loads it with Locust, and checks its objectives.

    python -m tests.load.run --locust build/load-tools/bin/locust [--seconds 20] [--step 12]

Each mix runs separately, over every wire format: no request may fail, and p99 must meet the
objective on each. Then a ramp: beyond the knee, goodput must hold and accepted requests must stay
fast. Locust's reports go to build/load; `--store` stores the figures for docs/load.md.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.load.results import RESULTS, store
from tests.load.served import OUT, ROOT, Served, on_cores, server, split_cores

HERE = ROOT / "tests" / "load"


# By mix, the number of users.
USERS: Mapping[str, int] = {"resnet50": 4, "mobilenet": 4, "small": 16, "huge": 4}
# Largest ratio of p99 to the stored one of the same mix and wire format.
MAX_RATIO = 2.0
WIRES = ("safetensors", "json", "grpc")
# Of the ramp: goodput at the last step relative to the best one.
MIN_GOODPUT = 0.8
RAMP_SETTINGS = {"CONVGRAD_MAX_QUEUE": "8"}


def locust(
    program: Path, served: Served, name: str, *more: str, files: str = "locustfile.py"
) -> dict[str, dict[str, Any]]:
    """Run Locust and return figures by wire format; its reports go to build/load."""
    OUT.mkdir(parents=True, exist_ok=True)
    paths = ",".join(str(HERE / file) for file in files.split(","))
    figures = OUT / f"{name}.figures.json"
    figures.unlink(missing_ok=True)
    command = [str(program), "-f", paths, "--headless", "--only-summary"]
    command += ["--host", served.url, "--grpc-host", served.grpc]
    command += ["--html", str(OUT / f"{name}.html"), "--csv", str(OUT / name)]
    command += ["--figures-out", str(figures), *more]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'client'}:{ROOT}"}
    # A non-zero exit status means failed requests, which the figures contain.
    done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True)
    if not figures.exists():
        raise SystemExit(f"locust did not run:\n{done.stderr[-3000:]}")
    found: dict[str, dict[str, Any]] = json.loads(figures.read_text())
    return found


def mixes(program: Path, seconds: float) -> tuple[list[str], list[dict[str, Any]]]:
    """Run every mix on every wire format; return the missed objectives and the figures."""
    missed, rows = [], []
    print(
        f"{'mix':10}{'users':>6}  {'wire':12}{'answered':>9}{'failed':>7}{'per s':>8}"
        f"{'p50 s':>8}{'p99 s':>8}  objective"
    )
    objectives = p99_objectives_s()
    with server() as served:
        for mix, count in USERS.items():
            users = str(count)
            length = ["-u", users, "-r", users, "-t", f"{seconds:.0f}s"]
            found = locust(program, served, mix, "--mix", mix, *length)
            for wire in WIRES:
                row = {
                    "mix": mix,
                    "users": count,
                    "wire": wire,
                    "seconds": seconds,
                    **found.get(wire, {"answered": 0, "refused": 0, "failed": 0}),
                    "objective_p99_s": objectives.get((mix, wire), math.inf),
                }
                missed += verdict(row, f"{mix} over {wire}")
                rows.append(row)
                print(
                    f"{mix:10}{users:>6}  {wire:12}{row['answered']:9}{row['failed']:7}"
                    f"{row['answered'] / seconds:8.1f}{_shown(row.get('p50_s')):>8}"
                    f"{_shown(row.get('p99_s')):>8}  {row['objective_p99_s']:.3g}",
                    flush=True,
                )
    return missed, rows


def p99_objectives_s() -> dict[tuple[str, str], float]:
    """Return the objective for p99 of each mix and wire format, from the stored figures.

    On a machine slower than theirs, store its own first.
    """
    return {
        (row["mix"], row["wire"]): MAX_RATIO * row["p99_s"]
        for row in stored_rows()
        if row["run"] == "mixes"
    }


def stored_rows() -> list[dict[str, Any]]:
    """Return the stored figures of all load tests."""
    return [json.loads(line) for line in RESULTS.read_text().splitlines()]


def verdict(row: Mapping[str, Any], what: str) -> list[str]:
    """Return the missed objectives of one wire format."""
    missed = []
    if not row["answered"]:
        missed.append(f"{what}: nothing was answered")
    if row["failed"] or row["refused"]:
        first = row.get("first_failure") or "refused"
        missed.append(f"{what}: {row['failed']} failed, {row['refused']} refused; first: {first}")
    if row["answered"] and row["p99_s"] > row["objective_p99_s"]:
        missed.append(f"{what}: p99 is {row['p99_s']:.3f} s")
    return missed


def ramp(program: Path, step_s: float, climbs: int = 3) -> tuple[list[str], list[dict[str, Any]]]:
    """Run the ramp; return the missed objectives and the figures of each step.

    The clients have their own core, so that more of them do not slow down the server.
    """
    out = OUT / "ramp.json"
    out.unlink(missing_ok=True)
    for_server, for_clients = split_cores()
    with ExitStack() as until_done:
        with on_cores(for_server):
            served = until_done.enter_context(server(**RAMP_SETTINGS))
        until_done.enter_context(on_cores(for_clients))
        more = ["--step", str(step_s), "--climbs", str(climbs), "--ramp-out", str(out)]
        more += ["--mix", "resnet50", "--server-process", str(served.process)]
        locust(program, served, "ramp", *more, files="locustfile.py,ramp.py")
    steps: list[dict[str, Any]] = json.loads(out.read_text())
    cores = {"cores_for_server": len(for_server), "cores_for_clients": len(for_clients)}
    steps = [{**one, **cores} for one in steps]
    print(
        f"{'users':>5}{'answered/s':>12}{'refused/s':>11}{'failed':>7}{'p50 s':>8}{'p99 s':>8}"
        f"  cores used by server, clients, others"
    )
    for one in steps:
        each = ", ".join(f"{climb['answered_per_s']:.0f}" for climb in one["climbs"])
        print(
            f"{one['users']:5}{one['answered_per_s']:12.1f}{one['refused_per_s']:11.1f}"
            f"{one['failed']:7}{_shown(one['p50_s']):>8}{_shown(one['p99_s']):>8}"
            f"  {one['server_cores']:.2f}, {one['clients_cores']:.2f}, {one['other_cores']:.2f}"
            f"  (answered/s: {each})"
        )
    return ramp_verdict(steps, ramp_objective_s()), steps


def ramp_objective_s() -> float:
    """Return the objective for p99 of what is accepted at the end of the ramp."""
    stored = [row for row in stored_rows() if row["run"] == "ramp"]
    return MAX_RATIO * float(stored[-1]["p99_s"])


def ramp_verdict(steps: list[dict[str, Any]], most_p99_s: float) -> list[str]:
    """Return the missed objectives of the ramp."""
    best = max(one["answered_per_s"] for one in steps)
    last = steps[-1]
    missed = [
        f"{one['failed']} failed at {one['users']} users; first: {one['first_failure']}"
        for one in steps
        if one["failed"]
    ]
    if last["refused_per_s"] == 0:
        missed.append("nothing was refused at the end of the ramp: it never met the limit")
    if last["answered_per_s"] < MIN_GOODPUT * best:
        missed.append(f"goodput fell from {best:.1f} to {last['answered_per_s']:.1f} a second")
    if last["p99_s"] is None or last["p99_s"] > most_p99_s:
        missed.append(f"p99 of what was accepted rose to {_shown(last['p99_s'])} s")
    return missed


def smoke(program: Path, seconds: float) -> tuple[list[str], list[dict[str, Any]]]:
    """Check that every wire format is answered and nothing fails, whatever the speed.

    Shows that the load tests work, even on a busy machine.
    """
    with server() as served:
        found = locust(program, served, "smoke", "-u", "4", "-r", "4", "-t", f"{seconds:.0f}s")
    _, steps = ramp(program, step_s=3.0, climbs=1)
    wires = [{"what": wire, **found.get(wire, {"answered": 0, "failed": 0})} for wire in WIRES]
    missed = []
    for one in [*wires, *({"what": f"{step['users']} users", **step} for step in steps)]:
        print(f"{one['what']}: {one['answered']} answered, {one['failed']} failed")
        if one["failed"]:
            missed.append(f"{one['what']}: {one['failed']} failed; first: {one['first_failure']}")
    missed += [f"{one['what']}: nothing was answered" for one in wires if not one["answered"]]
    return missed, []


def _shown(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.3f}"


Run = Callable[[Path, float], tuple[list[str], list[dict[str, Any]]]]
RUNS: Mapping[str, Run] = {"mixes": mixes, "ramp": ramp}
"""By name; called with Locust's program and the seconds per mix or step."""
OTHER_RUNS: Mapping[str, Run] = {"smoke": smoke}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--locust", type=Path, required=True, help="Locust's executable")
    parser.add_argument("--seconds", type=float, default=20.0, help="seconds per mix")
    parser.add_argument("--step", type=float, default=12.0, help="seconds per step of the ramp")
    every = {**RUNS, **OTHER_RUNS}
    parser.add_argument(
        "--only", choices=every, help="run only this; default: the mixes and the ramp"
    )
    parser.add_argument("--store", action="store_true", help="store the figures as results")
    options = parser.parse_args()
    missed = []
    seconds = {"ramp": options.step}
    for name in [options.only] if options.only else RUNS:
        missing, rows = every[name](options.locust, seconds.get(name, options.seconds))
        missed += missing
        if options.store:
            store(name, rows, ["numpy", "uvicorn", "httptools", "uvloop"])
    print(f"reports: {OUT.relative_to(ROOT)}")
    for one in missed:
        print(f"missed: {one}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
