"""Threads, locks, queues, pools and clocks of the simulated processes, under the names that the
standard library gives them.

Product code runs as it is: a thread is a greenlet that gives way only where a real one would block.
At a lock it may give way too, with a small chance, so that other orders are met. All of them belong
to the process that was running when they were made.

Not here: when somebody goes on (loop.py), what stands in for which module (stage.py).
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import time as real_time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

from greenlet import getcurrent, greenlet

from tests.fuzz_serve.loop import CLOCKS_S, WALL_S, Killed, Loop, Process

GIVES_WAY = 0.02  # at a lock that is free
_hub: SimpleNamespace = SimpleNamespace(loop=None, greenlet=None, numbers=None, viewed=None)


def enter(loop: Loop) -> None:
    """From now on `loop` is the world; called in the greenlet that runs it."""
    _hub.loop, _hub.greenlet, _hub.numbers = loop, getcurrent(), itertools.count()


def loop() -> Loop:
    found: Loop = _hub.loop
    return found


class GreenThread(greenlet):
    """Runs in a process. `switch` only from the loop."""

    def __init__(self, process: Process, work: Callable[[], Any], name: str) -> None:
        super().__init__(self._run, _hub.greenlet)
        self.process, self.work, self.name = process, work, name
        self.number = next(_hub.numbers)
        self.ended: list[Ticket] = []
        self.is_over = False

    def begin(self) -> None:
        self.process.threads.add(self)
        process = self.process
        process.loop.threads.add(self)
        process.loop.soon(self._resume, None, process)

    def _resume(self, value: Any) -> None:
        if not self.is_over:
            self.switch(value)

    def _run(self, _: Any = None) -> None:
        try:
            self.work()
        except Killed:
            pass
        except BaseException as error:
            if self.process.is_alive and not self.process.loop.is_over:
                on_crash(self, error)
        finally:
            self._over()

    def _over(self) -> None:
        self.is_over = True
        self.process.threads.discard(self)
        self.process.loop.threads.discard(self)
        for ticket in self.ended:
            ticket.wake(True)

    def end(self) -> None:
        """Its process was killed."""
        if getcurrent() is self:
            return  # it meets the end where it blocks next
        if self.is_over:
            return
        if self:  # has begun
            self.throw(Killed)
        else:
            self._over()


def on_crash(thread: GreenThread, error: BaseException) -> None:
    """A thread of product code died of an error: always a violation."""
    where = traceback.extract_tb(error.__traceback__)[-1]
    loop().fail(
        f"thread {thread.name} of {thread.process.name} died of {error!r} "
        f"({where.filename.rpartition('/')[2]}:{where.lineno})"
    )


class Ticket:
    """A thread that waits for something, at most until a time."""

    __slots__ = ("is_done", "thread")

    def __init__(self) -> None:
        self.thread = _current()
        self.is_done = False

    def wake(self, value: bool) -> None:
        if not self.is_done:
            self.is_done = True
            process = self.thread.process
            process.loop.soon(self.thread._resume, value, process)

    def _expire(self, _: Any) -> None:
        if not self.is_done:
            self.is_done = True
            self.thread._resume(False)

    def wait(self, timeout_s: float | None = None) -> bool:
        """True when woken in time."""
        process = self.thread.process
        loop = process.loop
        if loop.is_over or not process.is_alive:
            raise Killed
        if timeout_s is not None:
            loop.at(loop.now_s + max(timeout_s, 1e-6), self._expire, None, process)
        found: bool = _hub.greenlet.switch()
        if loop.is_over or not process.is_alive:
            raise Killed
        return found


def _current() -> GreenThread:
    thread = getcurrent()
    assert isinstance(thread, GreenThread), "only a thread of a process may wait"
    return thread


def in_process() -> Process | None:
    thread = getcurrent()
    return thread.process if isinstance(thread, GreenThread) else None


@contextlib.contextmanager
def looking_into(process: Process) -> Iterator[None]:
    """A judge asks product code of this process what time it is."""
    _hub.viewed = process
    try:
        yield
    finally:
        _hub.viewed = None


def spawn(process: Process, work: Callable[[], Any], name: str) -> GreenThread:
    thread = GreenThread(process, work, name)
    thread.begin()
    return thread


def end_own_process() -> None:
    """From a thread of it."""
    process = in_process()
    assert process is not None
    process.loop.at(process.loop.now_s, lambda _: process.kill())
    Event().wait()


# ---- the module `time`


def monotonic() -> float:
    """Each host has a clock of its own; all seconds are as long."""
    thread = getcurrent()
    process = thread.process if isinstance(thread, GreenThread) else _hub.viewed
    return loop().now_s + (process.clock_s if process else 0.0)


def wall_s() -> float:
    process = in_process()
    return (
        WALL_S + monotonic() + (process.skew_s - CLOCKS_S.get(process.host, 0.0) if process else 0)
    )


def sleep(seconds: float) -> None:
    Ticket().wait(seconds)


TIME = SimpleNamespace(
    monotonic=monotonic,
    perf_counter=monotonic,
    time=wall_s,
    time_ns=lambda: int(wall_s() * 1e9),
    monotonic_ns=lambda: int(monotonic() * 1e9),
    sleep=sleep,
    process_time=lambda: 0.0,
    clock_gettime=lambda _: monotonic(),
    CLOCK_BOOTTIME=real_time.CLOCK_BOOTTIME,
    CLOCK_MONOTONIC=real_time.CLOCK_MONOTONIC,
    strftime=real_time.strftime,
)


# ---- the module `threading`


class Lock:
    """Also `RLock`, which its owner may take again."""

    is_reentrant = False

    def __init__(self) -> None:
        self._owner: object | None = None
        self._count = 0
        self._waiting: deque[Ticket] = deque()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        thread = getcurrent()
        world = _hub.loop
        if self._owner is None:
            if (
                blocking
                and isinstance(thread, GreenThread)
                and thread.process.is_alive
                and not world.is_over
                and world.rng.random() < GIVES_WAY
            ):
                sleep(0.0)
            if self._owner is None:
                self._owner, self._count = thread, 1
                return True
        if self._owner is thread and self.is_reentrant:
            self._count += 1
            return True
        if not blocking:
            return False
        if world.is_over:
            raise Killed
        until_s = None if timeout < 0 else world.now_s + timeout
        while self._owner is not None:
            ticket = Ticket()
            self._waiting.append(ticket)
            left_s = None if until_s is None else until_s - world.now_s
            if (left_s is not None and left_s <= 0) or not ticket.wait(left_s):
                ticket.is_done = True
                if self._owner is not None:
                    return False
        self._owner, self._count = thread, 1
        return True

    def release(self) -> None:
        self._count -= 1
        if self._count > 0:
            return
        self._owner = None
        while self._waiting:
            ticket = self._waiting.popleft()
            if not ticket.is_done:
                ticket.wake(True)
                return

    def locked(self) -> bool:
        return self._owner is not None

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class RLock(Lock):
    is_reentrant = True


class Condition:
    def __init__(self, lock: Lock | None = None) -> None:
        self._lock = lock or RLock()
        self._tickets: deque[Ticket] = deque()
        self.acquire, self.release = self._lock.acquire, self._lock.release

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        ticket, lock = Ticket(), self._lock
        self._tickets.append(ticket)
        count, lock._count = lock._count, 1
        lock.release()
        try:
            return ticket.wait(timeout)
        finally:
            ticket.is_done = True
            if loop().is_over or not ticket.thread.process.is_alive:
                lock._owner, lock._count = getcurrent(), count
            else:
                lock.acquire()
                lock._count = count

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        until_s = None if timeout is None else monotonic() + timeout
        while not (found := predicate()):
            left_s = None if until_s is None else until_s - monotonic()
            if left_s is not None and left_s <= 0:
                return found
            self.wait(left_s)
        return found

    def notify(self, n: int = 1) -> None:
        while self._tickets and n > 0:
            ticket = self._tickets.popleft()
            if not ticket.is_done:
                ticket.wake(True)
                n -= 1

    def notify_all(self) -> None:
        self.notify(len(self._tickets))


class Event:
    def __init__(self) -> None:
        self._is_set = False
        self._tickets: list[Ticket] = []

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        tickets, self._tickets = self._tickets, []
        for ticket in tickets:
            ticket.wake(True)

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        if not self._is_set:
            ticket = Ticket()
            self._tickets.append(ticket)
            ticket.wait(timeout)
            if not self._is_set:
                self._tickets = [one for one in self._tickets if one is not ticket]
        return self._is_set


class Barrier:
    def __init__(self, parties: int) -> None:
        self._left = parties
        self._open = Event()

    def wait(self, timeout: float | None = None) -> int:
        self._left -= 1
        if self._left <= 0:
            self._open.set()
        self._open.wait(timeout)
        return 0


class Thread:
    def __init__(
        self,
        group: None = None,
        target: Callable[..., Any] | None = None,
        name: str = "",
        args: Iterable[Any] = (),
        kwargs: dict[str, Any] | None = None,
        daemon: bool = True,
    ) -> None:
        self._target, self._args, self._kwargs = target, tuple(args), kwargs or {}
        self.name, self.daemon = name, daemon
        self._thread: GreenThread | None = None

    def start(self) -> None:
        process = in_process()
        assert process is not None, f"thread {self.name} of no process"
        if process.is_alive and not process.loop.is_over:
            self._thread = GreenThread(process, self.run, self.name)
            self._thread.owner = self  # type: ignore[attr-defined]
            self._thread.begin()

    def run(self) -> None:
        if self._target is not None:
            self._target(*self._args, **self._kwargs)

    def join(self, timeout: float | None = None) -> None:
        if self._thread is not None and not self._thread.is_over:
            ticket = Ticket()
            self._thread.ended.append(ticket)
            ticket.wait(timeout)

    def is_alive(self) -> bool:
        return self._thread is not None and not self._thread.is_over


def current_thread() -> object:
    thread = getcurrent()
    return getattr(thread, "owner", thread)


class Local:
    """threading.local"""

    def __init__(self) -> None:
        self.__dict__["_of"] = {}

    def __getattr__(self, name: str) -> Any:
        try:
            return self._of[getcurrent(), name]
        except KeyError:
            raise AttributeError(name) from None

    def __setattr__(self, name: str, value: Any) -> None:
        self._of[getcurrent(), name] = value


THREADING = SimpleNamespace(
    Lock=Lock,
    RLock=RLock,
    Condition=Condition,
    Event=Event,
    Barrier=Barrier,
    Thread=Thread,
    current_thread=current_thread,
    get_ident=lambda: id(getcurrent()),
    local=Local,
)


# ---- the module `queue`


class Queue:
    def __init__(self, maxsize: int = 0) -> None:
        self._items: deque[Any] = deque()
        self._maxsize = maxsize
        self._changed = Condition()

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        with self._changed:
            if 0 < self._maxsize <= len(self._items):
                if not block:
                    raise queue.Full
                if not self._changed.wait_for(lambda: len(self._items) < self._maxsize, timeout):
                    raise queue.Full
            self._items.append(item)
            self._changed.notify_all()

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        with self._changed:
            if not self._items and not (
                block and self._changed.wait_for(lambda: self._items, timeout)
            ):
                raise queue.Empty
            item = self._items.popleft()
            self._changed.notify_all()
            return item

    def put_nowait(self, item: Any) -> None:
        self.put(item, block=False)

    def get_nowait(self) -> Any:
        return self.get(block=False)

    def empty(self) -> bool:
        return not self._items

    def qsize(self) -> int:
        return len(self._items)


QUEUE = SimpleNamespace(Queue=Queue, SimpleQueue=Queue, Full=queue.Full, Empty=queue.Empty)


# ---- concurrent.futures


class Future:
    def __init__(self) -> None:
        self._done = Event()
        self._result: Any = None
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[Future], None]] = []
        self._is_cancelled = False

    def done(self) -> bool:
        return self._done.is_set()

    def cancelled(self) -> bool:
        return self._is_cancelled

    def result(self, timeout: float | None = None) -> Any:
        if not self._done.wait(timeout):
            raise TimeoutError
        if self._error is not None:
            raise self._error
        return self._result

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._done.wait(timeout)
        return self._error

    def add_done_callback(self, callback: Callable[[Future], None]) -> None:
        if self.done():
            callback(self)
        else:
            self._callbacks.append(callback)

    def _work(self, work: Callable[..., Any], arguments: Any, named: Any) -> None:
        try:
            self._result = work(*arguments, **named)
        except Exception as error:  # as an executor does
            self._error = error
        self._end()

    def _end(self) -> None:
        self._done.set()
        for callback in self._callbacks:
            callback(self)


class ThreadPoolExecutor:
    def __init__(self, max_workers: int = 1, thread_name_prefix: str = "") -> None:
        self._free, self._name = max_workers, thread_name_prefix
        self._waiting: deque[tuple[Future, Callable[..., Any], Any, Any]] = deque()
        self._is_shut = False

    def submit(self, work: Callable[..., Any], *arguments: Any, **named: Any) -> Future:
        if self._is_shut:
            raise RuntimeError("cannot schedule new futures after shutdown")
        future = Future()
        process = in_process()
        if process is None or not process.is_alive or process.loop.is_over:
            return future
        self._waiting.append((future, work, arguments, named))
        if self._free > 0:
            self._free -= 1
            spawn(process, self._run, self._name)
        return future

    def _run(self) -> None:
        while self._waiting:
            future, work, arguments, named = self._waiting.popleft()
            future._work(work, arguments, named)
        self._free += 1

    def shutdown(self, wait: bool = True, cancel_futures: bool = False) -> None:
        self._is_shut = True
        if cancel_futures:
            while self._waiting:
                future = self._waiting.popleft()[0]
                future._is_cancelled = True
                future._end()

    def __enter__(self) -> ThreadPoolExecutor:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()


def wait(futures: Iterable[Future], timeout: float | None = None) -> None:
    until_s = None if timeout is None else monotonic() + timeout
    for future in futures:
        future._done.wait(None if until_s is None else max(0.0, until_s - monotonic()))
