"""key -> its ready copies, over all storage nodes.

The answer to a lookup (a tuple of places per key) is made when a key's copies change, not when it
is asked for: keys change once and are looked up many times, a thousand in one request.

Not here: copies that are being written (holder.py), a replica elsewhere (prefix_index.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from mooncake_store.holder import CopyState, HeldCopy
from mooncake_store.slots import Copy


@dataclass(slots=True, eq=False)
class Block:
    """The ready copies of one key, in order of their commits."""

    copies: list[HeldCopy] = field(default_factory=list)
    places: tuple[Copy, ...] = ()


class BlockIndex:
    def __init__(self) -> None:
        self._blocks: dict[bytes, Block] = {}

    def add(self, copy: HeldCopy) -> None:
        block = self._blocks.setdefault(copy.key, Block())
        block.copies.append(copy)
        block.places = tuple(held.place for held in block.copies)

    def remove(self, copy: HeldCopy) -> None:
        block = self._blocks[copy.key]
        block.copies.remove(copy)
        block.places = tuple(held.place for held in block.copies)
        if not block.copies:
            del self._blocks[copy.key]

    def prefix(self, keys: Sequence[bytes]) -> list[Block]:
        """The blocks of `keys` up to the first that is nowhere."""
        get = self._blocks.get
        found: list[Block] = []
        for key in keys:
            block = get(key)
            if block is None:
                break
            found.append(block)
        return found

    def each(self, keys: Sequence[bytes]) -> list[Block | None]:
        return [self._blocks.get(key) for key in keys]

    def announced(self) -> Iterator[tuple[bytes, tuple[str, ...]]]:
        """key -> nodes, without ephemeral copies: what a replica may know."""
        for key, block in self._blocks.items():
            nodes = tuple(copy.place.node_id for copy in block.copies if not copy.is_ephemeral)
            if nodes:
                yield key, nodes

    def copies(self) -> Iterator[HeldCopy]:
        for block in self._blocks.values():
            yield from block.copies

    def check(self) -> None:
        """Prove the invariants."""
        for key, block in self._blocks.items():
            assert block.copies, f"{key.hex()} is indexed and nowhere"
            assert all(copy.key == key for copy in block.copies)
            assert all(copy.state is CopyState.READY for copy in block.copies)
            nodes = [copy.place.node_id for copy in block.copies]
            assert len(nodes) == len(set(nodes)), f"two copies of {key.hex()} on one node"
            assert block.places == tuple(copy.place for copy in block.copies)
            assert all(copy.holder.copies.get(key) is copy for copy in block.copies)
