"""A value is changed in a config.pbtxt and nothing else is, or the change is refused."""

from __future__ import annotations

import pytest

from backends.errors import ConfigError
from backends.model_settings.model_file import changed, read_model_file
from tests.backends.model_settings.repositories import shipped_texts

FORMS = [
    'parameters { key: "threads" value { string_value: "1" } }',
    'parameters: { key: "threads", value: { string_value: "1" } }',
    'parameters {\n  key : "threads"\n  value {\n    string_value : "1"\n  }\n}',
]


def file(text: str, model: str = "prefill_0"):  # type: ignore[no-untyped-def]
    return read_model_file(model, text)


@pytest.mark.parametrize("model", sorted(shipped_texts()))
def test_every_shipped_parameter_can_be_changed_and_changed_back(model: str) -> None:
    text = shipped_texts()[model]
    read = file(text, model)
    for name, value in read.parameters.items():
        other = changed(read, {name: 'a "b" \\ é\t'})
        assert file(other, model).parameters == {**read.parameters, name: 'a "b" \\ é\t'}
        assert changed(file(other, model), {name: value}) == text


@pytest.mark.parametrize("form", FORMS)
def test_any_usual_form_keeps_its_layout_and_comments(form: str) -> None:
    text = f'backend: "prefill" # role\r\n# threads, é \udcff\n{form} # why\n# end'
    assert changed(file(text), {"threads": "12"}) == text.replace('"1"', '"12"')


def test_a_parameter_that_the_file_does_not_say_is_put_at_its_end() -> None:
    text = changed(file('backend: "prefill"\n'), {"threads": "2"})
    assert text.startswith('backend: "prefill"\n#') and file(text).parameters == {"threads": "2"}


def test_a_form_that_would_be_doubled_is_refused_with_the_form_that_works() -> None:
    text = 'backend: "prefill"\nparameters [ { key: "threads" value { string_value: "1" } } ]\n'
    assert file(text).parameters == {"threads": "1"}
    with pytest.raises(ConfigError, match=r"write the parameter as\s+parameters \{"):
        changed(file(text), {"threads": "2"})


def test_a_comment_with_a_parameter_in_it_is_not_the_parameter() -> None:
    comment = '# parameters { key: "threads" value { string_value: "8" } }'
    text = f'backend: "prefill"\n{comment}\n{FORMS[0]}\n'
    assert comment in changed(file(text), {"threads": "2"})
    assert file(text).parameters == {"threads": "1"}


def test_what_triton_could_not_read_is_refused_with_its_line() -> None:
    with pytest.raises(ConfigError, match=r"prefill_0/config.pbtxt .*line 2"):
        file('backend: "prefill"\nparamters { }\n')
