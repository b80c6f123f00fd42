"""The calls of a library against a gateway, one after the other, each with its result.

    PYTHONPATH=CHECKOUT python -m bench.clients.openai_calls

It runs in the library's own environment, so it and the modules with the calls import nothing else
of the project. The variable CALLED_SERVER has the server, because a command line must not contain
API keys. Each call is a JSON line of the output.

Not here: starting it and reading its lines (libraries.py).
"""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

VARIABLE = "CALLED_SERVER"
LONG_ANSWER_TOKENS = 7_000  # long enough not to end by itself during a call
PROMPT = "It is a truth universally acknowledged"
MESSAGES: list[Any] = [{"role": "user", "content": PROMPT}]
CALL_S_MAX = 60.0
RETRIES = 10  # of a library's own retries, until it is served


@dataclass(frozen=True, slots=True)
class CalledServer:
    url: str  # with /v1
    model: str
    key: str = "none"  # libraries require one, even if the server has no keys
    single_key: str = ""  # of a tenant that may have one request in flight; "": the server has none
    metered_key: str = ""  # of a tenant that may have one request a minute; "": the server has none
    checkpoint: str = ""  # folder with the tokenizer of the served model; "": unknown

    @property
    def has_keys(self) -> bool:
        return bool(self.single_key and self.metered_key)


Call = Callable[[CalledServer], str]


def run_calls(client: str, calls: Sequence[Call], calls_with_keys: Sequence[Call]) -> None:
    """The first line names the client with its version. `calls_with_keys` need API keys and
    tenants' limits."""
    server = CalledServer(**json.loads(os.environ[VARIABLE]))
    print(json.dumps({"client": client}), flush=True)
    for call in (*calls, *calls_with_keys):
        said: dict[str, str] = {"call": call.__name__, "came": "", "failure": "", "left_out": ""}
        if call in calls_with_keys and not server.has_keys:
            said["left_out"] = "the server has no API keys that this run knows"
        else:
            try:
                said["came"] = call(server)
            except Exception:  # Catch all: the other calls run anyway
                said["failure"] = traceback.format_exc(limit=-3)
        print(json.dumps(said), flush=True)


def raised(kind: type[BaseException], call: Callable[[], object]) -> BaseException:
    """The exception of `call`, which must be exactly of that class."""
    try:
        found = call()
    except kind as error:
        assert type(error) is kind, f"{type(error).__name__}, not {kind.__name__}: {error}"
        return error
    raise AssertionError(f"no {kind.__name__}, but {found!r:.200}")


class BackOff:
    """Records a client's responses; the first rejection ends the request that it has to wait
    for.
    """

    def __init__(self, first: Any) -> None:
        self._first = first
        self.statuses: list[int] = []
        self.waited_s: list[tuple[float, float]] = []  # (Retry-After, actual pause)
        self._rejected: tuple[float, float] | None = None

    def sent(self, _: Any) -> None:
        if self._rejected is not None:
            said_s, at_s = self._rejected
            self.waited_s.append((said_s, time.monotonic() - at_s))
            self._rejected = None

    def answered(self, response: Any) -> None:
        self.statuses.append(response.status_code)
        if response.status_code == 429:
            self._rejected = float(response.headers["retry-after"]), time.monotonic()
            self._first.close()

    async def sent_async(self, request: Any) -> None:
        self.sent(request)

    async def answered_async(self, response: Any) -> None:
        self.answered(response)

    def check(self) -> str:
        """Without the header the package would retry within half a second."""
        assert self.statuses[0] == 429 and self.statuses[-1] == 200, self.statuses
        assert len(self.waited_s) == self.statuses.count(429)
        assert all(waited_s >= said_s >= 1.0 for said_s, waited_s in self.waited_s), self.waited_s
        waits = ", ".join(
            f"told {said:g} s, waited {waited:.2f} s" for said, waited in self.waited_s
        )
        return f"{self.statuses}; {waits}"


def text_of(chunks: list[Any]) -> str:
    """The text of a streamed chat, as both libraries show its events."""
    return "".join(each.choices[0].delta.content or "" for each in chunks if each.choices)
