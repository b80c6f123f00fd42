"""What every test may use: the random seed and the scenario rewrite switch."""

from __future__ import annotations

import os
import secrets
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

# A busy machine is no failure. Continuous integration judges a change, not its luck: it draws the
# same examples each time, and everybody else draws others.
hypothesis.settings.register_profile(
    "mooncake", deadline=None, derandomize=bool(os.environ.get("CI")), print_blob=True
)
hypothesis.settings.load_profile("mooncake")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, default=None, help="seed of the randomised tests")
    parser.addoption(
        "--rewrite", action="store_true", help="write what scenarios print as their expectation"
    )


def pytest_configure(config: pytest.Config) -> None:
    # A shell lets its background jobs ignore Ctrl-C, and what they start inherits that.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    chosen = config.getoption("--seed")
    shared = getattr(config, "workerinput", {}).get("seed")  # of the process that shares tests out
    given = chosen if shared is None else shared
    config.stash[SEED] = secrets.randbits(31) if given is None else given


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """pytest-xdist starts one more process: all of a run have the same seed."""
    node.workerinput["seed"] = node.config.stash[SEED]


SEED = pytest.StashKey[int]()


def pytest_report_header(config: pytest.Config) -> str:
    return f"seed: {config.stash[SEED]} (repeat with --seed={config.stash[SEED]})"


UNDER_TRITON = "tests/e2e/"
SERVER_FIXTURES = {"etcd", "process", "targets"}  # who asks for one of these starts a server


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if SERVER_FIXTURES.intersection(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.servers)
        if "e2e" in item.path.parts:
            item.add_marker(pytest.mark.e2e)
        if item.get_closest_marker("e2e") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(900))  # the first test waits for its servers too


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """File by file; the first process begins with all that is under Triton, as two cores carry one
    such system, which often waits, and what needs none beside it. The three hosts of `tests/fleet`
    stay together. (The groups of pytest-xdist 3.8 do nothing under pytest 9.2, which keeps ids
    elsewhere.)
    """
    from xdist.scheduler import LoadScopeScheduling

    class OneTriton(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            for folder in (UNDER_TRITON, "tests/fleet/"):
                if nodeid.startswith(folder):
                    return folder
            return nodeid.partition("::")[0]

        def _assign_work_unit(self, node: Any) -> None:
            first = node is self.nodes[0]
            for scope in self.workqueue:  # the longest first
                if (scope == UNDER_TRITON) == first:
                    self.workqueue.move_to_end(scope, last=False)
                    break
            super()._assign_work_unit(node)

    return OneTriton(config, log)


SERVERS = {"mooncake_store.directory", "mooncake_store.node", "tritonserver", "etcd"}
_current: list[pytest.Item] = []


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    _current[:] = [item]
    try:
        return (yield)
    finally:
        _current.clear()


def _refuse_servers(event: str, arguments: tuple[Any, ...]) -> None:
    """`make test-quick` leaves out what starts servers, so whatever does must say so."""
    if event != "subprocess.Popen" or not _current:
        return
    words = {Path(os.fsdecode(word)).name for word in arguments[1]}
    marks = {mark.name for mark in _current[0].iter_markers()}
    if words & SERVERS and not marks & {"servers", "e2e"}:
        raise RuntimeError(f"mark {_current[0].nodeid} `servers`: it starts {words & SERVERS}")


sys.addaudithook(_refuse_servers)


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """The seed of this run; printed in the header and with every failing test."""
    value = request.config.stash[SEED]
    print(f"seed: {value}")
    return value
