"""pytest plugin for kernel authors: the fixture ``convgrad_verify`` and layers to test on.

::

    def test_my_kernel(convgrad_verify):
        convgrad_verify(my_kernel, "mb32ic64ih56oc64oh56kh3ph1", operation="conv_bwd_data")

    def test_on_many_layers(convgrad_verify, convgrad_layer):  # pytest --convgrad-suite resnet50
        convgrad_verify(my_kernel, convgrad_layer, operation="conv_bwd_data", batch=1)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from convgrad.check import KernelCheck

__all__ = ["convgrad_verify"]

# Layers used without --convgrad-suite.
_FEW = ("mb2ic16ih14oc32oh14kh3ph1", "mb1ic8ih9oc12oh5kh3sh2ph1", "g8mb2ic8ih10oc8oh10kh5ph2")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--convgrad-url`` and ``--convgrad-suite``."""
    group = parser.getgroup("convgrad", "verification of kernels by convgrad")
    group.addoption(
        "--convgrad-url",
        help="URL of a server that checks the results; by default this process checks them",
    )
    group.addoption(
        "--convgrad-suite",
        help="suite or network over whose layers `convgrad_layer` is parametrized, for example "
        "networks or resnet50",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Refuse a suite that does not exist."""
    name = config.getoption("--convgrad-suite")
    if name is None:
        return
    from convgrad import layers
    from convgrad.errors import MalformedRequest

    try:
        layers.suite(name)
    except MalformedRequest as refused:
        raise pytest.UsageError(f"--convgrad-suite: {refused}") from None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize tests that use ``convgrad_layer`` over the layers."""
    if "convgrad_layer" not in metafunc.fixturenames:
        return
    name = metafunc.config.getoption("--convgrad-suite")
    if name is None:
        metafunc.parametrize("convgrad_layer", _FEW)
        return
    from convgrad import layers

    words = [each.layer.name or layers.text(each.layer) for each in layers.suite(name)]
    metafunc.parametrize("convgrad_layer", words)


@pytest.fixture
def convgrad_verify(request: pytest.FixtureRequest) -> Iterator[Callable[..., KernelCheck]]:
    """Return a function that fails the test unless a kernel is correct.

    It takes the arguments of `convgrad.check.kernel`, but the layer before the operation.
    """
    import convgrad

    url = request.config.getoption("--convgrad-url")
    client = None if url is None else convgrad.Client(url)

    def verify(
        run: Callable[..., Any], layer: str, operation: str = "conv_bwd_data", **options: Any
    ) -> KernelCheck:
        __tracebackhide__ = True
        if "convgrad_layer" in request.fixturenames:
            possible = convgrad.layers.operations_of(convgrad.layers.parse(layer))
            if operation not in possible:
                pytest.skip(f"{operation} does not take the layer {layer}")
        if client is not None:
            options.setdefault("verify", client.verify)
        found = convgrad.check.kernel(run, operation, layer, **options)
        if not found.passed:
            lines = "\n  ".join(found.sentences)
            pytest.fail(f"{operation} of {found.layer} is wrong:\n  {lines}", pytrace=False)
        return found

    try:
        yield verify
    finally:
        if client is not None:
            client.close()
