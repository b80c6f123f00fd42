"""A drained host is stopped and nothing is lost: no request, no block, no cached prefix."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.backends.engine.reference import Reference
from tests.e2e.server import wait_until
from tests.fleet.conftest import LONG_TOKENS
from tests.fleet.site import BACK_S_MAX, Fleet
from tests.fleet.test_fleet import LONG_BEFORE, fresh_prompt, rest_of, wait_whole

pytestmark = [pytest.mark.e2e, pytest.mark.long]


def cluster(fleet: Fleet, *words: str) -> subprocess.CompletedProcess[str]:
    """`mooncake cluster`, as an operator types it on host a."""
    command = [
        sys.executable,
        "-m",
        "backends.cli",
        "cluster",
        *words,
        "--cluster",
        str(fleet.file),
    ]
    return subprocess.run(
        fleet.namespaces.command("a", command), capture_output=True, text=True, timeout=120
    )


def test_status_shows_every_host_and_who_leads(fleet: Fleet) -> None:
    wait_whole(fleet)

    def is_well() -> subprocess.CompletedProcess[str] | None:
        said = cluster(fleet, "status", "--json")
        return said if said.returncode == 0 else None

    shown = wait_until(is_well, "all to be well", BACK_S_MAX)
    parts = {host["name"]: host["parts"] for host in json.loads(shown.stdout)["hosts"]}
    assert set(parts) == {"a", "b", "c"}
    leading = [name for name, of in parts.items() if of.get("directory") == "leads"]
    assert leading == [fleet.leading_host()]
    assert parts["b"]["frontend"] == "up" and parts["c"]["etcd"] == "up"
    assert "running" in parts["c"]["decode_c_0"] and "blocks" in parts["c"]["node c0"]


def test_a_drained_host_loses_nothing(fleet: Fleet, story: list[int], reference: Reference) -> None:
    wait_whole(fleet)
    prompt = fresh_prompt(4)
    first = fleet.ask("a", prompt, 2, prefill="prefill_c_0", decode="decode_c_0")
    assert not first.error, first.error
    wait_until(lambda: fleet.holders(prompt) == [{"c0"}] * 4, "c alone to have the prefix")
    streams = [fleet.stream(frontend, story, LONG_TOKENS, tenant="drain") for frontend in "abab"]
    begun = [fleet.begun(stream, LONG_BEFORE) for stream in streams]
    drained = cluster(fleet, "drain", "c", "--requests-s", "0")
    assert drained.returncode == 0, drained.stdout + drained.stderr
    assert "c is drained" in drained.stdout
    held = fleet.holders(prompt)
    assert len(held) == 4 and all(nodes - {"c0"} for nodes in held), "before it stops"
    assert fleet.hosts["c"].stop() == 0
    for stream, answer in zip(streams, begun, strict=True):
        rest_of(stream, answer, reference)
    again = fleet.ask("a", prompt, 2, prefill="prefill_a_0")
    assert not again.error and again.output_ids == first.output_ids
    held = fleet.holders(prompt)
    assert len(held) == 4 and all({"a0", "b0"} & nodes for nodes in held), held
    shown = cluster(fleet, "status")
    assert shown.returncode == 1 and "DOWN" in shown.stdout
    fleet.start("c")
    wait_whole(fleet)
    wait_until(lambda: cluster(fleet, "status").returncode == 0, "all to be well", BACK_S_MAX)
