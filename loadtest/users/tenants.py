"""The tenants of the users, with weights, priorities and API keys. Pure except for reading keys.

`acme:3,batch:1@-1` are two tenants: three of four users belong to acme, and one to batch, whose
requests have priority -1. Every n-th user of a workload belongs to the same tenant in every run.

API keys are in a file of their own with a line `TENANT KEY` for each, as `mooncake tenants add`
prints them: all users of a host can read a command line.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from loadtest.client.protocol import GenerateRequest

TENANT = re.compile(r"([A-Za-z0-9._-]{1,64})(?::([0-9]{1,18}))?(?:@([+-]?[0-9]{1,9}))?")
EXAMPLE = "acme:3,batch:1@-1"
WEIGHT_MAX = 999


@dataclass(frozen=True, slots=True)
class LoadTenant:
    name: str
    weight: int = 1
    priority: int = 0
    # API key; "": none, and requests name the tenant instead
    key: str = field(default="", repr=False)


def tenants(text: str) -> tuple[LoadTenant, ...]:
    """ValueError for text that cannot be parsed."""
    found: list[LoadTenant] = []
    for part in filter(None, (part.strip() for part in (text or "").split(","))):
        parsed = TENANT.fullmatch(part)
        if parsed is None:
            raise ValueError(f"{part!r} is not a tenant; write NAME, NAME:WEIGHT or {EXAMPLE}")
        name, weight, priority = parsed.groups()
        if weight is not None and not 1 <= int(weight) <= WEIGHT_MAX:
            raise ValueError(
                f"{weight} is not a weight of {name}; write one from 1 to {WEIGHT_MAX}"
            )
        if name in {tenant.name for tenant in found}:
            raise ValueError(f"{name} is given twice")
        found.append(LoadTenant(name, int(weight or 1), int(priority or 0)))
    return tuple(found)


def shown(found: Sequence[LoadTenant]) -> str:
    """The text form of the tenants, without API keys."""
    return ",".join(
        f"{one.name}:{one.weight}{f'@{one.priority}' if one.priority else ''}" for one in found
    )


def read_keys(path: Path) -> dict[str, str]:
    """Tenant -> API key. ValueError with the line number; OSError when the file cannot be read."""
    keys: dict[str, str] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        # The message leaves out the line, which contains an API key.
        if len(words) != 2 or not words[1].isascii():
            raise ValueError(f"{path}:{number}: a line is TENANT KEY, separated by a space")
        if words[0] in keys:
            raise ValueError(f"{path}:{number}: {words[0]} is given twice")
        keys[words[0]] = words[1]
    if not keys:
        raise ValueError(f"{path}: no key in it; a line is TENANT KEY")
    return keys


def without_keys(found: Sequence[LoadTenant], keys: Mapping[str, str]) -> list[str]:
    return [tenant.name for tenant in found if tenant.name not in keys]


@dataclass(frozen=True, slots=True)
class UserIdentity:
    workload: str
    name: str  # unique among the users of its workload
    tenant: LoadTenant | None = None

    @property
    def group(self) -> str:
        return group_of(self.workload, self.tenant)

    def signed(self, request: GenerateRequest) -> GenerateRequest:
        if self.tenant is None:
            return request
        parameters = {**request.parameters, "tenant": self.tenant.name}
        return dataclasses.replace(request, parameters=parameters, priority=self.tenant.priority)


def group_of(workload: str, tenant: LoadTenant | None) -> str:
    return workload if tenant is None else f"{tenant.name}/{workload}"


def tenant_of(found: Sequence[LoadTenant], number: int) -> LoadTenant | None:
    """The tenant of user `number` from 0, in alternation: a, a, b, a with weights 3 and 1."""
    if not found:
        return None
    order = turns(tuple(tenant.weight for tenant in found))
    return found[order[number % len(order)]]


@functools.lru_cache(maxsize=8)
def turns(weights: tuple[int, ...]) -> tuple[int, ...]:
    """The order of turns: the tenant with the largest remaining share is next."""
    due = [
        ((turn + 0.5) / weight, place)
        for place, weight in enumerate(weights)
        for turn in range(weight)
    ]
    return tuple(place for _, place in sorted(due))


def number_among_parts(own: int, part: int, parts: int, mix_weights: Sequence[int]) -> int:
    """The number, among all users of its workload, of the `own`-th user in this process. Locust
    assigns users to workers in turn. If the length of the mix and the number of workers have a
    common divisor, a workload reaches only workers of one remainder. Workers of the same remainder
    share the numbers of a workload."""
    assert 0 <= part < parts
    weights = mix_weights or (1,)
    common = math.gcd(parts, sum(weights) // math.gcd(*weights))
    return own * (parts // common) + part // common + part % common
