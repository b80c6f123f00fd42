"""The principal of a request at the frontend: its tenant, with salt, priority and limits.

    no API keys configured   the client's parameters `tenant` and `request_priority` are used
    API keys, valid proof    the proven tenant, with the salt, priority and limits in the file
    API keys, no tenant      the default tenant, without a salt. If the file sets `keyless` to
                             `refused`, only `describe` is served and other requests are rejected
    API keys, invalid proof  the request is rejected. The proof is missing, expired or wrong, or
                             the tenant is no longer in the file

With API keys, a client's `request_priority` may be below the priority of its tenant. A higher value
is reduced to the tenant's priority.
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
from mooncake_store.block_keys import SALT_SEPARATOR


@dataclass(frozen=True, slots=True)
class Principal:
    """The tenant of a request."""

    tenant: str = ""
    known: ApiTenant | None = None  # the tenant's settings in the file; None without API keys

    def salt(self, given: str) -> str:
        """Salt of the block keys. `given`: parameter `tenant`, which is used without API keys, and
        after SALT_SEPARATOR parameter `cache_salt`, if the client sent it."""
        _, separator, of_client = given.partition(SALT_SEPARATOR)
        return given if self.known is None else f"{self.known.salt}{separator}{of_client}"

    @property
    def limits(self) -> TenantLimits | None:
        """None without API keys."""
        return self.known.limits if self.known is not None else None

    def priority(self, given: int | None) -> int:
        """The priority of the request. `given`: the client's `request_priority`, or None."""
        if self.known is None:
            return given or 0
        return self.known.priority if given is None else min(given, self.known.priority)


def principal_of(
    parameters: Mapping[str, Any], keys: ApiKeys | None, secret: str, now_unix_s: float
) -> Principal:
    """The principal of a request. Raises Forbidden for requests that the module's table rejects."""
    named, proof = parameters.get(TENANT, ""), parameters.get(PROOF, "")
    if keys is None:
        return Principal(named if isinstance(named, str) else "")  # parsing rejects other types
    if not named and not proof:
        # `describe` true returns only public properties, and the gateway sends it without a tenant.
        if not keys.serves_keyless and parameters.get("describe") is not True:
            raise Forbidden("this server serves only requests with an API key")
        return Principal(DEFAULT, keys.tenant(DEFAULT))
    if not isinstance(named, str) or not is_proven(named, proof, secret, now_unix_s):
        raise Forbidden(
            "parameter tenant is not proven: with API keys only the gateway sets it; "
            "send the key to the gateway, or leave the parameter out"
        )
    tenant = keys.tenant(named)
    if tenant is None:
        raise Forbidden(f"tenant {named!r} is no longer in the file of keys")
    return Principal(named, tenant)


def check_is_gateway(
    parameters: Mapping[str, Any], keys: ApiKeys | None, secret: str, now_unix_s: float
) -> None:
    """Raises Forbidden if keys are configured and the caller is not the gateway. This check guards
    answers with data of all tenants."""
    if keys is None:
        return
    named, proof = parameters.get(TENANT, ""), parameters.get(PROOF, "")
    if named != GATEWAY or not is_proven(GATEWAY, proof, secret, now_unix_s):
        raise Forbidden(
            "with API keys only the gateway describes the cluster; send it a key of an operator"
        )
