"""What an operator may set of the directory, with every bound on its memory."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class DirectoryConfig:
    node_ttl_s: float = 5.0  # a storage node that was silent this long is gone, with its copies
    worker_ttl_s: float = 5.0
    quarantine_s: float = 30.0  # rest of a slot whose writer vanished; longer than any transfer
    lease_s_max: float = 3_600.0
    nodes_max: int = 1_024
    workers_max: int = 4_096
    owners_max: int = 100_000  # requests that hold leases at once
    leases_max: int = 4_000_000
    events_max: int = 131_072  # kept for feeds that are behind; who misses more takes a snapshot

    def problems(self) -> list[str]:
        return [
            f"{field.name} is {getattr(self, field.name)}; it must be positive"
            for field in fields(self)
            if not getattr(self, field.name) > 0
        ]
