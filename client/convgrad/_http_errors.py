"""httpx's exceptions as convgrad's: one map, and no exception of httpx gets past it."""

from __future__ import annotations

import httpx

from convgrad.errors import ClientError, ClientTimeout, ConnectionFailed, InvalidAnswer

__all__ = ["GRPC_PORT", "HTTPX_ERRORS", "ROOTS", "from_httpx", "no_answer"]

# Found by method resolution order, so a subclass takes its nearest listed ancestor's entry.
HTTPX_ERRORS: dict[type[Exception], type[ClientError]] = {
    httpx.TimeoutException: ClientTimeout,
    # Nothing was sent yet, so nothing is known about the server but that it is out of reach.
    httpx.ConnectTimeout: ConnectionFailed,
    httpx.NetworkError: ConnectionFailed,
    httpx.RemoteProtocolError: ConnectionFailed,
    httpx.ProxyError: ConnectionFailed,
    # The request itself was wrong: a header or a URL that HTTP cannot carry.
    httpx.LocalProtocolError: ClientError,
    httpx.UnsupportedProtocol: ClientError,
    httpx.InvalidURL: ClientError,
    httpx.CookieConflict: ClientError,
    # Only an injected client's hooks make these.
    httpx.StreamError: ClientError,
    httpx.HTTPStatusError: InvalidAnswer,
    httpx.DecodingError: InvalidAnswer,
    httpx.TooManyRedirects: InvalidAnswer,
}

# The roots of httpx's tree: what to catch so that nothing is missed.
ROOTS = (httpx.HTTPError, httpx.InvalidURL, httpx.CookieConflict, httpx.StreamError)


def from_httpx(error: Exception, url: str, request_id: str) -> ClientError:
    """The error of ours for one of httpx's, saying where and what happened."""
    ours = next(
        (HTTPX_ERRORS[cls] for cls in type(error).__mro__ if cls in HTTPX_ERRORS), ClientError
    )
    return ours(no_answer(url, error), request_id=request_id)


def no_answer(url: str, error: Exception) -> str:
    """The sentence for an exception on the way to ``url``, with what may help."""
    reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    hint = ""
    if isinstance(error, ConnectionRefusedError | httpx.ConnectError) and "refused" in reason:
        hint = "; is a server running there? `convgrad serve` starts one"
    elif "WRONG_VERSION_NUMBER" in reason or "RECORD_LAYER_FAILURE" in reason:  # OpenSSL's two
        hint = "; does the server speak TLS? it may be http://, not https://"
    elif isinstance(error, httpx.RemoteProtocolError) and "illegal" in reason:
        hint = f"; {GRPC_PORT}"
    return f"no answer from {url}: {reason}{hint}"


GRPC_PORT = "this may be the server's gRPC port; HTTP has another, 8000 by default"
