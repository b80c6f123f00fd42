"""Who of this worker's prompts is just bringing which block: so that nobody brings it twice.

Twenty prompts with one new prefix in a burst would otherwise all find it missing and all compute
(or fetch) it. The first claims the blocks that it lacks; one whose next missing block is claimed
by another waits until that block is in the store, and looks again. Whoever waits holds no claims,
so nobody waits in a circle. Pure; the worker's lock guards it.
"""

from __future__ import annotations

from collections.abc import Sequence


class PrefixClaims:
    def __init__(self) -> None:
        self._owner_of: dict[bytes, str] = {}
        self._keys_of: dict[str, set[bytes]] = {}

    def __len__(self) -> int:
        return len(self._owner_of)

    def claim(self, missing: Sequence[bytes], owner: str) -> bool:
        """`missing` are the keys that `owner` lacks, in order. False: wait for another owner."""
        if missing and self._owner_of.get(missing[0], owner) != owner:
            return False
        # Blocks further on may be another's; then both bring them, which is waste, not harm.
        for key in missing:
            if key not in self._owner_of:
                self._owner_of[key] = owner
                self._keys_of.setdefault(owner, set()).add(key)
        return True

    def settle(self, keys: Sequence[bytes], owner: str) -> None:
        """These blocks are in the store now (or will not come)."""
        own = self._keys_of.get(owner, set())
        for key in keys:
            if key in own:
                own.discard(key)
                del self._owner_of[key]
        if not own:
            self._keys_of.pop(owner, None)

    def settle_all(self, owner: str) -> None:
        self.settle(list(self._keys_of.get(owner, ())), owner)

    def check(self) -> None:
        pairs = {(key, owner) for owner, keys in self._keys_of.items() for key in keys}
        assert pairs == set(self._owner_of.items()), "claims and owners disagree"
        assert all(self._keys_of.values()), "an owner without claims is remembered"
