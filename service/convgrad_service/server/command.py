"""``convgrad serve``: settings from the environment and the command line, then a server."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import resource
import socket
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import ByteSize, ValidationError
from pydantic.fields import FieldInfo

from convgrad import _version
from convgrad_service.server.logs import configure_logs
from convgrad_service.server.settings import Settings, log_format_variable

_log = logging.getLogger("convgrad.serve")

# Stored tensors, pipes to the other processes, libraries.
_OTHER_DESCRIPTORS = 512
# With one worker on a CPU, a start fails at 40, in places that cannot say why, and not at 48.
_LEAST_DESCRIPTORS = 64
_ALIASES = {"http_host": "--host", "http_port": "--port"}
_METAVARS = {"bytes": "BYTES", "s": "SECONDS", "count": "N", "FLOP": "FLOPS"}


def setting_fields() -> Iterator[tuple[str, FieldInfo, str]]:
    """Yield each setting's name, field and unit ("" if it has none)."""
    for name, field in Settings.model_fields.items():
        yield name, field, _unit(field)


def markdown_table() -> str:
    """Return the Markdown table of docs/reference/settings.md."""
    rows = ["| variable | default | meaning |", "| --- | --- | --- |"]
    for name, field, unit in setting_fields():
        default = _in_markdown(field.default, unit)
        rows.append(f"| `CONVGRAD_{name.upper()}` | {default} | {field.description} |")
    return "\n".join(rows) + "\n"


def _unit(field: FieldInfo) -> str:
    extra: Any = field.json_schema_extra
    if isinstance(extra, dict) and "unit" in extra:
        return str(extra["unit"])
    # An optional field has its Annotated type among the members of a union.
    for member in getattr(field.annotation, "__args__", ()):
        for item in getattr(member, "__metadata__", ()):
            inner = getattr(item, "json_schema_extra", None)
            if isinstance(inner, dict) and "unit" in inner:
                return str(inner["unit"])
    return ""


def _in_markdown(value: Any, unit: str) -> str:
    if value is None:
        return "unset"
    if isinstance(value, ByteSize):
        return f"`{value.human_readable(separator=' ')}`".replace(".0 ", " ")
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    suffix = f" {unit}" if unit not in ("", "count") else ""
    return f"`{value:g}`{suffix}" if isinstance(value, float) else f"`{value}`{suffix}"


