"""How every client of ours opens its gRPC connections, and what a broken one means.

Not here: the clients (triton_client.py with asyncio, swarm/grpc_sender.py with gevent).
"""

from __future__ import annotations

import grpc

from loadtest.protocol import ServerError

MESSAGE_BYTES_MAX = 2**31 - 1
CHANNEL_OPTIONS = [
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.use_local_subchannel_pool", 1),  # or all channels share one connection
]


def connection_error(error: grpc.RpcError, url: str) -> ServerError:
    code, details = error.code(), error.details()
    if code == grpc.StatusCode.DEADLINE_EXCEEDED:
        return ServerError("timeout", f"{url}: no complete answer in time")
    if code == grpc.StatusCode.UNAVAILABLE:
        return ServerError("unreachable", f"{url}: {details}")
    return ServerError("server_error", f"{url}: {code.name} {details}")
