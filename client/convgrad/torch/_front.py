"""Native kernels in front of the overrides of `use`, which repeat earlier calls without Python.

The service's native code registers kernels for ATen's operators through PyTorch's stable C ABI. A
call with shapes that they know is launched in about a microsecond. Any other is passed to an
operator in Python, ``convgrad_aten::…``, which computes it and tells them how to repeat it. See
``inprocess/native/torch_front.cpp``, whose structures are mirrored here.

An exception in that operator reaches the caller as a RuntimeError with its message, because
exceptions do not cross the C ABI.
"""

from __future__ import annotations

import ctypes
import re
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from convgrad._bridges import find_in_process
from convgrad.errors import ConvgradError
from convgrad.torch._local import ALIGNMENT_BYTES, CudaLaunch, is_capturing
from convgrad.torch._prepared import NOTED, Noted
from convgrad.torch._tensors import DTYPES, INDICES

__all__ = ["Front", "install"]

_NAMESPACE = "convgrad_aten"
_POINTER, _I32, _I64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
_U32, _U64 = ctypes.c_uint32, ctypes.c_uint64
# PyTorch's functions, in the order of the structure Torch in the native code.
_FUNCTIONS = (
    "aoti_torch_get_dim",
    "aoti_torch_get_sizes",
    "aoti_torch_get_strides",
    "aoti_torch_get_dtype",
    "aoti_torch_get_layout",
    "aoti_torch_get_device_index",
    "aoti_torch_get_data_ptr",
    "aoti_torch_empty_strided",
    "aoti_torch_new_uninitialized_tensor",
    "aoti_torch_delete_tensor_object",
    "aoti_torch_copy_",
    "torch_list_size",
    "torch_list_get_item",
    "torch_delete_list",
    "torch_delete_stable_ivalue",
    "aoti_torch_call_dispatcher",
    "aoti_torch_get_current_cuda_stream",
    "aoti_torch_check",
    "aoti_torch_cuda_convolution_backward",
)
# Before PyTorch 2.13 the receiver of an optional value frees it by C++'s operator delete.
_DELETE = "_ZdlPv"
_DRIVER_FUNCTIONS = 9
_PROBE = 23  # the number of an operator that is none of ATen's
_MOST_ARGUMENTS, _MOST_INPUTS, _MOST_OUTPUTS, _MOST_DIMS = 16, 8, 3, 5


class _Settings(ctypes.Structure):
    _fields_ = (
        ("driver", _POINTER * _DRIVER_FUNCTIONS),
        ("torch", _POINTER * len(_FUNCTIONS)),
        ("device_type", _I32),
        ("uint8_dtype", _I32),
        ("float32_dtype", _I32),
        ("strided_layout", _I32),
        ("alignment", _U64),
    )


class _Operator(ctypes.Structure):
    _fields_ = (
        ("kinds", ctypes.c_char * (_MOST_ARGUMENTS + 1)),
        ("behind", ctypes.c_char * 64),
        ("results", _U32),
        ("convolves", _U32),
    )


class _Dense(ctypes.Structure):
    _fields_ = (
        ("dim", _I64),
        ("sizes", _I64 * _MOST_DIMS),
        ("strides", _I64 * _MOST_DIMS),
        ("dtype", _I32),
        ("slot", _I32),
    )


class _Entry(ctypes.Structure):
    _fields_ = (
        ("key", _POINTER),
        ("hash", _U64),
        ("words", _U64),
        ("plan", _POINTER),
        ("context", _POINTER),
        ("calls", _U64),
        ("nanoseconds", _U64),
        ("workspace_bytes", _U64),
        ("input_count", _U32),
        ("output_count", _U32),
        ("scattered", _U64),
        ("inputs", _Dense * _MOST_INPUTS),
        ("outputs", _Dense * _MOST_OUTPUTS),
    )


