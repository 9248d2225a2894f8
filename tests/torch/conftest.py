"""Both backends of `convgrad.torch`: one in this process, one that asks a server in a thread."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from convgrad.torch import Backend

# PyTorch is no dependency: `make test-torch` installs it aside.
collect_ignore_glob = ["test_*.py"] if find_spec("torch") is None else []


@pytest.fixture(scope="session")
def server_url() -> Iterator[str]:
    # Here, so that tests of `Local` alone need none of the server's packages.
    from convgrad_service.backends.cpu import CpuBackend
    from tests.support.http_server import serving

    with serving(CpuBackend(), log_level="error") as server:
        yield server.url


@pytest.fixture(scope="session", params=["local", "remote"])
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    from convgrad.torch import Local, Remote

    if request.param == "local":
        yield Local()
        return
    remote = Remote(request.getfixturevalue("server_url"))
    yield remote
    remote.close()