def serve(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGINT or SIGTERM.

    Prints ``convgrad listens on http://HOST:PORT`` on stdout once the server listens, or logs it if
    the log is JSON.

    Returns
    -------
    int
        The exit status: 0, 1 if the server cannot listen, 2 for invalid settings.
    """
    arguments = _parser().parse_args(argv)
    given = {
        name: value
        for name, _, _ in setting_fields()
        if (value := getattr(arguments, name)) is not None
    }
    try:
        settings = Settings(**given)
    except ValidationError as invalid:
        for error in invalid.errors(include_url=False):
            sentence = error["msg"].removeprefix("Value error, ")
            if error["loc"]:
                name = str(error["loc"][0])
                option = f"{_option(name)} (CONVGRAD_{name.upper()})"
                # Sentences of our own already say what was given.
                found = "" if error["type"] == "value_error" else f", got {error['input']!r}"
                sentence = f"{option}: {sentence}{found}"
            _print_error(arguments.log_format or log_format_variable(), sentence)
        return 2
    port_file: Path | None = arguments.port_file
    if port_file is not None and not os.access(port_file.parent, os.W_OK):
        _print_error(settings.log_format, f"--port-file: cannot write {port_file}")
        return 2
    return _run(settings, port_file)


def _run(settings: Settings, port_file: Path | None) -> int:
    import uvloop

    from convgrad.errors import DeviceUnavailable
    from convgrad_service.server.composition import engine_options, prepare_process
    from convgrad_service.server.http_server import listening_socket
    from convgrad_service.server.process_tree import CannotListen, ProcessTree, run_until_signalled
    from convgrad_service.server.tls import TlsError, server_context

    try:
        secure = "s" if server_context(settings, "h2") else ""
    except TlsError as error:
        _print_error(settings.log_format, str(error))
        return 2
    bound: list[socket.socket] = []
    try:
        for port in (settings.http_port, settings.grpc_port):
            bound.append(listening_socket(settings.http_host, port))
    except OSError as error:
        for each in bound:
            each.close()
        _print_error(settings.log_format, f"cannot listen on {settings.http_host}:{port}: {error}")
        return 1
    listening, for_grpc = bound
    for_grpc.close()  # grpcio binds it later, and would not say why it cannot

    prepare_process(settings)
    allowed = _allow_descriptors(settings)
    if allowed < _LEAST_DESCRIPTORS:
        listening.close()
        _print_error(
            settings.log_format,
            f"at most {allowed} files may be open, which is too few to start: at least "
            f"{_LEAST_DESCRIPTORS} are needed (`ulimit -n`)",
        )
        return 1

    def started(grpc_port: int) -> None:
        host, port = listening.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        # Programs should wait for the port file instead of parsing these lines.
        lines = [
            f"convgrad listens on http{secure}://{shown}:{port}",
            f"convgrad listens on grpc{secure}://{shown}:{grpc_port}",
        ]
        if tree.management_port is not None:
            lines.append(
                f"convgrad answers health and metrics on http://{shown}:{tree.management_port}"
            )
        if settings.log_format == "json":
            for line in lines:
                _log.info(line)
        else:
            with contextlib.suppress(OSError):  # as for logs: a full disk must not end a server
                print("\n".join(lines), flush=True)
        if port_file is not None:
            _write_atomically(port_file, f"{port}\n")

    with listening:
        try:
            tree = ProcessTree(settings, listening)
        except OSError as error:
            arena_bytes = engine_options(settings).arena_bytes
            _print_error(
                settings.log_format,
                f"cannot map {arena_bytes:,} bytes of memory for tensors: {error}; "
                "--memory-bytes (CONVGRAD_MEMORY_BYTES) reduces it",
            )
            return 1
        try:
            uvloop.run(run_until_signalled(tree, started))
        except (CannotListen, DeviceUnavailable) as error:
            _print_error(settings.log_format, str(error))
            return 1
        finally:
            if port_file is not None:
                port_file.unlink(missing_ok=True)
    return 0


def _print_error(log_format: str | None, sentence: str) -> None:
    """Print why the server ends; as a log record if the log is JSON, whose lines all are."""
    if log_format == "json":
        configure_logs("error", "json")
        _log.error("%s", sentence)
    else:
        print(f"convgrad serve: {sentence}", file=sys.stderr)


def _allow_descriptors(settings: Settings) -> int:
    """Raise the soft limit of open files to what the settings may need, as far as is allowed.

    Returns how many may be open.
    """
    # HTTP's and gRPC's connections may all come to one process.
    needed = 2 * settings.max_connections + settings.max_shared_regions + _OTHER_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < needed:
        _log.warning(
            "at most %d files may be open, but %d connections to each port may need %d",
            allowed,
            settings.max_connections,
            needed,
        )
    return allowed


def _write_atomically(path: Path, text: str) -> None:
    # Renamed into place, so that nobody reads a partial port number.
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    partial.write_text(text)
    partial.replace(path)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="convgrad serve",
        usage="%(prog)s [options]",
        description="Serve convolution and pooling gradients over HTTP until interrupted.",
        epilog="Every option can also be set by an environment variable: CONVGRAD_ and its long "
        "name in capitals (--http-port: CONVGRAD_HTTP_PORT). The command line takes precedence. "
        "Sizes in bytes may have a unit: 256MiB, 4GB.",
    )
    parser.add_argument("--version", action="version", version=f"convgrad {_version.__version__}")
    parser.add_argument(
        "--port-file",
        type=Path,
        metavar="PATH",
        help="write the port to this file once the server listens (useful with --port 0)",
    )
    for name, field, unit in setting_fields():
        _add_setting(parser, name, field, unit)
    return parser


def _add_setting(parser: argparse.ArgumentParser, name: str, field: FieldInfo, unit: str) -> None:
    names = [_option(name)]
    if name in _ALIASES:
        names.insert(0, _ALIASES[name])
    keywords: dict[str, Any] = {"dest": name, "default": None}
    if field.annotation is bool:
        keywords["action"] = argparse.BooleanOptionalAction
    else:
        # Parsed by pydantic, like the environment, so that both accept the same spellings.
        choices = get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
        word = _METAVARS.get(unit) or _word(name, field.annotation)
        keywords["metavar"] = f"{{{','.join(choices)}}}" if choices else word
    default = "" if field.default is None else f" [{_formatted(field.default)}]"
    keywords["help"] = f"{field.description}{default}".replace("%", "%%")
    parser.add_argument(*names, **keywords)


def _word(name: str, annotation: Any) -> str:
    """Return a word for the value of a setting without a unit."""
    if _is_path(annotation):
        return "PATH"
    return "RATE" if name.endswith("_per_s") else name.rpartition("_")[2].upper()


def _is_path(annotation: Any) -> bool:
    return annotation is Path or any(map(_is_path, get_args(annotation)))


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _formatted(default: Any) -> str:
    readable = getattr(default, "human_readable", None)
    if readable is not None:
        return str(readable(separator="")).replace(".0", "")
    return f"{default:g}" if isinstance(default, float) else str(default)
