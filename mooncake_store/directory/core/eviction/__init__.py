"""Which idle copy of a storage node goes when its segment is full? Pure."""

from mooncake_store.directory.core.eviction.policies import POLICIES, EvictionOrder, make_eviction

__all__ = ["POLICIES", "EvictionOrder", "make_eviction"]
