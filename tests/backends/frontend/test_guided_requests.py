"""Guided answers of whole requests: refused before anything is computed, or they validate, through
hand-over and further attempts."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from backends.errors import InvalidRequest
from backends.frontend import sampling as client_sampling
from backends.tensors import JSON_SCHEMA
from backends.text import guides
from backends.text.tokenizer import Tokenizer
from tests.backends.frontend.test_request_logprobs import LogprobsClient
from tests.backends.frontend.test_whole_requests import (
    Client,
    Site,
    prompt,
    site,  # noqa: F401  (a fixture)
)
from tests.backends.small_tokenizers import DEMO

TOKENIZER = Tokenizer.load(DEMO)
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 4, "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {
            "type": "array",
            "items": {"enum": ["old", "new", "odd"]},
            "minItems": 2,
            "maxItems": 3,
        },
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
GUIDED: dict[str, Any] = {"guided_json": json.dumps(PERSON), "end_id": TOKENIZER.eos_ids[0]}


def value_of(client: Client) -> Any:
    assert client.reason == "end_id", client.reason
    return json.loads(TOKENIZER.decode(client.ids))


@pytest.mark.slow
@pytest.mark.parametrize("is_stream", [True, False])
def test_an_answer_that_is_not_cut_short_validates(site: Site, is_stream: bool) -> None:  # noqa: F811
    sampled = {"temperature": 1.0, "repetition_penalty": 1.1, "top_p": 0.9}
    for seed, more in enumerate(({}, sampled, sampled | {"top_k": 5}, sampled | {"min_p": 0.1})):
        client = site.ask(
            prompt(seed, 100), stream=is_stream, max_tokens=200, seed=seed, **GUIDED, **more
        )
        client.wait()
        jsonschema.validate(value_of(client), PERSON)
    site.check_idle()


@pytest.mark.slow
def test_guided_and_free_requests_share_a_batch(site: Site) -> None:  # noqa: F811
    alone = site.ask(prompt(9, 100), max_tokens=60).wait()
    free = [site.ask(prompt(9, 100), max_tokens=60) for _ in range(3)]
    guided = [site.ask(prompt(n, 80), max_tokens=200, **GUIDED) for n in range(3)]
    assert [client.wait() for client in free] == [alone] * 3
    for client in guided:
        client.wait()
        jsonschema.validate(value_of(client), PERSON)
    site.check_idle()


@pytest.mark.slow
def test_a_guided_answer_goes_on_where_a_lost_worker_left_it(site: Site) -> None:  # noqa: F811
    """In the middle of its JSON; with its logprobs, and the same tokens as without the loss."""
    ids = prompt(2, 130)
    alone = site.ask(ids, max_tokens=200, **GUIDED).wait()
    client = LogprobsClient()
    site.lose_decode_at(client, 4)
    site.submit(client, ids, max_tokens=200, return_log_probs=True, top_logprobs=2, **GUIDED)
    assert client.wait() == alone
    assert site.calls.models[2:].count("prefill_0") == 2
    jsonschema.validate(value_of(client), PERSON)
    client.check(ids)
    site.check_idle()


def refusal(site: Site, **inputs: Any) -> str:  # noqa: F811
    client = site.ask([30, 31, 32], **{**GUIDED, **inputs})
    with pytest.raises(AssertionError):
        client.wait()
    assert isinstance(client.error, InvalidRequest)
    return str(client.error)


def test_what_cannot_be_followed_is_refused_by_name_before_anybody_is_called(site: Site) -> None:  # noqa: F811
    assert "not at #" in refusal(site, guided_json='{"not": {"type": "string"}}')
    assert "incompatible types" in refusal(site, guided_json='{"type": "null", "const": 1}')
    assert "it is not valid JSON" in refusal(site, guided_json="{")
    assert "guided_json has 70,000 bytes" in refusal(site, guided_json=" " * 70_000)
    assert "end_id -1" in refusal(site, end_id=-1)
    assert "leave out min_tokens" in refusal(site, min_tokens=3)
    assert not site.calls.models
    site.check_idle()


def test_an_empty_schema_text_asks_for_nothing(site: Site) -> None:  # noqa: F811
    plain = site.ask([30, 31, 32]).wait()
    assert site.ask([30, 31, 32], guided_json="").wait() == plain
    site.check_idle()


def test_where_the_frontend_lacks_the_package_it_names_keywords_and_a_worker_says_the_rest(
    site: Site,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(guides, "is_installed", lambda: False)
    assert client_sampling.guide_problems(TOKENIZER, JSON_SCHEMA, "{}", (0,)) == []
    assert "not at #" in refusal(site, guided_json='{"not": {}}')
    assert not site.calls.models
    assert "needs the package llguidance" in refusal(site)
    assert site.calls.models == ["prefill_0"], "nobody else was asked"
    site.pair.wait_until_idle()
