"""``convgrad health``: reports as an exit status whether a server is ready."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import httpx

from convgrad._environment import server_url
from convgrad._http_errors import no_answer

__all__ = ["run"]


def run(argv: Sequence[str]) -> int:
    """Run ``convgrad health`` with these arguments: 0 if the server is ready, else 1."""
    parser = argparse.ArgumentParser(
        prog="convgrad health",
        description="Check whether a server accepts requests; the exit status is 0 if it does, "
        "otherwise 1.",
        allow_abbrev=False,
    )
    parser.add_argument("--live", action="store_true", help="check only that the process answers")
    parser.add_argument(
        "--url",
        help="address of the server (default: $CONVGRAD_URL, or http://127.0.0.1:8000)",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=5.0,
        metavar="SECONDS",
        help="how long to wait for the answer (default: %(default)g)",
    )
    options = parser.parse_args(argv)
    question = "live" if options.live else "ready"
    url = f"{server_url(options.url).rstrip('/')}/v2/health/{question}"
    try:
        answer = httpx.get(url, timeout=options.timeout)
    except (httpx.HTTPError, httpx.InvalidURL) as failed:
        print(f"not {question}: {no_answer(url, failed)}")
        return 1
    if answer.is_success:
        print(question)
        return 0
    print(f"not {question}: {_reason(answer)}")
    return 1


def _reason(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["detail"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP status {answer.status_code}"
