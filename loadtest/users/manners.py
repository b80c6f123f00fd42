"""What a polite client does next: after an answer, a rejection, a failure. Pure.

A rejected client comes back with the same request after `retry_after_s`, as it was told, though it
does not wait longer than RETRY_AFTER_S_MAX; told 0, which means never, it turns to something new,
as it does after a failure.
"""

from __future__ import annotations

from dataclasses import dataclass

from loadtest.results.metrics import COMPLETED, REJECTED, RequestRecord

RETRY_AFTER_S_MAX = 30.0


@dataclass(frozen=True, slots=True)
class Next:
    wait_s: float
    is_answered: bool = False
    is_repeated: bool = False  # the same request; otherwise something new


def after(record: RequestRecord, think_s: float) -> Next:
    if record.outcome == COMPLETED:
        return Next(think_s, is_answered=True)
    if (wait_s := retry_s(record)) > 0:
        return Next(wait_s, is_repeated=True)
    return Next(think_s)


def retry_s(record: RequestRecord) -> float:
    """How long a rejected client stays away; 0 for everyone else."""
    if record.outcome != REJECTED:
        return 0.0
    return min(record.retry_after_s or 0.0, RETRY_AFTER_S_MAX)
