"""Ctrl-C under gevent, in a process of its own: Locust replaces what other tests need."""

from __future__ import annotations

import signal
import subprocess
import sys

BUSY = """
import locust, gevent
from loadtest.users import gevent_setup

alive = []

def work():  # it is what runs nearly all the time, so a signal would hit it
    for turn in range(10**9):
        sum(range(2_000))
        alive.append(turn)
        gevent.sleep(0)

gevent_setup.interrupt_main_greenlet_only()
worker = gevent.spawn(work)
gevent.sleep(0.1)
print("ready", flush=True)
try:
    worker.join()
except KeyboardInterrupt:
    turns = len(alive)
    gevent.sleep(0.1)
    print("interrupted", not worker.dead and len(alive) > turns, flush=True)
"""


def test_ctrl_c_interrupts_the_main_greenlet_and_no_other() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", BUSY], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        said, errors = process.communicate(timeout=30.0)
    finally:
        process.kill()
    assert said == "interrupted True\n", errors
