"""Arguments, futures and partial results of StoreClient, with a directory in this process."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from mooncake_store.client import client as module
from mooncake_store.client.client import StoreClient, key_of
from mooncake_store.errors import QuotaExceeded, RequestInvalid, StoreUnavailable
from tests.mooncake_store.in_process import InProcessDirectory

KEYS = [key_of(name) for name in "abc"]


class Directory(InProcessDirectory):
    def close(self) -> None:
        """Nothing is connected."""


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[StoreClient]:
    """A client without nodes."""
    monkeypatch.setattr(module, "DirectoryClient", lambda _: Directory())
    with StoreClient("ipc:///nowhere", transports="mapped") as made:
        yield made


def test_a_put_of_no_blocks_needs_no_node(store: StoreClient) -> None:
    assert store.put([], []) == []


def test_a_single_key_is_rejected_as_no_list_of_keys(store: StoreClient) -> None:
    for call in (store.put, store.get_into):
        with pytest.raises(RequestInvalid, match="keys come in a list"):
            call(KEYS[0], [bytearray(b"x")])  # type: ignore[arg-type]


def test_a_put_keeps_the_results_of_sizes_before_a_full_quota(
    store: StoreClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def put(
        node_id: str, keys: Sequence[bytes], sources: Sequence[bytes], *_: object
    ) -> list[bool]:
        if len(sources[0]) == 2:
            raise QuotaExceeded("full")
        return [True] * len(keys)

    monkeypatch.setattr(store._putter, "put", put)
    assert store.put(KEYS, [b"x", b"yy", b"z"], "a") == [True, False, True]
    assert store.put(KEYS, [b"xx", b"y", b"zz"], "a") == [False, True, False]
    with pytest.raises(QuotaExceeded):
        store.put(KEYS[:1], [b"xx"], "a")


def test_first_futures_of_two_threads_use_one_pool(
    store: StoreClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two threads make the first call at once. `close` must wait for both futures."""
    both, pools = threading.Barrier(2), list[ThreadPoolExecutor]()

    def pool(threads: int, name: str) -> ThreadPoolExecutor:
        pools.append(ThreadPoolExecutor(threads, name))
        both.wait(10.0)
        return pools[-1]

    monkeypatch.setattr(module, "ThreadPoolExecutor", pool)
    futures: list[Future[list[bool]]] = []
    threads = [
        threading.Thread(target=lambda: futures.append(store.put_async([], []))) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [future.result(10.0) for future in futures] == [[], []]
    store.close()
    assert all(made._shutdown for made in pools), "close leaves threads behind"


def test_a_future_after_close_is_a_typed_error(store: StoreClient) -> None:
    store.close()
    with pytest.raises(StoreUnavailable, match="after shutdown"):
        store.put_async([], [])
