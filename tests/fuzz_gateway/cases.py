"""Cases against a gateway that runs, and what each answer must be.

Whatever is sent, the answer is in OpenAI's shape, its status is one of the table's, and none says
that the server has a defect. `max_tokens` is capped, so that a right request costs little.

Not here: starting a server (__main__.py, tests/e2e).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import hypothesis
import schemathesis
from hypothesis import strategies
from schemathesis import GenerationMode

from backends.statuses import TYPES

TOKENS_MAX = 4
NO_DEFECT = {*TYPES, 200} - {499, 500}
GENERATING = ("/v1/chat/completions", "/v1/completions")
# Route -> its fields that limit the tokens of an answer; the last one is set where all are missing.
TOKEN_LIMITS = {
    **dict.fromkeys(GENERATING, ("max_completion_tokens", "max_tokens")),
    "/v1/responses": ("max_output_tokens",),
    "/v1/messages": ("max_tokens",),
}
BROKEN_STREAMS = (b'data: {"error":{', b"event: response.failed", b"event: error")
S_MAX = 60.0
# Texts that are often an expression or a grammar: the description makes few of them.
PATTERNS = strategies.text("ab.*+?()[]{}|\\^$0,2-é\n", max_size=24)
RULES = strategies.text('ab"|()*+?/[]{}~&x<>%:=\n', max_size=40)
FORMS = strategies.one_of(
    PATTERNS.map(lambda text: {"structured_outputs": {"regex": text}}),
    strategies.lists(PATTERNS, max_size=4).map(lambda texts: {"guided_choice": texts}),
    RULES.map(lambda text: {"guided_grammar": f'start: x {text}\nx: "a"'}),
    RULES.map(lambda text: {"guided_grammar": f'root ::= "a" {text}'}),
    strategies.dictionaries(
        strategies.integers(0, 2100).map(str), strategies.floats(-101, 101), max_size=4
    ).map(lambda biases: {"logit_bias": biases, "return_token_ids": True}),
)


class WrongAnswer(AssertionError):
    """The gateway answered what it never should."""


def fuzz(url: str, key: str, cases: int, seed: int) -> Counter[tuple[str, int]]:
    """How often each route answered with each status; WrongAnswer with the case that breaks it."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json", headers=headers)
    operations = [each.ok() for each in schema.get_all_operations()]
    found: Counter[tuple[str, int]] = Counter()
    bodied = [each for each in operations if each.body]
    for operation in operations:
        has_body = operation in bodied
        share = cases * 0.9 / len(bodied) if has_body else cases * 0.1 / len(operations)
        modes = [GenerationMode.POSITIVE, *([GenerationMode.NEGATIVE] if has_body else [])]
        kinds = [operation.as_strategy(generation_mode=each) for each in modes]
        if operation.path in GENERATING:
            kinds.append(of_a_form(operation))
        sent = strategies.one_of(*kinds)

        def send(case: Any) -> None:
            cap(case, case.operation.path)
            answer = case.call(base_url=url, headers=headers, timeout=S_MAX)
            check(case.operation.path, answer.status_code, answer.content, case)
            found[case.operation.path, answer.status_code] += 1

        run_cases(send, sent, max(2, round(share)), seed)
    return found


def of_a_form(operation: Any) -> Any:
    """Requests that have only a prompt and the form or biases of their answer."""
    prompt: dict[str, Any] = {"prompt": "hi"}
    if "chat" in operation.path:
        prompt = {"messages": [{"role": "user", "content": "hi"}]}
    return FORMS.map(
        lambda form: operation.Case(
            body={**prompt, "cache_salt": "fuzz", **form}, media_type="application/json"
        )
    )


def run_cases(send: Callable[[Any], None], sent: Any, cases: int, seed: int) -> None:
    settings = hypothesis.settings(
        max_examples=cases,
        deadline=None,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
        phases=[hypothesis.Phase.generate],
    )

    def run(case: Any) -> None:
        send(case)

    hypothesis.seed(seed)(settings(hypothesis.given(case=sent)(run)))()


def cap(case: Any, path: str) -> None:
    """Few tokens for what would be answered; what is wrong about them stays wrong."""
    if path in TOKEN_LIMITS and isinstance(case.body, dict):
        *_, last = names = TOKEN_LIMITS[path]
        for name in names:
            value = case.body.get(name)
            if isinstance(value, int) and not isinstance(value, bool) and value > TOKENS_MAX:
                case.body[name] = TOKENS_MAX
        if case.body.get(last) is None:
            case.body[last] = TOKENS_MAX


def check(path: str, status: int, content: bytes, case: Any) -> None:
    said = f"{path} answered {status} {content[:300]!r} to {case.body!r:.500}"
    if status not in NO_DEFECT:
        raise WrongAnswer(said)
    if status != 200:
        try:
            error = json.loads(content)["error"]
        except (ValueError, KeyError, TypeError):
            raise WrongAnswer(said) from None
        if error["type"] != TYPES[status] or not error["message"] or not error["code"]:
            raise WrongAnswer(said)
    elif any(each in content for each in BROKEN_STREAMS):
        raise WrongAnswer(said)  # a stream that broke
