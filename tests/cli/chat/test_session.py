"""Conversations and settings: what is kept, what a file gives back, what is refused."""

from __future__ import annotations

import json

import pytest

from engine.cli.chat.session import ChatSession
from engine.cli.chat.settings import DEFAULTS, PARAMETERS, ChatSettings
from engine.runtime.errors import RequestError
from engine.runtime.sampling_params import SamplingParams


@pytest.fixture
def session() -> ChatSession:
    session = ChatSession("Be brief.")
    session.add("one?", "1")
    session.add("two?", "2")
    return session


def contents(session, question=None):
    return [message["content"] for message in session.messages(question)]


def test_the_model_sees_system_prompt_history_and_question(session):
    assert contents(session, "three?") == ["Be brief.", "one?", "1", "two?", "2", "three?"]
    assert [m["role"] for m in session.messages("q")] == [
        "system",
        "user",
        "assistant",
        "user",
        "assistant",
        "user",
    ]


def test_take_back_forgets_the_last_exchange(session):
    assert session.take_back() == "two?"
    assert contents(session) == ["Be brief.", "one?", "1"]
    assert session.take_back() == "one?"
    assert session.take_back() is None


def test_drop_oldest_forgets_whole_exchanges(session):
    assert session.drop_oldest(1) == 1
    assert contents(session) == ["Be brief.", "two?", "2"]
    assert session.drop_oldest(5) == 1
    assert contents(session) == ["Be brief."]


def test_a_saved_chat_comes_back_whole(session, tmp_path):
    path = tmp_path / "chat.json"
    session.settings = (
        session.settings.changed("temperature", "0.5").changed("stop", "END\\nX").changed("seed", "7")
    )
    session.add("ümläut ☃ \U0001f600", "\n")
    session.save(path, "a-model")
    other = ChatSession()
    other.load(path)
    assert other.messages() == session.messages()
    assert other.settings == session.settings
    assert json.loads(path.read_text())["model"] == "a-model"
    assert [file.name for file in tmp_path.iterdir()] == ["chat.json"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("not json", "the saved chat .* is not JSON"),
        ("[]", "it has no list of messages"),
        ('{"version": 2, "messages": []}', "has version 2, this engine reads 1"),
        (
            '{"version": 1, "messages": [{"role": "assistant", "content": "x"}]}',
            "message 0 is no message of the user",
        ),
        (
            '{"version": 1, "messages": [{"role": "user", "content": 5}]}',
            "message 0 is no message of the user",
        ),
        ('{"version": 1, "messages": [], "system": 5}', "the system prompt is not text"),
        ('{"version": 1, "messages": [], "settings": {"heat": 1}}', "unknown settings heat"),
        ('{"version": 1, "messages": [], "settings": {"top_p": "x"}}', "top_p is 'x', which is not valid"),
        ('{"version": 1, "messages": [], "settings": {"top_p": 7}}', "top_p is 7, but it must lie in"),
    ],
)
def test_a_file_that_is_not_ours_changes_nothing(session, tmp_path, text, message):
    path = tmp_path / "chat.json"
    path.write_text(text)
    before = session.messages()
    with pytest.raises(RequestError, match=message):
        session.load(path)
    assert session.messages() == before


def test_files_that_cannot_be_read_or_written_are_said(session, tmp_path):
    with pytest.raises(RequestError, match=r"the saved chat .*missing\.json cannot be read: No such file"):
        session.load(tmp_path / "missing.json")
    with pytest.raises(RequestError, match="cannot write .*: No such file"):
        session.save(tmp_path / "no" / "folder.json", "m")


def test_settings_change_one_by_one():
    settings = ChatSettings().changed("temperature", "0").changed("max_tokens", "5")
    assert (settings.temperature, settings.max_tokens) == (0.0, 5)
    assert settings.changed("temperature", "none").temperature == DEFAULTS.temperature
    assert settings.body() == {"temperature": 0.0, "max_tokens": 5}


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("temprature", "1", "unknown parameter 'temprature'; did you mean 'temperature'"),
        ("zzz", "1", "unknown parameter 'zzz'; there are temperature, top_p"),
        ("temperature", "hot", "temperature is 'hot', but it must be a number"),
        ("top_k", "1.5", "top_k is '1.5', but it must be a whole number"),
        ("top_p", "2", r"top_p is 2.0, but it must lie in \[0, 1\]"),
        ("temperature", "nan", "temperature is nan"),
    ],
)
def test_a_setting_that_cannot_be_is_refused(name, value, message):
    with pytest.raises(RequestError, match=message):
        ChatSettings().changed(name, value)


def test_every_parameter_reaches_engine_and_server():
    values = dict.fromkeys(PARAMETERS, "1") | {"stop": "x"}
    settings = ChatSettings()
    for name, value in values.items():
        settings = settings.changed(name, value)
    assert settings.body() == dict.fromkeys(PARAMETERS, 1) | {"stop": ["x"]}
    sampling = SamplingParams(**settings.body())
    assert (sampling.top_k, sampling.seed, sampling.min_p, sampling.stop) == (1, 1, 1.0, ("x",))
    assert (sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty) == (
        1.0,
        1.0,
        1.0,
    )
    assert ChatSettings().body() == {}  # the model's defaults hold
