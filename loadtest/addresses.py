"""Where a server listens, by convention from one of its addresses. Not here: what listens there."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where a server listens, each as HOST:PORT."""

    grpc: str
    http: str
    metrics: str

    @property
    def metrics_url(self) -> str:
        return f"http://{self.metrics}/metrics"


def addresses_of(grpc: str) -> Addresses:
    """Of a running server, by its gRPC address: HTTP is the port before, metrics the one after.

    That is Triton's own convention (8000, 8001, 8002), and `mooncake serve`'s.
    """
    host, _, port = grpc.rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(f"{grpc!r} is not a gRPC address; write for example 127.0.0.1:8001")
    return Addresses(grpc, f"{host}:{int(port) - 1}", f"{host}:{int(port) + 1}")
