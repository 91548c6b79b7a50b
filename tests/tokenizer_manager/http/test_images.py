"""Images in chats: their tokens in the prompt, their files, and what is refused."""

from __future__ import annotations

import base64
import gc
import json
import tracemalloc
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.runtime.errors import RequestError
from engine.runtime.feasibility import Capacity
from engine.runtime.media import runs_of
from engine.runtime.messages import GenerateRequest
from engine.tokenizer_manager.media.placement import ImagePlacement

from ..conftest import Serve, Served, _served
from ..fake_engine import CAPACITY, STOP, WAIT_S, ids_of, make_tokenizer, row, say_all, say_vectors
from ..media.image_files import file_of, picture
from ..media.test_image_store import VISION

PATH = "/v1/chat/completions"
SPECIAL = ("<image>", "<fake_token_around_image>", "<global-img>", "<row_1_col_1>", "<row_1_col_2>")
TOKENIZER = make_tokenizer(others=SPECIAL)
IMAGE_ID = 258
MODEL_VISION = msgspec.structs.replace(VISION, image_token_id=IMAGE_ID)
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}:{% for part in message.content %}"
    "{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}{% endfor %};{% endfor %}"
)
ROWS = VISION.rows_per_tile
ONE_TILE = f"<fake_token_around_image><global-img>{'<image>' * ROWS}<fake_token_around_image>"


def image_url(content: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(content).decode()


def part(content: bytes, detail: str | None = "low") -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": image_url(content), "detail": detail}}


def chat(*contents: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content} for content in contents]}


PICTURE = file_of(picture(30, 20))
OTHER = file_of(picture(30, 20, seed=1))


def _settings() -> dict[str, Any]:
    sizes = {"vocab_size": 258 + len(SPECIAL), "max_model_len": 2048, "num_pages": 512}
    sizes |= {"num_encoder_rows": 20 * ROWS, "encoder_tile_rows": ROWS}
    capacity = Capacity(**{**msgspec.structs.asdict(CAPACITY), **sizes})
    return {
        "vision": MODEL_VISION,
        "tokenizer": TOKENIZER,
        "chat_template": TEMPLATE,
        "capacity": capacity,
        "limits": {"max_images": 3},
    }


@pytest.fixture
def silent(serve: Serve) -> Served:
    """A server whose answers the test gives."""
    return serve(None, **_settings())


@pytest.fixture(scope="module")
def seeing(stopped_servers) -> Iterator[Served]:
    """A server that answers "x", shared: a test takes its requests from the engine."""
    with _served(stopped_servers, say_all("x"), _settings()) as served:
        yield served


def text_of(request: GenerateRequest) -> str:
    return TOKENIZER.decode(ids_of(request), skip_special_tokens=False)


def test_an_image_becomes_its_tokens_and_a_file(silent):
    served = silent
    question = [{"type": "text", "text": "What?"}, part(PICTURE), {"type": "text", "text": "Say!"}]

    pending = served.post_later(PATH, json=chat("Hi", question))
    request = served.engine.next_request()

    assert text_of(request) == f"user:Hi;user:What?{ONE_TILE}Say!;"
    [item] = request.media
    start, length = array("i", item.runs)
    assert ids_of(request)[start : start + length] == [IMAGE_ID] * ROWS and length == ROWS
    tiles = Path(item.pixels).read_bytes()
    assert item.shape == (1, 16, 16, 3) and len(tiles) == 16 * 16 * 3 and len(item.digest) == 32
    served.engine.say(row(request, "x", finish=STOP))
    usage = pending.result(WAIT_S).json()["usage"]
    assert usage["prompt_tokens"] == len(request.input_ids) // 4
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0, "image_tokens": ROWS}


