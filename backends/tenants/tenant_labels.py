"""Which tenants have series of their own on the metrics page: so many, and no more for ever.

Triton keeps each series until it ends, so a label must not be what clients say. Only tenants of the
file of keys have one, the first so many of them that ask; all others share one. Salts and keys are
never on the page. Not here: what is counted (frontend/request_times.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from backends.tenants.principal import Principal

LABELS_MAX = 64
OTHERS = "(others)"  # no name of a tenant
OF_A_TENANT = re.compile(rb'[{,]tenant="([^"]*)"')


def without_other_tenants(page: bytes, tenant: str) -> bytes:
    """A metrics page in Prometheus' text format, as this tenant may read it."""
    own = tenant.encode()
    lines = []
    for line in page.splitlines(keepends=True):
        found = OF_A_TENANT.search(line)
        if found is None or found[1] == own or line.startswith(b"#"):
            lines.append(line)
    return b"".join(lines)


class TenantLabels:
    """Not thread-safe."""

    def __init__(self, labels_max: int = LABELS_MAX) -> None:
        self._labels_max = labels_max
        self._known: set[str] = set()

    def of(self, principal: Principal) -> str:
        """ "" where there are no keys: then nothing is counted by tenant."""
        if principal.known is None:
            return ""
        if principal.tenant not in self._known and len(self._known) >= self._labels_max:
            return OTHERS
        self._known.add(principal.tenant)
        return principal.tenant

    def sums(self, of_tenants: Mapping[str, int]) -> dict[str, int]:
        """A number of each tenant, as it is shown: that of every label, 0 too."""
        found = dict.fromkeys(self._known, 0)
        for tenant, number in of_tenants.items():
            label = tenant if tenant in self._known else OTHERS
            found[label] = found.get(label, 0) + number
        return found
