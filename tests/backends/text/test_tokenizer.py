"""backends/text/tokenizer.py agrees with transformers, and says what is wrong with a checkpoint."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, note, settings
from hypothesis import strategies as st

from backends.errors import ConfigError, InvalidRequest
from backends.text.guides import Guides, is_installed
from backends.text.tokenizer import NAMED_TOKENS, Tokenizer
from tests.backends.small_tokenizers import (
    ASSISTANT,
    BOS,
    CHAT_TEMPLATE,
    DEMO,
    EOS,
    KINDS,
    TEXTS,
    USER,
    byte_fallback,
    byte_level,
    tokenizer_of,
    write_checkpoint,
)

NAMES = {"eos_token": EOS, "bos_token": BOS}
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Grüße <b>&amp; 日本</b>\n\n"},
    {"role": "assistant", "content": "Ja."},
    {"role": "user", "content": "  why? "},
]
demo_exists = pytest.mark.skipif(
    not (DEMO / "tokenizer_config.json").exists(), reason="the demo checkpoint is not there yet"
)


def peer_of(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def assert_same(folder: Path, texts: list[str]) -> None:
    ours, peer = Tokenizer.load(folder), peer_of(folder)
    for text in texts:
        token_ids = peer(text).input_ids
        assert ours.encode(text) == token_ids, text
        assert ours.encode(text, False) == peer(text, add_special_tokens=False).input_ids
        for skip_special in (True, False):
            expected = peer.decode(
                token_ids, skip_special_tokens=skip_special, clean_up_tokenization_spaces=False
            )
            assert ours.decode(token_ids, skip_special) == expected
    assert ours.vocabulary_tokens == len(peer)


VARIANTS = {
    "plain": (byte_level(), {}),
    "post_processor_adds_bos": (byte_level(adds_bos=True), {}),
    "config_adds_bos": (byte_level(), {"add_bos_token": True}),
    "config_takes_bos_away": (byte_level(adds_bos=True), {"add_bos_token": False}),
    "byte_fallback": (byte_fallback(), {"add_bos_token": True}),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_text_becomes_the_same_ids_and_text_as_with_transformers(
    variant: str, tmp_path: Path, seed: int
) -> None:
    backend, config = VARIANTS[variant]
    folder = write_checkpoint(tmp_path, backend, NAMES | config)
    rng = random.Random(seed)
    characters = "".join(TEXTS) + "\x00\x7f\u200b\ufffd𝔘   \t\n"
    garbage = ["".join(rng.choices(characters, k=rng.randint(0, 60))) for _ in range(40)]
    assert_same(folder, ["", " ", f"{EOS}a{USER}", *TEXTS, *garbage])


CONTENTS = [
    "<a>",
    "<b>",
    "<|im|>",
    "[PAD]",
    "hello",
    " the",
    "o",
    "日",
    "é",
    "x y",
    "Ab",
    EOS,
    USER,
]


def flags() -> st.SearchStrategy[dict[str, Any]]:
    names = ("single_word", "lstrip", "rstrip", "normalized", "special")
    return st.fixed_dictionaries({name: st.booleans() for name in names})


@st.composite
def token_tables(draw: st.DrawFn) -> tuple[dict[str, Any], dict[str, Any], list[Any]]:
    """tokenizer_config.json, the files beside it, and added tokens of tokenizer.json."""

    def tokens(count_max: int = 3) -> list[dict[str, Any]]:
        names = draw(st.lists(st.sampled_from(CONTENTS), max_size=count_max, unique=True))
        return [{"content": name, **draw(flags())} for name in names]

    # Names agree on the flags of a token: transformers resolves a contradiction by accident.
    named_flags = {content: draw(flags()) for content in CONTENTS}

    def written() -> Any:
        content = draw(st.sampled_from(CONTENTS))
        typed = {"__type": "AddedToken", "content": content, **named_flags[content]}
        return draw(st.sampled_from([content, typed]))

    own_names = [*NAMED_TOKENS, "image_token", "boi_token"]
    config = {name: written() for name in draw(st.sets(st.sampled_from(own_names)))}
    if draw(st.booleans()):
        ids = draw(st.permutations(range(1000, 1003)))
        config["added_tokens_decoder"] = dict(zip(map(str, ids), tokens(), strict=False))
    if draw(st.booleans()):
        name = draw(st.sampled_from(["additional_special_tokens", "extra_special_tokens"]))
        config[name] = [written() for _ in range(draw(st.integers(0, 2)))]
    elif draw(st.booleans()):
        config["extra_special_tokens"] = {"video_token": written()}
    if draw(st.booleans()):
        config["split_special_tokens"] = draw(st.booleans())
    files: dict[str, Any] = {}
    if draw(st.booleans()):
        names = draw(st.lists(st.sampled_from(CONTENTS), max_size=3, unique=True))
        files["added_tokens"] = dict(
            zip(names, draw(st.permutations(range(400, 403))), strict=False)
        )
    if draw(st.booleans()):
        named = draw(st.sets(st.sampled_from(own_names)))
        files["special_tokens_map"] = {
            name: draw(st.sampled_from([{"content": content, **named_flags[content]}, content]))
            for name in named
            for content in [draw(st.sampled_from(CONTENTS))]
        }
        if draw(st.booleans()):
            extra = draw(st.lists(st.sampled_from(CONTENTS), max_size=2))
            files["special_tokens_map"]["additional_special_tokens"] = extra
    return config, files, tokens()


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(
    kind=st.sampled_from(["byte_level", "byte_fallback", "word_piece"]),
    table=token_tables(),
    pieces=st.lists(st.sampled_from([*CONTENTS, " ", "  ", "a", "hello", "\n", "."]), max_size=12),
)
def test_any_table_of_added_tokens_gives_the_ids_of_transformers(
    kind: str, table: tuple[dict[str, Any], dict[str, Any], list[Any]], pieces: list[str]
) -> None:
    config, files, own = table
    note(f"{config}\n{files}\n{own}")
    backend = KINDS[kind]()
    for token in own:
        backend.add_tokens([tokenizers.AddedToken(**token)])
    template = "{{ bos_token }}|{{ image_token }}|{{ mask_token }}{{ messages[0].content }}"
    with tempfile.TemporaryDirectory() as written:
        folder = write_checkpoint(Path(written), backend, config | {"chat_template": template})
        for name, content in files.items():
            (folder / f"{name}.json").write_text(json.dumps(content))
        text = "".join(pieces)
        assert_same(folder, [text, "".join(CONTENTS)])
        ours, peer = Tokenizer.load(folder), peer_of(folder)
        chat = [{"role": "user", "content": text}]
        expected = peer.apply_chat_template(chat, tokenize=True, return_dict=False)
        assert ours.encode(ours.apply_chat(chat), add_special=False) == list(expected)
        assert ours.eos_ids == (() if peer.eos_token is None else (peer.eos_token_id,))
        for token_id in peer.added_tokens_decoder:
            is_special = peer.decode(token_id) != peer.decode(token_id, skip_special_tokens=True)
            assert ours.token_bytes.has_text(token_id) is not is_special


@demo_exists
def test_the_demo_checkpoint_is_read_as_by_transformers() -> None:
    assert_same(DEMO, ["", *TEXTS])
    ours, peer = Tokenizer.load(DEMO), peer_of(DEMO)
    assert ours.eos_ids == (peer.eos_token_id,)
    expected = peer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    assert ours.apply_chat(CHAT) == expected


TEMPLATES = [
    CHAT_TEMPLATE,
    "{% if messages[0].role == 'system' %}\n  {{ messages[0].content|tojson }}\n  {% endif %}\nX",
    "{% for m in messages %}{% if m.role == 'user' %}{% break %}{% endif %}{{ m }}{% endfor %}",
    "{%- for m in messages %}{% generation %}{{ m.content | trim }}{% endgeneration %}{% endfor %}",
    "{{ tools is none }}{{ documents is none }}{{ strftime_now('%Y') }}{{ pad_token is defined }}",
    "{% set s = namespace(n=0) %}{% for m in [1, 2] %}{% set s.n = s.n + 1 %}{% endfor %}{{ s.n }}",
]


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_chat_template_renders_as_with_transformers(template: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, byte_level(), NAMES | {"chat_template": template})
    expected = peer_of(folder).apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    assert Tokenizer.load(folder).apply_chat(CHAT) == expected


FORMS = {  # of a template's content: what it reads
    "{{ TEXT }}": "text",
    "{% for c in CONTENT %}{% if c.type=='text' %}{{ c['text'] }}{% endif %}{% endfor %}": "parts",
    "{% set list = CONTENT %}{% for c in list[0:] %}{{ c.text | trim }};{% endfor %}": "parts",
    "{% for part in CONTENT | list %}{{ part['text'] }}{% endfor %}": "parts",
    "{{ joined(CONTENT) }}": "parts",
    "{{ CONTENT[0]['text'] }}": "parts",
    "{% if CONTENT is string %}{{ CONTENT }}{% else %}{% for part in CONTENT %}[{{ part.text }}]"
    "{% endfor %}{% endif %}": "both",
}
MACRO = "{% macro joined(list) %}{% for part in list %}{{ part.text }}{% endfor %}{% endmacro %}"


@st.composite
def chats(draw: st.DrawFn) -> tuple[str, list[dict[str, Any]], list[dict[str, Any]]]:
    """A template, messages, and the same messages in the form that the template reads."""
    content = draw(st.sampled_from(["m.content", "m['content']"]))
    forms = {role: draw(st.sampled_from(list(FORMS))) for role in ("user", "assistant", "system")}
    bodies = "".join(
        f"{{% if m.role == '{role}' %}}{form}{{% endif %}}" for role, form in forms.items()
    ).replace("TEXT", draw(st.sampled_from([content, content + " | trim", content + ".strip()"])))
    source = (
        f"{MACRO}{{{{ bos_token }}}}{{% for m in messages %}}<user>"
        f"{bodies.replace('CONTENT', content)}{{{{ eos_token }}}}{{% endfor %}}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    texts = st.text(st.sampled_from("ab <>é\n{'\""), min_size=1, max_size=8)
    sent, read = [], []
    for _ in range(draw(st.integers(1, 4))):
        role = draw(st.sampled_from(list(forms)))
        said = draw(st.lists(texts, min_size=1, max_size=3))
        parts = [{"type": "text", "text": text} for text in said]
        is_text = draw(st.booleans())
        text = said[0]
        sent.append({"role": role, "content": text if is_text else parts})
        wants = FORMS[forms[role]]
        as_text = text if is_text else "\n".join(said)
        as_parts = parts[:1] if is_text else parts
        wanted = {"text": as_text, "parts": as_parts, "both": sent[-1]["content"]}[wants]
        read.append({"role": role, "content": wanted})
    return source, sent, read


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(chats())
def test_any_chat_template_gets_content_in_the_form_that_it_reads(
    chat: tuple[str, list[dict[str, Any]], list[dict[str, Any]]],
) -> None:
    source, sent, read = chat
    note(source)
    with tempfile.TemporaryDirectory() as folder:
        peer = peer_of(write_checkpoint(Path(folder), byte_level(), NAMES))
    expected = peer.apply_chat_template(
        read, chat_template=source, tokenize=True, add_generation_prompt=True, return_dict=False
    )
    ours = Tokenizer(byte_level(), NAMES | {"chat_template": source})
    assert ours.encode(ours.apply_chat(sent), add_special=False) == list(expected)


@pytest.mark.parametrize("role", ["user", "system", "tool", "anyone"])
@pytest.mark.parametrize(
    "template",
    [
        # Llama Guard 3: the roles must alternate, and only parts are read.
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) and m.role != "
        "'system' %}{{ raise_exception('alternate') }}{% endif %}{% for c in m['content'] %}"
        "{% if c['type'] == 'text' %}{{ c['text'] }}{% endif %}{% endfor %}{% endfor %}",
        # A trial shows nothing here, because the word is not repeated as it is: the loop decides.
        "{% set all = messages[0]['content'] %}{% for c in all %}{{ c['text'] | reverse }}"
        "{% endfor %}",
    ],
)
def test_a_template_of_parts_loses_no_text(template: str, role: str) -> None:
    tokenizer = Tokenizer(byte_level(), {"chat_template": template})
    said = {"role": role, "content": "qwertz"}
    messages = (
        [said]
        if "alternate" not in template or role in ("user", "system")
        else [{"role": "user", "content": "hi"}, said]
    )
    prompt = tokenizer.apply_chat(messages)
    assert "qwertz" in prompt or "ztrewq" in prompt


def test_an_empty_prompt_is_refused() -> None:
    tokenizer = Tokenizer(byte_level(), {"chat_template": "{{ messages[0].text }}"})
    with pytest.raises(InvalidRequest, match="rendered an empty prompt"):
        tokenizer.apply_chat(CHAT)


def test_a_rendered_chat_gets_no_second_bos(tmp_path: Path) -> None:
    config = NAMES | {"chat_template": CHAT_TEMPLATE}
    folder = write_checkpoint(tmp_path, byte_level(adds_bos=True), config)
    tokenizer = Tokenizer.load(folder)
    token_ids = tokenizer.encode(tokenizer.apply_chat(CHAT), add_special=False)
    expected = peer_of(folder).apply_chat_template(
        CHAT, tokenize=True, add_generation_prompt=True, return_dict=False
    )
    assert token_ids == list(expected)
    [bos_id] = tokenizer.encode(BOS, add_special=False)
    assert token_ids.count(bos_id) == 1


def test_a_template_may_lie_in_its_own_file_or_in_a_list(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, byte_level(), NAMES | {"chat_template": "old"})
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    assert Tokenizer.load(tmp_path).apply_chat([{"role": "user", "content": "é"}]) == "é!"
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    listed = write_checkpoint(tmp_path / "listed", byte_level(), {"chat_template": named})
    assert Tokenizer.load(listed).apply_chat(CHAT) == "D"
    no_default = [{"name": "a", "template": "A"}, {"name": "b", "template": "B"}]
    folder = write_checkpoint(tmp_path / "none", byte_level(), {"chat_template": no_default})
    with pytest.raises(InvalidRequest, match="a, b but no default"):
        Tokenizer.load(folder).apply_chat(CHAT)


def test_a_chat_without_a_template_is_refused_with_the_remedy() -> None:
    with pytest.raises(InvalidRequest, match=r"no chat template; send text_input.*/v1/compl"):
        tokenizer_of("byte_level").apply_chat(CHAT)


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{% for",
        "{{ messages[99].content }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
    ],
)
def test_a_template_that_fails_is_the_requests_fault_not_a_crash(template: str) -> None:
    tokenizer = Tokenizer(byte_level(), {"chat_template": template})
    with pytest.raises(InvalidRequest, match="the checkpoint's chat template rejected them"):
        tokenizer.apply_chat(CHAT)


def test_end_tokens_come_from_the_generation_config_then_the_config(tmp_path: Path) -> None:
    cases: list[tuple[dict[str, Any], tuple[int, ...]]] = [
        ({}, (0,)),
        ({"config": {"eos_token_id": 3}}, (3, 0)),
        ({"config": {"text_config": {"eos_token_id": [3]}}}, (3, 0)),
        ({"config": {"eos_token_id": None, "text_config": {"eos_token_id": 3}}}, (3, 0)),
        ({"config": {"eos_token_id": 3}, "generation_config": {"eos_token_id": [2, 1]}}, (2, 1, 0)),
        ({"generation_config": {"eos_token_id": 0}}, (0,)),
        ({"config": {"eos_token_id": 3}, "generation_config": {"eos_token_id": None}}, (3, 0)),
    ]
    for number, (files, expected) in enumerate(cases):
        folder = write_checkpoint(tmp_path / str(number), byte_level(), NAMES, **files)
        assert Tokenizer.load(folder).eos_ids == expected, files


def test_names_may_be_objects_and_lie_in_the_special_tokens_map(tmp_path: Path) -> None:
    token = {"content": BOS, "lstrip": False, "special": True}
    folder = write_checkpoint(
        tmp_path,
        byte_level(),
        {"eos_token": None, "chat_template": "{{ bos_token }}"},
        special_tokens_map={"bos_token": token},
    )
    assert Tokenizer.load(folder).apply_chat(CHAT) == BOS


def test_a_token_without_a_row_in_the_model_is_outside_the_vocabulary(tmp_path: Path) -> None:
    names = NAMES | {"pad_token": "[PAD]"}
    folder = write_checkpoint(tmp_path, byte_level(), names, config={"vocab_size": 341})
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.encode("[PAD]") == [341]
    assert tokenizer.vocabulary_tokens == 341
    if is_installed():  # the grammar of an answer has no such token either
        guide = Guides(lambda: tokenizer, 341).guide('{"enum": [1]}', tokenizer.eos_ids, [])
        assert guide.allowed().size == 341


def test_training_leftovers_do_not_truncate_or_pad(tmp_path: Path) -> None:
    backend = byte_level()
    backend.enable_truncation(4)
    backend.enable_padding(length=16)
    tokenizer = Tokenizer.load(write_checkpoint(tmp_path, backend, NAMES))
    assert tokenizer.decode(tokenizer.encode(TEXTS[0])) == TEXTS[0]


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("tokenizer.json", None, "tokenizer.json is missing.*save_pretrained"),
        ("tokenizer.json", "{", "tokenizer.json cannot be read"),
        ("tokenizer.json", json.dumps({"model": {"type": "BPE"}}), "tokenizer.json cannot be read"),
        ("tokenizer_config.json", "{nope", "tokenizer_config.json is not valid JSON"),
        ("generation_config.json", "[1]", "generation_config.json must hold a JSON object"),
        ("tokenizer_config.json", '{"chat_template": [1]}', "must be a string or a list"),
        ("generation_config.json", '{"eos_token_id": "x"}', "eos_token_id is 'x'"),
        ("generation_config.json", '{"eos_token_id": true}', "eos_token_id is True"),
        (
            "tokenizer_config.json",
            '{"added_tokens_decoder": {"x": "<a>"}}',
            "must map ids to tokens",
        ),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"400": 5}}', "5 is not a token"),
        (
            "tokenizer_config.json",
            '{"eos_token": {"content": "a", "lstrip": 1}}',
            "not an instance",
        ),
        ("added_tokens.json", '{"<a>": "400"}', "the id of '<a>' is '400'"),
    ],
)
def test_a_damaged_checkpoint_is_refused_by_file_name(
    name: str, content: str | None, expected: str, tmp_path: Path
) -> None:
    folder = write_checkpoint(tmp_path, byte_level(), NAMES)
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(content)
    with pytest.raises(ConfigError, match=expected):
        Tokenizer.load(folder)


def test_ids_outside_the_vocabulary_have_no_text() -> None:
    tokenizer = tokenizer_of("byte_level")
    token_ids = tokenizer.encode("hello")
    assert tokenizer.decode([-1, *token_ids, 99_999]) == "hello"


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=50, deadline=None)
@given(text=st.text(alphabet=st.characters(codec=None), max_size=20))
def test_any_text_is_encoded_or_refused(kind: str, text: str) -> None:
    try:
        assert all(isinstance(token_id, int) for token_id in TOKENIZERS[kind].encode(text))
    except InvalidRequest as error:
        assert "cannot be tokenised" in str(error)


TOKENIZERS = {kind: tokenizer_of(kind) for kind in KINDS}


def test_loading_needs_no_transformers() -> None:
    heavy = "('transformers' in sys.modules, 'torch' in sys.modules)"
    code = f"import sys, backends.frontend.request; print{heavy}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_the_assistant_mark_is_one_token() -> None:
    assert len(tokenizer_of("byte_level").encode(ASSISTANT)) == 1
