"""The `decision` output: every decision can be read, with what was predicted and what came."""

from __future__ import annotations

import random

from tests.e2e.server import Server

B = 64
TERMS = {"queue_s", "transfer_s", "prefill_s", "handover_s", "ttft_s", "tbt_s", "decode_sequences"}


def test_a_decision_names_its_candidates_with_their_terms_and_what_came_of_it(
    demo: Server, seed: int
) -> None:
    chance = random.Random(seed)
    prompt = [chance.randrange(16, 2048) for _ in range(8 * B + 5)]
    first = demo.ask(input_ids=prompt, max_tokens=4, end_id=-1, return_decision=True)
    again = demo.ask(input_ids=prompt, max_tokens=4, end_id=-1, return_decision=True)
    assert not first.error and not again.error, (first.error, again.error)
    for answer in (first, again):
        found = answer.decision
        assert (found["policy"], found["admission"]) == ("adaptive", "predictive_lengths")
        assert (found["queue_order"], found["queue_ahead"]) == ("shortest_first", 0)
        assert 0.0 <= found["place_s"] <= 5.0
        assert found["candidates_left_out"] == 0
        pairs = {(one["prefill"], one["decode"]) for one in found["candidates"]}
        assert pairs == {(f"prefill_{p}", f"decode_{d}") for p in (0, 1) for d in (0, 1)}
        verdicts = [one["verdict"] for one in found["candidates"]]
        assert verdicts == ["chosen", "slower", "slower", "slower"]
        chosen = found["candidates"][0]
        assert (chosen["prefill"], chosen["decode"]) == (found["prefill"], found["decode"])
        assert chosen["predicted"] == found["predicted"]
        for one in found["candidates"]:
            terms = one["predicted"]
            assert terms.keys() >= TERMS
            assert terms["ttft_s"] > 0 and terms["tbt_s"] > 0
        assert 0 < found["prefill_s"] < found["ttft_s"]
    hit = {one["prefill"]: one["local_blocks"] for one in again.decision["candidates"]}
    assert max(hit.values()) == 8, "one of the nodes has the prompt now"
    assert again.decision["predicted_cached_tokens"] == again.cached_tokens == 8 * B


def test_who_does_not_ask_for_a_decision_is_not_told(demo: Server) -> None:
    answer = demo.ask(text_input="It is", max_tokens=4, end_id=-1)
    assert not answer.error and not answer.decision
