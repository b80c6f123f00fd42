"""What the connector sends for a request: each message once, and in this order."""

from __future__ import annotations

from typing import Any

import pytest

from backends.engine.connected import messages as m
from tests.backends.engine.connected.connected import prompt_of
from tests.vllm.inside.gates import Sent
from tests.vllm.inside.real_engine import RealVllm
from tests.vllm.inside.stored import filled

LONG = prompt_of(300)


def test_a_loaded_request_sends_each_message_once_in_order(
    engine: RealVllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = filled(engine, LONG)
    sent = Sent(engine, monkeypatch)
    pages = engine.stage("a", LONG, store, loaded_tokens=256)
    engine.ask("a", LONG, 3)
    engine.heard.wait_for("saved", "a", 288)
    engine.unstage("a", pages)
    assert sent.all == [
        m.Staged("a"),
        m.Claimed("a", 0, 256),
        m.Loaded("a", 0),
        m.Saved("a", 0, 288),
        m.Unstaged("a", 2),
        m.Drained("a", 0),
    ]
    engine.check_clean()


def test_saved_tokens_grow_with_each_chunk(
    engine: RealVllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = Sent(engine, monkeypatch)
    prompt = prompt_of(400)  # in chunks of 256 tokens
    pages = engine.stage("a", prompt, more_tokens=40)
    engine.ask("a", prompt, 40)
    engine.heard.wait_for("saved", "a", 416)
    engine.unstage("a", pages)
    assert sent.of(m.Claimed) == [m.Claimed("a", 0, 0)] and not sent.of(m.Loaded)
    saved = [message.tokens for message in sent.all if isinstance(message, m.Saved)]
    assert saved == [256, 384, 416]
    assert sent.all[-2:] == [m.Unstaged("a", 3), m.Drained("a", 0)]
    engine.check_clean()


def test_the_second_call_after_an_allocation_claims_nothing(
    engine: RealVllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = filled(engine, LONG)
    calls: list[int] = []
    update = engine.in_scheduler.update_state_after_alloc

    def noted(request: Any, blocks: Any, tokens: int) -> None:
        calls.append(tokens)
        update(request, blocks, tokens)

    monkeypatch.setattr(engine.in_scheduler, "update_state_after_alloc", noted)
    sent = Sent(engine, monkeypatch)
    pages = engine.stage("a", LONG, store, loaded_tokens=256)
    engine.ask("a", LONG, 3)
    engine.unstage("a", pages)
    assert calls == [256, 0], "vLLM calls otherwise than the connector expects"
    assert sent.of(m.Claimed) == [m.Claimed("a", 0, 256)]
    engine.check_clean()


def test_a_match_without_pages_is_asked_again_and_claimed_once(
    engine: RealVllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = filled(engine, LONG)
    manager = engine.executor.scheduler.kv_cache_manager
    allocate, asked = manager.allocate_slots, []

    def full_at_first(*args: Any, **options: Any) -> Any:
        asked.append(args)
        return None if len(asked) < 4 else allocate(*args, **options)

    sent = Sent(engine, monkeypatch)
    pages = engine.stage("a", LONG, store, loaded_tokens=256)
    with monkeypatch.context() as patch:
        patch.setattr(manager, "allocate_slots", full_at_first)
        request = engine.ask("a", LONG, 3)
    assert engine.output(request) == engine.expected(LONG, 3)
    assert sent.of(m.Claimed) == [m.Claimed("a", 0, 256)]
    assert sent.of(m.Loaded) == [m.Loaded("a", 0)]
    engine.unstage("a", pages)
    engine.check_clean()
