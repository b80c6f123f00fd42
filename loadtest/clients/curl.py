"""What `curl` sends: one answer, a stream, vLLM's way of asking, an error; and its own TTFT.

The end-to-end test sends the same calls and reads the answers. curl's `time_starttransfer` is its
TTFT: Triton sends no byte of a stream before the first message. Not here: what the server does.
"""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from loadtest.clients.agreement import ClientLoad, ClientReport, one_after_another
from loadtest.clients.environment import ClientFailed

NAME = "curl"
CALL_S_MAX = 60


@dataclass(frozen=True, slots=True)
class CurlCall:
    title: str
    path: str  # after /v2/models/
    body: Mapping[str, Any]


PROMPT = "It is a truth"
CALLS = (
    CurlCall("one answer", "conductor/generate", {"text_input": PROMPT, "max_tokens": 8}),
    CurlCall(
        "one answer of the ensemble, as TensorRT-LLM's documentation asks for it",
        "ensemble/generate",
        {"text_input": PROMPT, "max_tokens": 8, "bad_words": "", "stop_words": ""},
    ),
    CurlCall(
        "a stream of server-sent events",
        "conductor/generate_stream",
        {"text_input": PROMPT, "max_tokens": 3, "stream": True},
    ),
    CurlCall(
        "a stream of the ensemble",
        "ensemble/generate_stream",
        {"text_input": PROMPT, "max_tokens": 3, "stream": True},
    ),
    CurlCall(
        "vLLM's sampling_parameters, whose numbers may be strings",
        "conductor/generate",
        {"text_input": PROMPT, "sampling_parameters": '{"max_tokens": "8", "temperature": "0"}'},
    ),
    CurlCall(
        "as vLLM's backend is asked in its documentation",
        "conductor/generate",
        {"text_input": PROMPT, "parameters": {"stream": False, "temperature": 0, "max_tokens": 8}},
    ),
    CurlCall("a mistake", "conductor/generate", {"text_input": PROMPT, "max_tokens": 0}),
)


@dataclass(frozen=True, slots=True)
class CurlAnswer:
    status: int
    first_byte_s: float
    text: str


def command(call: CurlCall, http: str) -> list[str]:
    url = f"http://{http}/v2/models/{call.path}"
    return [NAME, "-sS", "-N", url, "-d", json.dumps(call.body)]


def send(call: CurlCall, http: str) -> CurlAnswer:
    """Raises ClientFailed when curl is not there or had no answer."""
    if shutil.which(NAME) is None:
        raise ClientFailed("there is no curl on the PATH; install it (apt-get install curl)")
    options = ["--max-time", str(CALL_S_MAX), "--write-out", "\n%{http_code} %{time_starttransfer}"]
    done = subprocess.run(
        [*command(call, http), *options], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise ClientFailed(f"curl: {done.stderr.strip()}")
    text, _, last = done.stdout.rpartition("\n")
    status, first_byte_s = last.split()
    return CurlAnswer(int(status), float(first_byte_s), text.strip())


def shown(call: CurlCall, http: str) -> str:
    """The command as a person types it."""
    return shlex.join(command(call, http))


def run(load: ClientLoad, model: str) -> ClientReport:
    """Fresh prompts, one after the other, each a process of its own; raises ClientFailed."""

    def ttft_s(prompt: str) -> float:
        body = {
            "text_input": prompt,
            "max_tokens": load.output_tokens,
            "min_tokens": load.output_tokens,
            "stream": True,
        }
        answer = send(CurlCall("", f"{model}/generate_stream", body), load.addresses.http)
        if answer.status != 200:
            raise ClientFailed(f"curl had status {answer.status}: {answer.text[:300]}")
        return answer.first_byte_s

    return one_after_another(NAME, load, model, ttft_s, "time_starttransfer")
