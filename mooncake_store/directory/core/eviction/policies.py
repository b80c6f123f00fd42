"""The orders of eviction by name, as an operator writes it.

Not here: what they do (lru.py, density.py).
"""

from __future__ import annotations

from collections.abc import Callable

from mooncake_store.directory.core.eviction.density import Density
from mooncake_store.directory.core.eviction.lru import Lru
from mooncake_store.directory.core.eviction.order import EvictionOrder

_MAKERS: dict[str, Callable[[], EvictionOrder]] = {"lru": Lru, "density": Density}
POLICIES = tuple(_MAKERS)


def make_eviction(name: str) -> EvictionOrder:
    """A new, empty order."""
    maker = _MAKERS.get(name)
    if maker is None:
        raise ValueError(f"no eviction policy is called {name!r}; there are {', '.join(POLICIES)}")
    return maker()
