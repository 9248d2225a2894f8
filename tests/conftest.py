"""Fixtures for every test: a fresh seed for each run, printed so that a failure can be repeated."""

from __future__ import annotations

import secrets

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, default=None, help="repeat the random inputs of a run")
    parser.addoption("--image", default=None, help="what tests/deploy/build_image.sh has made")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--seed") is None:
        config.option.seed = secrets.randbelow(2**31)


def pytest_report_header(config: pytest.Config) -> str:
    return f"seed: {config.getoption('--seed')} (repeat with --seed)"


@pytest.fixture(scope="session")
def seed(request: pytest.FixtureRequest) -> int:
    """The run's seed: `tests.arrays.rng_for(seed, *names)` makes a generator of it."""
    value: int = request.config.getoption("--seed")
    return value
