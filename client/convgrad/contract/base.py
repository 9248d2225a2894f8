"""`Request`, the base of every request model, and `validate`, which makes requests.

Validation errors are raised as MalformedRequest with one sentence, never as pydantic errors.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, ClassVar, Literal, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticCustomError

from convgrad.contract.fields import Flag, Names, Parsed, TensorType
from convgrad.errors import MalformedRequest
from convgrad.wire.sentences import shown

__all__ = [
    "Parameters",
    "Request",
    "drop_unset",
    "is_tensor",
    "parse_field",
    "refuse_unknown",
    "validate",
]

R = TypeVar("R", bound="Request")


def _null_by_default(schema: dict[str, Any]) -> None:
    """Accept null in JSON, with the meaning of an omitted field."""
    choices = {key: schema.pop(key) for key in ("enum", "type")}
    schema.update(anyOf=[choices, {"type": "null"}], default=None)


class Parameters(BaseModel):
    """An object of a request: its fields are known by name, and no others are let in."""

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_first(cls, fields: Any) -> Any:
        # Checked before pydantic, which would make an error for each of a million unknown fields.
        if isinstance(fields, Mapping) and (sentence := _unknown(cls, fields)) is not None:
            raise PydanticCustomError("refused", "{sentence}", {"sentence": sentence})
        return fields


class Request(Parameters):
    """What every operation's request has in common."""

    operation: ClassVar[str]

    deterministic: Flag = Field(
        default=True,
        description="The same bits for the same request on the same device model.",
    )
    response: Literal["npy", "data", "values"] = Field(
        default="npy",
        description="Form of the tensors in a JSON answer; by default that of the first tensor in "
        "a JSON request, and npy elsewhere.",
        json_schema_extra=_null_by_default,
    )

    stored: Names = Field(
        default_factory=dict,
        json_schema_extra={"default": {}},
        description="Stored tensors to use, by field; in JSON "
        '{"stored": "name"} in place of a tensor says the same.',
    )
    store: Names = Field(
        default_factory=dict,
        json_schema_extra={"default": {}},
        description="Outputs to store on the server instead of sending them, each with the name to "
        "store it under.",
    )

    # Arrays have no single truth value, so requests compare by identity.
    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

    @classmethod
    def tensor_fields(cls) -> tuple[str, ...]:
        """The names of all tensors that the operation takes, required or not."""
        return _tensor_fields(cls)

    @classmethod
    def required_tensor_fields(cls) -> tuple[str, ...]:
        """The names of the required tensors."""
        fields = cls.model_fields
        return tuple(name for name in _tensor_fields(cls) if fields[name].is_required())

    def tensors(self) -> dict[str, np.ndarray[Any, np.dtype[Any]]]:
        """The tensors that were given, by name."""
        given = {name: getattr(self, name) for name in self.tensor_fields()}
        return {name: array for name, array in given.items() if array is not None}

    def parameters(self) -> dict[str, Any]:
        """The parameters that differ from their defaults, as JSON values."""
        names = set(type(self).model_fields) - set(self.tensor_fields())
        return self.model_dump(mode="json", include=names, exclude_defaults=True)


def drop_unset(model: type[Parameters], fields: dict[str, Any]) -> None:
    """Remove optional ``fields`` of several types, such as padding, that are null.

    Generated clients send null for a field that is not set: the OpenAPI document gives these fields
    no default, because some generators turn such defaults into invalid code.
    """
    for name in fields.keys() & model.model_fields.keys():
        field, value = model.model_fields[name], fields[name]
        if isinstance(value, dict):
            if isinstance(field.annotation, type) and issubclass(field.annotation, Parameters):
                drop_unset(field.annotation, value)
        elif value is None and not field.is_required() and _is_choice(field):
            del fields[name]


def _is_choice(field: FieldInfo) -> bool:
    return any(isinstance(each, Parsed) and "oneOf" in each.schema for each in field.metadata)


