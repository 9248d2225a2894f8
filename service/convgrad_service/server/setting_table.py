"""Lists the settings, for the command line, the reference and tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import ByteSize
from pydantic.fields import FieldInfo

from convgrad_service.server.settings import Settings

__all__ = ["markdown_table", "setting_fields"]


def setting_fields() -> Iterator[tuple[str, FieldInfo, str]]:
    """Yield each setting's name, field and unit ("" if it has none)."""
    for name, field in Settings.model_fields.items():
        yield name, field, _unit(field)


def markdown_table() -> str:
    """Return the Markdown table of docs/reference/settings.md."""
    rows = ["| variable | default | meaning |", "| --- | --- | --- |"]
    for name, field, unit in setting_fields():
        default = _formatted(field.default, unit)
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


def _formatted(value: Any, unit: str) -> str:
    if value is None:
        return "unset"
    if isinstance(value, ByteSize):
        return f"`{value.human_readable(separator=' ')}`".replace(".0 ", " ")
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    suffix = f" {unit}" if unit not in ("", "count") else ""
    return f"`{value:g}`{suffix}" if isinstance(value, float) else f"`{value}`{suffix}"
