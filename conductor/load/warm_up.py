"""A worker that joins others at work is given its share little by little.

It is idle, so by prediction alone everything goes there until its queue is as long as the others'.
But nothing is known of it yet: its coefficients were measured alone, its caches are cold, its
links untried; and if it is slow, a whole queue waits to find out. So for `slow_start_s` after it
joined its work is taken to last longer than predicted, by a factor that falls to 1:

    newness = 1 - age / slow_start_s                       1 when it joins, 0 from slow_start_s on
    cost    = cost + newness x SLOWER x (wait + prefill)   for the choice of a worker only

What is told as predicted, and what admission judges, stays the prediction. Copies of hot prefixes
to its node have `1 - newness` of the budget of others (hotspots.py). A cluster that starts as a
whole has no newcomers: there is nobody to wait for.

Not here: how fast it turns out to be (speed.py).
"""

from __future__ import annotations

SLOWER = 3.0  # four times as long at first: as much as speed.py ever corrects
BUDGET_LEAST = 0.125  # of copies, or a newcomer would never get the first


def newness(joined_s: float, now_s: float, slow_start_s: float) -> float:
    """1 when it joins, 0 from slow_start_s on."""
    if slow_start_s <= 0:
        return 0.0
    return min(1.0, max(0.0, 1.0 - (now_s - joined_s) / slow_start_s))


def budget(whole: int, newness: float) -> int:
    """Of blocks to a node that is so new; at least one."""
    return max(1, int(whole * max(BUDGET_LEAST, 1.0 - newness)))
