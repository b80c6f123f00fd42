"""The replica of the index as storage nodes keep it, against a real directory."""

from __future__ import annotations

import dataclasses
import secrets
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from mooncake_store.client.client import StoreClient
from mooncake_store.directory.boot_clock import boot_s
from mooncake_store.errors import StoreError
from mooncake_store.memory.index_table import SWITCH, IndexView, table_path
from mooncake_store.node import index_writer
from mooncake_store.node.index_writer import IndexWriter
from mooncake_store.records.blocks import Copy
from tests.e2e.server import wait_until
from tests.mooncake_store.processes import SiteProcesses

pytestmark = pytest.mark.servers
SIZE = 20_000


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SiteProcesses]:
    monkeypatch.delenv(SWITCH, raising=False)
    made = SiteProcesses(tmp_path)
    yield made
    made.close()
    assert not Path(path_of(made)).exists()


def path_of(site: SiteProcesses) -> str:
    return table_path("/dev/shm/x", site.address)


def view_of(site: SiteProcesses) -> IndexView:
    """The table as it is now, as soon as it is believed."""
    found: list[IndexView] = []

    def is_there() -> bool:
        try:
            found[:] = [IndexView(path_of(site))]
        except StoreError:
            return False
        return found[0].is_current(boot_s())

    wait_until(is_there, "the table")
    return found[0]


def put(store: StoreClient, count: int, node_id: str = "") -> list[bytes]:
    keys = [secrets.token_bytes(16) for _ in range(count)]
    blocks = [np.frombuffer(key * (SIZE // 16), np.uint8) for key in keys]
    assert all(store.put(keys, blocks, node_id))
    return keys


def says(view: IndexView, keys: list[bytes], places: list[tuple[Copy, ...]]) -> bool:
    return view.find(b"".join(keys)) == places


def test_the_table_follows_what_comes_and_goes(site: SiteProcesses) -> None:
    site.node("a")
    with StoreClient(site.address, "a") as store:
        view = view_of(site)
        keys = put(store, 40)
        wait_until(lambda: says(view, keys, store.stat(keys)), "the table")
        assert view.position[0] == store.directory.stats().epoch
        assert all(store.remove(keys[:10]))
        wait_until(lambda: says(view, keys, [(), *[()] * 9, *store.stat(keys[10:])]), "the table")
        with StoreClient(site.address, "a") as reader:
            assert reader.exist(keys) == [False] * 10 + [True] * 30
    site.nodes["a"].end()
    assert not Path(path_of(site)).exists() and not view.is_current(boot_s())


def test_who_begins_to_write_later_has_what_was_there_before(
    site: SiteProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In many pages, while blocks come and go."""
    monkeypatch.setattr(index_writer, "PAGE_BLOCKS", 7)
    site.node("a", 8, "--events", "")
    with StoreClient(site.address, "a") as store:
        keys = put(store, 100)
        [info] = store.directory.nodes()
        info = dataclasses.replace(info, index_path=path_of(site))
        writer = IndexWriter(info, site.address, site.directory.events_address)
        try:
            view = view_of(site)
            more = put(store, 50)
            assert all(store.remove(keys[::3]))
            every = keys + more
            wait_until(lambda: writer._next_page is None, "the table")
            wait_until(lambda: not any(view.find(b"".join(keys[::3]))), "the table")
            missing = sum(
                found != true
                for found, true in zip(view.find(b"".join(every)), store.stat(every), strict=True)
            )
            assert missing <= len(keys[::3]), "pages leave out at most as many as went meanwhile"
            assert not any(
                found and found != true
                for found, true in zip(view.find(b"".join(every)), store.stat(every), strict=True)
            )
            assert writer._table is not None
            writer._table.check()
        finally:
            writer.close()


def test_one_node_of_a_host_writes_and_another_takes_over_when_it_is_killed(
    site: SiteProcesses,
) -> None:
    first, second = site.node("a"), site.node("b")
    with StoreClient(site.address, "b") as store:
        keys = put(store, 30, "b")
        before = view_of(site)
        wait_until(lambda: says(before, keys, store.stat(keys)), "the table")
        first.end(signal.SIGKILL)
        wait_until(lambda: not before.is_current(boot_s()), "the table")
        assert store.exist(keys) == [True] * 30, "the directory knows"
        after = view_of(site)
        wait_until(lambda: says(after, keys, store.stat(keys)), "the table")
        assert store.exist(keys) == [True] * 30
    assert second.process.poll() is None


def test_the_next_directory_s_blocks_are_in_it(site: SiteProcesses) -> None:
    site.node("a")
    with StoreClient(site.address, "a") as store:
        view, keys = view_of(site), put(store, 20)
        wait_until(lambda: says(view, keys, store.stat(keys)), "the table")
        epoch = view.position[0]
        site.directory.end(signal.SIGKILL)
        wait_until(lambda: not view.is_current(boot_s()), "the table")
        site.directory.start()
        wait_until(lambda: view.is_current(boot_s()), "the table")
        assert view.position[0] > epoch
        wait_until(lambda: store.exist(keys) == [True] * 20, "the table")
        wait_until(lambda: says(view, keys, store.stat(keys)), "the table")


def test_a_table_is_not_believed_while_the_directory_is_silent(site: SiteProcesses) -> None:
    site.node("a")
    with StoreClient(site.address, "a"):
        view = view_of(site)
        site.directory.process.send_signal(signal.SIGSTOP)
        wait_until(lambda: not view.is_current(boot_s()), "the table")
        site.directory.process.send_signal(signal.SIGCONT)
        wait_until(lambda: view.is_current(boot_s()), "the table")


def test_it_can_be_switched_off(site: SiteProcesses, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "off")
    site.node("a")
    with StoreClient(site.address, "a") as store:
        keys = put(store, 3)
        assert store.exist(keys) == [True] * 3
        assert [info.index_path for info in store.directory.nodes()] == [""]
    assert not Path(path_of(site)).exists()


def test_a_block_that_only_an_ssd_has_is_asked_of_the_directory(
    site: SiteProcesses, tmp_path: Path
) -> None:
    ssd = "--ssd-path", str(tmp_path / "ssd"), "--ssd-bytes", str(64 * 2**20)
    (tmp_path / "ssd").mkdir()
    site.node("a", 2, *ssd)
    with StoreClient(site.address, "a") as store:
        view, keys = view_of(site), put(store, 80)

        def spilled() -> list[tuple[Copy, ...]]:
            return [copies for copies in store.stat(keys) if copies[:1] and len(copies) > 1]

        wait_until(lambda: bool(spilled()), "the table")
        key = next(key for key in keys if len(store.stat([key])[0]) > 1)
        dram = store.stat([key])[0][0]
        wait_until(lambda: says(view, [key], [(dram,)]), "the table")
        assert store.directory.drop_copy(key, dram.node_id, dram.generation)
        wait_until(lambda: says(view, [key], [()]), "the table")
        assert store.exist([key]) == [True]
        [block] = store.get([key])
        assert block is not None and bytes(block[:16]) == key
