"""Every error that the store shows to its callers: what happened, and what to do then.

Each is made from one message, so that it travels over the wire as (class name, message) and is
raised at the client as the same class. Those that one process alone can raise are where it does
(SegmentRefused in memory/segment_file.py, for instance).
"""

from __future__ import annotations


class StoreError(Exception):
    """Base of all."""


class RequestInvalid(StoreError):
    """The request is malformed or over a limit: fix the caller."""


class ProtocolMismatch(StoreError):
    """The other side speaks another version: upgrade one of the two."""


class StoreUnavailable(StoreError):
    """The directory did not answer in time: compute without the store."""


class AccessRefused(StoreError):
    """The other side does not let this process in, or is not who it should be: keys, or no keys."""


class StateNotSaved(StoreError):
    """A pin or a quota could not be written where it outlives the directory: nothing changed."""


class EpochPassed(StoreError):
    """An earlier directory granted this: what was written counts for nothing, allocate again."""


class NodeUnknown(StoreError):
    """No such storage node is registered now: wait until it registers."""


class NodeNotAttached(NodeUnknown):
    """The node or the directory has begun anew: attach() again."""


class StoreFull(StoreError):
    """No room, and nothing may be evicted: go on without storing."""


class QuotaExceeded(StoreFull):
    """A tenant's share is used up and in use: release, or raise it."""


class SsdRefused(StoreError):
    """The SSD tier cannot be had: another folder, or --ssd-reset."""


class ManifestDamaged(SsdRefused):
    """What is on the SSD cannot be known: it starts empty."""


class ManifestVersion(SsdRefused):
    """Another release wrote what is on the SSD: use that one, or --ssd-reset."""


class LayoutMismatch(StoreError):
    """Not even one such block fits into the node: give it a larger segment."""


class FingerprintMismatch(StoreError):
    """The worker's KV does not fit its pool: the worker must not start."""


class TransferFailed(StoreError):
    """Bytes did not arrive: read the next copy, or recompute."""


class TransferTimeout(TransferFailed):
    """Bytes did not arrive, and may still arrive: quarantine the targets."""


class WriteGivenUp(TransferTimeout):
    """One of several network paths got stuck while it wrote: write anew, into fresh slots."""


class BlockMissing(StoreError):
    """The copy is not there any more: a miss, never a failure of the request."""


def _tree(root: type[StoreError]) -> dict[str, type[StoreError]]:
    found = {root.__name__: root}
    for child in root.__subclasses__():
        found.update(_tree(child))
    return found


_BY_NAME = _tree(StoreError)


def named(kind: str, message: str) -> StoreError:
    """The error that came over the wire; a StoreError when this side does not know its class."""
    known = _BY_NAME.get(kind)
    return known(message) if known else StoreError(f"{kind}: {message}")
