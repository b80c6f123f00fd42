"""etcd as an election asks it: keys with revisions, leases with a TTL, compare and write.

One store that all hosts reach over the network; the cluster itself is taken to be right, as etcd
is. A call that meets a cut fails after its timeout, and may have been carried out all the same.

Not here: the election (mooncake_store/directory/election.py, which runs as it is).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from mooncake_store.directory.etcd import MISSING, EtcdFailed, KeyValue
from tests.fuzz_serve.green import in_process, loop, sleep
from tests.fuzz_serve.network import Network

HOST = "etcd"


class EtcdStore:
    def __init__(self, network: Network) -> None:
        self.network = network
        self.revision = 1
        self.values: dict[str, tuple[bytes, int, int]] = {}  # value, mod_revision, lease
        self.leases: dict[int, tuple[float, float]] = {}  # TTL, when it ends
        self.next_lease = 1

    def expire(self) -> None:
        now_s = loop().now_s
        ended = [lease for lease, (_, until_s) in self.leases.items() if until_s <= now_s]
        for lease in ended:
            self.revoke(lease)

    def revoke(self, lease: int) -> None:
        if self.leases.pop(lease, None) is not None:
            self.revision += 1
            self.values = {k: v for k, v in self.values.items() if v[2] != lease}


class EtcdClient:
    """In place of directory.etcd.EtcdClient; `store` is set by the stage."""

    store: EtcdStore

    def __init__(self, endpoints: Sequence[str], timeout_s: float = 1.0, **_: object) -> None:
        self.endpoints = list(endpoints)
        self.timeout_s = timeout_s

    def _ask(self) -> EtcdStore:
        self._travel(is_answer=False)
        self.store.expire()
        return self.store

    def _answer(self) -> None:
        self._travel(is_answer=True)

    def _travel(self, is_answer: bool) -> None:
        process = in_process()
        assert process is not None
        ends = (HOST, process.host) if is_answer else (process.host, HOST)
        network = self.store.network
        if network.is_cut(*ends):
            sleep(self.timeout_s)
            raise EtcdFailed("etcd does not answer")
        seconds = network.delay_s(*ends)
        if seconds > self.timeout_s:
            sleep(self.timeout_s)
            raise EtcdFailed("etcd is slow")
        sleep(seconds)

    def grant(self, ttl_s: int) -> tuple[int, float]:
        store = self._ask()
        lease, store.next_lease = store.next_lease, store.next_lease + 1
        store.leases[lease] = float(ttl_s), loop().now_s + ttl_s
        self._answer()
        return lease, float(ttl_s)

    def keep_alive(self, lease: int) -> float:
        store = self._ask()
        ttl_s = 0.0
        if lease in store.leases:
            ttl_s = store.leases[lease][0]
            store.leases[lease] = ttl_s, loop().now_s + ttl_s
        self._answer()
        return ttl_s

    def revoke(self, lease: int) -> None:
        self._ask().revoke(lease)
        self._answer()

    def get(self, key: str) -> KeyValue:
        store = self._ask()
        value, revision, _ = store.values.get(key, (b"", 0, 0))
        self._answer()
        return KeyValue(value, revision) if revision else MISSING

    def under(self, prefix: str, page_keys: int) -> Iterator[tuple[str, KeyValue]]:
        store = self._ask()
        found = sorted(
            (key, KeyValue(value, revision))
            for key, (value, revision, _) in store.values.items()
            if key.startswith(prefix)
        )
        self._answer()
        yield from found

    def write_unless_changed(
        self,
        expected: Mapping[str, int],
        values: Mapping[str, bytes],
        leases: Mapping[str, int],
        gone: Sequence[tuple[str, str]] = (),
    ) -> int:
        """The revision of the write; 0: nothing was written."""
        store = self._ask()
        is_done = all(
            store.values.get(key, (b"", 0, 0))[1] == revision for key, revision in expected.items()
        )
        is_done &= all(lease in store.leases for lease in leases.values() if lease)
        if is_done:
            loop().seen["writes to etcd"] += 1
            store.revision += 1
            for key, value in values.items():
                store.values[key] = value, store.revision, leases.get(key, 0)
            for first, end in gone:
                store.values = {k: v for k, v in store.values.items() if not first <= k < end}
        revision = store.revision if is_done else 0
        self._answer()
        return revision
