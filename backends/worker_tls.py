"""Mutual TLS of workers' gRPC: how their Tritons listen, and how they are called.

With a folder of keys (mooncake_store/keys) every worker's Triton asks for a certificate of the
cluster and shows its host's; without one all of it is plain, as on one machine. Triton reads
certificates when it starts, so renewed ones ask for a restart of it.

A client that Triton refuses hears nothing but "Socket closed", as from one that dies; but it hears
so while it connects, before anything is sent (gRPC counts a connection only from its first frame).
"""

from __future__ import annotations

from collections.abc import Sequence

import grpc

from backends.errors import GRPC_NEVER_SENT, WorkerRefused
from mooncake_store.keys import folder
from mooncake_store.keys.curve import is_loopback
from mooncake_store.keys.folder import MEMBER, Keys, LiveFiles
from mooncake_store.keys.tls import TlsContexts

HANDSHAKE = ("handshake", "certificate", "ssl", "tls", "wrong_version_number")
SILENT = ("socket closed", "connection reset", "recvmsg")


def server_arguments(keys: Keys | None) -> list[str]:
    """Of a worker's Triton; they name files, not what is in them."""
    if keys is None:
        return []
    return [
        "--grpc-use-ssl=true",
        "--grpc-use-ssl-mutual=true",
        f"--grpc-server-cert={keys.certificate}",
        f"--grpc-server-key={keys.private_key}",
        f"--grpc-root-cert={keys.authorities}",
    ]


_credentials: dict[Keys, LiveFiles[grpc.ChannelCredentials]] = {}


def credentials_now() -> grpc.ChannelCredentials | None:
    """This host's, the same object until the files change; None where there are no keys."""
    keys = folder.of_process()
    if keys is None:
        return None
    if keys not in _credentials:
        paths = [keys.certificate, keys.private_key, keys.authorities]
        _credentials[keys] = LiveFiles(paths, lambda: _read(keys))
    return _credentials[keys].get()


def _read(keys: Keys) -> grpc.ChannelCredentials:
    _ = TlsContexts(keys).client  # KeysInvalid for files that do not belong together
    return grpc.ssl_channel_credentials(
        keys.authorities.read_bytes(), keys.private_key.read_bytes(), keys.certificate.read_bytes()
    )


def worker_channel(address: str, options: Sequence[tuple[str, object]]) -> grpc.Channel:
    """To a worker's Triton, with this host's certificate where there are keys."""
    credentials = credentials_now()
    if credentials is None:
        return grpc.insecure_channel(address, list(options))
    named = ("grpc.ssl_target_name_override", MEMBER)
    return grpc.secure_channel(address, credentials, [*options, named])


def refusal(address: str, details: str | None) -> WorkerRefused | None:
    """What a broken call means when it was one of the two sides that did not believe the other."""
    said = (details or "").lower()
    if GRPC_NEVER_SENT not in said:
        return None
    if any(word in said for word in HANDSHAKE):
        return WorkerRefused(_words(address, details, "is not believed, or does not believe us"))
    # Without keys on one machine it is a Triton that ends.
    is_one_machine = folder.of_process() is None and is_loopback(address)
    if not is_one_machine and any(word in said for word in SILENT):
        return WorkerRefused(_words(address, details, "ends each connection: it may refuse us"))
    return None


def _words(address: str, details: str | None, what: str) -> str:
    return (
        f"the worker's Triton at {address} {what} ({details}). One side's certificate is of "
        "another cluster or generation or has expired (`mooncake keys check` on both hosts), one "
        f"side has no keys ({folder.VARIABLE}), or the worker ended"
    )
