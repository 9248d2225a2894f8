"""Run a command; report a failure as one sentence and an exit status.

Exit status: 0 success; 1 the server returned an error or could not be reached; 2 the command line,
or a file that it names, is invalid; 130 interrupted.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from convgrad._version import __version__
from convgrad.cli._failures import UsageError
from convgrad.errors import ConvgradError

__all__ = ["main"]

# Modules of this package with `run(argv) -> int`, imported only when needed.
_COMMANDS = {
    "serve": ("_service", "run the server (needs convgrad[service])"),
    "health": ("_health", "check whether a server accepts requests"),
    "call": ("_call", "send one request: tensors from files, results to a file"),
    "bench": ("_bench", "time an operation on a server"),
    "verify": ("_verify", "compare your results with a float64 reference"),
    "time": ("_time", "time a kernel, alone on the server's device"),
    "plan": ("_time", "explain which kernel the server would run"),
    "operations": ("_operations", "list the operations with their inputs and outputs"),
    "layers": ("_layers", "list named layers, or describe one in every notation"),
    "demo": ("_demo", "train a small network with gradients from a server"),
    "kernels": ("_service", "compile or tune the GPU kernels (needs convgrad[service])"),
    "key": ("_service", "make an API key for a server (needs convgrad[service])"),
    "probe": ("_service", "check the server on this machine (needs convgrad[service])"),
}
# Extra arguments for modules that implement several commands.
_KEYWORDS: Mapping[str, Mapping[str, Any]] = {
    name: {"command": name} for name in ("serve", "kernels", "key", "probe", "time", "plan")
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``convgrad`` with these arguments (by default the process's own)."""
    _open_standard_files()
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = _parser()
    if not arguments:
        parser.print_help()
        return 2
    try:
        # The first word selects the command, which parses the rest.
        command: str = parser.parse_args(arguments[:1]).command
        module = importlib.import_module(f"convgrad.cli.{_COMMANDS[command][0]}")
        status: int = module.run(arguments[1:], **_KEYWORDS.get(command, {}))
        sys.stdout.flush()
        return status
    except SystemExit as done:  # raised by argparse
        return done.code if isinstance(done.code, int) else 1
    except UsageError as error:
        return _fail(error, 2)
    except ConvgradError as error:
        return _fail(error, 1)
    except BrokenPipeError:
        # The reader closed the pipe (`convgrad operations | head`): discard buffered output.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 130


def _open_standard_files() -> None:
    """Open the null device as standard files that are closed.

    Otherwise the next socket gets their number, and what a child process prints.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
            os.set_inheritable(number, True)
            mode = "r" if name == "stdin" else "w"
            setattr(sys, name, os.fdopen(number, mode, closefd=False))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="convgrad",
        description="Gradients of convolution and pooling layers, computed by a server.",
        epilog="`convgrad COMMAND --help` describes a command.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"convgrad {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (_, summary) in _COMMANDS.items():
        commands.add_parser(name, help=summary, add_help=False)
    return parser


def _fail(error: Exception, status: int) -> int:
    print(f"convgrad: {error}", file=sys.stderr)
    return status
