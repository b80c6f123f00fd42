"""Sampling parameters of a request, and their limits.

`problems` reports all violated limits, each with a remedy. NaN violates the limit of every number.

Not here: the effect of the parameters on logits (sampling.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from backends.errors import CONTEXT_EXCEEDED
from backends.tensors import GRAMMAR, JSON_SCHEMA, STRUCTURAL_TAG, guide_name
from backends.token_logprobs import NO_LOGPROBS, TOP_LOGPROBS_MAX

SEED_MAX = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15  # distributes positions over all seeds
TEMPERATURE_MAX = 100.0  # at 100, a logit larger by 10 makes a token only 1.1 times as likely
PENALTY_MAX = 2.0  # absolute value of presence_penalty and frequency_penalty, as in OpenAI's API
REPETITION_PENALTY_MIN = 0.01
REPETITION_PENALTY_MAX = 100.0
END_IDS_MAX = 64
STOP_WORDS_MAX = 32
GUIDE_BYTES_MAX = 64 * 1024  # of a JSON schema or a regular expression
GRAMMAR_BYTES_MAX = 16 * 1024
LOGIT_BIASES_MAX = 1024  # as in vLLM
LOGIT_BIAS_MAX = 100.0  # absolute value, as in OpenAI's API
STOP_WORD_BYTES_MAX = 256  # UTF-8 bytes. Text that may begin a stop word is not streamed yet.


@dataclass(frozen=True, slots=True)
class SamplingLimits:
    """Limits of one request, from its prompt and the model."""

    prompt_tokens: int
    context_tokens_max: int  # largest number of prompt and output tokens
    vocabulary_tokens: int  # token ids are in [0, vocabulary_tokens)

    @property
    def output_tokens_max(self) -> int:  # <= 0 if the prompt leaves no room for output
        return self.context_tokens_max - self.prompt_tokens


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling of one request. `problems` checks the ranges below. The defaults are greedy."""

    max_tokens: int  # output tokens; 1 <= max_tokens <= SamplingLimits.output_tokens_max
    min_tokens: int = 0  # least output tokens before an end id or stop word; 0 to max_tokens
    temperature: float = 0.0  # 0 <= temperature <= TEMPERATURE_MAX; 0: greedy
    top_k: int = 0  # >= 0; 0: all tokens, 1: greedy
    top_p: float = 1.0  # 0 < top_p <= 1; 1: off
    min_p: float = 0.0  # 0 <= min_p <= 1; 0: off
    repetition_penalty: float = 1.0  # REPETITION_PENALTY_MIN to REPETITION_PENALTY_MAX; 1: off
    presence_penalty: float = 0.0  # -PENALTY_MAX to PENALTY_MAX; 0: off
    frequency_penalty: float = 0.0  # -PENALTY_MAX to PENALTY_MAX; 0: off
    seed: int = 0  # 0 <= seed <= SEED_MAX; 0 has no special meaning
    end_ids: tuple[int, ...] = ()  # token ids that end the output; (): none
    stop_words: tuple[str, ...] = ()  # texts that end the output
    # Number of best tokens whose logprobs the client gets besides those of the sampled token.
    top_logprobs: int = NO_LOGPROBS
    prompt_logprobs: int = NO_LOGPROBS  # as `top_logprobs`, of the prompt's tokens
    guide: str = ""  # JSON schema, regular expression or grammar of the output; "": none
    guide_kind: str = JSON_SCHEMA  # one of GUIDE_KINDS
    # (token id, number from -LOGIT_BIAS_MAX to LOGIT_BIAS_MAX that is added to its logit)
    logit_bias: tuple[tuple[int, float], ...] = ()
    shows_special: bool = False  # True: special tokens have text, but for end ids

    @property
    def wants_logprobs(self) -> bool:
        return self.top_logprobs != NO_LOGPROBS

    @property
    def scores_prompt(self) -> bool:
        return self.prompt_logprobs != NO_LOGPROBS

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0 or self.top_k == 1

    def of_answer(self, index: int) -> SamplingParams:
        """The parameters of answer `index` of several: seed + index, modulo 2**64."""
        return replace(self, seed=(self.seed + index) & SEED_MAX) if index else self

    def seed_at(self, position: int) -> int:
        """The seed of an engine that draws by itself and begins after `position` output tokens."""
        return (self.seed + position * GOLDEN) & SEED_MAX

    def problems(self, limits: SamplingLimits) -> list[str]:
        """One line for each violated limit; [] if the parameters are valid."""
        guided = _guided(self) if self.guide else ()
        biases = _biases(self, limits) if self.logit_bias else ()
        return [*_length(self, limits), *_numbers(self), *_endings(self, limits), *guided, *biases]


