"""Mutual TLS of the workers' gRPC: arguments of their Tritons, and channels to them.

With a folder of TLS keys (mooncake_store/keys), a worker's Triton requires a certificate of the
cluster and presents the certificate of its host. Without the folder, as on one machine, connections
have no TLS. Triton reads certificates only when it starts, so a renewal needs a restart.

A client with a wrong certificate gets only the error "Socket closed", as if Triton had exited. But
Triton rejects the client before the call is sent, so the text also contains GRPC_NEVER_SENT.
"""

from __future__ import annotations

from collections.abc import Sequence

import grpc

from backends.errors import GRPC_NEVER_SENT, WorkerRefused
from mooncake_store.keys import folder
from mooncake_store.keys.curve import is_loopback
from mooncake_store.keys.folder import MEMBER, Keys, LiveFiles
from mooncake_store.keys.tls import TlsContexts

# Words of gRPC's error text for a failed TLS handshake.
HANDSHAKE = ("handshake", "certificate", "ssl", "tls", "wrong_version_number")
SILENT = ("socket closed", "connection reset", "recvmsg")  # if the peer closed the connection


def server_arguments(keys: Keys | None) -> list[str]:
    """TLS arguments of a worker's Triton. They contain paths, but no secrets."""
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
    """This host's credentials, the same object until the files change; None without TLS keys."""
    keys = folder.of_process()
    if keys is None:
        return None
    if keys not in _credentials:
        paths = [keys.certificate, keys.private_key, keys.authorities]
        _credentials[keys] = LiveFiles(paths, lambda: _read(keys))
    return _credentials[keys].get()


def _read(keys: Keys) -> grpc.ChannelCredentials:
    _ = TlsContexts(keys).client  # raises KeysInvalid if the files do not belong together
    return grpc.ssl_channel_credentials(
        keys.authorities.read_bytes(), keys.private_key.read_bytes(), keys.certificate.read_bytes()
    )


def worker_channel(address: str, options: Sequence[tuple[str, object]]) -> grpc.Channel:
    """A channel to a worker's Triton, with this host's certificate if there are TLS keys."""
    credentials = credentials_now()
    if credentials is None:
        return grpc.insecure_channel(address, list(options))
    named = ("grpc.ssl_target_name_override", MEMBER)
    return grpc.secure_channel(address, credentials, [*options, named])


def refusal(address: str, details: str | None) -> WorkerRefused | None:
    """The error if a call was not sent because TLS failed, else None. `details`: gRPC's error text.
    A connection that the peer closed counts as failed TLS, except on one machine without keys."""
    text = (details or "").lower()
    if GRPC_NEVER_SENT not in text:
        return None
    if any(word in text for word in HANDSHAKE):
        return WorkerRefused(_message(address, details, "failed the TLS handshake with this host"))
    is_one_machine = folder.of_process() is None and is_loopback(address)
    if not is_one_machine and any(word in text for word in SILENT):
        return WorkerRefused(_message(address, details, "closes each connection of this host"))
    return None


def _message(address: str, details: str | None, what: str) -> str:
    return (
        f"the worker's Triton at {address} {what} ({details}). One side's certificate has expired, "
        "or is of another cluster or generation (`mooncake keys check` on both hosts), one side "
        f"has no TLS keys ({folder.VARIABLE}), or the worker has exited"
    )
