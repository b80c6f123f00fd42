"""Small routes, slashes at the end of a path, and refusals of several fields at once."""

from __future__ import annotations

from backends.gateway.app import PATHS
from backends.gateway.request.fields import CHAT
from tests.backends.gateway.rig import PROMPT, Rig, run


def test_version_ping_load_and_detokenize() -> None:
    async def check(rig: Rig) -> None:
        assert (await rig.send("GET", "/ping")).json == {"status": "alive"}
        assert (await rig.send("GET", "/version")).json["version"]
        assert (await rig.send("GET", "/load")).json == {"server_load": 0}
        text = "hello world"
        ids = (await rig.send("POST", "/tokenize", {"prompt": text})).json["tokens"]
        answer = await rig.send("POST", "/detokenize", {"tokens": ids})
        assert answer.json["prompt"].removeprefix("<s>").strip() == text
        for wrong in ({}, {"tokens": "x"}, {"tokens": [-1]}, {"tokens": [2**30]}, {"ids": [1]}):
            answer = await rig.send("POST", "/detokenize", wrong)
            assert answer.status == 400 and answer.error["param"] in ("tokens", "ids")

    run(check)


def test_a_slash_at_the_end_of_a_path_has_no_effect() -> None:
    async def check(rig: Rig) -> None:
        assert (await rig.send("GET", "/v1/models/")).json["object"] == "list"
        assert (await rig.send("POST", PATHS[CHAT] + "/", PROMPT[CHAT])).status == 200
        assert (await rig.send("GET", "/nothing/")).status == 404

    run(check)


def test_all_bad_fields_are_refused_at_once_and_counted_by_name() -> None:
    async def check(rig: Rig) -> None:
        answer = await rig.post(CHAT, n=0, audio={}, max_tokens="x", unheard=1, messages=[])
        assert answer.status == 400 and answer.error["param"] == "messages"
        for name in ("messages", "n is 0", "audio", "max_tokens", "unheard"):
            assert name in answer.error["message"]
        counted = rig.gateway.counts.refused_fields
        assert counted == {"messages": 1, "n": 1, "audio": 1, "max_tokens": 1, "other": 1}
        page = (await rig.send("GET", "/metrics")).body.decode()
        assert 'mooncake_gateway_refused_fields_total{field="other"} 1\n' in page

    run(check)
