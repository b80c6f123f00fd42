"""Whose prompt is computed next inside a prefill worker: short work first, with ageing.

Each request gets a key when it arrives, and the least key goes first:

    order_key_s = arrived_s + min(stretch * work_s, wait_s_max)

`work_s` is the predicted time of its prefill, after what is cached. So a short prompt overtakes a
long one that came a little earlier, and nobody is overtaken by a request that came more than
`wait_s_max` later: that is the ageing. `stretch = 0` is first come, first served.

Which stretch and bound hold depends on whether overload is being shed (gate.py, and
docs/decisions/0016). A key never changes. So the worker may keep a heap, the conductor can tell
which of the requests that it routed there will go ahead of a new one, and both agree without
talking about it.

Not here: what the queue holds (prefill_queue.py; in a worker backends/engine/batching/batching.py).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class QueueOrder:
    """How much later a request may queue per second of its work, and at most."""

    stretch: float
    wait_s_max: float

    def key_s(self, arrived_s: float, work_s: float) -> float:
        """Place in the queue, in seconds on the clock of `arrived_s`; the least goes first."""
        return arrived_s + min(self.stretch * work_s, self.wait_s_max)


FIFO = QueueOrder(stretch=0.0, wait_s_max=0.0)
