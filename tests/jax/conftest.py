"""JAX's settings, and a `convgrad.jax.Remote` of a server in a thread."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from convgrad.jax import Backend

# JAX is not a dependency: `make test-jax` installs it outside of the environment.
if find_spec("jax") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    import jax

    jax.config.update("jax_enable_x64", True)
    # Most of the time is XLA's for compiling.
    jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture(scope="session")
def remote() -> Iterator[Backend]:
    from convgrad.jax import Remote
    from convgrad_service.backends.cpu import CpuBackend
    from tests.support.http_server import serving

    with serving(CpuBackend(), log_level="error") as server:
        remote = Remote(server.url)
        yield remote
        remote.close()
