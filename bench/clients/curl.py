"""`curl` requests: one answer, a stream, vLLM's form, an error; and curl's own TTFT.

The end-to-end tests send the same calls and read the answers. curl's `time_starttransfer` is its
TTFT, because Triton sends no byte of a stream before the first message. Not here: OpenAI's
interface (curl_gateway.py).
"""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from bench.clients.agreement import ClientLoad, ClientReport, one_after_another
from bench.clients.environment import ClientFailed

NAME = "curl"
CALL_S_MAX = 60


@dataclass(frozen=True, slots=True)
class CurlCall:
    title: str
    path: str
    body: Mapping[str, Any] | None = None
    statuses: tuple[int, ...] = (200,)  # expected statuses
    key: str = ""
    options: tuple[str, ...] = ()
    input: str = ""  # a body that is too long for a command line


PROMPT = "It is a truth"
GENERATE, STREAM = "/v2/models/{}/generate", "/v2/models/{}/generate_stream"
CONDUCTOR, ENSEMBLE = "conductor", "ensemble"
CALLS = (
    CurlCall("one answer", GENERATE.format(CONDUCTOR), {"text_input": PROMPT, "max_tokens": 8}),
    CurlCall(
        "one answer of the ensemble, as TensorRT-LLM's documentation asks for it",
        GENERATE.format(ENSEMBLE),
        {"text_input": PROMPT, "max_tokens": 8, "bad_words": "", "stop_words": ""},
    ),
    CurlCall(
        "a stream of server-sent events",
        STREAM.format(CONDUCTOR),
        {"text_input": PROMPT, "max_tokens": 3, "stream": True},
    ),
    CurlCall(
        "a stream of the ensemble",
        STREAM.format(ENSEMBLE),
        {"text_input": PROMPT, "max_tokens": 3, "stream": True},
    ),
    CurlCall(
        "vLLM's sampling_parameters, whose numbers may be strings",
        GENERATE.format(CONDUCTOR),
        {"text_input": PROMPT, "sampling_parameters": '{"max_tokens": "8", "temperature": "0"}'},
    ),
    CurlCall(
        "as vLLM's backend is asked in its documentation",
        GENERATE.format(CONDUCTOR),
        {"text_input": PROMPT, "parameters": {"stream": False, "temperature": 0, "max_tokens": 8}},
    ),
    CurlCall(
        "a mistake", GENERATE.format(CONDUCTOR), {"text_input": PROMPT, "max_tokens": 0}, (400,)
    ),
)


@dataclass(frozen=True, slots=True)
class CurlAnswer:
    status: int
    first_byte_s: float
    text: str


def command(call: CurlCall, base: str) -> list[str]:
    """`base`: http://HOST:PORT."""
    found = [NAME, "-sS", "-N", *call.options, f"{base}{call.path}"]
    if call.key:
        found += ["-H", f"Authorization: Bearer {call.key}"]
    if call.input:
        found += ["-d", "@-"]
    return found if call.body is None else [*found, "-d", json.dumps(call.body)]


def send(call: CurlCall, base: str) -> CurlAnswer:
    """Raises ClientFailed when curl is missing or got no answer."""
    if shutil.which(NAME) is None:
        raise ClientFailed("curl is not on the PATH; install it (apt-get install curl)")
    options = ["--max-time", str(CALL_S_MAX), "--write-out", "\n%{http_code} %{time_starttransfer}"]
    done = subprocess.run(
        [*command(call, base), *options],
        input=call.input,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise ClientFailed(f"curl: {done.stderr.strip()}")
    text, _, last = done.stdout.rpartition("\n")
    status, first_byte_s = last.split()
    return CurlAnswer(int(status), float(first_byte_s), text.strip())


def shown(call: CurlCall, base: str) -> str:
    """The command as a person types it."""
    return shlex.join(command(call, base))


def run(load: ClientLoad, model: str) -> ClientReport:
    """Fresh prompts, one after the other, each a process of its own; raises ClientFailed."""

    def call(prompt: str) -> CurlCall:
        body = {
            "text_input": prompt,
            "max_tokens": load.output_tokens,
            "min_tokens": load.output_tokens,
            "stream": True,
        }
        return CurlCall("", STREAM.format(model), body)

    return timed(load, model, f"http://{load.addresses.http}", call)


def timed(load: ClientLoad, model: str, base: str, call: Callable[[str], CurlCall]) -> ClientReport:
    """`call` makes a streamed request of a prompt."""

    def ttft_s(prompt: str) -> float:
        answer = send(call(prompt), base)
        if answer.status != 200:
            raise ClientFailed(f"curl had status {answer.status}: {answer.text[:300]}")
        return answer.first_byte_s

    return one_after_another(NAME, load, model, ttft_s, "time_starttransfer")
