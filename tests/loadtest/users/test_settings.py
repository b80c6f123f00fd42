"""Reading options: every unit, every mistake at once."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from loadtest.replay.trace import TraceSettings
from loadtest.users.settings import (
    OPTIONS,
    LevelLimit,
    LoadSettings,
    MinGoodput,
    SettingsError,
    Sizes,
    add_options,
    address,
    limit,
    min_goodput,
    mix,
    settings_of,
)


def read(host: str | None = None, **changed: object) -> LoadSettings:
    parser = argparse.ArgumentParser()
    add_options(parser)
    return settings_of(vars(parser.parse_args([])) | changed, host)


def test_the_defaults_are_a_mix_over_grpc_with_the_limits_of_the_paper() -> None:
    settings = read()
    assert (settings.protocol, settings.model) == ("grpc", "conductor")
    assert settings.addresses.grpc == "127.0.0.1:8001"
    assert settings.metrics_url == "http://127.0.0.1:8002/metrics"
    assert dict(settings.mix) == {"chat": 3, "shared": 1, "document": 1}
    assert settings.ttft_limit == LevelLimit(times_unloaded=10.0)
    assert settings.tbt_limit == LevelLimit(times_unloaded=5.0)
    assert settings.min_goodput == MinGoodput()
    assert settings.sizes == Sizes()


def test_a_form_hands_everything_over_as_text() -> None:
    options = {o.flag[2:].replace("-", "_"): str(o.default) for o in OPTIONS}
    assert read(**options) == read()


def test_every_mistake_is_named_at_once() -> None:
    with pytest.raises(SettingsError) as refused:
        read(workload="chat,tea", slo_ttft_p90="fast", think_s="-1", seed="x", protocol="udp")
    for part in ("'tea' is no workload", "--slo-ttft-p90", "--think-s", "--seed", "'udp'"):
        assert part in str(refused.value)


def test_a_server_is_named_by_either_of_its_ports() -> None:
    assert address("127.0.0.1:9001") == address("http://127.0.0.1:9000")
    assert address("grpc://127.0.0.1:9001").http == "127.0.0.1:9000"
    for wrong in ("localhost", "127.0.0.1:", "https://127.0.0.1:8000", "8001"):
        with pytest.raises(ValueError, match="is no address"):
            address(wrong)


def test_a_mix_has_weights() -> None:
    assert mix("chat:3, burst:1") == {"chat": 3, "burst": 1}
    assert mix("document") == {"document": 1}
    for wrong in ("", "chat:0", "chat:x", "chat,chat:2"):
        with pytest.raises(ValueError):
            mix(wrong)


def test_a_limit_is_seconds_or_a_multiple_or_none() -> None:
    assert limit("0.5") == LevelLimit(seconds=0.5)
    assert limit("7.5x") == LevelLimit(times_unloaded=7.5)
    assert limit("none") == limit("") == LevelLimit()
    for wrong in ("0", "-1", "x", "nan", "inf"):
        with pytest.raises(ValueError, match="no positive number"):
            limit(wrong)


def test_goodput_is_a_rate_or_a_share() -> None:
    assert min_goodput("2.5") == MinGoodput(requests_per_s=2.5)
    assert min_goodput("90%") == MinGoodput(share=0.9)
    for wrong in ("0", "101%", "many"):
        with pytest.raises(ValueError):
            min_goodput(wrong)


def test_a_trace_stands_alone_and_needs_a_file_and_a_model_that_takes_tokens() -> None:
    with pytest.raises(SettingsError, match="cannot be mixed") as refused:
        read(workload="trace,chat", target_model="ensemble")
    assert "--trace FILE" in str(refused.value) and "token ids" in str(refused.value)
    assert read(workload="trace", trace="t.jsonl").trace == TraceSettings(Path("t.jsonl"))
    assert read(trace="t.jsonl").trace is None


def test_the_metrics_page_can_be_named_or_left_out() -> None:
    assert read(metrics_url="none").metrics_url is None
    assert read(metrics_url="http://a:1/metrics").metrics_url == "http://a:1/metrics"
    assert read(host="10.0.0.1:9001").metrics_url == "http://10.0.0.1:9002/metrics"