def test_tiles_have_rows_and_columns(silent):
    served = silent
    wide = file_of(picture(32, 16))
    served.post_later(PATH, json=chat([part(wide, None), part(PICTURE)]))

    request = served.engine.next_request()

    rows = "<image>" * ROWS
    around = "<fake_token_around_image>"
    first = msgspec.structs.replace(MODEL_VISION.processing, longest_edge=64)
    assert first.longest_edge == 64  # 64 x 32 pixels: 2 x 4 tiles
    text = text_of(request)
    assert text.startswith(
        f"user:{around}<row_1_col_1>{rows}{around}<row_1_col_2>{rows}{around}<row_1_col_3>"
    )
    assert text.endswith(f"{around}<row_2_col_4>{rows}\n\n{ONE_TILE}{ONE_TILE};")
    wide_item, item = request.media
    assert wide_item.shape == (9, 16, 16, 3) and len(array("i", wide_item.runs)) == 2 * 9
    positions = [at for each in (wide_item, item) for at in _positions(each)]
    assert positions == [at for at, token in enumerate(ids_of(request)) if token == IMAGE_ID]
    served.engine.say(row(request, "x", finish=STOP))


def test_the_same_image_is_one_file_and_another_one_a_second(seeing):
    served = seeing
    for _ in range(2):
        assert (
            served.client.post(PATH, json=chat([part(PICTURE), part(OTHER), part(PICTURE)])).status_code
            == 200
        )

    first, again = served.engine.next_request(), served.engine.next_request()

    assert first.media[0].digest == first.media[2].digest == again.media[0].digest != first.media[1].digest
    assert [item.pixels for item in first.media] == [item.pixels for item in again.media]


def test_images_are_counted_with_their_bytes_and_refusals(serve):
    served = serve(say_all("x"), **_settings())
    assert served.client.post(PATH, json=chat([part(PICTURE), part(OTHER)])).status_code == 200
    assert served.client.post(PATH, json=chat([part(PICTURE[:200])])).status_code == 400

    page = served.client.get("/metrics").text

    values = {
        name.partition("{")[0]: (name, float(value))
        for name, _, value in (line.rpartition(" ") for line in page.splitlines() if line[:1] != "#")
    }
    refused, num_refused = values["engine:refused_images_total"]
    assert num_refused == 1 and 'code="invalid_image"' in refused
    assert values["engine:images_total"][1] == 2 and values["engine:image_cache_bytes"][1] > 0
    assert values["engine:cached_images"][1] == 2


def num_in_use(served: Served) -> int:
    assert served.services.images.store is not None
    return sum(image.num_users for image in served.services.images.store._images.values())


def test_n_answers_share_their_images_until_the_last_one_ends(silent):
    served = silent
    pending = served.post_later(PATH, json=chat([part(PICTURE)]) | {"n": 3, "stream": True})
    requests = [served.engine.next_request() for _ in range(3)]
    assert requests[0].media == requests[1].media == requests[2].media

    for request in requests[:2]:
        served.engine.say(row(request, "x", finish=STOP))
    last = served.post_later(PATH, json=chat([part(PICTURE)]) | {"max_tokens": 1})
    other = served.engine.next_request()  # after the rows above

    assert num_in_use(served) == 2
    for request in (requests[2], other):
        served.engine.say(row(request, "x", finish=STOP))
    assert pending.result(WAIT_S).status_code == last.result(WAIT_S).status_code == 200
    assert num_in_use(served) == 0


def test_images_are_given_back_when_their_requests_end(silent):
    served = silent
    images = served.services.images.store
    assert images is not None
    pending = [served.post_later(PATH, json=chat([part(PICTURE)])) for _ in range(2)]
    for _ in range(2):
        served.engine.say(row(served.engine.next_request(), "x", finish=STOP))
    for each in pending:
        assert each.result(WAIT_S).status_code == 200
    too_long = chat([part(PICTURE), {"type": "text", "text": "x" * 3000}])
    assert served.client.post(PATH, json=too_long).json()["error"]["code"] == "context_length_exceeded"
    for path in ("/tokenize", f"{PATH}/render"):
        assert served.client.post(path, json=chat([part(PICTURE)])).status_code == 200

    images._max_bytes = 0
    images.release(())

    assert images.num_bytes == 0, "no request has taken it"


