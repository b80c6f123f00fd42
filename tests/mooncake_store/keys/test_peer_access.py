"""One socket that is connected to one peer after the other, as an event feed's is to leaders."""

from __future__ import annotations

import zmq

from mooncake_store.keys.curve import PeerAccess


def test_one_socket_goes_from_peer_to_peer_and_each_is_watched() -> None:
    with zmq.Context() as context, context.socket(zmq.SUB) as stream:
        stream.linger = 0
        for port in range(100):
            access = PeerAccess(f"tcp://127.0.0.1:{20_000 + port}")
            access.connect(stream)
            assert access.monitor is not None
            access.close()
            assert access.monitor is None
            stream.disconnect(f"tcp://127.0.0.1:{20_000 + port}")
