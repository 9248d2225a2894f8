"""``convgrad key``: make an API key."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from convgrad_service.security.keys import NAME, KeysError, hash_of, new_key, read_keys, read_line

__all__ = ["key"]


def key(argv: Sequence[str] | None = None) -> int:
    """Make a key; the exit code: 0, or 1 where its name is taken or the file cannot be written."""
    parser = argparse.ArgumentParser(
        prog="convgrad key",
        description="Make an API key: the key goes to whom it is for, and only its hash to the "
        "server's file (CONVGRAD_API_KEYS). To take a key back, take its line out of the file; a "
        "running server sees either within a second.",
        allow_abbrev=False,
    )
    parser.add_argument("name", help="whose it is, as logs and metrics will name it")
    parser.add_argument(
        "--file",
        type=Path,
        metavar="PATH",
        help="append the hash to this file; without it, the line is printed on stderr",
    )
    parser.add_argument("--max-inflight", metavar="N", help="requests that it may have in flight")
    parser.add_argument(
        "--max-inflight-bytes",
        metavar="SIZE",
        help="bytes that their tensors may hold together, such as 1GiB",
    )
    parser.add_argument(
        "--max-requests-per-s",
        metavar="RATE",
        help="requests that it may send in a second; with none, what the server's settings say of "
        "this limit does not hold for it, and so for the others",
    )
    parser.add_argument(
        "--max-flops-per-s",
        metavar="FLOPS",
        help="floating-point operations that it may have computed in a second, such as 1e12",
    )
    parser.add_argument(
        "--scopes",
        metavar="SCOPES",
        help="what it is for, of infer, metrics and admin, with commas; everything without this",
    )
    parser.add_argument(
        "--expires", metavar="TIME", help="until when it is accepted, such as 2027-01-31T12:00:00Z"
    )
    parser.add_argument(
        "--another",
        action="store_true",
        help="make one more key for a name that has one, to take its place: both are accepted "
        "until the older one's line is taken out",
    )
    options = parser.parse_args(argv)
    if not NAME.fullmatch(options.name):
        parser.error(
            f"a name is at most 64 letters, digits, '_', '-' and '.', not {options.name!r}"
        )
    made = new_key()
    given = vars(options)
    words = [
        f"{name}={value}"
        for name, value in given.items()
        if value and (name.startswith("max_") or name in ("scopes", "expires"))
    ]
    line = " ".join([f"{options.name}:{hash_of(made)}", *words])
    try:
        read_line(line)
        _store(line, options.name, options.file, another=options.another)
    except (KeysError, OSError) as error:
        print(f"convgrad key: {error}", file=sys.stderr)
        return 1
    print(made)
    return 0


def _store(line: str, name: str, file: Path | None, *, another: bool) -> None:
    if file is None:
        print(line, file=sys.stderr)
        return
    known = read_keys(file) if file.exists() else {}
    if not another and name in {key.caller.name for key in known.values()}:
        raise KeysError(
            f"{file} has a key named {name}; expected another name, or --another to replace it"
        )
    # Nobody else's business from the start.
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "a") as out:
        out.write(line + "\n")
    read_keys(file)