def _length(params: SamplingParams, limits: SamplingLimits) -> Iterator[str]:
    room = limits.output_tokens_max
    if limits.prompt_tokens < 1:
        yield "the prompt has no tokens; send at least one"
    exceeded = f"{CONTEXT_EXCEEDED} {limits.context_tokens_max} tokens. However, "
    if room < 1:
        yield (
            f"{exceeded}the prompt has {limits.prompt_tokens} tokens, which leaves no room for "
            f"output; shorten it to at most {limits.context_tokens_max - 1}"
        )
    elif params.max_tokens < 1:
        yield f"max_tokens is {params.max_tokens}; use 1 to {room}"
    elif params.max_tokens > room:
        yield (
            f"{exceeded}you requested {limits.prompt_tokens + params.max_tokens} tokens "
            f"({limits.prompt_tokens} in the prompt, {params.max_tokens} in the completion); "
            f"shorten the prompt, or use a max_tokens of 1 to {room}"
        )
    if not 0 <= params.min_tokens <= max(params.max_tokens, 0):
        yield f"min_tokens is {params.min_tokens}; use 0 to max_tokens ({params.max_tokens})"


def _numbers(params: SamplingParams) -> Iterator[str]:
    if not 0.0 <= params.temperature <= TEMPERATURE_MAX:
        yield f"temperature is {params.temperature}; use 0 (greedy) to {TEMPERATURE_MAX:g}"
    if params.top_k < 0:
        yield f"top_k is {params.top_k}; use 0 (all tokens) or more"
    if not 0.0 < params.top_p <= 1.0:
        yield f"top_p is {params.top_p}; use a number above 0, up to 1 (off)"
    if not 0.0 <= params.min_p <= 1.0:
        yield f"min_p is {params.min_p}; use 0 (off) to 1"
    if not REPETITION_PENALTY_MIN <= params.repetition_penalty <= REPETITION_PENALTY_MAX:
        yield (
            f"repetition_penalty is {params.repetition_penalty}; use "
            f"{REPETITION_PENALTY_MIN:g} to {REPETITION_PENALTY_MAX:g} (1: off)"
        )
    for name in ("presence_penalty", "frequency_penalty"):
        value = getattr(params, name)
        if math.isnan(value) or abs(value) > PENALTY_MAX:
            yield f"{name} is {value}; use {-PENALTY_MAX:g} to {PENALTY_MAX:g} (0: off)"
    if not 0 <= params.seed <= SEED_MAX:
        yield f"seed is {params.seed}; use 0 to {SEED_MAX}"
    for name in ("top_logprobs", "prompt_logprobs"):
        count = getattr(params, name)
        if count != NO_LOGPROBS and not 0 <= count <= TOP_LOGPROBS_MAX:
            yield f"{name} is {count}; use 0 to {TOP_LOGPROBS_MAX}"


def _guided(params: SamplingParams) -> Iterator[str]:
    name = guide_name(params.guide_kind)
    size_bytes = len(params.guide.encode("utf-8", "surrogatepass"))
    bytes_max = GRAMMAR_BYTES_MAX if params.guide_kind == GRAMMAR else GUIDE_BYTES_MAX
    if size_bytes > bytes_max:
        yield f"{name} has {size_bytes:,} bytes; send at most {bytes_max:,}"
    if params.guide_kind == STRUCTURAL_TAG:
        return  # such an answer may end after any text outside of a call
    if not params.end_ids:
        yield f"{name} needs an end token: send no ignore_eos and no end_id -1, or set end_id"
    if params.min_tokens:
        yield f"{name} determines the end of the output: leave out min_tokens"


def _biases(params: SamplingParams, limits: SamplingLimits) -> Iterator[str]:
    if len(params.logit_bias) > LOGIT_BIASES_MAX:
        yield f"logit_bias has {len(params.logit_bias):,} tokens; send at most {LOGIT_BIASES_MAX:,}"
    for token_id, bias in params.logit_bias[:LOGIT_BIASES_MAX]:
        if not 0 <= token_id < limits.vocabulary_tokens:
            last = limits.vocabulary_tokens - 1
            yield f"logit_bias has token {token_id}, outside the vocabulary; use 0 to {last}"
            return
        if not abs(bias) <= LOGIT_BIAS_MAX:
            most = LOGIT_BIAS_MAX
            yield f"logit_bias of token {token_id} is {bias}; use {-most:g} to {most:g}"
            return


def _endings(params: SamplingParams, limits: SamplingLimits) -> Iterator[str]:
    if len(params.end_ids) > END_IDS_MAX:
        yield f"{len(params.end_ids)} end ids; use at most {END_IDS_MAX}"
    last = limits.vocabulary_tokens - 1
    for token_id in params.end_ids[:END_IDS_MAX]:
        if not 0 <= token_id <= last:
            yield f"end id {token_id} is outside the vocabulary; use 0 to {last}"
    if len(params.stop_words) > STOP_WORDS_MAX:
        yield f"stop_words has {len(params.stop_words)} words; use at most {STOP_WORDS_MAX}"
    for index, word in enumerate(params.stop_words[:STOP_WORDS_MAX]):
        size_bytes = len(word.encode("utf-8", "surrogatepass"))
        if size_bytes == 0:
            yield f"stop_words[{index}] is empty; leave it out"
        elif size_bytes > STOP_WORD_BYTES_MAX:
            name = f"stop_words[{index}], {word[:16]!r}..."
            yield f"{name}, has {size_bytes} bytes; use at most {STOP_WORD_BYTES_MAX}"
