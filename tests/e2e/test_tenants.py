"""API keys on the real server: who is believed, whose cache is whose, what a tenant may have.

The tests play the gateway: they read the secret of the launch out of the environment of a process.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from backends.launch_secret import SECRET_VARIABLE
from backends.tenants import tenants_file
from backends.tenants.api_keys import sha256_of
from backends.tenants.proof import prove
from backends.tenants.tenants_file import KeyEntry, TenantEntry, TenantsFile
from tests.e2e.server import Answer, Server, running, wait_until

BLOCK = 64
KEY = "mk-key-of-a"
TENANTS = {
    "a": TenantEntry(salt="salt-of-a"),
    "b": TenantEntry(),
    "slow": TenantEntry(requests_per_minute=2, priority=-1),
    "short": TenantEntry(tokens_per_minute=100),
    "narrow": TenantEntry(requests_in_flight_max=1),
}


class Keyed:
    """A server with API keys, and a gateway's way to it."""

    def __init__(self, server: Server, path: Path) -> None:
        self.server, self.path = server, path
        [triton] = [
            child
            for child in psutil.Process(server.process.pid).children()
            if any("repository" in word and "frontend" in word for word in child.cmdline())
        ]
        self.secret = triton.environ()[SECRET_VARIABLE]

    def write(self, **changes: TenantEntry) -> None:
        keys = [KeyEntry(sha256_of(KEY), "a")]
        tenants_file.write(self.path, TenantsFile(TENANTS | changes, keys))

    def parameters(self, tenant: str, secret: str = "") -> dict[str, Any]:
        proof = prove(tenant, time.time(), secret or self.secret)
        return {"tenant": tenant, "tenant_proof": proof} if tenant else {}

    def ask(self, tenant: str, ids: list[int], tokens: int = 4, **parameters: Any) -> Answer:
        """As the gateway does for this tenant, "": without one; pinned, so that one node has it."""
        pinned = {"prefill_worker": "prefill_0", "decode_worker": "decode_0"}
        said = self.parameters(tenant) | pinned | parameters
        return self.server.ask(input_ids=ids, max_tokens=tokens, end_id=-1, parameters=said)

    def rejection(self, tenant: str, ids: list[int], tokens: int = 4) -> tuple[str, float]:
        """(kind, retry_after_s); ("", 0) of one that was answered."""
        error = self.ask(tenant, ids, tokens).error
        found = re.search(r"rejected kind=(\S+) retry_after_s=([0-9.]+)", error)
        assert found or not error, error
        return (found[1], float(found[2])) if found else ("", 0.0)


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory, state_dir: Path) -> Iterator[Keyed]:
    folder = tmp_path_factory.mktemp("keyed")
    path = folder / "keys.json"
    tenants_file.write(path, TenantsFile(TENANTS, [KeyEntry(sha256_of(KEY), "a")]))
    for server in running(folder, state_dir, {}, ("--api-keys", str(path))):
        yield Keyed(server, path)


def prompt(first: int, blocks: int = 4) -> list[int]:
    """Its own from the first token on, with a token behind the last full block."""
    return [(first * 31 + position * 7) % 900 + 5 for position in range(blocks * BLOCK + 1)]


def test_with_keys_only_a_proven_word_names_a_tenant(keyed: Keyed) -> None:
    ids = prompt(1)
    assert len(keyed.ask("a", ids).output_ids) == 4
    assert len(keyed.ask("", ids).output_ids) == 4, "the default tenant is served"
    stranger = keyed.parameters("a", secret="guessed")
    for parameters in (
        {"tenant": "a"},
        {"tenant_proof": stranger["tenant_proof"]},
        stranger,
        keyed.parameters("b") | {"tenant": "a"},
        keyed.parameters("nobody"),
    ):
        answer = keyed.server.ask(input_ids=ids, max_tokens=4, parameters=parameters)
        assert "forbidden: " in answer.error and not answer.output_ids, parameters
    status, body = keyed.server.post(
        "/v2/models/conductor/generate", {"text_input": "x", "max_tokens": 2, "tenant": "a"}
    )
    assert status == 400 and b"forbidden: parameter tenant is not proven" in body


