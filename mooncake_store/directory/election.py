"""Leader election of the directory: the directory that wrote the leader's key in etcd serves.

    PREFIX/leader   written when it is missing, under a lease that the leader keeps alive:
                    {"address": ..., "events": ..., "name": ..., "epoch": ...}
    PREFIX/epoch    epoch of the latest leader, written in the same transaction; so epochs, and
                    the generations of slots, grow even if a clock was set back

A leader's own deadline is the time at which it *sent* the last successful renewal of its lease,
plus the requested TTL, less a margin. This is earlier than the end of the lease in etcd. If etcd
hangs, the network is cut, or this process was stopped, `may_serve` is false before another
directory can be elected. This check needs no message, only the leader's clock.

Time is CLOCK_BOOTTIME, which continues while a machine sleeps. A machine whose clocks stopped (a
paused VM) detects the loss at its next renewal. Until then, only epochs distinguish its answers
from those of the next leader.

While etcd does not answer, no directory is elected, and a leader that cannot renew steps down.
After its deadline it sends at most one more answer, to the request that was being carried out.

An address `etcd://HOST:PORT,HOST:PORT/PREFIX` stands for the current leader (`leader_at`).
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable

import msgspec
from msgspec import structs

from mooncake_store.directory.boot_clock import boot_s
from mooncake_store.directory.etcd import EtcdClient, EtcdFailed, decimal, etcd_url
from mooncake_store.errors import RequestInvalid, StoreUnavailable
from mooncake_store.records.blocks import EPOCH_MAX
from mooncake_store.wire.addresses import ELECTED

log = logging.getLogger("mooncake_store.election")
PREFIX = "mooncake/directory"
TTL_S = 3  # default TTL of the leader's lease
MARGIN = 0.2  # fraction of the TTL between the leader's own deadline and the end of its lease
RENEWALS = 4  # renewals per TTL
POLL_S = 0.2  # interval at which a waiting directory checks whether a leader exists
WAITING, WAITING_TTL_S = "waiting", 6  # subfolder and TTL of the keys of waiting directories
STEP_S = 0.05  # delay until a stop is noticed


class NoLeader(StoreUnavailable):
    """No directory is elected at this address now."""


class Leader(msgspec.Struct, frozen=True):
    address: str  # address of its requests
    events: str  # address of its event stream
    name: str = ""  # host and process, for operators
    epoch: int = 0  # epoch of its leadership; set by the election


class Leadership:
    """A won election. A thread renews its lease; once lost, the leadership stays lost."""

    def __init__(
        self,
        etcd: EtcdClient,
        lease: int,
        epoch: int,
        asked_s: float,
        ttl_s: float,
        revision: int = 0,
        clock: Callable[[], float] = boot_s,
    ) -> None:
        """`asked_s`: when (by `clock`) the lease of at least `ttl_s` was requested. `revision`:
        mod_revision of the leader's key in etcd, which is not written again."""
        self.epoch, self.revision = epoch, revision
        self._etcd, self._lease, self._ttl_s, self._clock = etcd, lease, ttl_s, clock
        self._valid_until_s = self._valid_from(asked_s)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._renew_until_over, name="election", daemon=True)
        self._thread.start()

    def may_serve(self) -> bool:
        """Whether this process may still act as the leader. Call it before each action."""
        return self._clock() < self._valid_until_s and not self._is_over.is_set()

    @property
    def margin_s(self) -> float:
        """The least seconds from the deadline of `may_serve` to the lease's end in etcd. `close`
        ends the lease at once, so a leader that granted slots must wait this long before
        `close`."""
        return MARGIN * self._ttl_s

    def close(self) -> None:
        """Release the lead now, for a clean shutdown. A second call has no effect."""
        was_over = self._is_over.is_set()
        self._is_over.set()
        self._thread.join()
        if not was_over:
            with contextlib.suppress(EtcdFailed):  # the lease then ends with its TTL
                self._etcd.revoke(self._lease)

    def _renew_until_over(self) -> None:
        wait_s = self._ttl_s / RENEWALS
        while not self._is_over.wait(wait_s):
            wait_s = self._ttl_s / RENEWALS if self._renew() else STEP_S

    def _renew(self) -> bool:
        """Try to renew the lease. Returns False if etcd did not answer."""
        asked_s = self._clock()
        left_s = -1.0
        try:
            left_s = self._etcd.keep_alive(self._lease)
        except EtcdFailed as error:
            log.warning("leadership not renewed: %s", error)
        if left_s == 0 or self._clock() >= self._valid_until_s:  # once lost, the lead stays lost
            log.warning("leadership ended: its lease has ended or was not renewed in time")
            self._is_over.set()
        elif left_s > 0:
            self._valid_until_s = self._valid_from(asked_s)
        return left_s >= 0

    def _valid_from(self, asked_s: float) -> float:
        """The leader's own deadline for a lease requested at `asked_s`."""
        return asked_s + self._ttl_s * (1.0 - MARGIN)


