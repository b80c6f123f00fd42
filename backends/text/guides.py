"""Guided decoding: answers that follow a JSON schema, with llguidance.

A compiled grammar is made from the schema and the tokenizer's vocabulary, and cached. Each process
compiles its own, because a grammar cannot be sent. Requests with the same schema wait for the
compilation; requests with another schema do not. The rejection of a schema is cached, too.

A `SchemaGuide` is the grammar matcher of one answer. Its state depends only on the tokens of the
answer. So a worker that resumes an answer, as decode does after prefill, feeds these tokens into a
new guide.

An end id is allowed only where the answer is complete, whichever end ids the request chose. Between
two parts of an answer, one space, or a new line with its indentation, or nothing is allowed.
Without this limit a small model may fill the rest of its context with white space.

llguidance is an optional extra (`guided`). Not here: schemas that are rejected before compilation
(json_schema.py), sampling the tokens (engine/sampling.py).
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from backends.errors import InvalidRequest
from backends.extras import install_line
from backends.text.json_schema import constraints_of, keywords_in, read_schema
from backends.text.schema_size import schema_nodes
from backends.text.tokenizer import Tokenizer

GRAMMARS_MAX = 64  # compiled grammars in the cache
# Weights of all cached grammars in nodes (schema_size.py) of 8 KB: at most 160 MB in a process.
GRAMMARS_NODES_MAX = 20_000
# A weight is a grammar's nodes, plus NODES_OF_ONE, plus one for each BYTES_OF_NODE of its text.
NODES_OF_ONE, BYTES_OF_NODE = 64, 256
STACK_BYTES = 256 * 2**20  # reserved; memory is used only for the depth of the schema
_STACK_SIZE = threading.Lock()  # threading.stack_size holds for all new threads of the process
INDENTATION_MAX = 16
MISSING = (
    "guided_json needs the package llguidance, which this server does not have: "
    f"{install_line('guided')}"
)
OPTIONS: dict[str, Any] = {
    "whitespace_pattern": rf"(\x20|\r?\n[\x20\t]{{0,{INDENTATION_MAX}}})",
    "coerce_one_of": False,
    "lenient": False,
    # Without \\u, because "\\u0061" would be accepted as another property name than "a".
    "json_allowed_escapes": '"\\bfnrt',
}


def is_installed() -> bool:
    return importlib.util.find_spec("llguidance") is not None


class SchemaGuide:
    """The grammar matcher of one answer. Not thread-safe."""

    def __init__(self, matcher: Any, vocabulary: _Vocabulary, end_ids: Sequence[int]) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._end_ids = list(end_ids)
        self._is_over = False  # True after an end id

    def allowed(self) -> NDArray[np.bool_]:
        """Whether each token id is allowed next.

        Raises InvalidRequest if no token is, or if the matcher fails, as for a schema that proves
        too large only during the answer.
        """
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            raise InvalidRequest(f"guided_json: {_first_line(self._matcher.get_error())}")
        tokens = self._vocabulary.tokens
        allowed = np.unpackbits(bits, count=tokens, bitorder="little").view(np.bool_)
        is_complete = bool(allowed[self._vocabulary.eos_ids].any())
        allowed[self._vocabulary.eos_ids] = False
        allowed[self._end_ids] = is_complete
        if not allowed.any():
            raise InvalidRequest("guided_json: the model has no token that continues the answer")
        return allowed

    def advance(self, token_id: int) -> None:
        """Feed the answer's next token into the matcher. Raises InvalidRequest if the grammar does
        not allow the token, or if it follows an end id."""
        if token_id in self._end_ids:
            self._is_over = True
        elif self._is_over or not self._matcher.consume_token(token_id):
            reason = _first_line(self._matcher.get_error())
            raise InvalidRequest(f"guided_json: token {token_id} is not allowed there ({reason})")


class _Vocabulary:
    """The tokenizer in llguidance's form, with as many tokens as there are logits."""

    def __init__(self, tokenizer: Tokenizer, tokens: int) -> None:
        import llguidance

        if not tokenizer.eos_ids:
            raise InvalidRequest("guided_json needs a checkpoint with an end token")
        self.tokens = tokens
        self.eos_ids = [token_id for token_id in tokenizer.eos_ids if token_id < tokens]
        self.tokenizer = llguidance.LLTokenizer(
            tokenizer.to_json(), n_vocab=tokens, eos_token=self.eos_ids
        )


@dataclass(eq=False)
class _Grammar:
    """The compiled grammar of one schema."""

    matcher: Future[Any] = field(default_factory=Future)  # a matcher without tokens, or the error
    nodes: int = NODES_OF_ONE  # its weight in the cache


