"""Reads and writes tensors in .npy, .npz and .safetensors files."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.lib.format import MAGIC_PREFIX
from numpy.typing import NDArray

from convgrad.cli._failures import UsageError
from convgrad.dtypes import DType
from convgrad.errors import MalformedRequest
from convgrad.wire import safetensors

__all__ = ["check_output", "read_tensor", "write_tensors"]

Tensors = Mapping[str, NDArray[Any]]


def read_tensor(name: str, source: str) -> NDArray[Any]:
    """Read the tensor ``name`` from ``FILE`` or ``FILE:KEY``.

    The default key is ``name``, or the file's only entry.
    """
    path, key = _split(source)
    read = _READERS.get(path.suffix)
    if read is None:
        raise UsageError(f"{name}: expected a file {_NAMES}, got {str(path)!r}")
    try:
        tensors = read(path)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, MalformedRequest) as refused:
        reason = getattr(refused, "strerror", None) or refused
        raise UsageError(f"{name}: cannot read {path}: {reason}") from refused
    return _pick(name, tensors, path, key)


def check_output(target: str) -> Path:
    """Return the path of an output file; raise before the request if it cannot be written."""
    path = Path(target)
    if path.suffix not in _WRITERS:
        raise UsageError(f"--output: expected a file {_NAMES}, got {target!r}")
    if not path.parent.is_dir():
        raise UsageError(f"--output: there is no directory {str(path.parent)!r}")
    return path


def write_tensors(tensors: Tensors, path: Path) -> None:
    """Write the tensors; an existing file is replaced only when the new one is complete."""
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        with unfinished.open("wb") as file:
            _WRITERS[path.suffix](tensors, file)
        unfinished.replace(path)
    except OSError as refused:
        raise UsageError(f"--output: cannot write {path}: {refused.strerror}") from refused
    finally:
        unfinished.unlink(missing_ok=True)


def _split(source: str) -> tuple[Path, str | None]:
    # Split at the last colon only after a file extension: paths may contain colons.
    head, colon, key = source.rpartition(":")
    if colon and Path(head).suffix in _READERS:
        return Path(head), key
    return Path(source), None


def _pick(name: str, tensors: Tensors, path: Path, key: str | None) -> NDArray[Any]:
    if key is None:
        key = name if name in tensors or len(tensors) != 1 else next(iter(tensors))
    if key not in tensors:
        found = ", ".join(tensors) or "nothing"
        raise UsageError(f"{name}: {path} has no {key!r}; it has {found}")
    tensor = tensors[key]
    if tensor.dtype.kind == "V" and DType.of(tensor.dtype) is None:
        raise UsageError(
            f"{name}: {path} does not say what its {tensor.dtype.itemsize}-byte items are; "
            "store bfloat16 as .safetensors"
        )
    return tensor


def _read_npy(path: Path) -> Tensors:
    with path.open("rb") as file:
        # NumPy takes other files for pickles, and a renamed .npz for what it is.
        if file.read(len(MAGIC_PREFIX)) != MAGIC_PREFIX:
            raise ValueError("it does not begin as a .npy file does")
        file.seek(0)
        return {"": np.load(file, allow_pickle=False)}


def _read_npz(path: Path) -> Tensors:
    with np.load(path, allow_pickle=False) as archive:
        return {name: archive[name] for name in archive.files}


def _read_safetensors(path: Path) -> Tensors:
    tensors, _ = safetensors.decode(path.read_bytes())
    return tensors


def _write_npy(tensors: Tensors, file: IO[bytes]) -> None:
    if len(tensors) != 1:
        names = ", ".join(tensors)
        raise UsageError(f"--output: .npy holds one tensor, but the answer has {names}; use .npz")
    np.save(file, _with_npy_dtype(next(iter(tensors.values()))))


def _write_npz(tensors: Tensors, file: IO[bytes]) -> None:
    np.savez(
        file,
        allow_pickle=False,
        **{name: _with_npy_dtype(array) for name, array in tensors.items()},
    )


def _write_safetensors(tensors: Tensors, file: IO[bytes]) -> None:
    file.writelines(safetensors.encode(tensors, {}))


def _with_npy_dtype(array: NDArray[Any]) -> NDArray[Any]:
    if DType.of(array.dtype) is DType.BFLOAT16:
        raise UsageError("--output: .npy and .npz cannot hold bfloat16; use .safetensors")
    return array


_READERS: dict[str, Callable[[Path], Tensors]] = {
    ".npy": _read_npy,
    ".npz": _read_npz,
    ".safetensors": _read_safetensors,
}
_WRITERS: dict[str, Callable[[Tensors, IO[bytes]], None]] = {
    ".npy": _write_npy,
    ".npz": _write_npz,
    ".safetensors": _write_safetensors,
}
_NAMES = ".npy, .npz or .safetensors"