class Front:
    """The native kernels of this process, of which there is one set.

    Parameters
    ----------
    library : CDLL
        The service's native code.
    driver : Structure
        The addresses of CUDA's functions.
    symbols : mapping of str to int
        Addresses to use instead of PyTorch's functions, for tests.
    key : str
        The dispatch key of the operators.

    Raises
    ------
    LookupError
        This PyTorch lacks a function.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        driver: ctypes.Structure,
        key: str = "CUDA",
        symbols: dict[str, int] | None = None,
    ) -> None:
        self._native, self._key = library, key
        self._functions = _functions(symbols or {})
        value = {
            name: self._functions[f"aoti_torch_{name}"]()
            for name in (f"device_type_{key.lower()}", "dtype_uint8", "layout_strided")
        }
        names = {**DTYPES, **INDICES}
        self._dtypes = {
            dtype: self._functions[f"aoti_torch_dtype_{name}"]() for dtype, name in names.items()
        }
        addresses = [
            (symbols or {}).get(name) or ctypes.cast(self._functions[name], _POINTER).value
            for name in _FUNCTIONS
        ]
        settings = _Settings(
            (_POINTER * _DRIVER_FUNCTIONS).from_buffer_copy(driver),
            (_POINTER * len(_FUNCTIONS))(*addresses),
            value[f"device_type_{key.lower()}"],
            value["dtype_uint8"],
            self._dtypes[torch.float32],
            value["layout_strided"],
            ALIGNMENT_BYTES,
        )
        self._native.convgrad_front_settings(ctypes.byref(settings))
        self._native.convgrad_front_operator.restype = _POINTER
        self._native.convgrad_front_choose.argtypes = [_U64]
        self._libraries: list[Any] = []
        self._kept: list[Any] = []
        self._choices: dict[Any, int] = {}

    def register(self, overrides: dict[str, Callable[..., Any]]) -> None:
        """Register a kernel for each operator of ATen's, in front of its override in Python."""
        defined = torch.library.Library(_NAMESPACE, "FRAGMENT")
        handle = _POINTER()
        self._call("aoti_torch_library_init_impl", b"aten", self._key.encode(), b"", 0, handle)
        self._libraries += defined, handle
        for index, (name, override) in enumerate(overrides.items()):
            schema = torch._C._get_schema(f"aten::{name}", "")
            defined.define(re.sub(r"^[\w:]+", name, str(schema)))
            defined.impl(name, self._remembering(override), self._key)
            operator = _Operator(
                "".join(map(_kind, schema.arguments)).encode(),
                f"{_NAMESPACE}::{name}".encode(),
                len(schema.returns),
                name == "convolution_backward",
            )
            kernel = self._native.convgrad_front_operator(index, ctypes.byref(operator))
            self._call("aoti_torch_library_impl", handle, name.encode(), _POINTER(kernel))

    def check(self) -> None:
        """Raise LookupError if this PyTorch passes arguments differently than expected."""
        library, handle, words = (
            torch.library.Library(_NAMESPACE, "FRAGMENT"),
            _POINTER(),
            _POINTER(),
        )
        schema = (
            "(Tensor a, SymInt[]? b, SymInt[] c, bool d, SymInt e, bool[3] f, int? g) -> Tensor"
        )
        library.define(f"probe{schema}")
        self._native.convgrad_front_operator(_PROBE, ctypes.byref(_Operator(b"TLlsslS", b"", 1)))
        self._native.convgrad_front_probe.restype = _POINTER
        kernel = self._native.convgrad_front_probe(ctypes.byref(words))
        self._call("aoti_torch_library_init_impl", _NAMESPACE.encode(), b"CPU", b"", 0, handle)
        self._call("aoti_torch_library_impl", handle, b"probe", _POINTER(kernel))
        self._libraries += library, handle
        tensor = torch.empty(2, 3, dtype=torch.float64)
        torch.ops.convgrad_aten.probe(tensor, [7], [4, 9], True, 5, [True, False, True], None)
        wanted = [2 << 32 | self._dtypes[torch.float64], 2, 3, 3, 1]
        wanted += [1, 1, 7, 2, 4, 9, 1, 5, 3, 1, 0, 1, 0]
        if list((_U64 * len(wanted)).from_address(words.value or 0)) != wanted:
            raise LookupError(f"PyTorch {torch.__version__} passes arguments differently")

    def choose(self, backend: Any, fallback: bool) -> None:
        """Have calls answered as `use(backend, fallback=fallback)` asks."""
        number = 0
        if backend is not None:
            number = self._choices.setdefault((backend, fallback), len(self._choices) + 1)
        self._native.convgrad_front_choose(number)

    def _call(self, name: str, *given: Any) -> None:
        last = given[-1]
        out = isinstance(last, _POINTER) and name.endswith("init_impl")
        if self._functions[name](*given[:-1], ctypes.byref(last) if out else last) != 0:
            raise LookupError(f"{name} failed")

    def _remembering(self, override: Callable[..., Any]) -> Callable[..., Any]:
        def answer(*given: Any) -> Any:
            outer, NOTED.calls = NOTED.calls, []
            try:
                result = override(*given)
                if len(NOTED.calls) == 1:
                    self._remember(given, result, NOTED.calls[0])
            except Exception as error:
                kind = type(error)
                named = "" if kind is RuntimeError else f"{kind.__module__}.{kind.__qualname__}: "
                self._native.convgrad_front_failed(f"{named}{error}".encode()[:4000])
                raise
            finally:
                NOTED.calls = outer
            return result

        return answer

    def _remember(self, given: Sequence[Any], result: Any, noted: Noted) -> None:
        """Let native code answer calls like this one, which Python has answered, from now on."""
        stream = _POINTER()
        if not self._native.convgrad_front_pending(ctypes.byref(stream)):
            return
        kept: list[Any] = []
        entry = _Entry()
        if noted.results is not None:
            runner = noted.runner
            if type(runner) is not CudaLaunch or is_capturing():
                return
            places = {id(each): i for i, each in enumerate(given) if isinstance(each, torch.Tensor)}
            if len(places) < sum(isinstance(each, torch.Tensor) for each in given):
                return  # one tensor in two places: in the next call they may be two
            made = _tuple(result)
            slots = {id(each): index for index, each in enumerate(made)}
            inputs = [places.get(id(noted.given[index]), -1) for index in runner.inputs]
            outputs = [slots.get(id(noted.results[index]), -1) for index in runner.order]
            if -1 in inputs or -1 in outputs or len(inputs) > _MOST_INPUTS:
                return  # the override made it
            read = [noted.tensors[index] for index in runner.inputs]
            tensors = read + [made[index] for index in outputs]
            # Where they might be next time: aligned.
            addresses = [each.data_ptr() // ALIGNMENT_BYTES * ALIGNMENT_BYTES for each in tensors]
            plan = runner.prepared.native(addresses, stream.value or 0)
            if plan is None:
                return
            entry.plan, entry.context = plan.address, plan.context
            entry.workspace_bytes = runner.prepared.workspace_bytes
            entry.input_count, entry.output_count = len(inputs), len(outputs)
            for place, (index, slot) in enumerate(zip(runner.inputs, inputs, strict=True)):
                entry.inputs[place] = self._dense(noted.tensors[index], slot)
                entry.scattered |= (noted.tensors[index] is not noted.given[index]) << place
            for place, slot in enumerate(outputs):
                entry.outputs[place] = self._dense(made[slot], slot)
            kept.append(plan)
        if self._native.convgrad_front_remember(ctypes.byref(entry)):
            self._kept += entry, kept
            noted.counter.native.append(entry)

    def _dense(self, like: torch.Tensor, slot: int) -> _Dense:
        sizes, strides = (_I64 * _MOST_DIMS)(*like.shape), (_I64 * _MOST_DIMS)(*like.stride())
        return _Dense(like.dim(), sizes, strides, self._dtypes[like.dtype], slot)


def install(overrides: dict[str, Callable[..., Any]]) -> Front | None:
    """Put native kernels in front of the overrides for CUDA.

    Warns and returns None where that is not possible.
    """
    try:
        service = find_in_process()
        front = Front(service.native_library(), service.native_driver())
        front.check()
        front.register(overrides)
    except (ConvgradError, LookupError, OSError, RuntimeError) as error:
        text = f"passes are launched from Python, which costs the host more time: {error}"
        warnings.warn(text, RuntimeWarning, stacklevel=5)
        return None
    return front


def _functions(given: dict[str, int]) -> Any:
    """Return PyTorch's C functions by name."""
    folder = Path(torch.__file__).parent / "lib"
    libraries = [
        ctypes.CDLL(str(path))
        for path in (folder / f"libtorch_{part}.so" for part in ("cpu", "cuda", "python"))
        if path.exists()
    ]
    libraries.append(ctypes.CDLL("libstdc++.so.6"))

    class Functions(dict[str, Any]):
        def __missing__(self, name: str) -> Any:
            for library in libraries:
                if hasattr(library, name):
                    self[name] = library[name]
                    return self[name]
            if name == "torch_delete_stable_ivalue":
                return self[_DELETE]
            raise LookupError(f"PyTorch {torch.__version__} has no {name}")

    return Functions(given)


def _kind(argument: Any) -> str:
    """Return how the native code reads an argument."""
    text = str(argument.real_type)
    optional = text.startswith("Optional[")
    text = text.removeprefix("Optional[")
    if text == "Tensor":
        return "T"
    kind = "l" if text.startswith("List[") else "s"
    return kind.upper() if optional else kind


def _tuple(result: Any) -> tuple[Any, ...]:
    return result if isinstance(result, tuple) else (result,)
