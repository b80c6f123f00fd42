"""Eviction policies: the order in which idle copies of a full segment are evicted. Pure."""

from mooncake_store.directory.core.eviction.policies import POLICIES, EvictionOrder, make_eviction

__all__ = ["POLICIES", "EvictionOrder", "make_eviction"]
