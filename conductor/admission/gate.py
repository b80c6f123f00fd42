"""The part of admission that learns: how far predictions are off, and who asked for what lately.

    an idle cluster     always admits what its workers can hold. A service level is a promise about
                        load; a prompt that takes longer than its limit with nobody in front
                        harms nobody, and "come back later" would not help it
    fits its limits     predicted TTFT x measured error <= limit, TBT <= limit, room (admission.py)
    fair share          under overload, those that would fit are fewer than those that may come in
                        (fair_share.py)
    goes on             a request that lost its workers was admitted before: it always is

`objection` changes nothing, so `explain` shows what `on_request` would do; `note` counts what was
decided.

Not here: the words of a rejection and the limits (admission.py).
"""

from __future__ import annotations

from conductor.admission.admission import DECODE_KINDS, objection
from conductor.admission.fair_share import FairShare, Pressure, Shed
from conductor.config import ConductorConfig
from conductor.estimates.margin import Margin
from conductor.messages import Request
from conductor.queue_order import QueueOrder
from conductor.routing.pair import DecodeOption, Pair
from conductor.routing.routing import Options


def pressure_on(options: Options, decode: DecodeOption, config: ConductorConfig) -> Pressure:
    """What the pools are loaded with before this request: all prefill queues, the best batch."""
    info, load = decode.worker.info, decode.load
    decode_load = max(
        decode.tbt_s / config.tbt_slo_s,
        load.sequences / info.slots_max,
        load.pages / info.pages_max,
    )
    return Pressure(
        options.backlog_s, options.prefill_count, decode_load, is_decoding=load.sequences > 0
    )


class Gate:
    """Says what is wrong with a pair, given what was learned; learns from what became of others."""

    def __init__(self, config: ConductorConfig) -> None:
        self._config = config
        quantile, half_life_s = config.ttft_margin_quantile, config.demand_half_life_s
        self._margin = Margin(quantile, config.ttft_slo_s, half_life_s)
        self._order, self._overload_order = config.order, config.overload_order
        sheds = config.shedding == "fair_share" and config.admission != "none"
        self._share = FairShare(config) if sheds else None

    def order(self, request: Request) -> QueueOrder:
        """What gives it its place in a prefill queue. While some of its tenant's are turned away,
        cost and class decide who; an order by cost on top would keep the long ones out."""
        sheds = self._share is not None and self._share.is_shedding(request.tenant)
        return self._overload_order if sheds else self._order

    def ttft_limit_s(self, request: Request) -> float:
        """What predicted TTFT may be. A request that matters more than others takes the risk that
        the prediction is too low; one that matters less leaves more room."""
        if request.priority > 0:
            return self._config.ttft_slo_s
        share = self._config.low_priority_load_max if request.priority < 0 else 1.0
        return self._config.ttft_slo_s * share / self._margin.ratio(request.prompt_tokens)

    def objection(
        self, pair: Pair, request: Request, pressure: Pressure, ttft_limit_s: float
    ) -> str:
        """The kind of rejection that this pair would meet; empty when it is admitted. One that was
        admitted before may wait, but what it has cost is not thrown away."""
        if request.is_resumed:
            return ""
        kind = objection(pair, request, self._config, ttft_limit_s)
        if kind == "ttft_slo" and pressure.backlog_s <= 0.0:
            kind = ""
        if kind == "tbt_slo" and not pressure.is_decoding:
            kind = ""
        if not kind and self.shed(pair, request, pressure) is not None:
            return "fair_share"
        return kind

    def shed(self, pair: Pair, request: Request, pressure: Pressure) -> Shed | None:
        """Why fairness turns it away; None when it does not."""
        if self._share is None:
            return None
        return self._share.objection(request, pair.predicted.prefill_s, pressure)

    def note(
        self, pair: Pair, request: Request, pressure: Pressure, now_s: float, kind: str
    ) -> None:
        """Count a request that was decided on; `kind` is empty for one that was admitted."""
        if self._share is None:
            return
        if kind in DECODE_KINDS:
            self._share.decode_is_short()
        self._share.note(request, pair.predicted.prefill_s, pressure, now_s, not kind)

    def decode_was_short(self) -> None:
        """A decode worker refused a request that had been admitted."""
        if self._share is not None:
            self._share.decode_is_short()

    def learn_ttft(
        self, prompt_tokens: int, predicted_s: float, actual_s: float, now_s: float
    ) -> None:
        """Both from routing to the end of prefill."""
        self._margin.learn(prompt_tokens, predicted_s, actual_s, now_s)

    def tick(self, now_s: float) -> None:
        """About once a second."""
        self._margin.fade(now_s)

    def check(self) -> None:
        """Prove the invariants."""
        self._margin.check()
        if self._share is not None:
            self._share.check()
