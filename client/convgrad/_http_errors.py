"""Maps every httpx exception to a convgrad error."""

from __future__ import annotations

import urllib.request

import httpx

from convgrad.errors import ClientError, ClientTimeout, ConnectionFailed, InvalidAnswer

__all__ = ["GRPC_PORT", "HTTPX_ERRORS", "MAYBE_TLS", "ROOTS", "from_httpx", "no_answer"]

# Looked up in method resolution order, so a subclass uses the entry of its nearest ancestor.
HTTPX_ERRORS: dict[type[Exception], type[ClientError]] = {
    httpx.TimeoutException: ClientTimeout,
    # Nothing was sent: the server could not be reached.
    httpx.ConnectTimeout: ConnectionFailed,
    httpx.NetworkError: ConnectionFailed,
    httpx.RemoteProtocolError: ConnectionFailed,
    httpx.ProxyError: ConnectionFailed,
    # The request itself was wrong: a header or a URL with characters that HTTP does not allow.
    httpx.LocalProtocolError: ClientError,
    httpx.UnsupportedProtocol: ClientError,
    httpx.InvalidURL: ClientError,
    httpx.CookieConflict: ClientError,
    # Only the hooks of an injected client raise these.
    httpx.StreamError: ClientError,
    httpx.HTTPStatusError: InvalidAnswer,
    httpx.DecodingError: InvalidAnswer,
    httpx.TooManyRedirects: InvalidAnswer,
}

# The base classes of all httpx exceptions.
ROOTS = (httpx.HTTPError, httpx.InvalidURL, httpx.CookieConflict, httpx.StreamError)


def from_httpx(error: Exception, url: str, request_id: str) -> ClientError:
    """Convert an httpx exception to a convgrad error that says what happened and where."""
    ours = next(
        (HTTPX_ERRORS[cls] for cls in type(error).__mro__ if cls in HTTPX_ERRORS), ClientError
    )
    return ours(no_answer(url, error), request_id=request_id)


def no_answer(url: str, error: Exception) -> str:
    """Describe a failure to reach ``url``, with a hint if there is one."""
    reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    hint = ""
    if isinstance(error, httpx.ConnectError | httpx.ProxyError) and (proxy := _proxy(url)):
        hint = f"; the environment sets the proxy {proxy}; to bypass it, add the host to NO_PROXY"
    elif isinstance(error, ConnectionRefusedError | httpx.ConnectError) and "refused" in reason:
        hint = "; is a server running there? `convgrad serve` starts one"
    elif "WRONG_VERSION_NUMBER" in reason or "RECORD_LAYER_FAILURE" in reason:  # OpenSSL's two
        hint = "; does the server speak TLS? it may be http://, not https://"
    elif isinstance(error, httpx.RemoteProtocolError) and "illegal" in reason:
        hint = f"; {GRPC_PORT}"
    elif "without sending a response" in reason and url.startswith("http://"):
        hint = f"; {MAYBE_TLS}"
    return f"no answer from {url}: {reason}{hint}"


def _proxy(url: str) -> str:
    """Return host and port of the proxy that the environment sets for ``url``, or ""."""
    proxies, parsed = urllib.request.getproxies(), httpx.URL(url)
    proxy = proxies.get(parsed.scheme) or proxies.get("all")
    if not proxy or urllib.request.proxy_bypass(parsed.host):
        return ""
    return httpx.URL(proxy if "://" in proxy else f"http://{proxy}").netloc.decode()


GRPC_PORT = "this may be the server's gRPC port; HTTP has another, 8000 by default"
MAYBE_TLS = "if the server speaks TLS, its address begins with https://"
