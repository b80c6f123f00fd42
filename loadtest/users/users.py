"""Locust's users: one class for each workload. A user asks, waits for the answer, and pauses.

Users of `burst` and `trace` do not repeat a rejected request, because its time has passed. A
rejected `burst` user skips the bursts that come before its `retry_after_s` has passed.

Not here: the content of requests, and the retry policy (workloads.py, trace_share.py), the run
(run.py).
"""

from __future__ import annotations

import random
from typing import ClassVar

import gevent
from gevent import GreenletExit
from gevent.event import Event
from locust import User, task

from loadtest.replay.prompts import PlannedRequest
from loadtest.users.run import Outgoing, UserRun
from loadtest.users.workloads import TEXT_WORKLOADS, burst_due_s, next_step, retry_s

IDLE_S = 3_600.0  # pause of a user without work; stopping the run wakes it


class LoadUser(User):
    """Base of all users; all of them take part in the one run of this process."""

    abstract = True
    workload: ClassVar[str]
    _current_run: ClassVar[UserRun | None] = None
    _has_run: ClassVar[Event] = Event()

    @classmethod
    def take_part_in(cls, run: UserRun | None) -> None:
        """The run of all users of this process from now on; None: the run has ended."""
        LoadUser._current_run = run
        if run is not None:
            cls._has_run.set()

    def on_start(self) -> None:
        self._has_run.wait()  # a master may send users before its worker is set up
        run = LoadUser._current_run
        if run is None:  # the run has ended already
            raise GreenletExit  # StopUser would be logged as an error here
        self.run_of_user = run
        self.identity = run.identify(self.workload)
        self.name = self.identity.name
        self._chance = random.Random(f"{run.settings.seed}/pause/{self.workload}/{self.name}")
        self._asked = 0
        self._wait_s = 0.0

    def wait_time(self) -> float:
        """The pause that Locust makes after every task; a user in it does not delay the end."""
        wait_s, self._wait_s = self._wait_s, 0.0
        return wait_s

    def pause(self, wait_s: float) -> None:
        """Pause now, with the same effect."""
        if wait_s > 0:
            self._wait_s = wait_s
            self.wait()

    def think_s(self) -> float:
        return self.run_of_user.settings.sizes.think_s * self._chance.uniform(0.5, 1.5)

    def request_id(self) -> str:
        self._asked += 1
        return f"{self.workload}-{self.name}-{self._asked}"


class ScriptedUser(LoadUser):
    abstract = True

    def on_start(self) -> None:
        super().on_start()
        run = self.run_of_user
        make = TEXT_WORKLOADS[self.workload]
        self._script = make(run.settings.seed, self.name, run.settings.sizes, run.facts)

    def outgoing(self, due_s: float | None = None) -> Outgoing:
        ask = self._script.next()
        request = ask.to_send(self.request_id(), self.run_of_user.is_explained)
        signed = self.identity.signed(request)
        return Outgoing(signed, self.identity.group, ask.prompt_tokens, due_s)


class TextUser(ScriptedUser):
    abstract = True

    @task
    def ask(self) -> None:
        record, answer = self.run_of_user.send(self.outgoing())
        then = next_step(record, self.think_s())
        if then.is_answered:
            self._script.answered(answer)
        elif not then.is_repeated:
            self._script.gave_up()
        self._wait_s = then.wait_s


class ChatUser(TextUser):
    workload = "chat"


class SharedPromptUser(TextUser):
    workload = "shared"


class DocumentUser(TextUser):
    workload = "document"


class BurstUser(ScriptedUser):
    """Sends several requests at moments that are the same for all users of all workers."""

    workload = "burst"
    _not_before_s = 0.0

    @task
    def burst(self) -> None:
        run = self.run_of_user
        sizes = run.settings.sizes
        now_s = run.clock.now_s()
        due_s = burst_due_s(max(now_s, self._not_before_s), sizes.burst_every_s)
        self.pause(due_s - now_s)
        sending = [
            gevent.spawn(run.send, self.outgoing(due_s)) for _ in range(sizes.burst_requests)
        ]
        try:
            gevent.joinall(sending, raise_error=True)
        finally:
            gevent.killall(sending)
        records = [greenlet.value[0] for greenlet in sending]
        self._not_before_s = run.clock.now_s() + max(map(retry_s, records))


class DecodeUser(TextUser):
    workload = "decode"


class DataSetUser(LoadUser):
    """Takes the next request of its data set, reads the answer, pauses, and takes another."""

    abstract = True
    _planned: PlannedRequest | None = None  # a rejected request, to be sent again

    @task
    def ask(self) -> None:
        run = self.run_of_user
        share = run.data_sets.get(self.workload)
        if share is None:  # on a worker that joined after the run began
            self.pause(IDLE_S)
            return
        self._planned = planned = self._planned or share.take()
        request = self.identity.signed(
            planned.to_send(self.request_id(), return_decision=run.is_explained)
        )
        tokens = len(planned.prompt_ids)
        record, _ = run.send(Outgoing(request, self.identity.group, tokens))
        then = next_step(record, self.think_s())
        if not then.is_repeated:
            self._planned = None
        self._wait_s = then.wait_s


class ArxivUser(DataSetUser):
    workload = "arxiv"


class LEvalUser(DataSetUser):
    workload = "l-eval"


class Long16kUser(DataSetUser):
    workload = "16k"


class Long32kUser(DataSetUser):
    workload = "32k"


class Long64kUser(DataSetUser):
    workload = "64k"


class Long128kUser(DataSetUser):
    workload = "128k"


class TraceUser(LoadUser):
    """Takes a row of the trace, waits until it is due, sends it, and takes the next."""

    workload = "trace"

    @task
    def replay(self) -> None:
        run = self.run_of_user
        share = run.trace
        planned = share.take() if share is not None else None
        if share is None or planned is None:
            self.pause(IDLE_S)
            return
        self.pause(planned.due_s - run.clock.now_s())
        request = self.identity.signed(
            planned.to_send(f"trace-{planned.index}", return_decision=run.is_explained)
        )
        group, tokens = self.identity.group, len(planned.prompt_ids)
        share.sent += 1
        share.sending += 1
        try:
            run.send(Outgoing(request, group, tokens, planned.due_s, planned.index))
        finally:
            share.sending -= 1


USERS: tuple[type[LoadUser], ...] = (
    ChatUser,
    SharedPromptUser,
    DocumentUser,
    BurstUser,
    DecodeUser,
    ArxivUser,
    LEvalUser,
    Long16kUser,
    Long32kUser,
    Long64kUser,
    Long128kUser,
    TraceUser,
)
