"""Valid names of stored tensors."""

from __future__ import annotations

import re
from typing import Any

from convgrad.errors import MalformedRequest
from convgrad.wire.sentences import shown

__all__ = ["check_stored_name"]

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,127}")


def check_stored_name(name: Any) -> None:
    """Raise MalformedRequest for what cannot be the name of a stored tensor."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise MalformedRequest(
            f"a stored tensor cannot be called {shown(name)}: expected 1 to 128 letters, digits, "
            '"_", "-" and ".", beginning with a letter, a digit or "_"'
        )
