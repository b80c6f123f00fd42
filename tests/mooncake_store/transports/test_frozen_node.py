"""A node that is silent but not dead: deadlines hold, late bytes harm nobody, and it may come back.

Both sides talk TCP here: over CMA the kernel copies, and a frozen process answers like any other.
UCX_TLS must be set before UCX is loaded, so the client is a process too (frozen_client.py).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from mooncake_store.memory.segment import Segment
from mooncake_store.transports.nixl_agent import NixlUnavailable, load_nixl
from tests.mooncake_store.targets import ROOT, TARGET_BYTES, TargetPool

TCP = {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"}


@pytest.mark.long
@pytest.mark.parametrize("what", ["transport", "store"])
@pytest.mark.parametrize("fate", ["thaws", "dies"])
def test_a_frozen_node_times_out_and_its_targets_stay_pending_until_it(
    what: str, fate: str, targets: TargetPool, seed: int
) -> None:
    try:
        load_nixl()
    except NixlUnavailable as error:
        pytest.skip(str(error))
    target = targets.take("t0", TCP)
    with Segment.open(target.path) as segment:
        chance = np.random.default_rng(seed)
        segment.view[:] = chance.integers(0, 256, TARGET_BYTES, dtype=np.uint8)
    values = {name: getattr(target.info, name) for name in target.info.__slots__}
    values["agent_metadata"] = target.info.agent_metadata.hex()
    client = subprocess.Popen(
        [sys.executable, "-m", "tests.mooncake_store.frozen_client", what],
        cwd=ROOT,
        env={**os.environ, **TCP},
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        assert client.stdin and client.stdout and client.stderr

        def tell(line: str) -> str:
            assert client.stdin and client.stdout
            client.stdin.write(line + "\n")
            client.stdin.flush()
            return client.stdout.readline()

        assert tell(json.dumps(values)) == "connected\n"
        target.freeze()
        assert tell("") == "timed-out\n", client.stderr.read()
        if fate == "thaws":
            target.thaw()
        else:
            target.kill()
        assert tell(fate) == "resolved\n", client.stderr.read()
        assert client.wait(timeout=20) == 0
    finally:
        target.kill()  # UCX aborts a process that thaws with requests of a client that died
        client.kill()
        client.communicate()
        targets.give_back(target, is_reusable=False)
