"""The grammar matcher of one answer in vLLM's scheduler.

vLLM's matcher starts at the first token that vLLM itself generates, and allows the tokenizer's end
token where the answer is complete. `AnswerGrammar` wraps this matcher: it first accepts the given
tokens (given_tokens.py), and allows the request's own end ids instead.

A matcher that fails ends its request with finish reason `error`, and no other request.

Without vLLM this file cannot be imported.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
from vllm.v1.structured_output.backend_types import StructuredOutputGrammar

from backends.engine.vllm.given_tokens import given_tokens

log = logging.getLogger(__name__)
WORD_BITS = 32  # of vLLM's bitmask: bit `id % 32` of word `id // 32` belongs to token `id`
ALL_ALLOWED = -1


class AnswerGrammar(StructuredOutputGrammar):
    def __init__(self, grammar: Any, end_ids: Sequence[int]) -> None:
        """`grammar`: a GuidanceGrammar of vLLM that has accepted no token."""
        self._grammar = grammar
        self._end_ids = frozenset(end_ids)
        self._eos_ids = list(grammar.ll_tokenizer.eos_tokens)
        self._is_over = False  # an end id was accepted
        self._has_failed = False

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        """False: vLLM ends the request with an error."""
        for token_id in tokens:
            if token_id in self._end_ids and not self._has_failed:
                self._is_over = True
            elif self._is_over or not self._accepts(request_id, token_id):
                self._fail(request_id, f"token {token_id} is not allowed next")
        return not self._has_failed

    def _accepts(self, request_id: str, token_id: int) -> bool:
        if self._has_failed or self._grammar.ll_matcher.is_stopped():
            return False
        return bool(self._grammar.accept_tokens(request_id, [token_id]))

    def _fail(self, request_id: str, reason: str) -> None:
        if not self._has_failed:
            log.warning("the answer of %s cannot follow its grammar: %s", request_id, reason)
        self._has_failed = True

    def fill_bitmask(self, bitmask: Any, batch_index: int) -> None:
        """Set the bits of the tokens that may be next. After a failure all may, and the next one is
        rejected."""
        row: Any = bitmask[batch_index].numpy().view(np.uint32)
        if not self._has_failed:
            self._grammar.fill_bitmask(bitmask, batch_index)
            ends = [_take_bit(row, token_id) for token_id in self._eos_ids]
            if self._grammar.ll_matcher.is_error():
                self._fail("a request", self._grammar.ll_matcher.get_error()[:200])
            elif any(ends):  # the answer is complete
                for token_id in self._end_ids:
                    row[token_id // WORD_BITS] |= np.uint32(1 << token_id % WORD_BITS)
            if not row.any():
                self._fail("a request", "the model has no token that continues it")
        if self._has_failed:
            bitmask[batch_index].fill_(ALL_ALLOWED)

    def is_terminated(self) -> bool:
        return self._is_over

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        """For speculative decoding, which is refused (settings.py)."""
        raise NotImplementedError

    def rollback(self, num_tokens: int) -> None:
        """As `validate_tokens`."""
        raise NotImplementedError

    def reset(self) -> None:
        """As `validate_tokens`."""
        raise NotImplementedError


def _take_bit(row: Any, token_id: int) -> bool:
    """Whether the bit of this token was set; it is cleared."""
    word, bit = token_id // WORD_BITS, np.uint32(1 << token_id % WORD_BITS)
    was_set = bool(row[word] & bit)
    row[word] &= ~bit
    return was_set


def follow_answer(request: Any) -> None:
    """Let the matcher of a request of vLLM follow the whole answer. The scheduler calls this when
    the grammar has been compiled. It calls this again after a preemption: then nothing is done."""
    structured = request.structured_output_request
    if structured is None or isinstance(structured.grammar, AnswerGrammar):
        return
    params, given = request.sampling_params, given_tokens(request.sampling_params)
    grammar = AnswerGrammar(structured.grammar, params.stop_token_ids or ())
    if given:
        grammar.accept_tokens(request.request_id, list(request.prompt_token_ids[-given:]))
    structured.grammar = grammar