def test_images_whose_tokens_are_counted_are_given_back(seeing):
    path, body = _of_api("anthropic", PICTURE)

    reply = seeing.client.post(f"{path}/count_tokens", json=body)

    assert reply.json()["input_tokens"] > ROWS and num_in_use(seeing) == 0


@pytest.mark.parametrize("text", SPECIAL)
@pytest.mark.parametrize("with_image", [True, False])
def test_a_special_token_of_images_in_a_text_is_text(seeing, text, with_image):
    served = seeing
    content: Any = [{"type": "text", "text": f"a{text}b"}, part(PICTURE)] if with_image else f"a{text}b"

    assert served.client.post(PATH, json=chat(content)).status_code == 200

    request = served.engine.next_request()
    assert text_of(request) == f"user:a{text}b{ONE_TILE if with_image else ''};"
    ids = ids_of(request)
    assert ids.count(IMAGE_ID) == ROWS * with_image
    assert bytes(ids[5:8]) != text.encode() and ids[: len(f"user:a{text}")] == TOKENIZER.encode("user:a") + [
        token for char in text for token in TOKENIZER.encode(char)
    ]


def test_special_tokens_of_images_in_decisions_are_text(serve):
    served = serve(say_vectors(lambda _request: [-1.0] * 4), **_settings())
    questions = [{"type": "predicate", "instructions": text} for text in ("Is <image> x?", "Is it?")]

    body = {"input": "a<image>b", "questions": questions}
    served.client.post("/v1/decisions", json=body).raise_for_status()
    first, second = served.engine.next_request(), served.engine.next_request()

    for request, text in ((first, "Is <image> x?"), (second, "Is it?")):
        assert text_of(request).startswith(f"user:a<image>b\n\n{text}\n\nIs it true?")
        assert IMAGE_ID not in ids_of(request)


def test_more_special_tokens_than_a_prompt_may_have_are_refused(seeing):
    error = seeing.client.post(PATH, json=chat("<image>" * 10_001)).json()["error"]

    assert error["param"] == "messages" and "more than 10,000 special tokens of images" in error["message"]


def test_objects_of_a_client_that_look_like_images_stay():
    schema = {"enum": [{"type": "image", "source": "a camera"}]}

    assert ImagePlacement(MODEL_VISION, TOKENIZER).without_markers(schema) == schema


def test_a_text_that_becomes_a_placeholder_is_refused():
    placement = ImagePlacement(MODEL_VISION, TOKENIZER)

    with pytest.raises(RequestError, match="is read as <image> by this model"):
        placement.items_of(array("i", [1, IMAGE_ID]), ())


def test_a_marker_in_two_parts_is_refused(seeing):
    parts = [{"type": "text", "text": "<ima"}, part(PICTURE), {"type": "text", "text": "<ima"}]

    reply = seeing.client.post(PATH, json=chat([*parts, {"type": "text", "text": "ge>"}]))

    assert reply.status_code == 400 and "has written 2 of 1 images" in reply.json()["error"]["message"]
    assert num_in_use(seeing) == 0


def test_tokenize_shows_the_placeholders(seeing):
    served = seeing

    body = served.client.post("/tokenize", json=chat([part(PICTURE)])).json()

    assert body["prompt"] == f"user:{ONE_TILE};" and body["tokens"].count(IMAGE_ID) == ROWS
    assert body["count"] == len(body["tokens"])


@pytest.mark.parametrize(
    ("make", "cause"),
    [
        (lambda: b"no image", "is not an image"),
        (lambda: PICTURE[:-40], "PNG image"),
        (lambda: b"%PDF-1.7", "is a PDF file"),
        (lambda: file_of(picture(1100, 1000), "JPEG"), "1,100 x 1,000 pixels"),
    ],
)
def test_images_that_cannot_be_used_are_refused_by_their_path(seeing, make, cause):
    reply = seeing.client.post(PATH, json=chat([part(make())]))

    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, "messages[0].content[0].image_url.url")
    assert cause in error["message"]


