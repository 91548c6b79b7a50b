"""The rest of the page in a real browser: files, import, continue, adapters, a busy or lost server, colors, presets."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path

import pytest

from engine.cli.chat.answer import find_loop
from engine.runtime.messages import Finish, FinishKind
from engine.runtime.text import LOOP
from tests.adapter_files import loaded, write_adapter
from tests.browser import Tab
from tests.tokenizer_manager.fake_engine import SPEC, row, say_all

from ...media.image_files import file_of, picture
from ..test_images import _settings, text_of
from .chat_page import ANSWERED, ask, kept, open_settings, prompt_of
from .test_endpoints import pdf

pytestmark = pytest.mark.slow


def put_files(tab: Tab, selector: str, files: dict[str, bytes]) -> None:
    """Choose files, as in the dialog of the browser."""
    contents = {name: base64.b64encode(content).decode() for name, content in files.items()}
    tab.run(
        f"(() => {{ const all = new DataTransfer(), field = document.querySelector('{selector}'); "
        f"for (const [name, content] of Object.entries({json.dumps(contents)})) "
        "all.items.add(new File([Uint8Array.from(atob(content), (each) => each.charCodeAt(0))], name)); "
        "field.files = all.files; field.dispatchEvent(new Event('change')); })()"
    )


def send_event(tab: Tab, kind: str, content: str) -> bool:
    """Paste a text, or drop it as the file notes.txt; whether the page lets the browser act, too."""
    text = json.dumps(content)
    make = f"new File([{text}], 'notes.txt')" if kind == "drop" else f"{text}, 'text/plain'"
    event = (
        "new DragEvent('drop', { dataTransfer: data, bubbles: true, cancelable: true })"
        if kind == "drop"
        else "new ClipboardEvent('paste', { clipboardData: data, bubbles: true, cancelable: true })"
    )
    goes_on: bool = tab.run(
        f"(() => {{ const data = new DataTransfer(); data.items.add({make}); "
        f"return document.querySelector('#question').dispatchEvent({event}); }})()"
    )
    return goes_on


def test_files_go_with_the_message(open_page):
    tab, served = open_page(say_all("Read."))
    hello = pdf("BT /F1 12 Tf 20 100 Td (Hello from a PDF) Tj ET")
    put_files(tab, "#files", {"a.py": b"print('x')\n", "b.pdf": hello, "c.bin": b"\0\1"})
    tab.wait("document.querySelectorAll('#attached li').length === 2")
    tab.wait("document.querySelector('#status').textContent.includes('c.bin: this is no text')")
    put_files(tab, "#files", {"gone.txt": b"gone"})
    tab.click("[aria-label='Remove gone.txt']")
    ask(tab, "What is it?")
    tab.wait(ANSWERED)
    prompt = prompt_of(served.engine.next_request())
    assert "What is it?\n\na.py:\n```\nprint('x')\n```\n\nb.pdf:\n```\nHello from a PDF\n```" in prompt
    assert "gone" not in prompt
    assert tab.text(".user .plain") == "What is it?"
    assert [name.split("\n")[0] for name in tab.text(".user .body").split("\n") if "." in name] == [
        "a.py",
        "b.pdf",
    ]
    assert tab.run("document.querySelector('#attached').hidden")

    tab.click(".user [aria-label='Edit your message']")
    tab.type("!")
    tab.click(".edit [type=submit]")
    assert "Hello from a PDF" in prompt_of(served.engine.next_request())  # they stay with it


def test_a_dropped_file_and_a_long_paste_are_files_and_a_short_paste_is_text(open_page):
    tab, _ = open_page()
    assert not send_event(tab, "drop", "dropped")  # the browser does not open it in the page's place
    tab.wait("document.querySelectorAll('#attached li').length === 1")
    assert not send_event(tab, "paste", "word " * 1000)
    tab.wait("document.querySelectorAll('#attached li').length === 2")
    assert "notes.txt" in tab.text("#attached")
    assert "Pasted text 1" in tab.text("#attached")
    assert "5,000 characters" in tab.text("#attached")
    assert send_event(tab, "paste", "short")


@pytest.mark.parametrize("way", ["paste", "drop", "button"])
def test_an_image_is_pasted_dropped_or_chosen_and_sent(open_page, way):
    tab, served = open_page(say_all("A cat."), **_settings())
    content = base64.b64encode(file_of(picture(30, 20))).decode()
    make = (
        f"const data = new DataTransfer(); data.items.add(new File([Uint8Array.from(atob('{content}'), "
        "(each) => each.charCodeAt(0))], 'cat.png', { type: 'image/png' }));"
    )
    act = {
        "paste": "document.querySelector('#question').dispatchEvent(new ClipboardEvent('paste', "
        "{ clipboardData: data, bubbles: true, cancelable: true }));",
        "drop": "dispatchEvent(new DragEvent('drop', { dataTransfer: data, bubbles: true, cancelable: true }));",
        "button": "const field = document.querySelector('#files'); field.files = data.files; "
        "field.dispatchEvent(new Event('change'));",
    }[way]

    tab.run(f"(() => {{ {make} {act} }})()")
    drawn = (
        "(canvas) => canvas && canvas.width === 30 && "
        "canvas.getContext('2d').getImageData(0, 0, 30, 20).data.some(Boolean)"
    )
    tab.wait(f"({drawn})(document.querySelector('#attached canvas.small'))")
    ask(tab, "What is it?")
    tab.wait(ANSWERED)

    request = served.engine.next_request()
    [item] = request.media
    assert item.shape[0] > 1 and "What is it?" in text_of(request)
    assert text_of(request).startswith("user:<fake_token_around_image>")
    assert tab.run(f"({drawn})(document.querySelector('.user canvas.large'))")
    assert tab.text(".user .plain") == "What is it?" and tab.run("document.querySelector('#attached').hidden")

    tab.go(served.url + "/")  # it is kept, and sent again
    tab.wait("document.documentElement.dataset.ready")
    tab.wait(f"({drawn})(document.querySelector('.user canvas.large'))")
    ask(tab, "And?")
    assert served.engine.next_request().media == (item,)


def test_a_model_without_a_tower_says_so_when_an_image_is_added(open_page):
    tab, _ = open_page()
    tab.run(
        "(() => { const data = new DataTransfer(); data.items.add(new File(['x'], 'cat.png', { type: 'image/png' })); "
        "document.querySelector('#question').dispatchEvent(new ClipboardEvent('paste', { clipboardData: data, "
        "bubbles: true, cancelable: true })); })()"
    )
    tab.wait("document.querySelector('#status').textContent.includes('cat.png: this model sees no images')")
    assert tab.run("document.querySelector('#attached').hidden")


def test_images_of_an_imported_file_are_sent(open_page):
    tab, served = open_page(say_all("A cat."), **_settings())
    content = base64.b64encode(file_of(picture(30, 20))).decode()
    parts = [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{content}"}},
        {"type": "text", "text": "What?"},
    ]
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": "x"}]
    put_files(tab, "#import-file", {"a.json": json.dumps({"messages": messages}).encode()})
    tab.wait("document.querySelector('.user canvas.large')?.width === 30")
    assert tab.text(".user .plain") == "What?"
    ask(tab, "And?")

    assert len(served.engine.next_request().media) == 1


def headings(tab) -> list[str]:
    """Names of the models above the answers."""
    found: list[str] = tab.run(
        "[...document.querySelectorAll('.assistant h2')].map((each) => each.textContent)"
    )
    return found


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({"model": "org/other", "models": ["org/first.gguf", None]}, ["first", "Answer"]),
        ({"model": "org/other"}, ["other", "other"]),
        ({}, ["Answer", "Answer"]),
        ({"model": 5, "models": "x"}, ["Answer", "Answer"]),
    ],
)
def test_imported_answers_have_the_model_of_their_export(open_page, fields, shown):
    tab, _ = open_page()
    messages = [{"role": role, "content": role} for role in ("user", "assistant") * 2]
    put_files(tab, "#import-file", {"a.json": json.dumps({"messages": messages, **fields}).encode()})
    tab.wait("document.querySelectorAll('.assistant').length === 2")
    assert headings(tab) == shown


def test_an_exported_conversation_is_imported(open_page):
    tab, served = open_page(say_all("Next."))
    body = {
        "model": "x",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
            {"role": "assistant", "content": "Hello **you**."},
        ],
    }
    put_files(tab, "#import-file", {"conversation.json": json.dumps(body).encode()})
    tab.wait("document.querySelector('.assistant strong')")
    tab.wait("document.querySelector('#status').textContent === 'conversation.json was imported.'")
    ask(tab, "More")
    tab.wait(f"document.querySelectorAll('.assistant').length === 2 && {ANSWERED}")
    assert "Be brief." in prompt_of(served.engine.next_request())
    assert [message["content"] for message in kept(tab)] == ["Hi", "Hello **you**.", "More", "Next."]
    assert headings(tab) == ["x", "tiny"]

    put_files(tab, "#import-file", {"other.json": b"[1]"})
    tab.wait("document.querySelector('#status').textContent.includes('other.json cannot be imported')")


@pytest.mark.parametrize("ended_by", ["reader", "server"])
def test_a_stopped_answer_goes_on(open_page, ended_by):
    tab, served = open_page()
    ask(tab, "Count")
    request = served.engine.next_request()
    served.engine.say(row(request, "1, 2,", total=4))
    tab.wait("document.querySelector('.assistant .text')?.innerText.includes('1, 2,')")
    if ended_by == "reader":
        tab.click("#stop")
    else:
        failed = Finish(FinishKind.ERROR, message="out of luck", status=500)
        served.engine.say(row(request, "", total=4, finish=failed))
    tab.wait(ANSWERED)
    if ended_by == "server":
        assert "out of luck" in tab.text(".assistant .note")  # also after the next message, and a reload
    served.engine.script = say_all(" 3")
    tab.click(".assistant .end button")
    tab.wait("document.querySelector('.assistant .text').innerText === '1, 2, 3'")
    tab.wait(ANSWERED)
    assert prompt_of(served.engine.next_request()).endswith("assistant\n1, 2,")
    assert [message["content"] for message in kept(tab)] == ["Count", "1, 2, 3"]
    assert tab.run("document.querySelector('.assistant .end button')") is None


def test_an_answer_that_goes_on_is_shown_once(open_page):
    tab, served = open_page()
    ask(tab, "Count")
    served.engine.say(row(served.engine.next_request(), "First.\n\nSecond", total=2))
    tab.wait("document.querySelector('.arriving .blocks p')")
    tab.click("#stop")
    tab.wait(ANSWERED)
    tab.click(".assistant .end button")
    request = served.engine.next_request()
    served.engine.say(row(request, " part.", total=2))
    tab.wait("document.querySelector('.arriving .text').innerText.includes('part.')")
    tab.wait("document.querySelector('.arriving .blocks p')")
    assert tab.text(".arriving .text").split() == ["First.", "Second", "part."]
    served.engine.say(row(request, "\n\nThird", total=3))
    tab.wait("document.querySelectorAll('.arriving .blocks p').length === 2")
    assert tab.text(".arriving .text").split() == ["First.", "Second", "part.", "Third"]


def test_an_adapter_is_chosen(open_page, tmp_path: Path):
    write_adapter(tmp_path / "sql", SPEC)
    tab, served = open_page(say_all("x"), adapters=[loaded(tmp_path / "sql", SPEC, 1, "sql")])
    assert tab.run("[...document.querySelector('#choice').options].map((each) => each.text)") == [
        "no adapter",
        "sql",
    ]
    tab.run(
        "(() => { const field = document.querySelector('#choice'); field.value = 'sql'; "
        "field.dispatchEvent(new Event('change')); })()"
    )
    ask(tab, "Hi")
    tab.wait(ANSWERED)
    assert served.engine.next_request().lora_id
    assert tab.text(".assistant h2") == "sql"


def test_a_busy_server_is_asked_again(open_page):
    tab, served = open_page(say_all("x"))
    tab.run(
        "(() => { const real = fetch; let refusals = 2; window.fetch = (url, options) => "
        "String(url).endsWith('chat/completions') && refusals-- > 0 "
        '? Promise.resolve(new Response(\'{"error": {"message": "full"}}\', '
        "{ status: refusals ? 429 : 503, headers: { 'Retry-After': '1' } })) : real(url, options); })()"
    )
    ask(tab, "Hi")
    tab.wait("document.querySelector('#status').textContent.includes('asked again in 1 s')")
    tab.wait(ANSWERED)
    assert served.engine.next_request()
    assert tab.run("document.querySelector('#messages .error')") is None


def test_the_wait_for_a_busy_server_can_be_stopped(open_page):
    tab, served = open_page(say_all("x"))
    tab.run(
        "(() => { const real = fetch; window.fetch = (url, options) => String(url).endsWith('chat/completions') "
        "? Promise.resolve(new Response('', { status: 503, headers: { 'Retry-After': '30' } })) "
        ": real(url, options); })()"
    )
    ask(tab, "Hi")
    tab.wait("document.querySelector('#status').textContent.includes('asked again in')")
    tab.press("Escape")
    tab.wait("document.querySelector('#stop').hidden")
    assert served.engine.generate.empty()


def test_a_message_that_is_too_long_is_said_in_a_visitor_s_words(open_page):
    tab, _ = open_page(say_all("x"))
    ask(tab, "word " * 2000)
    tab.wait("document.querySelector('#messages .error')")
    assert "too long for the model. Send less, remove a file, or begin a new chat." in tab.text(
        "#messages .error"
    )


def test_the_dot_follows_the_server(open_page):
    tab, _ = open_page()
    assert tab.run("document.querySelector('#state').className") == "dot up"
    tab.run("window.real = fetch; window.fetch = () => Promise.reject(new TypeError('gone'))")
    tab.wait("document.querySelector('#state').className === 'dot down'")
    assert tab.run("document.querySelector('#state').ariaLabel") == "The server does not answer"
    tab.run("window.fetch = window.real")
    tab.wait("document.querySelector('#state').className === 'dot up'")


def test_the_colors_are_chosen_and_kept(open_page):
    tab, served = open_page()
    background = "getComputedStyle(document.body).backgroundColor"
    light = tab.run(background)
    tab.click("#theme")
    assert (tab.run(background), tab.run("document.querySelector('#theme').ariaLabel")) == (
        light,
        "Colors: light",
    )
    tab.click("#theme")
    dark = tab.run(background)
    assert dark != light
    tab.go(served.url + "/")
    tab.wait("document.documentElement.dataset.ready")
    assert tab.run(background) == dark


def test_an_example_is_a_click(open_page):
    tab, served = open_page(say_all("x"))
    tab.click("#examples button:nth-child(2)")
    tab.wait(ANSWERED)
    assert "Write a Python function" in prompt_of(served.engine.next_request())
    assert tab.run("document.querySelector('#empty').hidden")


def test_a_preset_sets_the_sampling_and_its_groups_fold(open_page):
    tab, served = open_page(say_all("x"))
    tab.click("#open-settings")
    folded = "[...document.querySelectorAll('#settings details')].map((each) => each.open)"
    assert tab.run(folded) == [True, False, False, False, False]
    tab.click(".presets button:nth-child(4)")
    assert tab.run("document.querySelector('#set-temperature').value") == "1.1"
    assert tab.run(folded) == [True, True, False, False, False]  # min_p is in the second group
    assert tab.text(".presets [aria-pressed=true]") == "Creative"
    ask(tab, "Hi")
    tab.wait(ANSWERED)
    sampling = served.engine.next_request().sampling
    assert (sampling.temperature, sampling.top_p, sampling.min_p) == pytest.approx((1.1, 0.95, 0.05))
    open_settings(tab)
    tab.click("#set-temperature")
    tab.type("5")
    assert tab.run("document.querySelector('.presets [aria-pressed=true]')") is None


def test_the_time_of_a_long_prompt_is_said(open_page):
    tab, served = open_page()
    ask(tab, "Hi")
    request = served.engine.next_request()
    tab.wait("/reads the conversation… [2-9] s/.test(document.querySelector('#status').textContent)")
    assert request.reports_progress
    text = "Reading the prompt: {} of {} tokens…"
    for processed in (8, 16):
        served.engine.say(row(request, "", processed=processed))
        shown = text.format(processed, len(request.input_ids) // 4)
        tab.wait(f"document.querySelector('#status').textContent.startsWith({shown!r})")
    served.engine.say(row(request, "x", total=1))
    tab.wait("document.querySelector('#status').textContent === 'The model answers…'")


def test_an_answer_that_repeats_itself_is_stopped_and_can_go_on(open_page):
    tab, served = open_page()
    ask(tab, "Hi")
    request = served.engine.next_request()
    served.engine.say(row(request, "A good beginning. "))
    for number in range(200):
        served.engine.say(row(request, "The same. ", total=number))
    assert served.engine.next_abort().rid == request.rid
    tab.wait(ANSWERED)
    note = tab.text(".assistant .note")
    assert re.match(r"Stopped: the answer repeats the same 10 characters \d+ times\. ", note), note
    served.engine.script = say_all("The end.")
    tab.click(".assistant .end button")
    tab.wait(
        "document.querySelector('.assistant .text').innerText.endsWith('The end.') && "
        "!document.querySelector('.assistant .note')"
    )


def test_the_page_finds_the_loops_that_the_terminal_finds(open_page):
    tab, _ = open_page()
    rows = "".join(f'{{"id": {number}, "tags": ["a", "b"]}},\n' for number in range(300))
    texts = ["", "ab" * 499, "ab" * 500, "x" * 1000, rows, rows + "\n" * 999, rows + "\n" * 1000]
    texts += ["y" + ("The answer is no. " * 60)[cut:] for cut in range(80, 100)]
    texts += [("z" * 400 + "-") * number for number in (7, 8, 9)]
    cut = [text[-LOOP.window_chars :] for text in texts]
    script = f"import('/page/chat/answer.js').then(({{ findLoop }}) => {json.dumps(cut)}.map(findLoop))"
    found = [None if loop is None else loop._asdict() for loop in map(find_loop, cut)]
    assert tab.run(script) == found
    assert 5 < sum(loop is not None for loop in found) < len(found)
