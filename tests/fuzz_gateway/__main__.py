"""`python -m tests.fuzz_gateway --cases 20000`: a server of our own, fuzzed; 1 for a wrong answer.

Afterwards nothing may be in use: no page, slot or lease, no request in the gateway's hands.
"""

from __future__ import annotations

import argparse
import secrets
import sys
import time

from bench.gateway.__main__ import keyed
from bench.leaks import wait_rest
from loadtest.harness.server import own_ports, started
from tests.fuzz_gateway.cases import WrongAnswer, fuzz


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=None)
    said = parser.parse_args()
    seed = secrets.randbits(31) if said.seed is None else said.seed
    print(f"--seed {seed}", flush=True)
    [port] = own_ports(1)
    begun_s = time.monotonic()
    with keyed() as keys:
        arguments = ["--openai-port", str(port), "--api-keys", str(keys.path), "--self-check"]
        with started(arguments) as server:
            try:
                found = fuzz(f"http://127.0.0.1:{port}", keys.key, said.cases, seed)
            except WrongAnswer as problem:
                print(f"WRONG: {problem}\nagain: --seed {seed} --cases {said.cases}")
                return 1
            left = wait_rest(server.addresses)
    for (path, status), count in sorted(found.items()):
        print(f"{count:7} {status} {path}")
    print(f"{found.total()} cases in {time.monotonic() - begun_s:.0f} s; left in use: {left or 0}")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