def test_no_tenant_is_served_what_another_one_has_cached(keyed: Keyed) -> None:
    """Of each order: who asked first has it cached, and nobody else sees a token of that."""
    for first, names in enumerate((("a", "b", ""), ("b", "", "a"), ("", "a", "b"))):
        ids = prompt(10 + first)
        whole = BLOCK * (len(ids) // BLOCK)
        answers = {name: keyed.ask(name, ids) for name in names}
        assert [answer.error for answer in answers.values()] == ["", "", ""]
        assert [answer.cached_tokens for answer in answers.values()] == [0, 0, 0], names
        again = [keyed.ask(name, ids) for name in names]
        assert [answer.cached_tokens for answer in again] == [whole] * 3, "each has its own"
        assert len({tuple(answer.output_ids) for answer in [*answers.values(), *again]}) == 1


def test_a_tenant_gets_its_requests_of_a_minute_and_reads_when_to_come_back(keyed: Keyed) -> None:
    kinds = [keyed.rejection("slow", prompt(30))[0] for _ in range(3)]
    assert kinds == ["", "", "request_rate"]
    kind, retry_s = keyed.rejection("slow", prompt(30))
    assert kind == "request_rate" and 0 < retry_s < 62
    assert keyed.rejection("a", prompt(30))[0] == "", "others have limits of their own"
    keyed.write(slow=TenantEntry(requests_per_minute=100))
    assert keyed.rejection("slow", prompt(30))[0] == "", "an edit counts at the next request"


def test_tokens_are_prompt_and_answer_and_what_was_not_used_comes_back(keyed: Keyed) -> None:
    ids = prompt(40, blocks=0) * 10
    assert keyed.rejection("short", ids, 91) == ("too_large", 0.0)
    [first] = keyed.ask("a", ids, 1).output_ids
    stopped = keyed.server.ask(
        input_ids=ids, max_tokens=90, end_id=first, parameters=keyed.parameters("short")
    )
    assert stopped.finish_reason == "end_id", "it asked for 100 tokens and used 11 at most"
    assert keyed.rejection("short", ids, 70) == ("", 0.0)
    assert keyed.rejection("short", ids, 5)[0] == "token_rate", "91 are used"


def test_a_tenant_has_so_many_in_flight_and_a_place_again_when_an_answer_is_over(
    keyed: Keyed,
) -> None:
    ids = prompt(50)
    parameters = keyed.parameters("narrow")
    stream = keyed.server.stream(
        parameters=parameters, input_ids=ids, max_tokens=2000, end_id=-1, stream=True
    )
    stream.begun(1)
    assert keyed.rejection("narrow", ids) == ("tenant_full", 1.0)
    stream.leave()
    wait_until(lambda: keyed.rejection("narrow", ids)[0] == "", "its place to be free")
    for _ in range(5):
        assert keyed.rejection("narrow", ids)[0] == "", "an answer that was read is over"


def test_a_tenant_that_leaves_the_file_is_refused_from_then_on(keyed: Keyed) -> None:
    keyed.write(late=TenantEntry())
    assert keyed.rejection("late", prompt(60))[0] == ""
    keyed.write()
    assert "forbidden: tenant 'late' is no longer" in keyed.ask("late", prompt(60)).error
    keyed.path.write_text("{")
    assert keyed.rejection("a", prompt(60))[0] == "", "what cannot be read changes nothing"
    keyed.write()


def test_the_metrics_page_has_tenants_of_the_file_and_neither_salts_nor_keys(keyed: Keyed) -> None:
    before = keyed.server.metric("mooncake_tenant_tokens_total", tenant="b", kind="cached")
    ids = prompt(70)
    for _ in range(2):
        assert not keyed.ask("b", ids).error
    cached = BLOCK * (len(ids) // BLOCK)

    def counted() -> float:
        return keyed.server.metric("mooncake_tenant_tokens_total", tenant="b", kind="cached")

    wait_until(lambda: counted() == before + cached, "what of its prompts was cached")
    page = "".join(keyed.server.metrics_pages())
    labels = set(re.findall(r'tenant="([^"]*)"', page))
    assert labels <= {*TENANTS, "default", "late"} and {"a", "b", "default"} <= labels
    for secret in ("salt-of-a", KEY, sha256_of(KEY), keyed.secret):
        assert secret not in page
    refused = keyed.server.metric("mooncake_requests_total", outcome="forbidden")
    assert refused > 0 and 'tenant="nobody"' not in page


def test_no_log_has_a_salt_a_proof_or_a_key(keyed: Keyed) -> None:
    ids = prompt(80)
    assert not keyed.ask("a", ids).error
    log = keyed.server.triton_log()
    assert "decision" in log
    for secret in ("salt-of-a", "tenant_proof", KEY, sha256_of(KEY), keyed.secret):
        assert secret not in log
