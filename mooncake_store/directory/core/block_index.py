"""Index of all holders: block key -> its ready copies.

A holder is the DRAM or the SSD of a storage node. Most keys have one copy, so the value is that
copy itself. A key with several copies has a tuple, DRAM before SSD. The start of a hot prefix is on
every node, and every request looks it up. So the answer for a key with many copies is cached.

Not here: when copies are added and removed (copies.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from mooncake_store.directory.core.holder import CopyState, HeldCopy, Holder
from mooncake_store.records.blocks import BlockPage, Copy

_made = tuple.__new__  # creates a NamedTuple in half the time of its constructor
KEPT_FROM = 8  # the answer for a key is cached if it has at least this many copies


class SeveralCopies(tuple[HeldCopy, ...]):
    """All ready copies of one key, at least two. The records of ready copies never change, so they
    can be cached."""

    answer: tuple[Copy, ...] = ()  # cached answer to a lookup; empty if not cached


Held = HeldCopy | SeveralCopies


def copies_of(held: Held | None) -> tuple[HeldCopy, ...]:
    if held is None:
        return ()
    return held if isinstance(held, tuple) else (held,)


def records_of(held: Held | None) -> tuple[Copy, ...]:
    """The answer to a lookup of one key."""
    if isinstance(held, HeldCopy):
        size_class, row = held.size_class, held.row
        columns = size_class.columns
        use = size_class.node_id, columns.slot[row], columns.generation[row], columns.checksum[row]
        return (_made(Copy, (*use, held.size_bytes)),)
    if held is None:
        return ()
    if held.answer:
        return held.answer
    answer = tuple(copy.record for copy in held)
    if len(answer) >= KEPT_FROM:
        held.answer = answer
    return answer


def hash_all(keys: Iterable[bytes]) -> None:
    """Compute the hashes of many keys, which Python caches in each `bytes`. Lookups that follow
    only wait for memory, and the CPU overlaps the waits of consecutive lookups."""
    deque(map(hash, keys), maxlen=0)


def _with_answer(held: Held, start: int, end: int, instead: tuple[HeldCopy, ...]) -> SeveralCopies:
    """The copies of `held`, with `instead` in place of [start, end); the cached answer likewise."""
    before = copies_of(held)
    after = SeveralCopies((*before[:start], *instead, *before[end:]))
    if isinstance(held, SeveralCopies) and held.answer and len(after) >= KEPT_FROM:
        new = tuple(copy.record for copy in instead)
        after.answer = (*held.answer[:start], *new, *held.answer[end:])
    return after


class BlockIndex:
    """The index. At ten million keys, its dict is the largest object in the process. It has ready
    copies only, ephemeral ones included. Copies in other states are in their holder."""

    def __init__(self) -> None:
        self.held: dict[bytes, Held] = {}  # read by other modules, written only here

    def __len__(self) -> int:
        return len(self.held)

    def add(self, copy: HeldCopy) -> None:
        held = self.held.setdefault(copy.key, copy)
        if held is copy:
            return
        before = copies_of(held)
        at = len(before)
        if not copy.size_class.is_ssd:
            while at and before[at - 1].size_class.is_ssd:
                at -= 1
        self.held[copy.key] = _with_answer(held, at, at, (copy,))

    def remove(self, copy: HeldCopy) -> None:
        if self.held[copy.key] is copy:
            del self.held[copy.key]
            return
        held = self.held[copy.key]
        assert isinstance(held, SeveralCopies), f"{copy.key.hex()} has another copy"
        at = held.index(copy)
        left = _with_answer(held, at, at + 1, ())
        self.held[copy.key] = left if len(left) > 1 else left[0]

    def on(self, key: bytes, holder: Holder) -> HeldCopy | None:
        """The ready copy of `key` on this holder, or None."""
        held = self.held.get(key)
        if held is None:
            return None
        if isinstance(held, HeldCopy):
            return held if held.size_class.holder is holder else None
        return next((copy for copy in held if copy.size_class.holder is holder), None)

    def all_on(self, keys: Sequence[bytes], holder: Holder) -> list[HeldCopy | None]:
        found: list[HeldCopy | None] = []
        for held in map(self.held.get, keys):
            if held is None or (held.__class__ is HeldCopy and held.size_class.holder is holder):
                found.append(held)
                continue
            here = (copy for copy in copies_of(held) if copy.size_class.holder is holder)
            found.append(next(here, None))
        return found

    def prefix(self, keys: Sequence[bytes]) -> list[Held]:
        """The entries of `keys` up to the first key without a ready copy."""
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

    def announced(self) -> Iterator[tuple[bytes, tuple[str, ...]]]:
        """(key, node ids) of each key with copies that are not ephemeral."""
        for key, held in self.held.items():
            nodes = tuple(copy.node_id for copy in copies_of(held) if not copy.is_ephemeral)
            if nodes:
                yield key, nodes

    def page(self, first: int, blocks_max: int) -> BlockPage:
        """The blocks among `blocks_max` keys from position `first`, without ephemeral copies, and
        whether these were the last keys. Removals shift the positions, so later pages may omit
        blocks. Each of the first `first` keys costs 10 ns."""
        chosen = list(islice(self.held.items(), first, first + blocks_max))
        page = []
        for key, held in chosen:
            copies = tuple(copy.record for copy in copies_of(held) if not copy.is_ephemeral)
            if copies:
                page.append((key, copies))
        return page, len(chosen) < blocks_max

    def copies(self) -> Iterator[HeldCopy]:
        for held in self.held.values():
            yield from copies_of(held)

    def check(self) -> None:
        for key, held in self.held.items():
            copies = copies_of(held)
            assert copies, f"{key.hex()} is indexed without a copy"
            assert isinstance(held, tuple) == (len(copies) > 1)
            assert all(copy.key == key for copy in copies)
            kept = held.answer if isinstance(held, SeveralCopies) else ()
            assert kept in ((), tuple(copy.record for copy in copies)), "a cached answer is stale"
            assert all(copy.state is CopyState.READY for copy in copies)
            nodes = [copy.node_id for copy in copies]
            assert len(nodes) == len(set(nodes)), f"two copies of {key.hex()} on one holder"
            tiers = [copy.holder.info.tier != "dram" for copy in copies]
            assert tiers == sorted(tiers), f"{key.hex()}: an SSD copy before a DRAM copy"
