"""Errors of the store for its callers. Each docstring gives the cause and the remedy.

Every error is constructed from one message. On the wire it is (class name, message), and the client
raises the same class. Errors that never cross the wire are defined where they are raised, for
instance SegmentRefused in memory/segment_file.py.
"""

from __future__ import annotations


class StoreError(Exception):
    """Base class of all store errors."""


class RequestInvalid(StoreError):
    """The request is malformed or over a limit: fix the caller."""


class ProtocolMismatch(StoreError):
    """The peer uses another protocol version: upgrade one of the two."""


class StoreUnavailable(StoreError):
    """The directory or a node does not answer in time or cannot serve: do without the store."""


class AccessRefused(StoreError):
    """This process or its peer rejects the keys of the other: correct the folder of keys."""


class StateNotSaved(StoreError):
    """A pin or a quota could not be saved in etcd, so nothing changed: try again."""


class EpochPassed(StoreError):
    """An earlier directory granted these slots or leases, which are void: allocate again."""


class NodeUnknown(StoreError):
    """The storage node is not registered: wait until it registers."""


class NodeNotAttached(NodeUnknown):
    """The node or the directory has restarted: call attach() again."""


class StoreFull(StoreError):
    """No block may be evicted, or the directory is at a limit: do without the store."""


class QuotaExceeded(StoreFull):
    """A tenant's quota is full of blocks in use: release blocks, or raise the quota."""


class SsdRefused(StoreError):
    """The SSD tier cannot be opened as configured: change --ssd-path, or use --ssd-reset."""


class ManifestDamaged(SsdRefused):
    """The manifest of the SSD cannot be used: nothing to do, because the tier starts empty."""


class ManifestVersion(SsdRefused):
    """Another release wrote the manifest of the SSD: use that release, or --ssd-reset."""


class LayoutMismatch(StoreError):
    """The node's segment is smaller than one block: configure a larger segment."""


class FingerprintMismatch(StoreError):
    """This worker cannot use another worker's KV: give both the same checkpoint and settings."""


class TransferFailed(StoreError):
    """A transfer failed: read the next copy, recompute, or write again."""


class TransferTimeout(TransferFailed):
    """A transfer did not end in time, and its bytes may still arrive: quarantine the targets."""


class WriteGivenUp(TransferTimeout):
    """A stalled write was given up before its deadline: write again, into new slots."""


def _tree(root: type[StoreError]) -> dict[str, type[StoreError]]:
    found = {root.__name__: root}
    for child in root.__subclasses__():
        found.update(_tree(child))
    return found


_BY_NAME = _tree(StoreError)


def named(kind: str, message: str) -> StoreError:
    """The error that a reply contains; a StoreError if this process has no class `kind`."""
    known = _BY_NAME.get(kind)
    return known(message) if known else StoreError(f"{kind}: {message}")
