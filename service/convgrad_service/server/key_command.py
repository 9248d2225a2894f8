"""``convgrad key``: create an API key."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from convgrad_service.security.keys import NAME, KeysError, hash_of, new_key, read_keys, read_line


def key(argv: Sequence[str] | None = None) -> int:
    """Create a key; return the exit status, 1 if its name is taken or the file is not writable."""
    parser = argparse.ArgumentParser(
        prog="convgrad key",
        description="Create an API key. The key is printed, and only its hash is written to the "
        "server's key file (CONVGRAD_API_KEYS). To revoke a key, delete its line from the file; a "
        "running server notices changes within a second.",
        allow_abbrev=False,
    )
    parser.add_argument("name", help="name of the key in logs and metrics")
    parser.add_argument(
        "--file",
        type=Path,
        metavar="PATH",
        help="append the hash to this file; by default its line is printed on stderr",
    )
    parser.add_argument("--max-inflight", metavar="N", help="maximum number of requests in flight")
    parser.add_argument(
        "--max-inflight-bytes",
        metavar="SIZE",
        help="maximum total size of their tensors, such as 1GiB",
    )
    parser.add_argument(
        "--max-requests-per-s",
        metavar="RATE",
        help="maximum request rate; 'none' lifts the server's default limit, here and for the "
        "other limits",
    )
    parser.add_argument(
        "--max-flops-per-s",
        metavar="FLOPS",
        help="maximum floating-point operations per second, on average, such as 1e12",
    )
    parser.add_argument(
        "--scopes",
        metavar="SCOPES",
        help="comma-separated list of infer, metrics and admin; default: all",
    )
    parser.add_argument(
        "--expires", metavar="TIME", help="time of expiry, such as 2027-01-31T12:00:00Z"
    )
    parser.add_argument(
        "--another",
        action="store_true",
        help="create a second key of an existing name, to rotate it: both are accepted until you "
        "delete the older one's line",
    )
    options = parser.parse_args(argv)
    if not NAME.fullmatch(options.name):
        parser.error(
            f"a name is at most 64 letters, digits, '_', '-' and '.', not {options.name!r}"
        )
    created = new_key()
    fields = [
        f"{name}={value}"
        for name, value in vars(options).items()
        if value and (name.startswith("max_") or name in ("scopes", "expires"))
    ]
    line = " ".join([f"{options.name}:{hash_of(created)}", *fields])
    try:
        read_line(line)
        _store(line, options.name, options.file, another=options.another)
    except (KeysError, OSError) as error:
        print(f"convgrad key: {error}", file=sys.stderr)
        return 1
    print(created)
    return 0


def _store(line: str, name: str, file: Path | None, *, another: bool) -> None:
    if file is None:
        print(line, file=sys.stderr)
        return
    existing = read_keys(file) if file.exists() else {}
    # An editor may have left the last line without its end.
    text = file.read_bytes() if file.exists() else b""
    start = "" if text.endswith(b"\n") or not text else "\n"
    if not another and name in {key.caller.name for key in existing.values()}:
        raise KeysError(
            f"{file} has a key named {name}; expected another name, or --another to replace it"
        )
    # Created with mode 0600.
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "a") as out:
        out.write(f"{start}{line}\n")
    read_keys(file)
