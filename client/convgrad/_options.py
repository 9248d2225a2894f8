"""Client options and their defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from numbers import Integral, Real
from typing import Any, TypedDict

import httpx

from convgrad._body import WIRES
from convgrad._environment import server_url, stated_api_key, warn_of_misspelt_variables
from convgrad._events import EventHooks, check_event_hooks
from convgrad._retry import Backoff

__all__ = ["OptionChanges", "Options"]


class OptionChanges(TypedDict, total=False):
    """Keyword arguments of `with_options`; each means the same as the parameter of `Client`."""

    timeout: float | None
    connect_timeout: float
    read_timeout: float | None
    max_retries: int
    wire: str
    headers: Mapping[str, str]
    api_key: str | None
    event_hooks: EventHooks
    store: Mapping[str, str]


@dataclass(frozen=True)
class Options:
    """Validated options of a client; the constructor raises ValueError if one is invalid."""

    base_url: str
    timeout: float | None = 60.0
    connect_timeout: float = 10.0
    read_timeout: float | None = None
    max_retries: int = 2
    wire: str = "safetensors"
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)  # may hold a key
    event_hooks: EventHooks = field(default_factory=EventHooks, repr=False)
    store: Mapping[str, str] = field(default_factory=dict)
    backoff: Backoff = field(default_factory=Backoff, repr=False)
    base_path: str = field(init=False, repr=False)

    @classmethod
    def of(
        cls,
        base_url: str | None,
        api_key: str | None,
        headers: Mapping[str, str] | None,
        event_hooks: EventHooks | None,
        **others: Any,
    ) -> Options:
        """Build options from a client's arguments, CONVGRAD_URL and CONVGRAD_API_KEY."""
        warn_of_misspelt_variables()
        lowered = _lowered(headers or {})
        if api_key is None and "authorization" not in lowered:
            api_key = stated_api_key()
        return cls(
            server_url(base_url),
            headers=_with_key(lowered, api_key),
            event_hooks=event_hooks or {},
            **others,
        )

    def __post_init__(self) -> None:
        try:
            url = httpx.URL(self.base_url)
        except httpx.InvalidURL as refused:
            raise ValueError(f"base_url: {refused}") from refused
        # The dataclass is frozen, so derived fields are set like this.
        object.__setattr__(self, "base_path", url.raw_path.decode("ascii").rstrip("/"))
        if url.scheme not in ("http", "https") or not url.host:
            raise ValueError(f"base_url: expected http://… or https://…, got {self.base_url!r}")
        if url.query or url.fragment:
            raise ValueError(f"base_url: expected neither ? nor #, got {self.base_url!r}")
        for name in ("timeout", "connect_timeout", "read_timeout"):
            value = getattr(self, name)
            if value is None and name != "connect_timeout":
                continue
            if not _is_number(value, Real) or not value > 0:
                raise ValueError(f"{name}: expected a positive number of seconds, got {value!r}")
        if not _is_number(self.max_retries, Integral) or self.max_retries < 0:
            raise ValueError(
                f"max_retries: expected a whole number, 0 or more; got {self.max_retries!r}"
            )
        if self.wire not in WIRES:
            raise ValueError(f"wire: expected {' or '.join(WIRES)}, got {self.wire!r}")
        check_event_hooks(self.event_hooks)
        store: Any = self.store
        if not isinstance(store, Mapping):
            raise ValueError(
                f'store: expected names by output, such as {{"grad_input": "g"}}; got {store!r:.80}'
            )

    def changed(self, changes: OptionChanges) -> Options:
        """Return a copy with some options replaced; headers are merged with the existing ones.

        Raises
        ------
        TypeError
            An option does not exist.
        """
        unknown = changes.keys() - OptionChanges.__annotations__.keys()
        if unknown:
            known = ", ".join(OptionChanges.__annotations__)
            raise TypeError(f"with_options has no {min(unknown)!r}; it takes {known}")
        fields: dict[str, Any] = dict(changes)
        headers = {**self.headers, **_lowered(fields.pop("headers", None) or {})}
        fields["headers"] = _with_key(headers, fields.pop("api_key", None))
        for name in fields.keys() & {"event_hooks", "store"}:
            fields[name] = fields[name] or {}
        return replace(self, **fields)


def _is_number(value: Any, kind: type) -> bool:
    # A function, because a type checker believes that callers pass what is declared.
    return isinstance(value, kind)


def _lowered(headers: Mapping[str, str]) -> dict[str, str]:
    return {name.lower(): value for name, value in headers.items()}


def _with_key(headers: dict[str, str], api_key: str | None) -> dict[str, str]:
    return headers if api_key is None else {**headers, "authorization": f"Bearer {api_key}"}
