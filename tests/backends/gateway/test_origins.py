"""Web pages of allowed origins may call the gateway; others may not."""

from __future__ import annotations

import json

import pytest

from backends.gateway.app import PATHS
from backends.gateway.doors import read_origins
from backends.gateway.request.fields import CHAT
from backends.tenants import ApiKeys
from tests.backends.gateway.rig import KEYS, PROMPT, Rig, run

PAGE = "http://localhost:3000"


def from_page(origin: str, **more: str) -> dict[str, str]:
    return {"Origin": origin, "Sec_Fetch_Site": "cross-site", **more}


def test_without_allowed_origins_there_are_no_headers_of_cors() -> None:
    async def check(rig: Rig) -> None:
        answer = await rig.send("POST", PATHS[CHAT], PROMPT[CHAT], Origin=PAGE)
        assert answer.status == 200
        assert not any(name.startswith("access-control") for name in answer.headers)
        answer = await rig.send("POST", PATHS[CHAT], PROMPT[CHAT], **from_page(PAGE))
        assert answer.status == 403 and "--allowed-origins" in answer.error["message"]

    run(check)


def test_pages_of_an_allowed_origin_may_read_answers_and_errors() -> None:
    async def check(rig: Rig) -> None:
        for body, status in ((PROMPT[CHAT], 200), ({"messages": []}, 400)):
            answer = await rig.send("POST", PATHS[CHAT], body, **from_page(PAGE))
            assert answer.status == status
            assert answer.headers["access-control-allow-origin"] == PAGE
            assert "X-Request-Id" in answer.headers["access-control-expose-headers"]
        for other in ("http://localhost:3001", "https://localhost:3000", "null"):
            answer = await rig.send("POST", PATHS[CHAT], PROMPT[CHAT], **from_page(other))
            assert answer.status == 403 and "access-control-allow-origin" not in answer.headers

    run(check, origins=f"https://chat.example.com, {PAGE}/")


def test_a_preflight_is_answered_before_a_key_is_required() -> None:
    async def check(rig: Rig) -> None:
        asked = {
            "Access_Control_Request_Method": "POST",
            "Access_Control_Request_Headers": "authorization,content-type",
        }
        answer = await rig.send("OPTIONS", PATHS[CHAT], **from_page(PAGE, **asked))
        assert answer.status == 200 and answer.headers["access-control-allow-origin"] == PAGE
        assert "authorization" in answer.headers["access-control-allow-headers"].lower()
        assert "POST" in answer.headers["access-control-allow-methods"]
        answer = await rig.send("OPTIONS", PATHS[CHAT], **from_page("http://evil.example", **asked))
        assert answer.status == 400
        assert (await rig.post(CHAT)).status == 401
        rig.key = "key-of-acme"
        assert (await rig.post(CHAT)).status == 200

    run(check, ApiKeys(None, json.dumps(KEYS)), origins=PAGE)


@pytest.mark.parametrize(
    "text", ["localhost:3000", "http://", "http://a/b", "http://u@a", "a b", "http://a?x"]
)
def test_what_is_no_origin_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not an origin"):
        read_origins(f"{PAGE},{text}")


def test_origins_are_compared_without_case() -> None:
    assert read_origins("HTTPS://Chat.Example.com/") == {"https://chat.example.com"}
    assert read_origins(" , ") == frozenset()