class _Waiting:
    """Announces in etcd that a directory waits, so that operators can see it (`waiting_at`)."""

    def __init__(self, etcd: EtcdClient, key: str) -> None:
        self._etcd, self._key = etcd, key
        self._lease, self._again_s = 0, 0.0

    def announce(self) -> None:
        """Write or renew the key, at most three times per WAITING_TTL_S. May be called often."""
        if time.monotonic() < self._again_s:
            return
        self._again_s = time.monotonic() + WAITING_TTL_S / 3
        with contextlib.suppress(EtcdFailed):
            if self._lease and self._etcd.keep_alive(self._lease) > 0:
                return
            self._lease, _ = self._etcd.grant(WAITING_TTL_S)
            self._etcd.write_unless_changed({}, {self._key: b""}, {self._key: self._lease})

    def end(self) -> None:
        with contextlib.suppress(EtcdFailed):  # the lease then ends with its TTL
            if self._lease:
                self._etcd.revoke(self._lease)


def campaign(
    etcd: EtcdClient,
    prefix: str,
    leader: Leader,
    is_stopping: Callable[[], bool],
    now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    ttl_s: int = TTL_S,
) -> Leadership | None:
    """Wait until `leader` is elected. None: `is_stopping` became true first."""
    logged = ""
    waiting = _Waiting(etcd, f"{prefix}/{WAITING}/{leader.address}")
    while not is_stopping():
        try:
            won = _try_once(etcd, prefix, leader, now_ms, ttl_s)
            if won is not None:
                log.info("leads %s as %s, epoch %d", prefix, leader.address, won.epoch)
                return won
            waiting.announce()
            state = f"waits: {_leader_of(etcd, prefix).address} leads {prefix}"
        except NoLeader:
            continue  # the leader left between the two requests
        except StoreUnavailable as error:  # etcd is silent, or the key names no directory
            state = f"waits: {error}"
        if state != logged:
            log.info("%s", state)
            logged = state
        until_s = time.monotonic() + POLL_S
        while time.monotonic() < until_s and not is_stopping():
            time.sleep(STEP_S)
    waiting.end()
    return None


def _try_once(
    etcd: EtcdClient, prefix: str, leader: Leader, now_ms: Callable[[], int], ttl_s: int
) -> Leadership | None:
    key, epoch_key = f"{prefix}/leader", f"{prefix}/epoch"
    if etcd.get(key).mod_revision:
        return None
    last = etcd.get(epoch_key)
    epoch = _next_epoch(epoch_key, last.value, now_ms())
    asked_s = boot_s()
    lease, granted_s = etcd.grant(ttl_s)
    if granted_s > ttl_s:
        log.warning(
            "etcd extends a lease of %d s to %g s, so a dead leader is replaced only after that "
            "(the minimum TTL of etcd is 1.5 times its --election-timeout)",
            ttl_s,
            granted_s,
        )
    revision = 0
    try:
        revision = etcd.write_unless_changed(
            {key: 0, epoch_key: last.mod_revision},
            {
                key: msgspec.json.encode(structs.replace(leader, epoch=epoch)),
                epoch_key: str(epoch).encode(),
            },
            {key: lease},
        )
    finally:
        if not revision:  # the answer may be lost, so delete the key before its TTL, if possible
            with contextlib.suppress(EtcdFailed):
                etcd.revoke(lease)
    won_ttl_s = min(granted_s, ttl_s)
    return Leadership(etcd, lease, epoch, asked_s, won_ttl_s, revision) if revision else None


