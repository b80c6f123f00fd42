"""Whose request it is, as the frontend takes it: the client's word, or the gateway's proven one.

    no keys configured   the parameter `tenant` is the client's word, as is its priority
    keys, and a proof    the tenant of the file: its cache salt, its priority, its limits
    keys, no tenant      the default tenant, without a salt; where the file says so refused, but for
                         the question what is served (`describe`)
    keys, a word alone   refused: a tenant that is not proven, or whose proof is old or wrong

With keys a client may lower its priority (`request_priority`) and not raise it above its tenant's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from backends.errors import Forbidden
from backends.tenants.api_keys import ApiKeys
from backends.tenants.proof import GATEWAY, PROOF, TENANT, is_proven
from backends.tenants.tenants_file import DEFAULT, ApiTenant
from conductor.messages import TenantLimits


@dataclass(frozen=True, slots=True)
class Principal:
    """`known` is None where there are no keys: then the client says what it likes."""

    tenant: str = ""
    known: ApiTenant | None = None

    def salt(self, said: str) -> str:
        """Of the cache keys; `said`: by the client."""
        return said if self.known is None else self.known.salt

    @property
    def limits(self) -> TenantLimits | None:
        """None where nobody counts."""
        known = self.known
        if known is None:
            return None
        return TenantLimits(
            known.requests_per_minute, known.tokens_per_minute, known.requests_in_flight_max
        )

    def priority(self, said: int | None) -> int:
        """`said` by the client, None: nothing."""
        if self.known is None:
            return said or 0
        return self.known.priority if said is None else min(said, self.known.priority)


def principal_of(
    parameters: Mapping[str, Any], keys: ApiKeys | None, secret: str, now_unix_s: float
) -> Principal:
    """Forbidden when keys are configured and the tenant is nobody's word but the client's."""
    named, proof = parameters.get(TENANT, ""), parameters.get(PROOF, "")
    if keys is None:
        return Principal(named if isinstance(named, str) else "")  # else it is refused later
    if not named and not proof:
        # What is served is no secret, and the gateway asks for it without being anybody's.
        if not keys.serves_keyless and parameters.get("describe") is not True:
            raise Forbidden("this server serves only requests that come with an API key")
        return Principal(DEFAULT, keys.tenant(DEFAULT))
    if not isinstance(named, str) or not is_proven(named, proof, secret, now_unix_s):
        raise Forbidden(
            "parameter tenant is not proven: with API keys the gateway says whose request it is; "
            "send the key there, or leave the parameter out"
        )
    tenant = keys.tenant(named)
    if tenant is None:
        raise Forbidden(f"there is no tenant {named!r} in the file of keys any more")
    return Principal(named, tenant)


def check_is_gateway(
    parameters: Mapping[str, Any], keys: ApiKeys | None, secret: str, now_unix_s: float
) -> None:
    """Forbidden for everybody else, where keys are configured: what follows is of all tenants."""
    if keys is None:
        return
    named, proof = parameters.get(TENANT, ""), parameters.get(PROOF, "")
    if named != GATEWAY or not is_proven(GATEWAY, proof, secret, now_unix_s):
        raise Forbidden(
            "with API keys only the gateway describes the cluster; ask it, with an operator's key"
        )
