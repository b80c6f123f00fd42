"""Checks whether this host reaches etcd and the elected directory.

`state` checks once and describes the result in one line. A starting host repeats the check until it
succeeds. While the host serves, a thread of `DeploymentWatch` checks every WATCH_S, and the
launcher prints changes.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass

from backends.launcher.etcd_member import ask_etcd
from mooncake_store.directory.client import DirectoryClient
from mooncake_store.directory.election import NoLeader, endpoints_and_prefix, leader_at
from mooncake_store.directory.etcd import EtcdAccessRefused, EtcdFailed
from mooncake_store.errors import StoreError
from mooncake_store.wire.addresses import ELECTED

WATCH_S = 2.0  # pause between two checks
ASK_S_MAX = 1.5  # timeout of a call to etcd or the directory


@dataclass(frozen=True, slots=True)
class DeploymentState:
    is_well: bool
    text: str  # one line for the operator


def state(directory: str) -> DeploymentState:
    """The state of the directory at this address. etcd:// stands for the elected directory, whose
    state includes that of etcd."""
    if not directory.startswith(ELECTED):
        return _asked(directory, f"the directory is at {directory}")
    endpoints, _ = endpoints_and_prefix(directory)
    try:
        leader = leader_at(directory, ASK_S_MAX)
    except NoLeader:
        return DeploymentState(False, "no directory leads yet: an election takes a few seconds")
    except EtcdAccessRefused as error:
        return DeploymentState(False, str(error))
    except EtcdFailed:
        answers = ask_etcd(endpoints)
        problem = "elects its own leader" if answers.has_quorum else "has no quorum"
        return DeploymentState(False, f"etcd {problem}: {answers.summary()}")
    except StoreError as error:
        return DeploymentState(False, str(error))
    return _asked(directory, f"a directory leads at {leader.address}")


def _asked(directory: str, where: str) -> DeploymentState:
    try:
        with DirectoryClient(directory, ASK_S_MAX) as client:
            client.exist(())  # a cheap call, because every host repeats it
    except StoreError as error:
        return DeploymentState(False, f"{where}, but it does not answer this host ({error})")
    return DeploymentState(True, where)


class DeploymentWatch:
    """Checks in a thread of its own, because a broken service may answer slowly."""

    def __init__(self, directory: str, known: DeploymentState) -> None:
        self._directory, self._known = directory, known
        self._news: deque[DeploymentState] = deque()  # used by two threads; a deque is thread-safe
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="deployment", daemon=True)
        self._thread.start()

    def news(self) -> list[DeploymentState]:
        """The changed states since the last call."""
        return [self._news.popleft() for _ in range(len(self._news))]

    def close(self) -> None:
        self._is_closing.set()
        self._thread.join(timeout=0.2)  # a check may take longer

    def _run(self) -> None:
        last = self._known
        while not self._is_closing.wait(WATCH_S):
            now = state(self._directory)
            if now != last:
                self._news.append(now)
                last = now
