"""What `curl` sends: one answer, a stream, vLLM's way of asking, an error.

The end-to-end test sends the same calls and reads the answers. Not here: what the server does.
"""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from loadtest.clients.environment import ClientFailed

CALL_S_MAX = 60


@dataclass(frozen=True, slots=True)
class Call:
    title: str
    path: str  # after /v2/models/
    body: Mapping[str, Any]


PROMPT = "It is a truth"
CALLS = (
    Call("one answer", "conductor/generate", {"text_input": PROMPT, "max_tokens": 8}),
    Call(
        "one answer of the ensemble, as TensorRT-LLM's documentation asks for it",
        "ensemble/generate",
        {"text_input": PROMPT, "max_tokens": 8, "bad_words": "", "stop_words": ""},
    ),
    Call(
        "a stream of server-sent events",
        "conductor/generate_stream",
        {"text_input": PROMPT, "max_tokens": 3, "stream": True},
    ),
    Call(
        "a stream of the ensemble",
        "ensemble/generate_stream",
        {"text_input": PROMPT, "max_tokens": 3, "stream": True},
    ),
    Call(
        "vLLM's sampling_parameters, whose numbers may be strings",
        "conductor/generate",
        {"text_input": PROMPT, "sampling_parameters": '{"max_tokens": "8", "temperature": "0"}'},
    ),
    Call(
        "as vLLM's backend is asked in its documentation",
        "conductor/generate",
        {"text_input": PROMPT, "parameters": {"stream": False, "temperature": 0, "max_tokens": 8}},
    ),
    Call("a mistake", "conductor/generate", {"text_input": PROMPT, "max_tokens": 0}),
)


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    text: str


def command(call: Call, http: str) -> list[str]:
    url = f"http://{http}/v2/models/{call.path}"
    return ["curl", "-sS", "-N", url, "-d", json.dumps(call.body)]


def send(call: Call, http: str) -> Answer:
    """Raises ClientFailed when curl is not there or had no answer."""
    if shutil.which("curl") is None:
        raise ClientFailed("there is no curl on the PATH; install it (apt-get install curl)")
    limits = ["--max-time", str(CALL_S_MAX), "--write-out", "\n%{http_code}"]
    done = subprocess.run(
        [*command(call, http), *limits], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise ClientFailed(f"curl: {done.stderr.strip()}")
    text, _, status = done.stdout.rpartition("\n")
    return Answer(int(status), text.strip())


def shown(call: Call, http: str) -> str:
    """The command as a person types it."""
    return shlex.join(command(call, http))
