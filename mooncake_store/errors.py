"""Every error that the store shows to its callers.

* StoreError
  x RequestInvalid        the request is malformed or over a limit      -> fix the caller
  x ProtocolMismatch      the other side speaks another version         -> upgrade one of the two
  x StoreUnavailable      the directory did not answer in time          -> compute without the store
  x NodeUnknown           no such storage node is registered now        -> wait until it registers
    - NodeNotAttached     it or the directory has begun anew            -> attach() again
  x StoreFull             no room, and nothing may be evicted           -> go on without storing
    - QuotaExceeded       a tenant's share is used up and in use        -> release, or raise it
  x SegmentRefused        a segment cannot be had (in segment.py)       -> fewer bytes
  x SsdRefused            the SSD tier cannot be had                    -> other folder, --ssd-reset
    - ManifestDamaged     ... what is on it cannot be known             -> it starts empty
    - ManifestVersion     ... another release wrote it                  -> that one, or --ssd-reset
  x LayoutMismatch        not even one such block fits into the node    -> a larger segment
  x FingerprintMismatch   the worker's KV does not fit its pool         -> the worker must not start
  x TransferFailed        bytes did not arrive                          -> next copy, or recompute
    - TransferTimeout     ... and may still arrive: quarantine targets
  x BlockMissing          the copy is not there any more                -> a miss, never a failure

Each is made from one message, so that it travels over the wire as (class name, message) and is
raised at the client as the same class.
"""

from __future__ import annotations


class StoreError(Exception):
    """Base of everything above."""


class RequestInvalid(StoreError):
    pass


class ProtocolMismatch(StoreError):
    pass


class StoreUnavailable(StoreError):
    pass


class NodeUnknown(StoreError):
    pass


class NodeNotAttached(NodeUnknown):
    pass


class StoreFull(StoreError):
    pass


class QuotaExceeded(StoreFull):
    pass


class SsdRefused(StoreError):
    pass


class ManifestDamaged(SsdRefused):
    pass


class ManifestVersion(SsdRefused):
    pass


class LayoutMismatch(StoreError):
    pass


class FingerprintMismatch(StoreError):
    pass


class TransferFailed(StoreError):
    pass


class TransferTimeout(TransferFailed):
    pass


class BlockMissing(StoreError):
    pass


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
