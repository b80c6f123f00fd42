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
CACHED_BY_A, FRESH, OWN = KINDS = (
    "of b, cached by a",
    "of b, asked by nobody",
    "of a, its own again",
)


@dataclass(frozen=True, slots=True)
class TenantProbe:
    ttft_s: float
    cached_tokens: int


async def ask(client: TritonClient, secret: str, tenant: str, prompt: TokenIds) -> TenantProbe:
    """Send the prompt for this tenant, as the gateway does."""
    proof = prove(tenant, time.time(), secret)
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
    async for event in client.generate(request):
        answer.add(event)
    return TenantProbe(answer.token_times_s[0] - sent_s, answer.cached_tokens or 0)


async def probe(
    grpc: str, secret: str, pairs: int, prompt_tokens: int, seed: int
) -> dict[str, list[TenantProbe]]:
    """The probes of each pair, by the names in KINDS."""
    rng = random.Random(seed)
    found: dict[str, list[TenantProbe]] = {kind: [] for kind in KINDS}
    async with TritonClient(grpc, "conductor", channels=1) as client:
        source = TokenSource.of_server(await describe_server(client, {}), seed)
        for index in range(WARM_PAIRS + pairs):
            theirs, fresh = (source.fresh(2 * index + i, prompt_tokens) for i in range(2))
            await ask(client, secret, "a", theirs)
            asked = [(CACHED_BY_A, theirs), (FRESH, fresh)]
            rng.shuffle(asked)
            seen = {kind: await ask(client, secret, "b", prompt) for kind, prompt in asked}
            seen[OWN] = await ask(client, secret, "a", theirs)
            if index >= WARM_PAIRS:
                for kind, one in seen.items():
                    found[kind].append(one)
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
        ttfts_s = {
            kind: statistics.median(one.ttft_s for one in probes) for kind, probes in found.items()
        }
        run.rows += [
            {"prompt": kind, "ttft_ms_median": round(ttft_s * 1e3, 3)}
            for kind, ttft_s in ttfts_s.items()
        ]
        cached = max(one.cached_tokens for one in (*found[CACHED_BY_A], *found[FRESH]))
        own_cached = min(one.cached_tokens for one in found[OWN])
        difference = abs(ttfts_s[CACHED_BY_A] - ttfts_s[FRESH]) / ttfts_s[FRESH]
        run.targets += [
            Target("cached_tokens_of_b", cached, "<=", 0),
            Target("cached_tokens_of_a_again", own_cached, ">=", prompt_tokens // 64 * 64),
            Target("ttft_medians_difference", round(difference, 4), "<=", DIFFERENCE_GOAL),
        ]
        run.constants |= {"pairs": pairs, "prompt_tokens": prompt_tokens, "seed": used_seed}


if __name__ == "__main__":
    typer.run(main)
