"""Open loop: requests arrive as they do from many callers, at random times at a given rate, whether
or not earlier ones have been answered.

    python -m tests.load.open_loop --rate 100 [--url https://host:8000] [--mix small] [--workers 2]

Latency counts from when a request was to be sent: one that waits behind a server that stands still
is not left out, as it is where each user waits for an answer before asking again. Without ``--url``
a server is started here. `--store` keeps the figures; without it they are compared with those that
are kept for this machine, of which no quantile may be twice as long.
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
from tests.load.served import on_cores, server, shared_out

__all__ = ["Plan", "arrivals", "compared", "figures", "run"]

QUANTILES = {"p50_s": 0.5, "p90_s": 0.9, "p99_s": 0.99, "p99.9_s": 0.999}
# Against the kept figures; below this a quantile says more of the machine than of the server.
MOST_TIMES, LEAST_S = 2.0, 0.002
# A generator that sends later than this, at its p99, has too little of the machine to be believed.
MOST_LATE_S = 0.005
_STARTS_IN_S = 2.0
PACKAGES = ("numpy", "uvicorn", "uvloop")


@dataclass(frozen=True)
class Plan:
    """What is sent where: ``rate`` requests a second by all workers together."""

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


class Seen(NamedTuple):
    """What a worker saw after its warm-up; seconds, from when each request was to be sent."""

    answered_s: list[float]
    late_s: list[float]
    codes: dict[str, int]


def arrivals(rate: float, seconds: float, rng: np.random.Generator) -> np.ndarray[Any, Any]:
    """When requests arrive within so many seconds: a Poisson process."""
    count = rng.poisson(rate * seconds)
    return np.sort(rng.uniform(0.0, seconds, count))


def run(plan: Plan) -> dict[str, Any]:
    """Send it all; the figures."""
    # Not forked: a process with gRPC's or a server's threads must not be.
    context = multiprocessing.get_context("spawn")
    begins_s = time.time() + _STARTS_IN_S + plan.workers * 0.5
    with context.Pool(plan.workers) as pool:
        seen = pool.starmap(_work, [(plan, number, begins_s) for number in range(plan.workers)])
    return figures(plan, seen)


def figures(plan: Plan, seen: Sequence[Seen]) -> dict[str, Any]:
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
        # The least that so many answers stayed within, not a value between two of them.
        row[name] = (
            float(np.quantile(answered, q, method="inverted_cdf")) if answered.size else None
        )
    return row


def compared(row: Mapping[str, Any], kept: Mapping[str, Any] | None) -> list[str]:
    """What is wrong with figures, by themselves and against those that are kept."""
    wrong = []
    if row["answered"] < row["sent"]:
        wrong.append(f"{row['sent'] - row['answered']} of {row['sent']} failed: {row['codes']}")
    if not row["answered"]:
        return [*wrong, "nothing was answered"]
    if row["late_p99_s"] > MOST_LATE_S:
        wrong.append(
            f"the generator was {row['late_p99_s'] * 1e3:.1f} ms late at its p99: more workers, a "
            "lower rate, or a machine of its own"
        )
    if kept is None:
        return wrong
    return wrong + [
        f"{name} was {kept[name]:.4f} and is {row[name]:.4f}"
        for name in QUANTILES
        if row[name] > MOST_TIMES * max(kept[name], LEAST_S)
    ]


def _work(plan: Plan, number: int, begins_s: float) -> Seen:
    return asyncio.run(_send(plan, number, begins_s))


async def _send(plan: Plan, number: int, begins_s: float) -> Seen:
    rng = np.random.default_rng([plan.seed, number])
    sent = requests_of(plan.mix)
    shares = np.array([one.count for one in sent], float)
    times = arrivals(plan.rate / plan.workers, plan.warm_up + plan.seconds, rng)
    chosen = rng.choice(len(sent), len(times), p=shares / shares.sum())
    seen = Seen([], [], {})
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
                # Late ones leave at once, and the wait counts.
                await asyncio.sleep(max(wait_s, 0.0))
                asking.create_task(ask(int(one), start_s + at_s, at_s >= plan.warm_up))
    return seen


@asynccontextmanager
async def _client(plan: Plan) -> AsyncIterator[convgrad.AsyncClient]:
    """The client, with an HTTP client of its own where there is TLS."""
    async with AsyncExitStack() as stack:
        http = None
        if plan.url.startswith("https:"):
            # Of many callers each has a connection: there is no limit on how many there are.
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
            verify = ssl.create_default_context(cafile=plan.ca)
            http = await stack.enter_async_context(httpx.AsyncClient(verify=verify, limits=limits))
        client = convgrad.AsyncClient(
            plan.url, api_key=plan.api_key, timeout=plan.timeout_s, max_retries=0, http_client=http
        )
        yield await stack.enter_async_context(client)


def _run_name(mix: str, rate: float) -> str:
    return f"open loop {mix} {rate:g}/s"


def kept_row(mix: str, rate: float, on: str) -> Mapping[str, Any] | None:
    """The figures that are kept of this mix and rate on a device."""
    rows = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    for row in rows:
        if (row["run"], row["device"]) == (_run_name(mix, rate), on):
            return dict(row)
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--url", help="a server that runs; without it one is started here")
    parser.add_argument("--mix", choices=sorted(MIXES), default="resnet50")
    parser.add_argument("--rate", type=float, required=True, help="requests a second")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--warm-up", type=float, default=5.0, help="seconds that do not count")
    parser.add_argument("--workers", type=int, default=1, help="processes that send")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ca", help="file of the authority that signed the server's certificate")
    parser.add_argument("--out", type=Path, help="append the figures to this file, too")
    parser.add_argument("--git-sha", help="of the tree, where there is no git to ask")
    parser.add_argument("--gpu", help="what computes, where that is not the machine's CPU")
    parser.add_argument("--store", action="store_true", help="keep the figures as results")
    options = parser.parse_args()
    with ExitStack() as stack:
        if options.url is None:
            for_server, for_clients = shared_out(options.workers)
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
    kept = None if options.store else kept_row(plan.mix, plan.rate, options.gpu or device())
    wrong = compared(row, kept)
    quantiles = ", ".join(
        f"{name.removesuffix('_s')} {math.nan if row[name] is None else row[name] * 1e3:.2f} ms"
        for name in QUANTILES
    )
    print(
        f"{plan.mix} at {plan.rate:g}/s: {row['answered']} of {row['sent']} answered, {quantiles}"
        + ("" if kept or options.store else "; nothing is kept for this machine to compare with")
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
