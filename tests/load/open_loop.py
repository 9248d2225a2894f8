"""Open-loop load: requests arrive at random times at a given rate, answered or not.

    python -m tests.load.open_loop --rate 100 [--url https://host:8000] [--mix small] [--workers 2]

Latency counts from the time a request was due, so that a stalled server shows in the latencies of
all requests that were due meanwhile (no coordinated omission). Without ``--url`` a server is
started here. ``--store`` stores the figures; without it they are compared with those stored for
this machine, and no quantile may be more than twice the stored one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import multiprocessing
import os
import ssl
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np

import convgrad
from convgrad.errors import ClientError, ServiceError
from tests.load.mixes import MIXES, requests_of
from tests.load.results import RESULTS, device, stamped, store
from tests.load.served import on_cores, server, split_cores

__all__ = ["Plan", "arrivals", "compared", "figures", "run", "starts_in_s"]

QUANTILES = {"p50_s": 0.5, "p90_s": 0.9, "p99_s": 0.99, "p99.9_s": 0.999}
# Largest ratio to a stored quantile; shorter ones than MIN_BASELINE_S count as this.
MAX_RATIO, MIN_BASELINE_S = 2.0, 0.002
# If the generator's p99 lateness exceeds this, the measurement is invalid.
MAX_LATE_S = 0.005
_STARTS_IN_S = 2.0
PACKAGES = ("numpy", "uvicorn", "uvloop")


@dataclass(frozen=True)
class Plan:
    """What to send where; ``rate`` is in requests per second, of all workers together."""

    url: str
    mix: str
    rate: float
    seconds: float
    warm_up: float = 2.0
    workers: int = 1
    seed: int = 0
    ca: str | None = None
    api_key: str | None = None
    timeout_s: float = 60.0


class Observed(NamedTuple):
    """A worker's observations after its warm-up, in seconds from when each request was due."""

    answered_s: list[float]
    late_s: list[float]
    codes: dict[str, int]


def arrivals(rate: float, seconds: float, rng: np.random.Generator) -> np.ndarray[Any, Any]:
    """Draw the arrival times of a Poisson process, sorted, in seconds."""
    count = rng.poisson(rate * seconds)
    return np.sort(rng.uniform(0.0, seconds, count))


def starts_in_s(workers: int) -> float:
    """Return after how many seconds `run` sends its first request: the workers start first."""
    return _STARTS_IN_S + workers * 0.5


def run(plan: Plan) -> dict[str, Any]:
    """Run the plan and return its figures."""
    # Not fork: the parent may have threads, for example gRPC's.
    context = multiprocessing.get_context("spawn")
    begins_s = time.time() + starts_in_s(plan.workers)
    with context.Pool(plan.workers) as pool:
        seen = pool.starmap(_work, [(plan, number, begins_s) for number in range(plan.workers)])
    return figures(plan, seen)


def figures(plan: Plan, seen: Sequence[Observed]) -> dict[str, Any]:
    """The workers' observations as one row of results."""
    answered = np.concatenate([one.answered_s for one in seen])
    late = np.concatenate([one.late_s for one in seen])
    codes: Counter[str] = Counter()
    for one in seen:
        codes.update(one.codes)
    row: dict[str, Any] = {
        "mix": plan.mix,
        "rate": plan.rate,
        "seconds": plan.seconds,
        "workers": plan.workers,
        "tls": plan.url.startswith("https:"),
        "sent": sum(codes.values()),
        "answered": codes["ok"],
        "codes": dict(sorted(codes.items())),
        "goodput_per_s": codes["ok"] / plan.seconds,
        "late_p99_s": float(np.quantile(late, 0.99)) if late.size else None,
    }
    for name, q in QUANTILES.items():
        # A latency that was observed, not interpolated.
        row[name] = (
            float(np.quantile(answered, q, method="inverted_cdf")) if answered.size else None
        )
    return row


def compared(row: Mapping[str, Any], stored: Mapping[str, Any] | None) -> list[str]:
    """Return what is wrong with the figures, alone and compared with those stored."""
    wrong = []
    if row["answered"] < row["sent"]:
        wrong.append(f"{row['sent'] - row['answered']} of {row['sent']} failed: {row['codes']}")
    if not row["answered"]:
        return [*wrong, "nothing was answered"]
    if row["late_p99_s"] > MAX_LATE_S:
        wrong.append(
            f"the load generator was {row['late_p99_s'] * 1e3:.1f} ms late at its p99: use more "
            "workers, a lower rate, or a separate machine"
        )
    if stored is None:
        return wrong
    return wrong + [
        f"{name} was {stored[name]:.4f} and is {row[name]:.4f}"
        for name in QUANTILES
        if row[name] > MAX_RATIO * max(stored[name], MIN_BASELINE_S)
    ]


def _work(plan: Plan, number: int, begins_s: float) -> Observed:
    return asyncio.run(_send(plan, number, begins_s))


