"""How the process of a storage node waits between two reports."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

STOPPED_S = 1.2  # longer than both waits
# Waits in two ways at once, and stops itself when both threads are in the kernel: the other way,
# select(2), waits for what is left of its time when it goes on.
CHILD = """
import os, pathlib, select, signal, threading, time
from mooncake_store.node.__main__ import StopSignals

signals, order = StopSignals(), []

def wait_as_a_node():
    signals.wait(1.0)
    order.append("node")

def wait_for_what_is_left():
    select.select([], [], [], 0.6)
    order.append("select")

threads = [threading.Thread(target=each) for each in (wait_as_a_node, wait_for_what_is_left)]
for thread in threads:
    thread.start()
WAITS = {"7", "271", "23", "270", "72", "73"}  # poll and select, on x86-64 and arm64
calls = [pathlib.Path(f"/proc/self/task/{thread.native_id}/syscall") for thread in threads]
while not all(call.read_text().split()[0] in WAITS for call in calls):
    time.sleep(0.001)  # between two polls of /proc
os.kill(os.getpid(), signal.SIGSTOP)
for thread in threads:
    thread.join()
print(*order)
"""


def test_a_process_that_was_stopped_has_waited_meanwhile() -> None:
    child = subprocess.Popen([sys.executable, "-c", CHILD], stdout=subprocess.PIPE, text=True)
    try:
        _, status = os.waitpid(child.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        over_s = time.monotonic() + STOPPED_S
        while time.monotonic() < over_s:
            time.sleep(0.05)  # between two polls of the clock: the time of both waits passes
        child.send_signal(signal.SIGCONT)
        said, _ = child.communicate()
    finally:
        child.kill()
        child.wait()
    assert said.split() == ["node", "select"]
