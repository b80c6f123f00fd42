"""Can this host reach what decides for all: etcd, and the directory that was elected there?

`state` asks once and says it in one line. A host that starts waits until it is well; while it
serves, a thread of `DeploymentWatch` asks now and then, and the launcher prints what changes.

Not here: starting members of either (launch.py).
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from backends.launcher.etcd_member import ask_etcd
from mooncake_store.directory.client import DirectoryClient
from mooncake_store.directory.election import (
    EtcdFailed,
    NoLeader,
    endpoints_and_prefix,
    leader_at,
)
from mooncake_store.directory.etcd import EtcdAccessRefused
from mooncake_store.errors import StoreError
from mooncake_store.wire.addresses import ELECTED

WATCH_S = 2.0
ASK_S_MAX = 1.5


@dataclass(frozen=True, slots=True)
class DeploymentState:
    is_well: bool
    said: str  # for the operator


def state(directory: str) -> DeploymentState:
    """Of the directory at this address (ipc://, tcp://, or etcd:// for one that is elected)."""
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
        if answers.has_quorum:
            return DeploymentState(False, f"etcd elects its own leader: {answers.said()}")
        return DeploymentState(False, f"etcd has no quorum: {answers.said()}")
    except StoreError as error:
        return DeploymentState(False, str(error))
    return _asked(directory, f"a directory leads at {leader.address}")


def _asked(directory: str, where: str) -> DeploymentState:
    try:
        with DirectoryClient(directory, ASK_S_MAX) as client:
            client.exist(())  # the cheapest question: every host asks
    except StoreError as error:
        return DeploymentState(False, f"{where}, and does not answer from here ({error})")
    return DeploymentState(True, where)


class DeploymentWatch:
    """Asks in a thread of its own, because what is broken may take its time to answer."""

    def __init__(self, directory: str, known: DeploymentState) -> None:
        self._directory, self._known = directory, known
        self._news: list[DeploymentState] = []
        self._lock = threading.Lock()
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="deployment", daemon=True)
        self._thread.start()

    def news(self) -> list[DeploymentState]:
        """What has changed since the last call."""
        with self._lock:
            news, self._news = self._news, []
        return news

    def close(self) -> None:
        self._is_closing.set()
        self._thread.join(timeout=0.2)  # it may be asking what hangs

    def _run(self) -> None:
        last = self._known
        while not self._is_closing.wait(WATCH_S):
            now = state(self._directory)
            if now != last:
                with self._lock:
                    self._news.append(now)
                last = now