async def _send(plan: Plan, number: int, begins_s: float) -> Observed:
    rng = np.random.default_rng([plan.seed, number])
    sent = requests_of(plan.mix)
    shares = np.array([one.count for one in sent], float)
    times = arrivals(plan.rate / plan.workers, plan.warm_up + plan.seconds, rng)
    chosen = rng.choice(len(sent), len(times), p=shares / shares.sum())
    seen = Observed([], [], {})
    async with _client(plan) as client:

        async def ask(one: int, intended_s: float, counts: bool) -> None:
            late_s, request = time.perf_counter() - intended_s, sent[one]
            try:
                method = getattr(client, request.operation)
                await method(**request.tensors, **request.parameters)
                code = "ok"
            except ServiceError as error:
                code = error.code
            except ClientError as error:
                code = type(error).__name__
            if counts:
                seen.late_s.append(late_s)
                seen.codes[code] = seen.codes.get(code, 0) + 1
                if code == "ok":
                    seen.answered_s.append(time.perf_counter() - intended_s)

        start_s = time.perf_counter() + (begins_s - time.time())
        async with asyncio.TaskGroup() as asking:
            for at_s, one in zip(times, chosen, strict=True):
                wait_s = start_s + at_s - time.perf_counter()
                # A late request is sent at once; its lateness counts.
                await asyncio.sleep(max(wait_s, 0.0))
                asking.create_task(ask(int(one), start_s + at_s, at_s >= plan.warm_up))
    return seen


@asynccontextmanager
async def _client(plan: Plan) -> AsyncIterator[convgrad.AsyncClient]:
    """Make the client, with its own HTTP client for TLS."""
    async with AsyncExitStack() as stack:
        http = None
        if plan.url.startswith("https:"):
            # Stands for many clients, each with its own connection.
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
            verify = ssl.create_default_context(cafile=plan.ca)
            http = await stack.enter_async_context(httpx.AsyncClient(verify=verify, limits=limits))
        client = convgrad.AsyncClient(
            plan.url, api_key=plan.api_key, timeout=plan.timeout_s, max_retries=0, http_client=http
        )
        yield await stack.enter_async_context(client)


def _run_name(mix: str, rate: float) -> str:
    return f"open loop {mix} {rate:g}/s"


def stored_row(mix: str, rate: float, on: str) -> Mapping[str, Any] | None:
    """Return the stored figures of this mix and rate on a device."""
    rows = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    for row in rows:
        if (row["run"], row["device"]) == (_run_name(mix, rate), on):
            return dict(row)
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--url", help="address of a running server; by default one is started here")
    parser.add_argument("--mix", choices=sorted(MIXES), default="resnet50")
    parser.add_argument("--rate", type=float, required=True, help="requests per second")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument(
        "--warm-up", type=float, default=5.0, help="seconds of warm-up, which are not measured"
    )
    parser.add_argument("--workers", type=int, default=1, help="number of client processes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ca", help="file of the CA that signed the server's certificate")
    parser.add_argument("--out", type=Path, help="also append the figures to this file")
    parser.add_argument("--git-sha", help="commit, where git is not available")
    parser.add_argument(
        "--gpu", help="name of the device in the results; by default this machine's CPU"
    )
    parser.add_argument("--store", action="store_true", help="store the figures as results")
    options = parser.parse_args()
    with ExitStack() as stack:
        if options.url is None:
            for_server, for_clients = split_cores(options.workers)
            with on_cores(for_server):
                options.url = stack.enter_context(server()).url
            stack.enter_context(on_cores(for_clients))
        plan = Plan(
            options.url,
            options.mix,
            options.rate,
            options.seconds,
            options.warm_up,
            options.workers,
            options.seed,
            options.ca,
            os.environ.get("CONVGRAD_API_KEY"),
        )
        row = run(plan)
    stored = None if options.store else stored_row(plan.mix, plan.rate, options.gpu or device())
    wrong = compared(row, stored)
    quantiles = ", ".join(
        f"{name.removesuffix('_s')} {math.nan if row[name] is None else row[name] * 1e3:.2f} ms"
        for name in QUANTILES
    )
    print(
        f"{plan.mix} at {plan.rate:g}/s: {row['answered']} of {row['sent']} answered, {quantiles}"
        + (
            ""
            if stored or options.store
            else "; no figures are stored for this machine to compare with"
        )
    )
    for one in wrong:
        print(f"missed: {one}")
    if options.out is not None:
        stamp = stamped(PACKAGES)
        stamp["git_sha"] = options.git_sha or stamp["git_sha"]
        stamp["device"] = options.gpu or stamp["device"]
        named = {"bench": "load", "run": _run_name(plan.mix, plan.rate)}
        with options.out.open("a") as out:
            out.write(json.dumps({**named, **row, **stamp}) + "\n")
    if options.store and not wrong:
        store(_run_name(plan.mix, plan.rate), [row], PACKAGES)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
