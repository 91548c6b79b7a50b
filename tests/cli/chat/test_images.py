"""Images of questions: `--image`, `/image`, pasted paths, and what becomes of them in the conversation."""

from __future__ import annotations

import base64
import json
import os
import sys
from pathlib import Path

import pytest

from engine.cli import main as cli
from engine.cli.chat import command
from engine.cli.chat.command import _run_line
from engine.cli.chat.images import pasted_images
from engine.runtime.errors import RequestError
from tests.tokenizer_manager.media.image_files import file_of, picture

CONTENT = file_of(picture(5, 4))
PART = {
    "type": "image_url",
    "image_url": {"url": f"data:image/png;base64,{base64.b64encode(CONTENT).decode()}"},
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "a cat.PNG"
    path.write_bytes(CONTENT)
    return path


def sent(chat):
    return chat.backend.seen[-1][-1]["content"]


def question(text):
    return [PART, {"type": "text", "text": text}]


def test_an_image_goes_with_its_question_and_stays_in_the_conversation(make_chat, path):
    chat = make_chat()

    _run_line(chat.conversation, f"/image '{path}' What is it?")
    assert sent(chat) == question("What is it?") and "a cat.PNG goes with" in chat.written()
    _run_line(chat.conversation, "And now?")

    assert sent(chat) == "And now?" and chat.backend.seen[-1][0]["content"] == question("What is it?")
    assert chat.conversation.images == []


@pytest.mark.parametrize(
    "form",
    [
        "'{}' What?",
        '"{}" What?',
        "{escaped} What?",
        "What? {escaped}",
        "file://{escaped} What?",
        "{url} What?",
    ],
)
def test_a_pasted_path_is_an_image(make_chat, path, form):
    chat = make_chat()

    _run_line(chat.conversation, form.format(path, escaped=str(path).replace(" ", "\\ "), url=path.as_uri()))

    assert sent(chat) == question("What?")


def test_a_path_alone_waits_for_the_question(make_chat, path):
    chat = make_chat()

    _run_line(chat.conversation, f"'{path}'")
    assert chat.backend.seen == []
    _run_line(chat.conversation, "What?")

    assert sent(chat) == question("What?")


@pytest.mark.parametrize("line", ["What is a.png?", "/nowhere/b.png?", "don't 'x.png' it", "no path", ""])
def test_other_texts_stay(line):
    assert pasted_images(line) == ([], line)


def test_a_path_is_an_argument_of_a_command(make_chat, tmp_path):
    chat = make_chat()
    saved = tmp_path / "saved.png"
    saved.write_bytes(CONTENT)

    _run_line(chat.conversation, f"/save {saved}")

    assert "exists already" in chat.written() and chat.conversation.images == []


def test_regen_and_edit_keep_the_image_and_undo_forgets_it(make_chat, path):
    chat = make_chat()
    _run_line(chat.conversation, f"/image '{path}' What?")

    _run_line(chat.conversation, "/regen")
    assert sent(chat) == question("What?")
    _run_line(chat.conversation, "/edit")
    assert chat.conversation.pending == "What?" and chat.conversation.images == [PART]
    chat.conversation.ask("Who?")
    assert sent(chat) == question("Who?")
    _run_line(chat.conversation, "/undo")
    _run_line(chat.conversation, "x")
    assert sent(chat) == "x"


@pytest.mark.parametrize(
    ("param", "message", "left"),
    [
        ("messages[3].content[0].image_url.url", "the file is damaged", 1),
        ("messages", "the request has 2 images, the limit is 1", 0),
        (None, "this model reads no images", 0),
    ],
)
def test_a_refused_image_is_dropped_and_the_question_comes_back(make_chat, path, param, message, left):
    chat = make_chat()
    chat.conversation.session.system = "Be brief."
    chat.conversation.ask("Hello?")
    chat.backend.script = [RequestError(message, param=param)]
    _run_line(chat.conversation, f"'{path}' '{path}' What?")

    assert chat.conversation.images == [PART] * left and chat.conversation.pending == "What?"
    written = chat.written()
    assert (
        message in written
        and "The image is dropped" in written
        and ("(1 other left)" in written) == bool(left)
    )
    chat.backend.script = ["A cat."]
    chat.conversation.ask("What?")
    assert sent(chat) == ([PART] * left + [{"type": "text", "text": "What?"}] if left else "What?")
    assert chat.session.num_exchanges == 2


def test_images_stay_while_a_server_is_busy_and_an_earlier_one_is_named(make_chat, path):
    chat = make_chat()
    _run_line(chat.conversation, f"'{path}' What?")
    busy = RequestError("too many images at once", param="messages[2].content[0].image_url.url", status=429)
    chat.backend.script = [busy]
    _run_line(chat.conversation, f"'{path}' And this?")
    assert chat.conversation.images == [PART]
    chat.backend.script = [RequestError("it is damaged", param="messages[0].content[0].image_url.url")]
    chat.written()
    chat.conversation.ask("And this?")
    assert chat.conversation.images == [PART] and chat.conversation.pending is None
    assert "an earlier image" in chat.written()


def test_a_saved_conversation_has_its_images(make_chat, path, tmp_path):
    chat, other = make_chat(), make_chat()
    _run_line(chat.conversation, f"/image '{path}' What?")

    _run_line(chat.conversation, f"/save {tmp_path / 'chat.json'}")
    _run_line(chat.conversation, f"/export {tmp_path / 'chat.md'}")
    _run_line(other.conversation, f"/load {tmp_path / 'chat.json'}")

    assert other.session.messages() == chat.session.messages()
    assert "## You\n\n[image]\n\nWhat?" in (tmp_path / "chat.md").read_text()
    document = json.loads((tmp_path / "chat.json").read_text())
    document["messages"][0]["content"][0]["image_url"] = 5
    (tmp_path / "chat.json").write_text(json.dumps(document))
    with pytest.raises(RequestError, match="message 0 is no message of the user"):
        other.session.load(tmp_path / "chat.json")


def test_what_is_no_image_and_a_model_without_a_tower_are_told(make_chat, path, tmp_path):
    chat, blind = make_chat(), make_chat(sight=False)
    text = tmp_path / "a.png"
    text.write_bytes(b"%PDF-1.7")

    _run_line(chat.conversation, f"/image {text}")
    assert "a.png is a PDF file, but only PNG" in chat.written()
    os.mkfifo(tmp_path / "pipe.png")
    _run_line(chat.conversation, f"/image {tmp_path / 'pipe.png'}")
    assert "pipe.png is no regular file" in " ".join(chat.written().split())
    _run_line(chat.conversation, "/image /nowhere/b.png")
    assert "cannot read /nowhere/b.png: No such file" in chat.written()
    for line in (f"/image '{path}' What?", f"'{path}' What?"):
        _run_line(blind.conversation, line)
        assert "scripted in a script sees no images; chat with a model that does" in " ".join(
            blind.written().split()
        )
    assert blind.backend.seen == []


def test_the_option_of_the_command_line(monkeypatch, make_chat, path, capsys):
    backend = make_chat().backend
    monkeypatch.setattr(command, "attach", lambda *_: backend)
    monkeypatch.setattr(sys, "stdin", open("/dev/null", encoding="utf-8"))  # noqa: SIM115

    assert cli.run(["chat", "--quiet", "--image", str(path), "What?"]) == 0
    assert backend.seen[-1][-1]["content"] == question("What?") and "Hello there" in capsys.readouterr().out

    backend.sight = False
    assert cli.run(["chat", "--quiet", "--image", str(path), "What?"]) != 0
    assert "sees no images" in capsys.readouterr().err
