"""Messages of a request stay in order, and nobody waits for somebody else's receiver."""

from __future__ import annotations

import random
import threading
from collections import defaultdict

from backends.ordered_sender import OrderedSender

WAIT_S = 10.0


def test_a_stuck_receiver_holds_up_nobody_else() -> None:
    sender = OrderedSender(threads_max=4)
    release, sent = threading.Event(), threading.Event()
    sender.send("stuck", lambda: release.wait(WAIT_S) and None)
    sender.send("stuck", lambda: None)
    sender.send("free", sent.set)
    assert sent.wait(WAIT_S)
    assert sender.pending_requests >= 1
    release.set()
    sender.close(is_waiting=True)
    assert sender.pending_requests == 0


def test_messages_of_each_request_arrive_in_order(seed: int) -> None:
    chance = random.Random(seed)
    sender = OrderedSender(threads_max=8)
    arrived: dict[str, list[int]] = defaultdict(list)
    expected: dict[str, list[int]] = defaultdict(list)
    for number in range(2000):
        request_id = f"r{chance.randrange(20)}"
        expected[request_id].append(number)
        sender.send(request_id, lambda r=request_id, n=number: arrived[r].append(n))
    sender.close(is_waiting=True)
    assert arrived == expected


def test_an_answer_that_fails_does_not_stop_the_next() -> None:
    sender = OrderedSender(threads_max=1)
    sent = threading.Event()

    def fail() -> None:
        raise RuntimeError("the receiver is gone")

    sender.send("a", fail)
    sender.send("a", sent.set)
    assert sent.wait(WAIT_S)
    sender.close(is_waiting=True)