@pytest.mark.parametrize(
    ("bad", "param", "cause"),
    [
        ({"type": "image_url"}, "messages[0].content[0].image_url", "is missing"),
        ({"type": "image_url", "image_url": {}}, "messages[0].content[0].image_url", "url"),
        ({"type": "image_url", "image_url": 5}, "messages[0].content[0].image_url", "5"),
        (
            {"type": "image_url", "image_url": "https://example.org/a.png"},
            "messages[0].content[0].image_url",
            "this server fetches no URLs",
        ),
        (
            {"type": "image_url", "image_url": {"url": image_url(PICTURE), "detail": "ultra"}},
            "messages[0].content[0].image_url.detail",
            "must be one of auto, low, high",
        ),
        ({"type": "video_url", "video_url": "x"}, "messages[0].content[0].type", "only images are read"),
        (
            {"type": "input_audio", "input_audio": {}},
            "messages[0].content[0].type",
            "only images are read",
        ),
        ({"type": "file", "file": {}}, "messages[0].content[0].type", "only images are read"),
    ],
)
def test_other_parts_are_refused_by_their_path(seeing, bad, param, cause):
    error = seeing.client.post(PATH, json=chat([bad])).json()["error"]

    assert error["param"].startswith(param) and cause in error["message"]


def test_a_file_that_the_server_allows_is_read(serve, tmp_path):
    served = serve(say_all("x"), media={"allowed_local_media_path": str(tmp_path)}, **_settings())
    (tmp_path / "a.png").write_bytes(PICTURE)

    body = chat([part(PICTURE), {"type": "image_url", "image_url": f"file://{tmp_path}/a.png"}])
    assert served.client.post(PATH, json=body).status_code == 200

    first, second = served.engine.next_request().media
    assert first.shape == (1, 16, 16, 3) and second.shape[0] > 1, "detail low, and none"
    body = chat([{"type": "image_url", "image_url": "file:///etc/passwd"}])
    error = served.client.post(PATH, json=body).json()["error"]
    assert error["param"] == "messages[0].content[0].image_url" and "is not below" in error["message"]


def test_too_many_images_are_refused(seeing):
    served = seeing

    error = served.client.post(PATH, json=chat([part(PICTURE)] * 3, [part(PICTURE)])).json()["error"]

    assert (error["code"], error["param"]) == ("too_many_images", "messages[1].content[0].image_url")
    assert "--limit-mm-per-prompt" in error["message"]


def test_images_with_more_tiles_than_the_encoder_cache_holds_are_refused(seeing):
    large = [part(file_of(picture(64, 64, seed=seed)), None) for seed in range(2)]

    error = seeing.client.post(PATH, json=chat(large)).json()["error"]

    assert error["param"] == "messages" and "the images have 34 tiles with 136 rows" in error["message"]


def _of_api(api: str, content: bytes) -> tuple[str, dict[str, Any]]:
    """A question with an image, in the form of an API."""
    data = base64.b64encode(content).decode()
    match api:
        case "responses":
            image: dict[str, Any] = {"type": "input_image", "image_url": image_url(content), "detail": "low"}
            texts = [{"type": "input_text", "text": text} for text in ("What?", "Say!")]
            return "/v1/responses", {"input": [{"role": "user", "content": [texts[0], image, texts[1]]}]}
        case "anthropic":
            image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}
            blocks = [{"type": "text", "text": "What?"}, image, {"type": "text", "text": "Say!"}]
            return "/v1/messages", {"max_tokens": 4, "messages": [{"role": "user", "content": blocks}]}
        case "ollama chat":
            message = {"role": "user", "content": "What?", "images": [data]}
            return "/api/chat", {"messages": [message], "stream": False}
        case _:
            return "/api/generate", {"prompt": "What?", "images": [data], "stream": False}


APIS = {
    "responses": "input[0].content[1].image_url",
    "anthropic": "messages[0].content[1].source.data",
    "ollama chat": "messages[0].images[0]",
    "ollama generate": "images[0]",
}


