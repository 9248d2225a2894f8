"""A browser, and the servers that it is pointed at."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from convgrad_service.backends.cpu import CpuBackend
from tests.support.oip_server import OipServer, serving_oip

# Without these, Chromium asks its maker's hosts for news at every start.
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Chromium, the distribution's."""
    api = pytest.importorskip("playwright.sync_api", reason="make test-ui installs Playwright")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("Chromium is not installed")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def server() -> Iterator[OipServer]:
    with serving_oip(CpuBackend(threads=1)) as server:
        yield server
