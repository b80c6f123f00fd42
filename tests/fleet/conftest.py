"""One fleet of three hosts for all tests of this folder; starting it takes some twenty seconds.

Its hosts know each other by keys. MOONCAKE_FLEET_INSECURE=1 runs the same tests without.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from backends.engine.sampling_params import SamplingParams
from backends.engine.torch.torch_engine import TorchEngine
from bench.harness.fleet import Namespaces, why_no_namespaces
from bench.harness.generate import generate
from tests.backends.engine.checkpoints import load_reference
from tests.backends.engine.reference import Reference, greedy
from tests.backends.small_tokenizers import DEMO
from tests.fleet.site import NAMES, B, Fleet, leftovers

LONG_TOKENS = 1_200  # of an answer that something happens to: some two seconds
CHECKED_TOKENS = 150


@pytest.fixture(scope="package")  # then it is gone, and with it this process's keys
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    if reason := why_no_namespaces():
        pytest.skip(reason)
    with Namespaces(NAMES) as namespaces, pytest.MonkeyPatch.context() as patch:
        is_secured = os.environ.get("MOONCAKE_FLEET_INSECURE") != "1"
        fleet = Fleet(namespaces, tmp_path_factory.mktemp("fleet"), is_secured)
        if is_secured:  # this process asks directories too
            patch.setenv("MOONCAKE_KEYS", str(fleet.keys / "a"))
        else:
            patch.setenv("MOONCAKE_INSECURE", "1")
        try:
            fleet.start()
            yield fleet
            statuses = fleet.stop()
        finally:
            fleet.stop()
        assert set(statuses.values()) == {0}, statuses
        assert not leftovers(fleet), leftovers(fleet)


@pytest.fixture(scope="session")
def story() -> list[int]:
    """The prompt of the long answer: three blocks and a bit."""
    return [30 + (n * 37 + n * n) % 1900 for n in range(3 * 64 + 9)]


@pytest.fixture(scope="session")
def reference(story: list[int]) -> Reference:
    """The long answer in one process: all of it from our engine, its beginning from transformers
    too, which takes a minute for the whole."""
    engine = TorchEngine.load(DEMO, 64, B)
    [alone] = generate(engine, [story], SamplingParams(LONG_TOKENS))
    begin = greedy(load_reference(DEMO), story, CHECKED_TOKENS)
    assert begin.compared_tokens == CHECKED_TOKENS, "choose a prompt without near-ties"
    assert list(alone)[:CHECKED_TOKENS] == begin.token_ids
    return Reference(list(alone), LONG_TOKENS)
