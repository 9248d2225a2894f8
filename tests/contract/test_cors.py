"""Scripts of other origins: nothing unless a setting names them, and then what they need."""

from __future__ import annotations

import httpx

from tests.support.fake_backends import Zeros
from tests.support.http_server import EXAMPLE, JSON, serving

PREFLIGHT = {
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type,x-request-timeout",
}


def preflight(url: str, origin: str) -> httpx.Response:
    return httpx.options(f"{url}/conv_bwd_data", headers={"Origin": origin, **PREFLIGHT})


def test_no_header_is_sent_unless_a_setting_says_so() -> None:
    with serving(Zeros(), log_level="error") as server:
        answer = server.post(headers={"Origin": "https://lab.example"})
        assert answer.status_code == 200
        refused = preflight(server.url, "https://lab.example")
    for found in (answer, refused):
        assert not [name for name in found.headers if name.startswith("access-control")]
    assert refused.status_code == 405


def test_the_origins_that_are_named_may_ask() -> None:
    origins = "https://lab.example, https://other.example"
    with serving(Zeros(), cors_origins=origins, log_level="error") as server:
        for origin in origins.split(", "):
            assert preflight(server.url, origin).status_code == 200
            answer = server.post(EXAMPLE, headers={"Origin": origin, "Content-Type": JSON})
            assert answer.headers["access-control-allow-origin"] == origin
            assert "X-Request-Id" in answer.headers["access-control-expose-headers"]
        assert preflight(server.url, "https://evil.example").status_code == 400
        stranger = server.post(headers={"Origin": "https://evil.example"})
        assert "access-control-allow-origin" not in stranger.headers
        refused = server.post(b"{", headers={"Origin": origin})
        assert refused.status_code == 400
        assert refused.headers["access-control-allow-origin"] == origin
