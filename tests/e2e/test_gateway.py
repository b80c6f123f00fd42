"""OpenAI's interface of a real `mooncake serve`: the package `openai` as it is, curl, a browser on
the status page, and one who leaves. API keys are configured, so every request here passes the whole
way of a deployment."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import psutil
import pytest

from bench.clients import curl, curl_gateway, libraries, openai_calls
from bench.clients.call_matrix import Call
from bench.clients.keyed_gateway import KEEPERS_KEY, KEY, OPERATORS_KEY, SINGLE_KEY
from loadtest.results.metrics import COMPLETED, REJECTED
from tests.e2e.chromium import Tab, chromium, tab
from tests.e2e.gateways import Gateway
from tests.e2e.locusts import LENIENT, headless
from tests.e2e.public_clients import installed
from tests.e2e.server import wait_until
from tests.fuzz_gateway.cases import fuzz

FREED_S_MAX = 15.0  # a lease without a release ends after twice this time
TOKENS = 7_000  # nothing ends by itself


CALLS = (*openai_calls.CALLS, *openai_calls.CALLS_WITH_KEYS)


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_the_openai_package_is_served_as_it_is(gateway: Gateway, call: Call) -> None:
    """Version 3, in the environment of the tests."""
    assert openai.__version__.startswith("3.")
    assert call(gateway.called)


@pytest.mark.parametrize("name", libraries.LIBRARIES)
def test_a_library_that_is_installed_is_served_as_it_is(
    gateway: Gateway, name: str, tmp_path: Path
) -> None:
    """Each in its own environment."""
    found = libraries.run(
        libraries.LIBRARIES[name], installed(name), gateway.called, tmp_path / "out"
    )
    assert not found.failed, "\n".join(f"{each.call}: {each.failure}" for each in found.failed)
    assert not any(each.left_out for each in found.outcomes)


# --- the status page and playground, in a browser

WORKERS = {f"{role}_{number}" for role in ("prefill", "decode") for number in (0, 1)}
HOSTILE = "<img src=x onerror='window.hacked=1'><script>window.hacked=1</script>"


@pytest.fixture(scope="module")
def browser(gateway: Gateway) -> Iterator[Tab]:
    """A tab on the page, without a key yet."""
    path = chromium()
    if path is None:
        pytest.skip("chromium is not installed")
    with tab(path) as made:
        made.look(1280, 900)
        made.open(gateway.url)
        yield made


def with_key(browser: Tab, key: str) -> None:
    """Whatever key it had before is forgotten."""
    if browser.value("!$('page').hidden"):
        browser.click("#forget")
    browser.type("#key", key)
    browser.click("#key-form button")
    browser.wait("!$('page').hidden && latest", "the status to be shown")


def ask(browser: Tab, prompt: str, max_tokens: int = 4, route: str = "completion") -> None:
    browser.type("#prompt", prompt)
    browser.type("#max-tokens", str(max_tokens))
    browser.value(f"$('route').value = '{route}'")
    browser.click("#send")


def answered(browser: Tab) -> None:
    browser.wait("!running && (!$('result').hidden || !$('error').hidden)", "an answer")
    assert browser.value("$('error').hidden"), browser.text("#error")


def blocks(browser: Tab) -> dict[str, int]:
    kinds = "[...$('blocks').children].map((each) => each.className)"
    found = browser.value(kinds)
    return {kind: found.count(kind) for kind in ("hit", "fetched", "computed")}


def test_the_page_asks_for_a_key_and_shows_nothing_without_one(browser: Tab) -> None:
    browser.wait("!$('key-card').hidden", "the question for a key")
    browser.type("#key", "mk-of-nobody")
    browser.click("#key-form button")
    browser.wait("$('key-said').textContent.includes('does not know')", "its refusal")
    assert browser.value("$('page').hidden && !latest")
    assert browser.value("sessionStorage.length + localStorage.length") == 0
    assert browser.problems and all("401" in each for each in browser.problems)
    browser.problems.clear()


def test_an_operator_sees_workers_with_load_and_decisions_with_terms(
    browser: Tab, gateway: Gateway
) -> None:
    asked = gateway.client().completions.create(model="demo", prompt="Who", max_tokens=2)
    assert asked.choices[0].text
    with_key(browser, OPERATORS_KEY)
    names = "[...$('workers').rows].map((each) => each.cells[0].innerText)"
    wait_until(lambda: set(browser.value(names)) == WORKERS, "all workers to be there")
    browser.wait("$('workers').innerText.includes('of 2,048')", "the pages of a worker")
    browser.wait("$('nodes').rows.length === 2", "both storage nodes")
    browser.wait("$('decisions').children.length", "a decision")
    browser.value("$('decisions').firstChild.open = true")
    browser.wait("document.querySelectorAll('.terms table').length", "its terms")
    heads = "[...document.querySelectorAll('.terms thead th')].map((each) => each.innerText)"
    terms = ["pair", "queue", "fetch", "compute", "hand-over", "TTFT", "per token"]
    assert browser.value(heads)[:7] == terms
    assert "acme" in browser.text("#decisions"), "an operator sees all tenants' decisions"
    assert not browser.problems


def test_a_prompt_streams_and_its_blocks_are_computed_once(browser: Tab, seed: int) -> None:
    with_key(browser, KEY)
    chance = random.Random(seed)
    words = ["house", "letter", "sister", "morning", "carriage", "window", "summer", "garden"]
    prompt = " ".join(chance.choice(words) for _ in range(150))
    ask(browser, prompt)
    answered(browser)
    first = blocks(browser)
    assert first["computed"] >= 2 and first["hit"] == first["fetched"] == 0
    assert browser.value("$('progress').textContent.startsWith('Done')")
    label = "document.querySelector('#blocks').getAttribute('aria-label')"
    assert "computed" in browser.value(label)

    def found_again() -> bool:
        """All but the last one, of which a token has to be computed where it ends the prompt."""
        ask(browser, prompt)
        answered(browser)
        again = blocks(browser)
        return again["hit"] + again["fetched"] >= first["computed"] - 1

    wait_until(found_again, "its blocks to be found in the store")
    facts = browser.text("#facts")
    assert "prefill_" in facts and "decode_" in facts and "tokens a second".upper() in facts.upper()
    assert browser.value("$('why').querySelectorAll('tbody tr').length") == 4
    assert browser.value("$('runs').rows.length") >= 2
    ask(browser, "Who is she?", route="chat")
    answered(browser)
    assert not browser.problems


def test_of_a_tenant_that_is_no_operator_it_shows_its_own_decisions_only(
    browser: Tab, gateway: Gateway
) -> None:
    gateway.client(SINGLE_KEY).completions.create(model="demo", prompt="Who", max_tokens=2)
    with_key(browser, SINGLE_KEY)
    found = browser.wait(
        "latest.cluster && latest.cluster.decisions.length && latest", "its decision"
    )
    assert {each["tenant"] for each in found["cluster"]["decisions"]} == {"single"}
    assert found["cluster"]["hot_prefixes"] is None and not found["asker"]["is_operator"]
    assert "operator" in browser.text("#no-hot")


def test_past_the_gateway_nobody_is_told_of_all_tenants(gateway: Gateway) -> None:
    status, body = gateway.server.post(
        "/v2/models/conductor/generate", {"stream": False, "describe": "cluster"}
    )
    assert status == 400 and b"forbidden:" in body and b"decisions" not in body


def test_a_rejection_is_shown_as_what_it_is_and_the_stop_button_cancels(
    browser: Tab, gateway: Gateway
) -> None:
    server = gateway.server
    wait_until(server.is_idle, "an idle start", FREED_S_MAX)
    with_key(browser, KEY)
    before = server.metric("mooncake_requests_total", outcome="cancelled")
    # It may not end by itself, which the page has no field for.
    browser.value("window.realFetch = window.fetch")
    browser.value(
        "window.fetch = (url, more) => realFetch(url, more && more.body ? {...more, "
        "body: JSON.stringify({...JSON.parse(more.body), ignore_eos: true})} : more)"
    )
    ask(browser, "It was", max_tokens=TOKENS)
    browser.wait("$('answer').textContent.length > 20", "its first words")
    browser.click("#stop")
    browser.wait("!running && $('progress').textContent.startsWith('Stopped')", "it to stop")
    browser.value("window.fetch = window.realFetch")
    wait_until(server.is_idle, "pages, slots and leases to be free", FREED_S_MAX)
    cancelled = lambda: server.metric("mooncake_requests_total", outcome="cancelled")  # noqa: E731
    wait_until(lambda: cancelled() > before, "the request to be cancelled")

    with_key(browser, SINGLE_KEY)
    stream = gateway.client(SINGLE_KEY).completions.create(
        model="demo",
        prompt="It was",
        max_tokens=TOKENS,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    next(iter(stream))
    browser.problems.clear()
    ask(browser, "Who")
    browser.wait("!$('error').hidden && !running", "the rejection")
    stream.close()
    said = browser.text("#error")
    assert "429" in said and "tenant_full" in said and "Retry-After" in said
    assert all("429" in each for each in browser.problems)
    browser.problems.clear()
    wait_until(server.is_idle, "pages, slots and leases to be free", FREED_S_MAX)


def test_what_a_prompt_or_a_model_says_is_never_more_than_text(browser: Tab) -> None:
    with_key(browser, KEY)
    ask(browser, HOSTILE)
    answered(browser)
    # The demo model does not say what a test wants, so here its words are made.
    events = [
        {
            "choices": [{"text": HOSTILE, "finish_reason": "stop"}],
            "decision": {
                "prefill": HOSTILE,
                "decode": HOSTILE,
                "fetch_node": HOSTILE,
                "predicted": {"ttft_s": 1},
            },
        },
        {
            "choices": [],
            "usage": {
                "prompt_tokens": 130,
                "completion_tokens": 2,
                "prompt_tokens_details": {"cached_tokens": 64},
            },
        },
    ]
    body = "".join(f"data: {json.dumps(each)}\n\n" for each in events) + "data: [DONE]\n\n"
    error = json.dumps({"error": {"message": HOSTILE, "code": HOSTILE, "param": HOSTILE}})
    answers = [
        f"new Response({json.dumps(body)})",
        f"new Response({json.dumps(error)}, {{status: 400}})",
    ]
    browser.value("window.realFetch = window.fetch")
    for answer, place in zip(answers, ("#answer", "#error"), strict=True):
        browser.value(
            "window.fetch = async (url, more) => "
            f"url === 'status' ? realFetch(url, more) : {answer}"
        )
        ask(browser, HOSTILE)
        browser.wait(f"!running && $('{place[1:]}').innerText.includes('<script>')", "the words")
    browser.value("window.fetch = window.realFetch")
    assert browser.value("document.querySelectorAll('main img, main script').length") == 0
    assert browser.value("typeof window.hacked") == "undefined"
    refused = "(() => { try { document.body.innerHTML = '<b>'; } catch { return true; } })()"
    assert browser.value(refused), "the policy lets nobody make elements of text"
    browser.problems.clear()


def test_it_fits_a_telephone_and_follows_light_and_dark(browser: Tab) -> None:
    with_key(browser, OPERATORS_KEY)
    browser.wait("$('decisions').children.length", "a decision")
    browser.value("$('decisions').firstChild.open = true")
    grounds = []
    for width, is_dark in ((1280, False), (1280, True), (390, False), (390, True)):
        browser.look(width, 844, is_dark)
        browser.wait(f"innerWidth === {width}", "its width")
        assert browser.value("document.documentElement.scrollWidth") <= width
        grounds.append(browser.value("getComputedStyle(document.body).backgroundColor"))
    assert grounds[0] == grounds[2] != grounds[1] == grounds[3]
    browser.look(1280, 900)
    assert not browser.problems


def test_a_keyboard_reaches_everything_and_everything_has_a_name(browser: Tab) -> None:
    with_key(browser, KEY)
    browser.type("#prompt", "Who")
    browser.press("Enter", modifiers=2)  # Ctrl
    browser.wait("running || !$('result').hidden", "it to be sent")
    browser.wait("!running", "the answer")
    nameless = """[...document.querySelectorAll('button, input, select, textarea, [tabindex]')]
        .filter((each) => each.offsetParent && !(each.innerText || '').trim()
            && !each.labels?.length && !each.getAttribute('aria-label')
            && !each.getAttribute('aria-labelledby')).map((each) => each.outerHTML)"""
    assert browser.value(nameless) == []
    assert browser.value("document.querySelectorAll('[onclick], [onload], [onerror]').length") == 0
    assert not browser.problems


def test_a_chat_goes_on_and_a_tool_is_called_and_answered(browser: Tab) -> None:
    with_key(browser, KEY)
    browser.value("$('further').open = true")
    browser.type("#system", "Answer.")
    browser.type("#seed", "7")
    ask(browser, "Who is she?", route="chat")
    answered(browser)
    browser.value("$('keep').checked = true")
    browser.value("$('tool-choice').value = 'required'")
    ask(browser, "What is the weather?", max_tokens=200, route="chat")
    answered(browser)
    sent = "chat.map((each) => each.role).join(' ')"
    assert browser.value(sent) == "user assistant user assistant"
    assert "get_weather" in browser.text("#answer")
    browser.value("$('max-tokens').value = 4")
    browser.click("#call-form button")
    browser.wait(f"{sent}.endsWith('assistant tool assistant')", "the answer after the call")
    answered(browser)
    assert "get_weather" in browser.text("#turns")
    browser.click("#anew")
    assert browser.value("chat.length === 0 && $('turns').hidden")
    browser.value("$('keep').checked = false; $('tool-choice').value = ''")
    browser.type("#system", "")
    assert not browser.problems


def test_an_answer_follows_the_schema_of_the_page_and_a_wrong_one_is_not_sent(browser: Tab) -> None:
    with_key(browser, KEY)
    browser.value("$('further').open = true")
    browser.type("#schema", '{"enum": ["Paris"]}')
    ask(browser, "Which town?", max_tokens=60, route="chat")
    answered(browser)
    assert browser.value("JSON.parse($('answer').textContent)") == "Paris"
    browser.type("#schema", "{")
    ask(browser, "Which town?", route="chat")
    browser.wait("!$('error').hidden", "what is wrong with it")
    assert "not JSON" in browser.text("#error")
    browser.type("#schema", "")
    assert not browser.problems


def test_thinking_is_folded_and_the_page_tells_how_to_call_it(browser: Tab) -> None:
    """The demo model does not think, so here its words are made."""
    with_key(browser, KEY)
    deltas = [{"reasoning_content": "Let me see."}, {"content": "Yes."}]
    events = [{"choices": [{"delta": each, "finish_reason": None}]} for each in deltas]
    body = "".join(f"data: {json.dumps(each)}\n\n" for each in events) + "data: [DONE]\n\n"
    browser.value("window.realFetch = window.fetch")
    browser.value(
        "window.fetch = async (url, more) => "
        f"url === 'status' ? realFetch(url, more) : new Response({json.dumps(body)})"
    )
    ask(browser, "Is it?", route="chat")
    browser.wait("!running && $('answer').textContent.includes('Yes.')", "the words")
    browser.value("window.fetch = window.realFetch")
    assert browser.value("document.querySelector('details.thought').open") is False
    assert browser.value("document.querySelector('details.thought').textContent") == (
        "ThinkingLet me see."
    )
    browser.value("$('how').open = true")
    said = browser.text("#how")
    assert "/v1/chat/completions" in said and "context of" in said and "$KEY" in said
    browser.value("$('how').open = false")
    assert not browser.problems


def test_curves_have_a_gap_where_nothing_came_and_the_playground_comes_first_on_a_telephone(
    browser: Tab,
) -> None:
    with_key(browser, KEY)
    browser.wait("latest.history.length >= 2", "two points of the history")
    browser.wait("$('curves').children.length === 4", "four curves")
    points = [
        {
            "unix_s": at,
            "ttft_p90_s": each,
            "tbt_p90_s": None,
            "tokens_per_s": 5,
            "rejections_per_s": 0,
        }
        for at, each in ((0, 1.0), (10, None), (20, 2.0), (30, 1.5))
    ]
    browser.value("clearTimeout(polling)")
    browser.value(f"showCurves({json.dumps(points)})")
    paths = browser.value(
        "[...$('curves').querySelectorAll('path')].map((each) => each.getAttribute('d'))"
    )
    assert [path.count("M") for path in paths] == [2, 0, 1, 1]
    assert browser.value("$('curves').children[0].innerText") == "TTFT p90: 1.5 s, at most 2.0 s"
    browser.look(390, 844)
    browser.wait("innerWidth === 390", "its width")
    top = "document.querySelector('{}').getBoundingClientRect().top"
    assert browser.value(top.format("#playground")) < browser.value(top.format("#tiles"))
    browser.look(1280, 900)
    browser.value("poll()")
    assert not browser.problems


def test_who_leaves_frees_pages_slot_and_leases(gateway: Gateway) -> None:
    server = gateway.server
    wait_until(server.is_idle, "an idle start")
    before = server.metric("mooncake_requests_total", outcome="cancelled")
    stream = gateway.client().completions.create(
        model="demo",
        prompt="It was",
        max_tokens=TOKENS,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    next(iter(stream))
    wait_until(lambda: server.metric("mooncake_pages_used"), "a worker to be at work")
    stream.close()
    wait_until(server.is_idle, "pages, slots and leases to be free", FREED_S_MAX)
    cancelled = lambda: server.metric("mooncake_requests_total", outcome="cancelled")  # noqa: E731
    wait_until(lambda: cancelled() > before, "the request to be cancelled")


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl on the PATH")
def test_curl_gets_an_answer_or_the_status_of_its_mistake(gateway: Gateway) -> None:
    calls = curl_gateway.calls(gateway.called)
    assert {status for call in calls for status in call.statuses} == {
        200,
        400,
        401,
        403,
        404,
        405,
        413,
        429,
        504,
    }
    for call in calls:
        answer = curl.send(call, gateway.url)
        assert answer.status in call.statuses, (call.title, answer.text)
        if call.body is not None and call.body.get("stream"):
            events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
            assert events[-1] == "[DONE]" and json.loads(events[-2])["usage"]["total_tokens"] > 3
        elif answer.status == 429 and "-i" in call.options:
            wait_s = answer.text.lower().partition("retry-after: ")[2].split()[0]
            assert int(wait_s) >= 1
        elif answer.status >= 400 and not call.options:
            assert json.loads(answer.text)["error"]["message"]


@pytest.mark.parametrize("cases", [50, pytest.param(150, marks=pytest.mark.long)])
def test_whatever_is_sent_the_answer_is_an_answer_or_an_error_by_name(
    gateway: Gateway, seed: int, cases: int
) -> None:
    """`make fuzz-gateway CASES=20000` has more of it."""
    found = fuzz(gateway.url, KEY, cases, seed)
    assert {status for _, status in found} >= {200, 400}
    wait_until(gateway.server.is_idle, "pages, slots and leases to be free")


def test_locusts_users_of_two_tenants_come_with_their_keys_and_a_full_one_is_rejected(
    gateway: Gateway, tmp_path: Path
) -> None:
    """`single` may have one request at a time, so a burst of its only user is rejected in part."""
    keys = tmp_path / "keys"
    keys.write_text(f"acme {KEY}\nsingle {SINGLE_KEY}\n")
    run = headless(
        gateway.server,
        tmp_path,
        "--via",
        "openai",
        "--host",
        gateway.url,
        "--metrics-url",
        f"{gateway.url}/metrics",
        "--tenants",
        "acme:3,single",
        "--tenant-keys",
        str(keys),
        "--workload",
        "shared:1,burst:3",
        *LENIENT,
        users=4,
        seconds=8,
    )
    assert (run.status, run.failures) == (0, 0), run.log
    records = run.recording.requests
    groups = {"acme/shared", "acme/burst", "single/burst"}
    assert {record.workload for record in records} == groups
    assert run.recording.slo is not None or run.recording.slo_by_workload.keys() == groups
    rejected = [record for record in records if record.outcome == REJECTED]
    assert {(one.workload, one.kind) for one in rejected} == {("single/burst", "tenant_full")}
    assert {record.retry_after_s for record in rejected} == {1.0}
    done = [record for record in records if record.outcome == COMPLETED]
    assert all(
        len(record.token_times_s) == 12 for record in done if record.finish_reason == "length"
    )
    assert max(record.cached_tokens or 0 for record in done) >= 64, "the common prompt is found"
    assert run.recording.samples and run.recording.settings["model"] == "demo"


def kill_its_process(gateway: Gateway) -> None:
    """Returns when another process of the gateway runs."""
    launcher = psutil.Process(gateway.server.process.pid)

    def found() -> list[psutil.Process]:
        alive = []
        for each in launcher.children():
            with contextlib.suppress(psutil.Error):  # it may end while it is looked at
                alive += [each] if "gateway-0" in each.cmdline() else []
        return alive

    [one] = found()
    one.send_signal(signal.SIGKILL)
    wait_until(lambda: any(each.pid != one.pid for each in found()), "another process")


def test_a_process_of_the_gateway_that_dies_is_started_again(gateway: Gateway) -> None:
    server = gateway.server
    gateway.client().models.list()
    counted = wait_until(
        lambda: server.metric("mooncake_gateway_requests_total"), "a request to be counted"
    )
    kill_its_process(gateway)
    wait_until(
        lambda: server.metric("mooncake_gateway_requests_total") >= counted,
        "what was counted to stay",
    )
    answer = gateway.client(max_retries=5).completions.create(
        model="demo", prompt="Who", max_tokens=2
    )
    assert answer.choices[0].finish_reason in ("stop", "length")


def test_a_process_that_dies_while_responses_are_stored_leaves_them_whole_or_unknown(
    gateway: Gateway, seed: int
) -> None:
    rng, made, is_killed = random.Random(seed), [], threading.Event()
    keeper = gateway.client(KEEPERS_KEY, max_retries=0)

    def store() -> None:
        while not is_killed.is_set():
            said = f"{rng.random()}" * rng.randint(1, 400)
            with contextlib.suppress(openai.APIError):  # of the killed process
                answer = keeper.responses.create(
                    model="demo", input=said, max_output_tokens=2, store=True
                )
                made.append((answer.id, said, answer.output_text))

    with ThreadPoolExecutor() as threads:
        writers = [threads.submit(store) for _ in range(4)]
        wait_until(lambda: len(made) > 5, "responses to be stored")
        kill_its_process(gateway)
        is_killed.set()
        for each in writers:
            each.result()
    for key, is_whole in ((KEEPERS_KEY, True), (KEY, False)):
        client, kept = gateway.client(key, max_retries=5), 0
        for response_id, said, text in made:
            try:
                found = client.responses.retrieve(response_id)
                [item] = client.responses.input_items.list(response_id).data
            except openai.NotFoundError as error:
                assert error.code == "response_not_found"
                continue
            assert found.output_text == text and item.to_dict()["content"][0]["text"] == said
            kept += 1
        assert (kept > 0) == is_whole, f"{kept} of {len(made)} with the key {key}"
    with pytest.raises(openai.NotFoundError):
        keeper.responses.retrieve("resp_" + "0" * 32)
