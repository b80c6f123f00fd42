"""What every test may use: the random seed and the scenario rewrite switch."""

from __future__ import annotations

import secrets

import hypothesis
import pytest

# A busy machine is no failure.
hypothesis.settings.register_profile("no deadline", deadline=None)
hypothesis.settings.load_profile("no deadline")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, default=None, help="seed of the randomised tests")
    parser.addoption(
        "--rewrite", action="store_true", help="write what scenarios print as their expectation"
    )


def pytest_configure(config: pytest.Config) -> None:
    chosen = config.getoption("--seed")
    config.stash[SEED] = secrets.randbits(31) if chosen is None else chosen


SEED = pytest.StashKey[int]()


def pytest_report_header(config: pytest.Config) -> str:
    return f"seed: {config.stash[SEED]} (repeat with --seed={config.stash[SEED]})"


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """The seed of this run; printed in the header and with every failing test."""
    value = request.config.stash[SEED]
    print(f"seed: {value}")
    return value
