"""Options for every test: which random inputs a run draws, and how to have others."""

from __future__ import annotations

import secrets

import pytest
from hypothesis import HealthCheck, settings


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, default=None, help="of the random inputs; 0 unless fresh")
    parser.addoption(
        "--fresh", action="store_true", help="draw other random inputs and examples than last time"
    )
    parser.addoption(
        "--part", default="1/1", help="only this part of the tests, such as 2/3: every third one"
    )
    parser.addoption("--image", default=None, help="what tests/deploy/build_image.sh has made")
    parser.addoption(
        "--generators", default=None, help="the environment of deploy/locks/generators.txt"
    )
    parser.addoption(
        "--examples-python", default=None, help="of the environment of deploy/locks/examples.txt"
    )
    parser.addoption("--built-dist", default=None, help="what tests/deploy/build_dist.py has made")


def pytest_configure(config: pytest.Config) -> None:
    """The same inputs each time, so that a change is judged by what it changes.

    New ones are for `--fresh`, which the slow targets pass. No example has a limit of time: a
    machine may be busy.
    """
    fresh = config.getoption("--fresh")
    if config.getoption("--seed") is None:
        config.option.seed = secrets.randbelow(2**31) if fresh else 0
    kept = {} if fresh else {"database": None}
    settings.register_profile(
        "convgrad",
        derandomize=not fresh,
        deadline=None,
        print_blob=True,
        suppress_health_check=[HealthCheck.too_slow],
        **kept,
    )
    settings.load_profile("convgrad")


@pytest.hookimpl(trylast=True)  # after -m and -k have selected
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep a part of the tests, with some of each file."""
    part, parts = map(int, config.getoption("--part").split("/"))
    if parts > 1:
        kept = set(range(part - 1, len(items), parts))
        others = [one for number, one in enumerate(items) if number not in kept]
        config.hook.pytest_deselected(items=others)
        items[:] = items[part - 1 :: parts]


def pytest_report_header(config: pytest.Config) -> str:
    return f"seed: {config.getoption('--seed')} (repeat with --seed)"


@pytest.fixture(scope="session")
def seed(request: pytest.FixtureRequest) -> int:
    """The run's seed; `tests.support.numerics.arrays.rng_for(seed, *names)` makes a generator."""
    value: int = request.config.getoption("--seed")
    return value
