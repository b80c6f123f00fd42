"""Which idle copy of a storage node to drop when its segment is full.

Redis-style: this only *orders* candidates; it never frees anything. A copy is a candidate only
while nobody leases it: a leased block must survive even when it is the coldest one, because NIXL
reads it without asking anybody.

`order.py` is the contract, `lru.py` and `density.py` keep it, `make_eviction` picks one by name.

Not here: where a copy lives (holder.py), who leases it (leases.py), when memory is short
(copies.py).
"""

from mooncake_store.directory.core.eviction.order import EvictionOrder
from mooncake_store.directory.core.eviction.policies import POLICIES, make_eviction

__all__ = ["POLICIES", "EvictionOrder", "make_eviction"]
