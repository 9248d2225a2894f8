"""One request with leased memory: filling its inputs, computing, and reading its outputs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Hashable, Mapping
from contextlib import suppress
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from convgrad.contract import Report, Request
from convgrad.errors import ServiceError
from convgrad_service.engine.engine import Engine, call_hub
from convgrad_service.engine.memory.arena import Lease
from convgrad_service.engine.memory.tensor_layout import TensorLayout
from convgrad_service.engine.request import SMALL_BYTES, ComputeRequest, blank
from convgrad_service.engine.scheduling.job import (
    Job,
    JobHandle,
    JobResult,
    count_tasks,
)
from convgrad_service.engine.shm.registry import RegionPart
from convgrad_service.engine.shm.stored import TensorStore
from convgrad_service.engine.telemetry.record import Timings

Parts = Mapping[str, RegionPart]
Filler = Callable[[NDArray[Any]], None]
"""Writes a tensor into the array that it is called with."""
Source = NDArray[Any] | Filler

_NO_PARTS: Parts = MappingProxyType({})

# Placeholder for the seconds in a response's text that is to be cached.
_PLACEHOLDER_S = 0.123456789
# Normally one per problem: another kernel is used only if the device changes.
_MAX_TEXTS = 4


class PreparedRequest(NamedTuple):
    """What all requests with the same key share; the pipeline caches it.

    ``parts`` is the shared memory used, in the layout's order. ``texts`` maps the ways in which the
    request was computed to responses' texts, without the seconds; None if it is not cached.
    """

    request: Request
    layout: TensorLayout
    parts: tuple[RegionPart, ...]
    timeout_s: float | None
    transport_data: Any
    texts: dict[Hashable, tuple[bytes, bytes]] | None


class Execution:
    """One request: `fill`, then `compute`, then `end`.

    ``in_thread`` is `Pipeline.in_thread`. ``to_store`` maps the names of outputs to be stored on
    the server to their memory. Arrays and report are made on demand.
    """

    job_result: JobResult
    """How it was computed, once `compute` has returned."""

    def __init__(
        self,
        engine: Engine,
        request: ComputeRequest,
        prepared: PreparedRequest,
        lease: Lease,
        in_thread: Callable[..., Awaitable[None]],
        to_store: Parts = _NO_PARTS,
    ) -> None:
        self.request, self.layout, self.lease = prepared.request, prepared.layout, lease
        self.transport_data = prepared.transport_data
        self.is_stored = False
        self._engine, self._compute_request, self._prepared = engine, request, prepared
        self._in_thread, self._to_store = in_thread, to_store
        layout, regions = prepared.layout, lease.regions
        tasks = 1 if layout.parts == 1 else count_tasks(layout, regions)
        self._job = Job(layout, lease.offset, regions, tasks)

    def input_views(self) -> dict[str, memoryview]:
        """Return the memory of the inputs that are not in shared memory, writable, by name."""
        view, base = self._engine.arena.view, self.lease.offset
        return {
            name: view(base + offset, spec.size_bytes)
            for name, spec, offset, region in self.layout.inputs
            if offset is not None and region is None
        }

    @cached_property
    def inputs(self) -> dict[str, NDArray[Any]]:
        """`input_views` as arrays."""
        return {
            name: self._engine.arena.array(self.lease.offset + offset, spec)
            for name, spec, offset, region in self.layout.inputs
            if offset is not None and region is None
        }

    @cached_property
    def outputs(self) -> dict[str, NDArray[Any]]:
        """The outputs; those in shared memory are `blank`."""
        return {
            name: blank(spec.shape, spec.dtype, name=name)
            if offset is None
            else self._engine.arena.array(self.lease.offset + offset, spec)
            for name, spec, offset, _ in self.layout.outputs
        }

    async def fill(self, sources: Mapping[str, Source], *, body_lease: Lease | None = None) -> None:
        """Write inputs, from arrays or with functions that are called with the array to fill.

        ``body_lease`` holds what they read, if that is in the arena.
        """

        def write() -> None:
            for name, source in sources.items():
                if name not in self.inputs:
                    continue  # given but not needed, such as accumulate with beta = 0
                if callable(source):
                    source(self.inputs[name])
                else:
                    np.copyto(self.inputs[name], source, casting="no")

        small = sum(self.inputs[name].nbytes for name in sources if name in self.inputs)
        await self._in_thread(write, self.lease, body_lease, inline=small <= SMALL_BYTES)

    async def compute(self) -> None:
        """Compute the outputs.

        Cancelling this drops a waiting job, and asks a running one to stop.
        """
        self.job_result = self._try_inline() or await self._compute_by_worker()
        timings = self._compute_request.timings
        timings.flops += self.layout.flops
        timings.compulsory_bytes += self.layout.compulsory_bytes
        if self._to_store:
            owner = self._compute_request.owner
            await call_hub(self._engine, TensorStore.commit, owner, self._to_store)
            self.is_stored = True

    async def end(self) -> None:
        """Release the memory."""
        self.lease.release()
        if self._to_store and not self.is_stored:
            await abandon(self._engine, self._to_store)

    def text(self, encode: Callable[[Report], bytes], number: Callable[[float], bytes]) -> bytes:
        """Return a response's text: ``encode(self.report)``, which holds no output's elements.

        If the request is cached, so is its text, in which only the seconds are replaced; ``number``
        encodes them.
        """
        texts, job_result = self._prepared.texts, self.job_result
        if texts is None:
            return encode(self.report)
        key = self._engine.backend, job_result.kernel, job_result.pieces, job_result.workspace_bytes
        if (found := texts.get(key)) is None:
            if len(texts) >= _MAX_TEXTS:
                texts.clear()
            before, after = encode(self._report(_PLACEHOLDER_S)).split(number(_PLACEHOLDER_S))
            found = texts[key] = before, after
        return number(job_result.compute_s).join(found)

    def _try_inline(self) -> JobResult | None:
        """Compute on the event loop; None if a worker must do it."""
        executor, lease = self._engine.inline_executor, self.lease
        if executor is None or self._to_store or self._job.tasks > 1:
            return None
        began_s = time.monotonic()
        if began_s >= self._compute_request.deadline.at_s:
            return None  # the scheduler refuses it
        job_result = executor.try_run(self.layout, lease.offset, lease.regions)
        if job_result is not None:
            timings = self._compute_request.timings
            timings.add("queue", 0.0, began_s)
            timings.add("compute", time.monotonic() - began_s, began_s)
        return job_result

    async def _compute_by_worker(self) -> JobResult:
        engine, request = self._engine, self._compute_request
        # Taken first: a worker may be done before this coroutine continues.
        submitted_s = time.monotonic()
        handle = engine.submit(self.lease, self._job, request.deadline.at_s)
        if request.submitted is not None:
            request.submitted(handle)
        upload_s = download_s = 0.0
        try:
            # Not cancelled with the caller: it says when the job's memory is free.
            job_result = await asyncio.shield(handle.done)
            upload_s, download_s = job_result.upload_s, job_result.download_s
        except asyncio.CancelledError:
            engine.cancel(handle)
            raise
        finally:
            _add_stages(request.timings, handle, submitted_s, upload_s, download_s)
        if engine.inline_executor is not None:
            engine.inline_executor.learn(self.layout, job_result.compute_s)
        return job_result

    @property
    def report(self) -> Report:
        """How the problem was computed, for the client."""
        return self._report(self.job_result.compute_s)

    def _report(self, compute_s: float) -> Report:
        job_result = self.job_result
        return Report(
            backend=self._engine.backend,
            kernel=job_result.kernel,
            flops=self.layout.flops,
            bytes=self.layout.compulsory_bytes,
            compute_s=compute_s,
            pieces=job_result.pieces,
            workspace_bytes=job_result.workspace_bytes,
        )


def json_seconds(seconds: float) -> bytes:
    """Encode the seconds of `Execution.text` in JSON."""
    return repr(seconds).encode()


async def abandon(engine: Engine, parts: Parts) -> None:
    """Free tensors that were allocated and not committed.

    For handlers of errors: it completes even if the caller is cancelled, and a refusal by the hub,
    which frees them after a while by itself, does not hide the error that is being handled.
    """
    with suppress(ServiceError):
        await asyncio.shield(call_hub(engine, TensorStore.abandon, list(parts.values())))


def _add_stages(
    timings: Timings, handle: JobHandle, submitted_s: float, upload_s: float, download_s: float
) -> None:
    """Add the stages of a job that has ended now."""
    spent_s = time.monotonic() - submitted_s
    # A cancelled job may have started, too.
    waited_s = spent_s if handle.waited_s is None else min(handle.waited_s, spent_s)
    compute_s = max(spent_s - waited_s - upload_s - download_s, 0.0)
    timings.add("queue", waited_s, submitted_s)
    began_s = submitted_s + waited_s
    if upload_s + download_s:
        timings.add("upload", upload_s, began_s)
        timings.add("download", download_s, began_s + upload_s + compute_s)
    timings.add("compute", compute_s, began_s + upload_s)