@pytest.mark.parametrize("api", APIS)
def test_images_in_other_apis(seeing, api):
    path, body = _of_api(api, file_of(picture(16, 16)))

    assert seeing.client.post(path, json=body).status_code == 200

    request = seeing.engine.next_request()
    before, _, rest = text_of(request).partition("<fake_token_around_image>")
    after = rest.rpartition("<fake_token_around_image>")[2]
    assert len(request.media) == 1 and ids_of(request).count(IMAGE_ID) == request.media[0].shape[0] * ROWS
    assert (before, after) == (("user:", "What?;") if api.startswith("ollama") else ("user:What?", "Say!;"))
    path, body = _of_api(api, b"no image")
    refused = seeing.client.post(path, json=body)
    assert refused.status_code == 400 and f"{APIS[api]} is not an image" in refused.text


DATA = base64.b64encode(PICTURE).decode()


@pytest.mark.parametrize(
    "image",
    [DATA, [DATA], image_url(PICTURE), [{"url": image_url(PICTURE), "detail": "low"}], {"url": DATA}],
)
def test_image_data_of_generate(seeing, image):
    body = {"text": "What<image>?", "image_data": image, "sampling_params": {"max_new_tokens": 2}}

    assert seeing.client.post("/generate", json=body).status_code == 200

    request = seeing.engine.next_request()
    text = text_of(request)
    assert text.startswith("What<fake_token_around_image>") and text.endswith("<fake_token_around_image>?")
    [item] = request.media
    assert ids_of(request).count(IMAGE_ID) == item.shape[0] * ROWS
    assert item.shape[0] == 1 or not isinstance(image, list) or isinstance(image[0], str)


@pytest.mark.parametrize(
    ("fields", "param", "cause"),
    [
        ({"image_data": DATA}, "text", "has 0 of '<image>', and image_data 1 images"),
        ({"text": "<image><image>", "image_data": [DATA]}, "text", "has 2 of '<image>'"),
        ({"text": ["<image>", "x"], "image_data": [DATA]}, "image_data", "belongs to one text"),
        ({"text": None, "input_ids": [1, IMAGE_ID], "image_data": DATA}, "image_data", "belongs to one text"),
        ({"text": "<image>", "image_data": ["&"]}, "image_data[0]", "which is not base64"),
        ({"text": "<image>", "image_data": 5}, "image_data", "5"),
        ({"text": "<image>", "image_data": {"url": DATA, "detail": "x"}}, "image_data.detail", "must be one"),
        ({"text": "<image>", "image_data": [DATA] * 4}, "image_data[3]", "is image 4 of the request"),
        ({"text": "<image>", "image_data": ["http://a.org/b"]}, "image_data[0]", "fetches no URLs"),
    ],
)
def test_image_data_that_cannot_be_used(seeing, fields, param, cause):
    reply = seeing.client.post("/generate", json={"text": "x", **fields})

    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, param) and cause in error["message"]


def test_image_data_of_a_model_without_a_tower_is_refused(answering):
    error = answering.client.post("/generate", json={"text": "x", "image_data": DATA}).json()["error"]

    assert error["param"] == "image_data" and "serves only the text of this model" in error["message"]


@pytest.mark.parametrize("api", APIS)
def test_other_apis_of_a_model_without_a_tower_refuse_images(answering, api):
    path, body = _of_api(api, PICTURE)

    refused = answering.client.post(path, json=body)

    assert refused.status_code == 400 and "serves only the text of this model" in refused.text


