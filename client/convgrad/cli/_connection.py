"""Command-line options for the connection to the server."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from typing import Literal

import convgrad
from convgrad.cli._failures import UsageError

__all__ = ["add_connection_options", "connect"]


def add_connection_options(parser: argparse.ArgumentParser) -> None:
    """Add --url, --timeout, --connect-timeout, --max-retries, --header and --progress."""
    group = parser.add_argument_group("connection")
    group.add_argument(
        "--url", help="address of the server (default: $CONVGRAD_URL, or http://127.0.0.1:8000)"
    )
    group.add_argument(
        "--timeout",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="time limit of the whole call, retries included (default: %(default)g)",
    )
    group.add_argument(
        "--connect-timeout",
        type=float,
        default=10.0,
        metavar="SECONDS",
        help="time limit for connecting (default: %(default)g)",
    )
    group.add_argument(
        "--max-retries",
        type=int,
        default=2,
        metavar="N",
        help="retries after errors that may be temporary (default: %(default)s)",
    )
    group.add_argument(
        "--header",
        action="append",
        default=[],
        metavar="'NAME: VALUE'",
        help="header to send with every request; may be repeated (API key: $CONVGRAD_API_KEY)",
    )
    group.add_argument(
        "--progress",
        action=argparse.BooleanOptionalAction,
        default=sys.stderr.isatty() and find_spec("rich") is not None,
        help="show a progress bar for long calls (default: on a terminal, with convgrad[progress])",
    )


@contextmanager
def connect(
    options: argparse.Namespace, wire: Literal["safetensors", "json"] = "safetensors"
) -> Iterator[convgrad.Client]:
    """Make a client from the options."""
    headers = {}
    for header in options.header:
        name, colon, value = header.partition(":")
        if not colon:
            raise UsageError(f"--header: expected 'NAME: VALUE', got {header!r}")
        headers[name.strip()] = value.strip()
    with ExitStack() as stack:
        try:
            hooks = stack.enter_context(convgrad.progress_bars()) if options.progress else None
            client = convgrad.Client(
                options.url,
                timeout=options.timeout,
                connect_timeout=options.connect_timeout,
                max_retries=options.max_retries,
                wire=wire,
                headers=headers,
                event_hooks=hooks,
            )
        except (ValueError, ImportError) as refused:
            raise UsageError(str(refused)) from refused
        yield stack.enter_context(client)
