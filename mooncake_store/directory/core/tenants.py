"""Quotas of tenants, in bytes over all holders, and their current usage.

Only the usage of tenants with a quota is counted. A new block beyond its tenant's quota evicts
the coldest blocks of this tenant, never those of another tenant. A block that two tenants compute
counts for the tenant that stored it (with a cache salt per tenant, no block is shared). A further
copy of the block, fetched by a node or restored from an SSD, counts for the same tenant, unless its
writer names another tenant. Spilling (a copy to the SSD) evicts no block for a quota. Instead, a
block is not spilled if its tenant's quota is full.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice

from mooncake_store.directory.core.holder import HeldCopy, Pin
from mooncake_store.errors import QuotaExceeded, RequestInvalid

TENANTS_MAX = 10_000  # tenants with a quota
LOOKED_AT_MAX = 1_024  # copies of a tenant examined per call of `victims`, coldest first


@dataclass(slots=True, eq=False)
class Tenant:
    name: str
    quota_bytes: int  # at least 1
    used_bytes: int = 0  # sum over `copies`; may exceed a quota that was lowered
    copies: dict[HeldCopy, None] = field(default_factory=dict)  # least recently used first


class TenantTable:
    def __init__(self) -> None:
        self._tenants: dict[str, Tenant] = {}
        self._tenant_of: dict[HeldCopy, Tenant] = {}

    def __len__(self) -> int:
        """The number of copies that count for a tenant."""
        return len(self._tenant_of)

    @property
    def are_limited(self) -> bool:
        """Whether any tenant has a quota."""
        return bool(self._tenants)

    def set_quota(self, name: str, quota_bytes: int) -> None:
        """Set a quota; 0 removes it. Copies from before a tenant had a quota are not counted."""
        known = self._tenants.get(name)
        self.check_quota(name, quota_bytes)
        if quota_bytes == 0:
            gone = self._tenants.pop(name, None)
            for copy in gone.copies if gone else ():
                del self._tenant_of[copy]
        elif known is not None:
            known.quota_bytes = quota_bytes
        else:
            self._tenants[name] = Tenant(name, quota_bytes)

    def check_quota(self, name: str, quota_bytes: int) -> None:
        """Raise RequestInvalid when `set_quota` would raise it; nothing changes."""
        if quota_bytes and name not in self._tenants and len(self._tenants) >= TENANTS_MAX:
            raise RequestInvalid(
                f"{TENANTS_MAX} tenants have a quota, which is the limit: set one quota to 0 first"
            )

    def usage(self) -> list[tuple[str, int, int]]:
        """(tenant, used bytes, quota bytes), by name."""
        return [(name, t.used_bytes, t.quota_bytes) for name, t in sorted(self._tenants.items())]

    def payer(self, copies: Iterable[HeldCopy]) -> str:
        """The tenant that one more copy of a block with these copies counts for; "": none."""
        payers = (self._tenant_of.get(copy) for copy in copies)
        return min((tenant.name for tenant in payers if tenant is not None), default="")

    def has_room(self, name: str, size_bytes: int) -> bool:
        """Whether `size_bytes` fit the tenant's quota, if it has one, without an eviction."""
        tenant = self._tenants.get(name)
        return tenant is None or tenant.used_bytes + size_bytes <= tenant.quota_bytes

    def victims(self, name: str, size_bytes: int) -> list[HeldCopy]:
        """Idle copies of the tenant to evict so that `size_bytes` fit. Raises QuotaExceeded if its
        LOOKED_AT_MAX oldest copies do not suffice."""
        tenant = self._tenants.get(name)
        if tenant is None:
            return []
        over_bytes = tenant.used_bytes + size_bytes - tenant.quota_bytes
        chosen: list[HeldCopy] = []
        for copy in islice(tenant.copies, LOOKED_AT_MAX):
            if over_bytes <= 0:
                break
            if copy.leases == 0 and copy.pin is not Pin.HARD:
                chosen.append(copy)
                over_bytes -= copy.size_bytes
        if over_bytes > 0:
            raise QuotaExceeded(
                f"tenant {name} stores {tenant.used_bytes} bytes of its {tenant.quota_bytes}; "
                f"{size_bytes} more do not fit, even if its oldest blocks without leases and hard "
                "pins are evicted; raise the quota (mooncake store quota), or end leases or pins"
            )
        return chosen

    def charge(self, name: str, copy: HeldCopy) -> None:
        tenant = self._tenants.get(name)
        if tenant is not None:
            tenant.copies[copy] = None
            tenant.used_bytes += copy.size_bytes
            self._tenant_of[copy] = tenant

    def used(self, copy: HeldCopy) -> None:
        """Record a use: the copy is now the tenant's most recently used one."""
        tenant = self._tenant_of.get(copy) if self._tenant_of else None
        if tenant is not None:
            del tenant.copies[copy]
            tenant.copies[copy] = None

    def discharge(self, copy: HeldCopy) -> None:
        tenant = self._tenant_of.pop(copy, None) if self._tenant_of else None
        if tenant is not None:
            del tenant.copies[copy]
            tenant.used_bytes -= copy.size_bytes

    def check(self) -> None:
        charged = 0
        for tenant in self._tenants.values():
            assert tenant.used_bytes == sum(copy.size_bytes for copy in tenant.copies)
            assert all(self._tenant_of[copy] is tenant for copy in tenant.copies)
            charged += len(tenant.copies)
        assert charged == len(self._tenant_of), "a copy is charged to a tenant without a quota"
