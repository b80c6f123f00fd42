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
    assert (settings.via, settings.model) == ("grpc", "conductor")
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
        read(workload="chat,tea", slo_ttft_p90="fast", think_s="-1", seed="x", via="udp")
    for part in ("'tea' is not a workload", "--slo-ttft-p90", "--think-s", "--seed", "'udp'"):
        assert part in str(refused.value)


def test_a_server_is_named_by_either_of_its_ports() -> None:
    assert address("127.0.0.1:9001") == address("http://127.0.0.1:9000")
    assert address("grpc://127.0.0.1:9001").http == "127.0.0.1:9000"
    for wrong in ("localhost", "127.0.0.1:", "https://127.0.0.1:8000", "8001", "h:\u00b2"):
        with pytest.raises(ValueError, match="is not an address"):
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
        with pytest.raises(ValueError, match="not a positive number"):
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


def test_through_the_gateway_the_address_is_openais_and_so_is_the_page() -> None:
    settings = read(via="openai")
    assert settings.gateway is not None and settings.addresses is None
    assert settings.url == "http://127.0.0.1:9000"
    assert settings.metrics_url == "http://127.0.0.1:9000/metrics"
    assert read(host="https://llm.example.org/v1", via="openai-chat").url == (
        "https://llm.example.org:443"
    )
    assert read(via="http").url == "127.0.0.1:8000" and read(via="http").gateway is None
    with pytest.raises(SettingsError, match="--target-model ensemble"):
        read(via="openai", target_model="ensemble")
    with pytest.raises(SettingsError, match="use --via openai"):
        read(via="openai-chat", workload="trace", trace="t.jsonl")


def test_the_former_name_of_an_option_is_still_read() -> None:
    parser = argparse.ArgumentParser()
    add_options(parser)
    assert parser.parse_args(["--protocol", "http"]).via == "http"


def test_keys_are_of_the_tenants_and_none_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "mk-of-all")
    keys = tmp_path / "keys"
    keys.write_text("# tenant key\nacme mk-of-acme\n\nbatch mk-of-batch\nmore mk-x\n")
    settings = read(via="openai", tenants="acme:3, batch@-1", tenant_keys=str(keys))
    assert [one.key for one in settings.tenants] == ["mk-of-acme", "mk-of-batch"]
    assert settings.any_key == "mk-of-acme" and read(via="openai").any_key == "mk-of-all"
    assert read().key == "", "Triton's ports know no keys"
    assert settings.described()["tenants"] == "acme:3,batch:1@-1"
    assert "mk-" not in repr(settings) + str(settings.described())


def test_a_key_goes_to_the_gateways_own_page_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "mk-of-all")
    own = "http://127.0.0.1:9000/metrics"
    assert read(via="openai").page_key == read(via="openai", metrics_url=own).page_key
    assert read(via="openai").page_key == "mk-of-all"
    assert read(via="openai", metrics_url="http://127.0.0.1:8002/metrics").page_key == ""
    assert read(via="openai", metrics_url="none").page_key == ""
    assert read(metrics_url=own).page_key == ""


def test_missing_keys_are_named_with_what_to_do(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("acme mk-of-acme\n")
    with pytest.raises(SettingsError, match="no key of batch, c; add a line TENANT KEY"):
        read(via="openai", tenants="acme,batch,c", tenant_keys=str(keys))
    with pytest.raises(SettingsError, match="No such file"):
        read(via="openai", tenants="acme", tenant_keys=str(tmp_path / "none"))
    with pytest.raises(SettingsError, match="name them"):
        read(via="openai", tenant_keys=str(keys))
    with pytest.raises(SettingsError, match="are for --via openai, not for grpc"):
        read(tenants="acme", tenant_keys=str(keys))
    keys.write_text("acme mk of acme\n")
    with pytest.raises(SettingsError, match="keys:1: a line is TENANT KEY") as refused:
        read(via="openai", tenants="acme", tenant_keys=str(keys))
    assert "mk of" not in str(refused.value), "a key is never shown"


def test_data_sets_are_workloads_at_a_scale_for_what_takes_token_ids() -> None:
    settings = read(workload="l-eval:2,chat:1", length_scale="0.25", tenants="a,b")
    assert dict(settings.mix) == {"l-eval": 2, "chat": 1} and settings.length_scale == 0.25
    assert settings.described()["length_scale"] == 0.25
    with pytest.raises(SettingsError, match=r"16k sends token ids.*conductor") as refused:
        read(workload="16k,chat", target_model="ensemble")
    assert "chat sends" not in str(refused.value)
    with pytest.raises(SettingsError, match=r"arxiv sends token ids.*use --via openai"):
        read(workload="arxiv", via="openai-chat")
