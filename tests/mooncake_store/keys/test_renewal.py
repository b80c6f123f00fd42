"""Renewing the keys under running processes: at each step everybody who should be is let in."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import pytest

from mooncake_store.directory.client import DirectoryClient
from mooncake_store.directory.core.directory import Directory
from mooncake_store.directory.event_feed import EventFeed
from mooncake_store.directory.server import DirectoryServer
from mooncake_store.errors import AccessRefused
from mooncake_store.keys.folder import VARIABLE
from tests.mooncake_store.keys.hosts import Hosts

ANY_PORT = "tcp://127.0.0.1:*"
PATIENCE_S = 30.0


class CopiedHosts:
    """Folders as they lie on the hosts: each is as old as when it was copied last."""

    def __init__(self, hosts: Hosts, folder: Path) -> None:
        self.hosts, self.folder = hosts, folder

    def copy(self, host: str) -> Path:
        place = self.folder / host
        place.mkdir(exist_ok=True)
        for file in (self.hosts.ours / host).iterdir():
            beside = self.folder / f".{file.name}"
            shutil.copy2(file, beside)
            beside.replace(place / file.name)
        return place


def test_each_step_is_read_live_by_the_directory_and_by_clients_of_a_step_before(
    hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The directory's host is copied first, then last; requests and events go on in any order."""
    copies = CopiedHosts(hosts, tmp_path)
    monkeypatch.setenv(VARIABLE, str(copies.copy("a")))
    server = DirectoryServer(Directory(1), ANY_PORT, ANY_PORT)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    monkeypatch.setenv(VARIABLE, str(copies.copy("b")))
    client = DirectoryClient(server.address, PATIENCE_S)
    snapshots = threading.Semaphore(0)
    feed = EventFeed(
        server.address, server.events_address, lambda _: snapshots.release(), lambda _: None
    )
    assert feed.wait_ready(PATIENCE_S) and client.nodes() == []
    for first, second in (("a", "b"), ("b", "a")):
        for _ in range(3):
            hosts.authority.rotate()
            for host in (first, second):
                copies.copy(host)
                active = hosts.authority.state.used
                wait_for_key(server, active if host == "a" or second == "b" else None)
                assert client.nodes() == []
                with DirectoryClient(server.address, PATIENCE_S) as fresh:
                    assert fresh.nodes() == []
    assert feed.wait_ready(PATIENCE_S)
    feed.close()
    client.close()
    server.stop()
    thread.join()
    server.close()


def wait_for_key(server: DirectoryServer, number: int | None) -> None:
    """Until the directory has noticed what lies in its folder."""
    if number is None:
        return
    for _ in range(3_000):
        if server._key._number == number and not server._key._unbound:
            return
        threading.Event().wait(0.01)
    pytest.fail(f"the directory still uses generation {server._key._number}, not {number}")


def test_who_missed_a_whole_renewal_is_refused(hosts: Hosts, tmp_path: Path) -> None:
    copies = CopiedHosts(hosts, tmp_path)
    stale = copies.copy("b")
    for _ in range(3):
        hosts.authority.rotate()
    hosts.be("a")
    server = DirectoryServer(Directory(1), ANY_PORT, ANY_PORT)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    hosts._monkeypatch.setenv(VARIABLE, str(stale))
    with DirectoryClient(server.address, PATIENCE_S) as client:
        with pytest.raises(AccessRefused, match="different clusters or generations"):
            client.nodes()
        copies.copy("b")
        assert client.nodes() == [], "read again without a restart"
    server.stop()
    thread.join()
    server.close()
