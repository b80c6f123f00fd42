"""The label `tenant` of metrics: a bounded number of tenants have series of their own.

Triton keeps each series until it exits, so the number of labels is bounded. The first LABELS_MAX
tenants that send a request get a label of their own. All later tenants share the label OTHERS.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from backends.tenants.principal import Principal

LABELS_MAX = 64
OTHERS = "(others)"  # no tenant can have this name
OF_A_TENANT = re.compile(rb'[{,]tenant="([^"]*)"')


def without_other_tenants(page: bytes, tenant: str) -> bytes:
    """A metrics page in Prometheus' text format, without the series of other tenants."""
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
        """The tenant's label; "" without API keys, when metrics are not counted by tenant."""
        if principal.known is None:
            return ""
        if principal.tenant not in self._known and len(self._known) >= self._labels_max:
            return OTHERS
        self._known.add(principal.tenant)
        return principal.tenant

    def sums(self, of_tenants: Mapping[str, int]) -> dict[str, int]:
        """Label -> sum of its tenants' numbers, with the label of a known tenant even if 0."""
        found = dict.fromkeys(self._known, 0)
        for tenant, number in of_tenants.items():
            label = tenant if tenant in self._known else OTHERS
            found[label] = found.get(label, 0) + number
        return found