@pytest.mark.parametrize(
    ("path", "bad", "cause"),
    [
        ("/v1/responses", {"type": "input_image", "file_id": "f"}, "this server keeps no files"),
        ("/v1/responses", {"type": "input_image"}, "image_url is missing"),
        ("/v1/responses", {"type": "input_file", "file_data": "x"}, "only images are read"),
        (
            "/v1/messages",
            {"type": "image", "source": {"type": "file", "file_id": "f"}},
            "must be base64 or url",
        ),
        ("/v1/messages", {"type": "image", "source": {"type": "base64"}}, "source.data is missing"),
        (
            "/v1/messages",
            {"type": "image", "source": {"type": "url", "url": "https://x/y"}},
            "fetches no URLs",
        ),
    ],
)
def test_images_of_other_apis_that_cannot_be_used(seeing, path, bad, cause):
    key, more = ("input", {}) if path == "/v1/responses" else ("messages", {"max_tokens": 4})

    refused = seeing.client.post(path, json={key: [{"role": "user", "content": [bad]}], **more})

    assert refused.status_code == 400 and cause in refused.text


def test_clients_of_ollama_see_that_images_are_read(seeing, answering):
    assert "vision" in seeing.client.post("/api/show", json={}).json()["capabilities"]
    assert "vision" not in answering.client.post("/api/show", json={}).json()["capabilities"]


@pytest.mark.slow
@pytest.mark.parametrize("api", ["chat", *APIS, "native generate"])
def test_a_running_request_keeps_no_copy_of_its_images(silent, api):
    image = file_of(picture(900, 900), "BMP")  # 2.4 MB
    if api == "chat":
        path, body = PATH, chat([part(image)])
    elif api == "native generate":
        path, body = "/generate", {"text": "<image>", "image_data": base64.b64encode(image).decode()}
    else:
        path, body = _of_api(api, image)
    content = json.dumps(body).encode()
    del body, image
    tracemalloc.start()

    pending = silent.post_later(path, content=content, headers={"Content-Type": "application/json"})
    request = silent.engine.next_request()
    gc.collect()
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert request.media and kept < 1_500_000
    silent.engine.say(row(request, "x", finish=STOP))
    assert pending.result(WAIT_S).status_code == 200


def test_halves_of_a_pair_take_no_images(seeing):
    pair = {"bootstrap_host": "127.0.0.1", "bootstrap_port": 8998, "bootstrap_room": 7}

    error = seeing.client.post(PATH, json=chat([part(PICTURE)]) | pair).json()["error"]

    assert error["param"] == "messages" and "one engine computes an image and its answer" in error["message"]


def test_a_rendered_chat_says_that_its_images_are_not_there(seeing):
    body = seeing.client.post(f"{PATH}/render", json=chat([part(PICTURE)])).json()

    assert body["token_ids"].count(IMAGE_ID) == ROWS
    assert any("has only the placeholders" in warning for warning in body["warnings"])


def test_only_messages_of_the_user_have_images(seeing):
    served = seeing
    body = {"messages": [{"role": "system", "content": [part(PICTURE)]}, {"role": "user", "content": "x"}]}

    reply = served.client.post(PATH, json=body)

    assert reply.status_code == 400 and "in messages of the user" in reply.json()["error"]["message"]


def test_a_model_without_a_tower_refuses_images(serve: Serve):
    error = serve(say_all("x")).client.post(PATH, json=chat([part(PICTURE)])).json()["error"]

    assert (
        error["param"] == "messages[0].content[0].type"
        and "serves only the text of this model" in error["message"]
    )


def test_a_request_is_submitted_again_with_its_images(silent):
    served = silent
    pending = served.post_later(PATH, json=chat([part(PICTURE)]))
    request = served.engine.next_request()
    manager = served.services.manager

    loop = served.engine.loop
    loop.call_soon_threadsafe(manager.peers_lost, "the scheduler died", {request.rid})
    loop.call_soon_threadsafe(manager.peers_back, manager.capacity)

    again = served.engine.next_request()
    assert again.rid != request.rid and again.media == request.media
    assert Path(again.media[0].pixels).exists()
    served.engine.say(row(again, "x", finish=STOP))
    assert pending.result(WAIT_S).json()["choices"][0]["message"]["content"] == "x"


def _positions(item) -> list[int]:
    return [at for start, length in runs_of(item) for at in range(start, start + length)]