def _next_epoch(key: str, last: bytes, now_ms: int) -> int:
    """An epoch larger than `last`. A value that no directory can have written is ignored."""
    number = decimal(last)
    if last and not 0 < number < EPOCH_MAX:
        log.error("%s in etcd is damaged: no directory had the epoch %r", key, last[:32])
        number = 0
    return max(now_ms if now_ms < EPOCH_MAX else 0, number + 1)


def _leader_of(etcd: EtcdClient, prefix: str) -> Leader:
    found = etcd.get(f"{prefix}/leader")
    if not found.mod_revision:
        raise NoLeader(
            f"no directory leads {prefix} at {', '.join(etcd.endpoints)}: start one with --etcd, "
            "or wait: an election takes a few seconds"
        )
    try:
        return msgspec.json.decode(found.value, type=Leader)
    except (msgspec.DecodeError, ValueError) as error:
        raise StoreUnavailable(f"{prefix}/leader in etcd names no directory: {error}") from error


def leader_at(address: str, timeout_s: float = 1.0) -> Leader:
    """The leader at etcd://HOST:PORT[,HOST:PORT...][/PREFIX]. Raises NoLeader or EtcdFailed."""
    etcd, prefix = parse_address(address, timeout_s)
    return _leader_of(etcd, prefix)


def waiting_at(address: str, timeout_s: float = 1.0) -> set[str]:
    """Addresses of the directories that wait to be elected. A directory that died or was elected
    within the last WAITING_TTL_S may be included. Raises EtcdFailed."""
    etcd, prefix = parse_address(address, timeout_s)
    folder = f"{prefix}/{WAITING}/"
    return {key.removeprefix(folder) for key, _ in etcd.under(folder, page_keys=100)}


class ElectedAddress:
    """The address of an elected directory, found through etcd. For one thread at a time."""

    def __init__(self, address: str) -> None:
        self._etcd, self._prefix = parse_address(address)
        self._leader: Leader | None = None

    def find(self) -> str:
        """The address of the current leader. `has_moved` compares later leaders with this one."""
        self._leader = _leader_of(self._etcd, self._prefix)
        return self._leader.address

    def leader(self) -> Leader:
        """The current leader. Raises NoLeader or EtcdFailed. `has_moved` still compares with the
        leader of the last `find`."""
        return _leader_of(self._etcd, self._prefix)

    def has_moved(self) -> bool:
        """Whether the lead has changed since `find`: another leader or epoch, or no leader."""
        try:
            return self.leader() != self._leader
        except EtcdFailed:
            return False  # unknown, because etcd does not answer
        except StoreUnavailable:
            return True


def endpoints_and_prefix(address: str) -> tuple[list[str], str]:
    """etcd's members (HOST:PORT each) and the key prefix of an elected directory's address."""
    hosts, _, prefix = address.removeprefix(ELECTED).partition("/")
    endpoints = [host for host in hosts.split(",") if host]
    if not address.startswith(ELECTED) or not endpoints:
        raise RequestInvalid(f"{address!r}: use {ELECTED}HOST:PORT[,HOST:PORT...][/{PREFIX}]")
    return endpoints, prefix.strip("/") or PREFIX


def parse_address(address: str, timeout_s: float = 1.0) -> tuple[EtcdClient, str]:
    endpoints, prefix = endpoints_and_prefix(address)
    return EtcdClient(list(map(etcd_url, endpoints)), timeout_s), prefix
