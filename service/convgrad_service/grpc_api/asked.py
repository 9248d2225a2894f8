"""A ModelInferRequest as it is received: its head first, its tensors straight to their places."""

from __future__ import annotations

import asyncio

import numpy as np

from convgrad.errors import MalformedRequest, ServiceError
from convgrad.wire.shapes import data_view
from convgrad_service.engine.pipeline import SMALL_BYTES, Work
from convgrad_service.grpc_api.call import Message
from convgrad_service.grpc_api.infer_wire import (
    MAX_FIELDS,
    field_at,
    read_infer_head,
    read_infer_request,
    refuse_long_head,
    request_names,
)
from convgrad_service.oip.fields import tensor_in
from convgrad_service.oip.request import InferRequest, Span

__all__ = ["Asked"]

# A field's tag and length.
_FIELD_HEAD_BYTES = 20


class Asked:
    """One request for inference on its way in.

    A small message is read whole. Of a large one, what stands before its raw_input_contents is
    read and each of those is then received to where the problem wants it: on the wire they come
    last, as every protobuf library writes fields in the order of their numbers. ``received`` is
    set once all of it has come.
    """

    def __init__(self, message: Message) -> None:
        self.size = message.size
        self.model = self.id = ""
        self.received = asyncio.Event()
        self._message = message
        self._body: bytes | None = None

    async def head(self) -> InferRequest:
        """What is asked; ``model`` and ``id`` are set as far as they can be read.

        Raises
        ------
        ServiceError
            The message cannot be read, or does not come.
        """
        message = self._message
        if message.size <= SMALL_BYTES or message.encoding is not None:
            self._body = await message.whole()
            self.size = len(self._body)
            rest = self._body
        else:
            rest = await self._before_raw()
        try:
            if self._body is not None:
                request = read_infer_request(self._body)
            else:
                request = read_infer_head(rest, raw_follows=message.left > 0)
        except ServiceError:
            self.model, self.id = request_names(rest)
            raise
        self.model, self.id = request.operation.name, request.id
        return request

    @property
    def whole(self) -> bytes | None:
        """All of a message that came whole and is yet to be filled from."""
        return self._body

    async def fill(self, request: InferRequest, work: Work) -> None:
        """Receive the tensors into the places that ``work`` has for them."""
        spans = {
            tensor.name: tensor
            for tensor in request.inputs
            if self._body is not None and isinstance(tensor.source, Span)
        }
        views = {name: tensor_in(self._body or b"", tensor) for name, tensor in spans.items()}
        spelt = {
            tensor.name: tensor.source
            for tensor in request.inputs
            if isinstance(tensor.source, np.ndarray)
        }
        await work.fill({**views, **spelt})
        if self._body is not None:
            self._body = b""
            return
        for tensor in request.inputs:
            if isinstance(tensor.source, Span):
                await self._raw(tensor.name, tensor.source.size_bytes, work)
        if self._message.left:
            raise MalformedRequest(
                f"{self._message.left:,} bytes follow the {len(request.inputs)} inputs' "
                "raw_input_contents; expected those to end the message"
            )
        self._message.end()

    async def skip(self) -> None:
        """Receive what is left of the message, for the next one's sake."""
        await self._message.drop(self._message.left)
        self._message.end()

    async def _before_raw(self) -> bytes:
        """All fields of the message before the first of raw_input_contents."""
        message = self._message
        kept = bytearray()
        for _ in range(MAX_FIELDS):
            if not message.left:
                return bytes(kept)
            is_raw, value_at, size = field_at(await message.next(_FIELD_HEAD_BYTES), 0)
            if is_raw:
                return bytes(kept)
            refuse_long_head(len(kept) + value_at + size)
            if value_at + size > message.left:
                raise MalformedRequest(
                    f"the message ends within a field: {message.left - value_at:,} of {size:,} "
                    "bytes"
                )
            await message.next(value_at + size)
            kept += message.take(value_at + size)
        raise MalformedRequest(f"the message has more than {MAX_FIELDS} fields")

    async def _raw(self, name: str, size_bytes: int, work: Work) -> None:
        message = self._message
        is_raw, value_at, found = False, 0, 0
        if message.left:
            is_raw, value_at, found = field_at(await message.next(_FIELD_HEAD_BYTES), 0)
        if not is_raw:
            raise MalformedRequest(f"{name}: no data in raw_input_contents")
        if found != size_bytes or value_at + found > message.left:
            raise MalformedRequest(
                f"{name}: its shape and datatype take {size_bytes:,} bytes, got {found:,} of "
                "raw_input_contents"
            )
        message.take(value_at)
        if name in work.inputs:
            await message.into(data_view(work.inputs[name]))
        else:
            await message.drop(size_bytes)
