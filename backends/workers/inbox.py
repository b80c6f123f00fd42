"""The mailboxes of a launch: what frontends and workers write to each other's very process.

An inbox per worker *process* (a model name may be served by two processes while a config.pbtxt
reloads) and per frontend. What the messages say is in workers/protocol.py. Losing one is harmless:
hand-over progress only saves time, a stop is sent again while the request lives, and lost tokens
are noticed (token_streams.py). What comes from outside this launch is dropped: it does not know its
secret (keys.py).
"""

from __future__ import annotations

from collections.abc import Callable

from backends.launcher import keys
from backends.workers.protocol import Letter, decode_inbox, encode
from mooncake_store.wire.mailbox import Inbox, Outbox

WorkerInbox = Inbox[Letter]
WorkerOutbox = Outbox[Letter]


def open_inbox(address: str, on_messages: Callable[[list[Letter]], float | None]) -> WorkerInbox:
    return Inbox(address, decode_inbox, on_messages, keys.secret_of_launch())


def open_outbox() -> WorkerOutbox:
    return Outbox(encode, keys.secret_of_launch())