class Guides:
    """The compiled grammars of one model. Thread-safe."""

    def __init__(self, tokenizer: Callable[[], Tokenizer], vocabulary_tokens: int) -> None:
        """`tokenizer` is called for the first guided request only."""
        self._tokenizer = tokenizer
        self._tokens = vocabulary_tokens
        self._reading = threading.Lock()
        self._vocabulary: _Vocabulary | None = None
        self._lock = threading.Lock()  # guards the cache; not held during compilation
        self._grammars: OrderedDict[bytes, _Grammar] = OrderedDict()  # digest -> grammar, LRU first

    def guide(self, schema: str, end_ids: Sequence[int], output_ids: Sequence[int]) -> SchemaGuide:
        """A guide after these tokens of an answer. A new schema is compiled first: slow.

        Raises InvalidRequest for an unusable schema or token, without llguidance or an end token.
        """
        if not is_installed():
            raise InvalidRequest(MISSING)
        with self._reading:
            if self._vocabulary is None:
                self._vocabulary = _Vocabulary(self._tokenizer(), self._tokens)
        digest = hashlib.sha256(schema.encode("utf-8", "surrogatepass")).digest()
        with self._lock:
            is_new = digest not in self._grammars
            grammar = self._grammars.setdefault(digest, _Grammar())
            self._grammars.move_to_end(digest)
        if is_new:
            self._compile(schema, digest, self._vocabulary, grammar)
        guide = SchemaGuide(grammar.matcher.result().deep_copy(), self._vocabulary, end_ids)
        for token_id in output_ids:
            guide.advance(token_id)
        return guide

    def _compile(
        self, schema: str, digest: bytes, vocabulary: _Vocabulary, grammar: _Grammar
    ) -> None:
        """Compile in a thread with a large stack.

        The compiler recurses into all parts and references of a schema, and a stack overflow would
        kill the process. Errors other than InvalidRequest are not cached.
        """

        def compile_it() -> None:
            try:
                self._weigh(grammar, _nodes_of(schema))
                grammar.matcher.set_result(self._compiled(schema, vocabulary))
            except BaseException as error:  # every error must reach the waiting threads
                fail(error)

        def fail(error: BaseException) -> None:
            with self._lock:
                if not isinstance(error, InvalidRequest) and self._grammars.get(digest) is grammar:
                    del self._grammars[digest]
            grammar.matcher.set_exception(error)

        with _STACK_SIZE:
            before_bytes = threading.stack_size(STACK_BYTES)
            try:
                thread = threading.Thread(target=compile_it, name="grammar", daemon=True)
                thread.start()
            except BaseException as error:  # no memory for the stack
                fail(error)
                return
            finally:
                threading.stack_size(before_bytes)
        thread.join()

    def _weigh(self, grammar: _Grammar, nodes: int) -> None:
        """Set the grammar's weight, and evict the least recently used ones above the limits."""
        with self._lock:
            grammar.nodes = nodes
            total = sum(each.nodes for each in self._grammars.values())
            while len(self._grammars) > 1 and (
                len(self._grammars) > GRAMMARS_MAX or total > GRAMMARS_NODES_MAX
            ):
                # Threads that wait for the evicted grammar hold a reference to it.
                total -= self._grammars.popitem(last=False)[1].nodes

    def _compiled(self, text: str, vocabulary: _Vocabulary) -> Any:
        import llguidance

        schema, problems = read_schema(text)
        if problems:
            raise InvalidRequest([f"guided_json: {problem}" for problem in problems])
        grammar = llguidance.LLMatcher.grammar_from_json_schema(
            json.dumps(constraints_of(schema)), overrides=OPTIONS
        )
        matcher = llguidance.LLMatcher(vocabulary.tokenizer, grammar, log_level=0)
        error = _error_at_first_tokens(matcher)
        if error:
            reason = _first_line(error)
            keywords = sorted(keywords_in(schema))
            raise InvalidRequest(
                f"guided_json cannot be followed: {reason} (its keywords: {', '.join(keywords)})"
            )
        return matcher


def _nodes_of(text: str) -> int:
    """The weight of this schema's grammar in the cache; a rejected schema counts no nodes."""
    schema, problems = read_schema(text)
    nodes = 0 if problems else schema_nodes(schema)
    return NODES_OF_ONE + nodes + len(text) // BYTES_OF_NODE


def _error_at_first_tokens(matcher: Any) -> str:
    """The error of a grammar at its first tokens, where some errors first appear; "" if valid."""
    probe = matcher if matcher.is_error() else matcher.deep_copy()
    if not probe.is_error():
        bits = np.frombuffer(probe.compute_bitmask(), np.uint8)
        allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little"))
        if not probe.is_error() and len(allowed) and probe.consume_token(int(allowed[0])):
            probe.compute_bitmask()
    return str(probe.get_error())


@lru_cache(maxsize=4)
def guides_of(tokenizer: Tokenizer) -> Guides:
    """Guides of a tokenizer without a model, for the frontend's check of schemas."""
    return Guides(lambda: tokenizer, tokenizer.vocabulary_tokens)


def _first_line(error: str) -> str:
    """The error's essential line, without states of the parser."""
    lines = [line.strip() for line in error.strip().splitlines() if line.strip()]
    if not lines:
        return "no answer satisfies it"
    if lines[0].startswith("regex parse error"):
        return f"pattern: {lines[-1]}"
    if "NoExtension" in lines[0]:
        return "no answer satisfies it"
    if lines[0].startswith("lexer error"):
        return f"pattern, format or maxLength: too large ({lines[0]})"
    if lines[0].startswith("oneOf constraints"):
        return "oneOf: its cases are not provably exclusive; use anyOf"
    return lines[0][:200]
