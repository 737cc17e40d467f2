"""The clock of chat templates: all prompts of a run have the same date."""

from datetime import datetime

import pytest
import transformers.utils.chat_template_utils as transformers_templates
from fakes import run_config

from openenv_pipe.config.compose import compose
from openenv_pipe.errors import ConfigError
from openenv_pipe.models.chat.chat_template import ChatFormat
from openenv_pipe.models.chat.template_source import pinned_template
from openenv_pipe.models.load import load_chat, load_tokenizer
from openenv_pipe.models.tiny import CHAT_TEMPLATE, build_tokenizer
from openenv_pipe.runs.folder import RunFolder

MOMENT = datetime(2026, 4, 30, 23, 59, 7)
DATED = "{{ '<|system|>Today: ' + strftime_now('%d %B %Y') }}" + CHAT_TEMPLATE
USER = {"role": "user", "content": "a"}


def set_clock(monkeypatch, moment):
    class Clock(datetime):
        @classmethod
        def now(cls, tz=None):
            return moment

    monkeypatch.setattr(transformers_templates, "datetime", Clock)


def rendered(template):
    return build_tokenizer().apply_chat_template([USER], chat_template=template, tokenize=False)


@pytest.mark.parametrize(
    "template",
    [
        DATED,
        "\n  {% if true %}x{% endif %}\n{{ strftime_now('%d %B %Y') }}\n",
        "   {% set d = strftime_now('%-d %b %H:%M:%S 100%%') %}  {{ d }}",
        "{% macro m(x) %}{{ strftime_now(x) }}|{% endmacro %}{{ m('%A %j') }}{{ m('%Y') }}",
        "{%- if strftime_now is defined %}{{ strftime_now('%x %X %c %p') }}{% endif %}",
        "{%- set f = '%' ~ 'd' %}{{ strftime_now(f) }}{{ strftime_now('%%d') }}",
        "{% for message in messages %}{{ strftime_now('%Z%z|%D') }}{% endfor %}",
    ],
)
def test_a_pinned_template_renders_as_it_does_at_that_moment(template, monkeypatch):
    set_clock(monkeypatch, MOMENT)
    live = rendered(template)
    set_clock(monkeypatch, datetime(2031, 1, 1))
    assert rendered(pinned_template(template, MOMENT)) == live
    assert rendered(template) != live
    earlier = pinned_template(template, datetime(2020, 2, 2))
    assert pinned_template(earlier, MOMENT) == pinned_template(template, MOMENT)


def test_a_template_without_a_date_stays_as_it_is():
    assert pinned_template(CHAT_TEMPLATE, MOMENT) == CHAT_TEMPLATE


def test_a_format_without_a_pinned_value_is_an_error():
    tokenizer = build_tokenizer()
    tokenizer.chat_template = pinned_template(CHAT_TEMPLATE + "{{ strftime_now('%!') }}", MOMENT)
    with pytest.raises(ConfigError, match="no pinned value for %!"):
        ChatFormat(tokenizer)


@pytest.mark.parametrize("history", ["append", "rerender"])
def test_a_clock_that_goes_on_changes_no_prompt(history, monkeypatch):
    """The first template of the new month would be shorter: markers would lose letters."""
    config = run_config({"model.chat_template": DATED, "model.history": history}).model
    set_clock(monkeypatch, MOMENT)
    chat = load_chat(config.model_copy(update={"template_time": MOMENT.isoformat()}))
    first, reply = chat.first_ids([USER]), chat.reply_ids("b")
    set_clock(monkeypatch, datetime(2026, 5, 1))
    if history == "append":
        later = first + reply + chat.following_ids([USER], end=chat.ends.usual)
    else:
        assistant = {"role": "assistant", "content": "b"}
        later = chat.rendered_ids([USER, assistant, USER])
    prompt = "<|system|>Today: 30 April 2026<|user|>a<|assistant|>b<|end|><|user|>a<|assistant|>"
    assert load_tokenizer(config).decode(later) == prompt


def test_all_processes_of_a_run_read_the_time_of_its_creation(tmp_path):
    """Null in config.json, so that runs of one configuration do not differ in it."""
    config = compose(["conf=smoke", f"runs_dir={tmp_path}"]).config
    folder = RunFolder.create(config, overrides=[], command=[])
    started = folder.with_template_time(config)
    resumed = RunFolder.open(folder.path).config_to_run()
    created = folder.record.created.replace(tzinfo=None, microsecond=0)
    assert datetime.fromisoformat(started.model.template_time) == created
    assert resumed == started
    assert folder.written_config == config
    child = RunFolder.create(resumed, overrides=[], command=[])
    assert child.with_template_time(resumed) == child.config_to_run() == resumed


@pytest.mark.parametrize("time", ["noon", "2026-04-30T12:00:00+02:00", ""])
def test_another_time_is_rejected(time):
    with pytest.raises(ConfigError, match="expected one without a time zone"):
        compose(["conf=smoke", f"model.template_time='{time}'"])