def validate(request_model: type[R], fields: Mapping[str, Any]) -> R:
    """Make a request from ``fields``: tensors as arrays, parameters as Python values.

    Raises
    ------
    MalformedRequest
        A field is missing, unknown or of the wrong type; the sentence names it, says what was
        expected and what was found.
    """
    try:
        return request_model.model_validate(dict(fields))
    except ValidationError as refused:
        # `shown` bounds the length of the input shown; the number of fields bounds that of errors.
        first = refused.errors(include_url=False)[0]
    raise MalformedRequest(_sentence(request_model, first))


def parse_field(request_model: type[Request], name: str, value: Any) -> Any:
    """Read the value of one field that is a `Parsed`; raises MalformedRequest as `validate`."""
    (parsed,) = (
        item for item in request_model.model_fields[name].metadata if isinstance(item, Parsed)
    )
    try:
        return parsed.parse(value)
    except (ValueError, TypeError, OverflowError):
        raise MalformedRequest(f"{name}: expected {parsed.expected}, got {shown(value)}") from None


def refuse_unknown(request_model: type[Request], names: Iterable[Any]) -> None:
    """Raise MalformedRequest for the first of ``names`` that is not a field of the request."""
    if (sentence := _unknown(request_model, names)) is not None:
        raise MalformedRequest(sentence)


def is_tensor(field: FieldInfo) -> bool:
    """Whether a model's field holds a tensor."""
    return any(isinstance(item, TensorType) for item in field.metadata) or any(
        isinstance(item, TensorType)
        for member in getattr(field.annotation, "__args__", ())
        for item in getattr(member, "__metadata__", ())
    )


@cache
def _tensor_fields(model: type[BaseModel]) -> tuple[str, ...]:
    return tuple(name for name, field in model.model_fields.items() if is_tensor(field))


def _unknown(model: type[BaseModel], names: Iterable[Any]) -> str | None:
    known = model.model_fields
    for name in names:
        if name in known:
            continue
        sentence = f"unknown field {shown(name)}"
        near = difflib.get_close_matches(str(name)[:64], known, n=1)
        if near:
            sentence += f', did you mean "{near[0]}"?'
        listed = sorted(known, key=lambda name: _prominence(known[name]))
        return f"{sentence}; {_title(model)} takes {', '.join(listed)}"
    return None


def _prominence(field: FieldInfo) -> tuple[bool, bool]:
    """Sorts required fields before optional ones, and tensors before parameters."""
    return not field.is_required(), not is_tensor(field)


def _title(model: type[BaseModel]) -> str:
    return model.operation if issubclass(model, Request) else "this object"


# What pydantic's types of errors expect, with their `ctx`.
_EXPECTED = {
    "greater_than": "a number above {gt:g}",
    "greater_than_equal": "at least {ge:g}",
    "less_than_equal": "at most {le:g}",
    "string_too_long": "at most {max_length} characters",
}


def _sentence(model: type[Request], error: ErrorDetails) -> str:
    path = ".".join(str(part) for part in error["loc"])
    found = shown(error["input"])
    match error["type"]:
        case "missing":
            fields = model.model_fields
            needed = [name for name in fields if fields[name].is_required()]
            needed.sort(key=lambda name: _prominence(fields[name]))
            return f'missing field "{path}"; {model.operation} needs {", ".join(needed)}'
        case "refused":
            return f"{path}: {error['msg']}" if path else error["msg"]
        case "literal_error":
            choices = error["ctx"]["expected"].replace("'", '"')
            return f"{path}: expected {choices}, got {found}"
        case "bool_type":
            return f"{path}: expected true or false, got {found}"
        case "model_type" | "model_attributes_type":
            return f"{path}: expected an object, got {found}"
        case kind if kind in _EXPECTED:
            return f"{path}: expected {_EXPECTED[kind].format(**error['ctx'])}, got {found}"
        case _:
            return f"{path}: {error['msg']}, got {found}"
