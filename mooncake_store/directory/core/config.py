"""Options of the directory, including every bound on its memory."""

from __future__ import annotations

from dataclasses import dataclass, fields

from mooncake_store.directory.core.eviction.policies import POLICIES

HELP = {
    "node_ttl_s": "seconds without a report after which a storage node is removed with its copies",
    "worker_ttl_s": "seconds without a report after which a worker is removed",
    "quarantine_s": "quarantine of a slot whose writer vanished; must outlive any transfer to it",
    "lease_s_max": "longest lease; longer ones are cut to this",
    "nodes_max": "most storage nodes at once",
    "workers_max": "most live workers at once",
    "owners_max": "most requests that hold leases at once",
    "leases_max": "most leases of all requests together",
    "hard_pin_fraction_max": "largest share of a holder's memory that may be hard-pinned, above 0",
    "eviction": f"policy that orders idle blocks: {' or '.join(POLICIES)}",
    "spill_fraction": "used share of a segment from which cold blocks are copied to SSD, above 0",
    "slow_start_s": "seconds in which a new node's share of placed blocks grows to its full value",
    "events_max": "events kept for the stream; a client that misses more takes a snapshot",
}


@dataclass(frozen=True, slots=True)
class DirectoryConfig:
    node_ttl_s: float = 5.0
    worker_ttl_s: float = 5.0
    quarantine_s: float = 30.0
    lease_s_max: float = 3_600.0
    nodes_max: int = 1_024
    workers_max: int = 4_096
    owners_max: int = 100_000
    leases_max: int = 4_000_000
    hard_pin_fraction_max: float = 0.5
    eviction: str = "density"
    spill_fraction: float = 0.7
    slow_start_s: float = 60.0
    events_max: int = 8_192

    def problems(self) -> list[str]:
        """All mistakes at once, each with its limit; [] if there are none."""
        found = [
            f"{field.name} is {getattr(self, field.name)}; it must be positive"
            for field in fields(self)
            if field.name != "eviction" and not getattr(self, field.name) > 0
        ]
        if self.eviction not in POLICIES:
            found.append(f"eviction is {self.eviction!r}; use {' or '.join(POLICIES)}")
        return found
