"""The page at ``/ui/`` as the server gives it: files, headers, keys; `make test-ui` uses it."""

from __future__ import annotations

import re
from pathlib import Path

import httpx

from convgrad_service.backends.cpu import CpuBackend
from convgrad_service.http_api.app import POLICY
from convgrad_service.security.keys import hash_of, new_key
from tests.perf.page_networks import OUT, networks_json
from tests.support.http_server import LiveServer
from tests.support.oip_server import serving_oip


def test_it_is_where_people_look(live: LiveServer) -> None:
    asked = live.get("/ui")
    assert asked.status_code == 307
    assert asked.headers["location"] == "/ui/"


def test_everything_that_it_names_is_served_under_its_policy(live: LiveServer) -> None:
    page = live.get("/ui/")
    assert page.headers["content-type"].startswith("text/html")
    assert page.headers["cache-control"] == "no-cache"
    # Nothing inline, and nothing from elsewhere: the policy would stop it.
    assert not re.search(r"<style|<script[^>]*>[^<]|style=|\bon\w+=|https?:", page.text)
    named = re.findall(r'(?:src|href)="\./([^"]+)"', page.text)
    assert {name.rpartition(".")[2] for name in named} == {"js", "css"}
    for name in named:
        answer = live.get(f"/ui/{name}")
        assert answer.status_code == 200
        assert "immutable" in answer.headers["cache-control"]
        assert answer.headers["content-security-policy"] == POLICY


def test_nothing_else_of_the_package_is_served(live: LiveServer) -> None:
    for path in ("/ui/../page.py", "/ui/%2e%2e/page.py", "/ui/nothing"):
        assert live.get(path).status_code == 404


def test_its_files_need_no_key_and_what_it_asks_does(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(f"ada:{hash_of(new_key())}")
    with serving_oip(CpuBackend(threads=1), api_keys=tmp_path / "keys") as server:
        assert httpx.get(f"http://{server.http}/ui/").status_code == 200
        assert httpx.get(f"http://{server.http}/layers").status_code == 401


def test_its_networks_are_the_stored_results() -> None:
    assert OUT.read_text(encoding="utf-8") == networks_json()
    served = OUT.parents[2] / "convgrad_service" / "http_api" / "page" / "networks.json"
    assert served.read_bytes() == OUT.read_bytes()
