"""Blocks of prompts as the store would have them, computed and saved by the engine under test."""

from __future__ import annotations

from collections.abc import Sequence

from tests.vllm.inside.real_engine import RealVllm


def filled(engine: RealVllm, prompt: Sequence[int], salt: str = "") -> dict[bytes, bytes]:
    """The store after the engine has computed this prompt. Its prefix cache is empty then."""
    store: dict[bytes, bytes] = {}
    pages = engine.stage("fill", prompt, salt=salt)
    engine.ask("fill", prompt, 1, salt=salt or None)
    page_tokens = engine.family.page_tokens
    engine.heard.wait_for("saved", "fill", len(prompt) // page_tokens * page_tokens)
    engine.keep(prompt, pages, store, salt)
    engine.unstage("fill", pages)
    engine.forget()
    engine.new_listener()
    return store


def filled_to_end(engine: RealVllm, prompt: Sequence[int]) -> dict[bytes, bytes]:
    """The same with the partial block, as a prefill worker hands it over."""
    store: dict[bytes, bytes] = {}
    pages, page_tokens = engine.stage_to_end("fill", prompt), engine.family.page_tokens
    engine.ask("fill", prompt, 1)
    engine.heard.wait_for("saved", "fill", -(-len(prompt) // page_tokens) * page_tokens)
    engine.keep(prompt, pages, store)
    engine.unstage("fill", pages)
    engine.forget()
    engine.new_listener()
    return store
