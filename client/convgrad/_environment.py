"""The environment variables of a client."""

from __future__ import annotations

import difflib
import os
import warnings

__all__ = ["server_url", "stated_api_key", "warn_of_misspelt_variables"]

_VARIABLES = ("CONVGRAD_URL", "CONVGRAD_API_KEY")
# Server settings with names similar to the client's.
_OF_THE_SERVER = ("CONVGRAD_API_KEYS",)


def server_url(given: str | None) -> str:
    """Return ``given``, else CONVGRAD_URL, else the address of a local `convgrad serve`."""
    return given or os.environ.get("CONVGRAD_URL") or "http://127.0.0.1:8000"


def stated_api_key() -> str | None:
    """Return CONVGRAD_API_KEY, None if it is missing or empty."""
    return os.environ.get("CONVGRAD_API_KEY") or None


def warn_of_misspelt_variables() -> None:
    """Warn about environment variables that look like misspellings of one that is not set."""
    for variable in os.environ:
        if variable.startswith("CONVGRAD_") and variable not in (*_VARIABLES, *_OF_THE_SERVER):
            for meant in difflib.get_close_matches(variable, _VARIABLES, n=1, cutoff=0.85):
                if meant not in os.environ:
                    warnings.warn(
                        f"the variable {variable} is not read; did you mean {meant}?",
                        RuntimeWarning,
                        stacklevel=4,  # where the client is constructed
                    )
