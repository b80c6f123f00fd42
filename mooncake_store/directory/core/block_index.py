"""key -> its ready copies, over all holders.

Nearly every key has one copy, so the value is that copy itself; a key with several has a tuple of
them, DRAM before SSD. At ten million keys this dictionary is the largest thing in the process.

Not here: copies that are being written (holder.py), a replica elsewhere (prefix_index.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from struct import Struct

from mooncake_store.block_keys import KEY_BYTES
from mooncake_store.directory.core.holder import CopyState, HeldCopy, Holder
from mooncake_store.records.blocks import Copy

_made = tuple.__new__
_KEY = Struct(f"{KEY_BYTES}s")
Held = HeldCopy | tuple[HeldCopy, ...]


def copies_of(held: Held | None) -> tuple[HeldCopy, ...]:
    if held is None:
        return ()
    return held if isinstance(held, tuple) else (held,)


def places_of(held: Held | None) -> tuple[Copy, ...]:
    """The answer to a lookup of one key."""
    if isinstance(held, HeldCopy):
        shelf, row = held.shelf, held.row
        rows = shelf.rows
        use = shelf.node_id, rows.slot[row], rows.generation[row], rows.checksum[row]
        return (_made(Copy, (*use, held.size_bytes)),)  # half the time of Copy(...)
    return tuple(copy.place for copy in held or ())


def hash_all(keys: Iterable[bytes]) -> None:
    """Before many of them are looked up: Python keeps the hash of a `bytes`. What is left of each
    lookup is waiting for memory, and the CPU then waits for several keys at once."""
    deque(map(hash, keys), maxlen=0)


class BlockIndex:
    def __init__(self) -> None:
        self.held: dict[bytes, Held] = {}  # read by everybody, written only here

    def __len__(self) -> int:
        return len(self.held)

    def add(self, copy: HeldCopy) -> None:
        held = self.held.setdefault(copy.key, copy)
        if held is copy:
            return
        both = sorted((*copies_of(held), copy), key=lambda each: each.holder.info.tier != "dram")
        self.held[copy.key] = tuple(both)

    def remove(self, copy: HeldCopy) -> None:
        if self.held[copy.key] is copy:
            del self.held[copy.key]
            return
        left = tuple(each for each in copies_of(self.held[copy.key]) if each is not copy)
        if not left:
            del self.held[copy.key]
        else:
            self.held[copy.key] = left if len(left) > 1 else left[0]

    def on(self, key: bytes, holder: Holder) -> HeldCopy | None:
        """The ready copy of `key` in this holder."""
        held = self.held.get(key)
        if held is None:
            return None
        if isinstance(held, HeldCopy):
            return held if held.shelf.holder is holder else None
        return next((copy for copy in held if copy.shelf.holder is holder), None)

    def prefix(self, keys: Sequence[bytes]) -> list[Held]:
        """What is known of `keys` up to the first that is nowhere."""
        hash_all(keys)
        get = self.held.get
        found: list[Held] = []
        for key in keys:
            held = get(key)
            if held is None:
                break
            found.append(held)
        return found

    def each(self, keys: Sequence[bytes]) -> list[Held | None]:
        hash_all(keys)
        return list(map(self.held.get, keys))

    def exist(self, keys: bytes) -> bytes:
        """Is each of these keys, joined, anywhere? One byte per key: 0 or 1."""
        names = [name for (name,) in _KEY.iter_unpack(keys)]
        hash_all(names)
        return bytes(map(self.held.__contains__, names))

    def announced(self) -> Iterator[tuple[bytes, tuple[str, ...]]]:
        """key -> holders, without ephemeral copies: what a replica may know."""
        for key, held in self.held.items():
            nodes = tuple(copy.node_id for copy in copies_of(held) if not copy.is_ephemeral)
            if nodes:
                yield key, nodes

    def copies(self) -> Iterator[HeldCopy]:
        for held in self.held.values():
            yield from copies_of(held)

    def check(self) -> None:
        """Prove the invariants."""
        for key, held in self.held.items():
            copies = copies_of(held)
            assert copies, f"{key.hex()} is indexed and nowhere"
            assert isinstance(held, tuple) == (len(copies) > 1)
            assert all(copy.key == key for copy in copies)
            assert all(copy.state is CopyState.READY for copy in copies)
            nodes = [copy.node_id for copy in copies]
            assert len(nodes) == len(set(nodes)), f"two copies of {key.hex()} on one holder"
            tiers = [copy.holder.info.tier != "dram" for copy in copies]
            assert tiers == sorted(tiers), f"{key.hex()}: an SSD copy before a DRAM copy"
