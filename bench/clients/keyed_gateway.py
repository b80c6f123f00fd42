"""A server with a gateway, for public clients.

Either one of our own, with API keys of some tenants, or a running one with unknown keys. If that
one requires a key, the variable OPENAI_API_KEY has it, and calls about keys are left out.
"""

from __future__ import annotations

import json
import os
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from backends.direct_http import DIRECTLY
from backends.models.catalogue import CHECKPOINTS_DIR
from backends.tenants import tenants_file
from backends.tenants.api_keys import sha256_of
from backends.tenants.tenants_file import KeyEntry, TenantEntry, TenantsFile
from bench.clients.call_matrix import CalledServer
from loadtest.client.server import Addresses
from loadtest.harness.server import PROJECT, own_ports, serving

# No secrets: only for a server of our own on loopback.
KEY, SINGLE_KEY, METERED_KEY = "mk-of-acme", "mk-of-single", "mk-of-metered"
OPERATORS_KEY, KEEPERS_KEY = "mk-of-ops", "mk-of-keeper"
TENANTS = {
    "acme": (KEY, TenantEntry()),
    "single": (SINGLE_KEY, TenantEntry(requests_in_flight_max=1)),
    "metered": (METERED_KEY, TenantEntry(requests_per_minute=1)),
    "ops": (OPERATORS_KEY, TenantEntry(operator=True)),
    "keeper": (KEEPERS_KEY, TenantEntry(stored_responses_bytes_max=1_000_000)),
}
MODEL, DEMO = "demo", PROJECT / "backends" / "demo_checkpoint"
ANSWER_S_MAX = 10.0


@dataclass(frozen=True, slots=True)
class KeyedGateway:
    """The start options of a server of our own, and its call parameters."""

    arguments: tuple[str, ...]
    called: CalledServer


@dataclass(frozen=True, slots=True)
class PublicServer:
    addresses: Addresses
    gateway: CalledServer | None  # None: there is none, or its address is unknown


def keyed_gateway(folder: Path, checkpoint: str = "") -> KeyedGateway:
    """Writes the file of keys into `folder`, and chooses a port. The `checkpoint` is a folder or a
    name that the server fetches; the demo's for an empty one."""
    path = folder / "tenants.json"
    entries = {name: entry for name, (_, entry) in TENANTS.items()}
    keys = [KeyEntry(sha256_of(key), name) for name, (key, _) in TENANTS.items()]
    tenants_file.write(path, TenantsFile(entries, keys))
    [port] = own_ports(1)
    url, model, at = f"http://127.0.0.1:{port}/v1", MODEL, DEMO
    arguments = ["--openai-port", str(port), "--api-keys", str(path)]
    if checkpoint:
        at = checkpoint_folder(checkpoint)
        model = at.name
        arguments += ["--checkpoint", checkpoint, "--decode", "1"]
    return KeyedGateway(
        tuple(arguments), CalledServer(url, model, KEY, SINGLE_KEY, METERED_KEY, str(at))
    )


def checkpoint_folder(checkpoint: str) -> Path:
    """Where the server has, or will have, the checkpoint."""
    path = Path(checkpoint)
    return path.resolve() if path.is_dir() else PROJECT / CHECKPOINTS_DIR / checkpoint


@contextmanager
def public_server(
    url: str | None, openai_url: str | None, checkpoint: str = ""
) -> Iterator[PublicServer]:
    """The server at `url`, or one of our own until the block ends."""
    if url is not None:
        with serving(url) as addresses:
            gateway = running_gateway(openai_url) if openai_url else None
            if gateway is not None and checkpoint:
                gateway = replace(gateway, checkpoint=str(checkpoint_folder(checkpoint)))
            yield PublicServer(addresses, gateway)
        return
    with tempfile.TemporaryDirectory(prefix="mooncake-clients-keys-") as folder:
        own = keyed_gateway(Path(folder), checkpoint)
        with serving(None, own.arguments) as addresses:
            yield PublicServer(addresses, own.called)


def running_gateway(openai_url: str) -> CalledServer:
    """The gateway and its first model; OSError when it does not answer."""
    base, key = f"{openai_url.rstrip('/').removesuffix('/v1')}/v1", os.environ.get("OPENAI_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    request = urllib.request.Request(f"{base}/models", headers=headers)
    with DIRECTLY.open(request, timeout=ANSWER_S_MAX) as answer:
        [model] = json.loads(answer.read())["data"]
    return CalledServer(base, model["id"], key or "none")
