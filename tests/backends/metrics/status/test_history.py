"""The figures of the last ten minutes."""

from __future__ import annotations

from backends.metrics.status.history import EVERY_S, KEPT_S, History
from backends.metrics.status.view import Page, parse


def page(read_at_s: float, tokens: int, late: int = 0) -> Page:
    lines = [
        f'mooncake_output_tokens_total{{model="d"}} {tokens}',
        'mooncake_ttft_seconds_bucket{le="1.0"} 0',
        f'mooncake_ttft_seconds_bucket{{le="2.0"}} {late}',
        f'mooncake_ttft_seconds_bucket{{le="+Inf"}} {late}',
        f"mooncake_ttft_seconds_count {late}",
    ]
    return parse("\n".join(lines) + "\n", read_at_s)


def test_a_point_has_the_figures_since_the_one_before_it() -> None:
    history = History()
    for number, (tokens, late) in enumerate([(0, 0), (50, 10), (50, 10)]):
        assert history.is_due(number * EVERY_S)
        history.add(page(number * EVERY_S, tokens, late), 1e9)
        assert not history.is_due(number * EVERY_S + 1)
    first, second = history.points
    assert (first.tokens_per_s, second.tokens_per_s) == (5.0, 0.0)
    assert first.ttft_p90_s is not None and 1.8 < first.ttft_p90_s <= 2.0
    assert second.ttft_p90_s is None
    assert first.tbt_p90_s is None


def test_it_keeps_ten_minutes() -> None:
    history = History()
    for number in range(200):
        history.add(page(number * EVERY_S, number), number)
    assert len(history.points) == KEPT_S / EVERY_S
    assert history.points[-1].unix_s == 199
