"""Can a tenant find out, by its cached tokens or by time, which prompts another tenant has sent?

    python -m bench.tenants [--pairs 200]

A server with API keys and the tenants a and b. For each pair tenant a sends a fresh prompt. Then b
sends that prompt and another fresh one, in random order. The two must be indistinguishable: b's
`cached_tokens` is 0 for both, and the medians of its TTFT differ by less than 5 %. As a proof that
caching is visible, a sends its prompt again and gets cached tokens.

The benchmark acts as the gateway: it proves the tenant with the secret of the launch. It reads the
secret from the environment of the server's process, which only the same user may read.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from backends.launch_secret import SECRET_VARIABLE
from backends.tenants import tenants_file
from backends.tenants.proof import PROOF, TENANT, prove
from backends.tenants.tenants_file import TenantEntry, TenantsFile
from bench.harness.processes import server_processes
from loadtest.client.answer import ReceivedAnswer
from loadtest.client.protocol import GenerateRequest
from loadtest.client.server import describe_server
from loadtest.client.triton_client import TritonClient
from loadtest.harness.benchmark import FreshSeed, benchmark, console, served
from loadtest.harness.result import Target
from loadtest.harness.server import CannotMeasure
from loadtest.replay.prompts import TokenIds, TokenSource

DIFFERENCE_GOAL = 0.05
OUTPUT_TOKENS = 2
PINNED = {"prefill_worker": "prefill_0", "decode_worker": "decode_0"}
WARM_PAIRS = 5


@dataclass(frozen=True, slots=True)
class TenantProbe:
    ttft_s: float
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class ProbedPair:
    asked_before: TenantProbe  # by b, a prompt that a has cached
    fresh: TenantProbe  # by b, a fresh prompt
    own: TenantProbe  # by a, its own prompt again


class ProvingClient:
    """Sends requests for either tenant, as the gateway does."""

    def __init__(self, client: TritonClient, secret: str) -> None:
        self._client, self._secret = client, secret

    async def ask(self, tenant: str, prompt: TokenIds) -> TenantProbe:
        proof = prove(tenant, time.time(), self._secret)
        request = GenerateRequest(
            request_id="probe",
            input_ids=prompt,
            max_tokens=OUTPUT_TOKENS,
            min_tokens=OUTPUT_TOKENS,
            end_id=-1,
            parameters={**PINNED, TENANT: tenant, PROOF: proof},
        )
        answer = ReceivedAnswer()
        sent_s = time.perf_counter()
        async for event in self._client.generate(request):
            answer.add(event)
        return TenantProbe(answer.token_times_s[0] - sent_s, answer.cached_tokens or 0)


async def probe(
    grpc: str, secret: str, pairs: int, prompt_tokens: int, seed: int
) -> list[ProbedPair]:
    rng, found = random.Random(seed), []
    async with TritonClient(grpc, "conductor", channels=1) as triton:
        server = await describe_server(triton, {})
        source = TokenSource(server.vocabulary_tokens, server.special_token_ids, seed)
        client = ProvingClient(triton, secret)
        for index in range(WARM_PAIRS + pairs):
            theirs, fresh = (source.fresh(2 * index + i, prompt_tokens) for i in range(2))
            await client.ask("a", theirs)
            asked = [("asked_before", theirs), ("fresh", fresh)]
            rng.shuffle(asked)
            seen = {name: await client.ask("b", prompt) for name, prompt in asked}
            seen["own"] = await client.ask("a", theirs)
            if index >= WARM_PAIRS:
                found.append(ProbedPair(**seen))
    return found


def secret_of(grpc: str) -> str:
    """The secret of the launch that listens there."""
    for process in server_processes(grpc):
        if found := process.environ().get(SECRET_VARIABLE):
            return found
    raise CannotMeasure(f"the server at {grpc} is not a process of this user on this host")


def main(
    pairs: Annotated[int, typer.Option(min=1)] = 200,
    prompt_tokens: Annotated[int, typer.Option(min=65)] = 520,
    seed: FreshSeed = None,
) -> None:
    """Measure on a server of our own, the only one whose tenants can be proven."""
    used_seed = secrets.randbits(31) if seed is None else seed
    with benchmark("tenants") as run, tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys.json"
        tenants_file.write(keys, TenantsFile({"a": TenantEntry(), "b": TenantEntry()}))
        with served(None, ("--api-keys", str(keys))) as addresses:
            secret = secret_of(addresses.grpc)
            with console.status(f"{pairs} pairs ..."):
                found = asyncio.run(probe(addresses.grpc, secret, pairs, prompt_tokens, used_seed))
        before_s = statistics.median(pair.asked_before.ttft_s for pair in found)
        fresh_s = statistics.median(pair.fresh.ttft_s for pair in found)
        own_s = statistics.median(pair.own.ttft_s for pair in found)
        run.rows += [
            {"prompt": name, "ttft_ms_median": round(seconds * 1e3, 3)}
            for name, seconds in (
                ("of b, cached by a", before_s),
                ("of b, asked by nobody", fresh_s),
                ("of a, its own again", own_s),
            )
        ]
        cached = max(max(p.asked_before.cached_tokens, p.fresh.cached_tokens) for p in found)
        own_cached = min(pair.own.cached_tokens for pair in found)
        difference = abs(before_s - fresh_s) / fresh_s
        run.targets += [
            Target("cached_tokens_of_b", cached, "<=", 0),
            Target("cached_tokens_of_a_again", own_cached, ">=", prompt_tokens // 64 * 64),
            Target("ttft_medians_difference", round(difference, 4), "<=", DIFFERENCE_GOAL),
        ]
        run.constants |= {"pairs": pairs, "prompt_tokens": prompt_tokens, "seed": used_seed}


if __name__ == "__main__":
    typer.run(main)
