from __future__ import annotations

import asyncio
import os
import random
import signal
import stat
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from engine.models.spec.vision_spec import ImageProcessing, VisionSpec
from engine.runtime.config.media_config import MediaConfig
from engine.runtime.errors import QueueFullError, RequestError
from engine.tokenizer_manager.job_process import JobLostError, JobProcess
from engine.tokenizer_manager.media.image_store import ImageStore
from engine.tokenizer_manager.media.sources import ImageSource, image_of_bytes
from engine.tokenizer_manager.media.worker import NO_PILLOW

from .image_files import MODES, file_of, picture, png_of

VISION = VisionSpec(
    family="idefics3",
    hidden_size=8,
    intermediate_size=16,
    num_layers=1,
    num_heads=2,
    norm_eps=1e-6,
    activation="gelu_tanh",
    image_size=16,
    patch_size=4,
    scale_factor=2,
    image_token_id=5,
    image_token="<image>",
    begin_token="<fake_token_around_image>",
    end_token="<fake_token_around_image>",
    global_token="<global-img>",
    marker="<image>",
    processing=ImageProcessing(
        longest_edge=64,
        tile_size=16,
        splits=True,
        resample=1,
        rescale_factor=1 / 255,
        mean=(0.5, 0.5, 0.5),
        std=(0.5, 0.5, 0.5),
    ),
)
TILE_BYTES = 16 * 16 * 3
PARAM = "messages[0].content[1].image_url.url"

MakeStore = Callable[..., ImageStore]


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Iterator[ImageStore]:
    """A store whose process the tests share."""
    store = ImageStore(VISION, str(tmp_path_factory.mktemp("images")), max_pixels=1_000_000)
    yield store
    store.close()


@pytest.fixture
def make_store(tmp_path: Path, store: ImageStore) -> Iterator[MakeStore]:
    """Makes stores that use the process of `store`, or their own ones."""
    stores: list[ImageStore] = []

    def make(*, own_process: bool = False, max_bytes: int = 1 << 30, **settings) -> ImageStore:
        media = MediaConfig(mm_cache_gb=max_bytes / 2**30)
        made = ImageStore(VISION, str(tmp_path), media, **{"max_pixels": 1_000_000, **settings})
        if own_process:
            stores.append(made)
        else:
            made.jobs = store.jobs
        return made

    yield make
    for made in stores:
        made.close()


def source(content: bytes, detail="auto") -> ImageSource:
    return image_of_bytes(content, PARAM, detail)


def take(store: ImageStore, *contents: bytes, detail="auto"):
    return asyncio.run(store.take([source(content, detail) for content in contents]))


def refused(store: ImageStore, content: bytes) -> RequestError:
    with pytest.raises(RequestError) as error:
        take(store, content)
    return error.value


def test_tiles_are_in_a_private_file_until_the_store_closes(make_store, tmp_path):
    store = make_store(own_process=True)
    content = file_of(picture(61, 43))

    [image] = take(store, content)

    path = Path(image.path)
    assert path.parent == tmp_path and stat.S_IMODE(path.stat().st_mode) == 0o600
    tiles = np.frombuffer(path.read_bytes(), np.uint8).reshape(image.shape)
    assert image.shape == (13, 16, 16, 3) and (image.rows, image.columns) == (3, 4)
    assert tiles.std() > 10 and len(image.digest) == 32
    store.close()
    assert os.listdir(tmp_path) == []


def test_equal_pixels_share_a_file_and_a_digest(make_store, tmp_path):
    store = make_store()
    image = picture(30, 30)
    first, again, other_file = take(store, file_of(image), file_of(image), file_of(image, "BMP"))
    [other] = take(store, file_of(picture(30, 30, seed=1)))

    assert first == again == other_file and other.digest != first.digest
    assert len(os.listdir(tmp_path)) == 2
    store.release([first.digest] * 3)
    assert take(store, file_of(image)) == [first]


def test_low_detail_is_one_tile(make_store):
    store = make_store()
    content = file_of(picture(61, 43))

    [low], [high] = take(store, content, detail="low"), take(store, content)

    assert (low.shape[0], low.rows, low.columns) == (1, 0, 0) and high.shape[0] == 13


def test_an_image_without_a_detail_has_that_of_the_server(make_store, tmp_path):
    store = ImageStore(VISION, str(tmp_path), MediaConfig(mm_detail="low"), max_pixels=1_000_000)
    store.jobs, own = make_store().jobs, store.jobs
    content = file_of(picture(61, 43))

    [none], [high] = take(store, content), take(store, content, detail="high")

    assert none.shape[0] == 1 and high.shape[0] == 13
    own.close()


def test_unused_images_make_room_and_used_ones_do_not(make_store, tmp_path):
    store = make_store(max_bytes=26 * TILE_BYTES)
    contents = [file_of(picture(61, 43, seed=seed)) for seed in range(3)]
    [first], [second] = (take(store, content) for content in contents[:2])
    with pytest.raises(QueueFullError, match="larger --mm-cache-gb"):
        take(store, contents[2])

    store.release([second.digest])
    [third] = take(store, contents[2])

    assert {Path(tmp_path, name) for name in os.listdir(tmp_path)} == {Path(first.path), Path(third.path)}
    assert store.num_bytes == 26 * TILE_BYTES


def test_the_least_recently_used_image_makes_room(make_store):
    store = make_store(max_bytes=2 * TILE_BYTES)
    contents = [file_of(picture(8, 8, seed=seed)) for seed in range(3)]
    for number in (0, 1, 0, 2):
        store.release(image.digest for image in take(store, contents[number], detail="low"))

    assert list(store._digests) == [source(contents[number], "low").key for number in (0, 2)]


def test_an_image_that_is_removed_while_it_is_written_again_is_to_be_sent_again(make_store, tmp_path):
    store = make_store()
    image = picture(8, 8)
    store.release(each.digest for each in take(store, file_of(image)))
    jobs = store.jobs

    class RemovesUnused:
        async def ask(self, *job) -> bytes:
            reply: bytes = await jobs.ask(*job)
            store._max_bytes = 0
            store.release(())
            store._max_bytes = 1 << 20
            return reply

    store.jobs = RemovesUnused()
    with pytest.raises(QueueFullError, match="was removed to make room"):
        take(store, file_of(image, "BMP"))
    store.jobs = jobs

    assert (store.num_bytes, os.listdir(tmp_path)) == (0, [])
    assert take(store, file_of(image, "BMP"))


def test_an_error_releases_the_images_before_it(make_store, tmp_path):
    store = make_store(max_bytes=13 * TILE_BYTES)
    with pytest.raises(RequestError):
        take(store, file_of(picture(61, 43)), b"no image")

    assert take(store, file_of(picture(61, 43, seed=1)))[0].shape[0] == 13


def test_a_client_that_leaves_leaves_no_used_image(make_store):
    async def leave(store: ImageStore) -> None:
        task = asyncio.create_task(store.take([source(file_of(picture(61, 43)))]))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await store.take([source(file_of(picture(61, 43, seed=1)))])  # after it, in the same process

    asyncio.run(leave(make_store(max_bytes=13 * TILE_BYTES)))


def test_the_image_of_a_client_that_has_left_is_not_decoded(make_store, tmp_path):
    async def leave(store: ImageStore) -> None:
        others_done = threading.Event()
        store.jobs._thread.submit(others_done.wait)
        task = asyncio.create_task(store.take([source(file_of(picture(61, 43)))]))
        for _ in range(3):  # it waits for the process
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        others_done.set()
        await store.take([source(file_of(picture(61, 43, seed=1)))])

    asyncio.run(leave(make_store()))

    assert len(os.listdir(tmp_path)) == 1


def test_files_of_a_lost_process_are_removed(make_store, tmp_path):
    lost, other = tmp_path / f"image-{'0' * 64}", tmp_path / "lock"
    for path in (lost, lost.with_name(f"{lost.name}.new"), other):
        path.write_bytes(b"x")

    make_store()

    assert os.listdir(tmp_path) == ["lock"]


def test_an_image_that_can_never_be_stored_is_refused_for_good(make_store, tmp_path):
    store = make_store(max_bytes=12 * TILE_BYTES)

    error = refused(store, file_of(picture(61, 43)))

    assert (error.status, error.code, error.param) == (413, "image_too_large", PARAM)
    assert "9,984 bytes of tiles, the limit of all images is 9,216" in error.message
    assert os.listdir(tmp_path) == []


def test_files_with_the_same_pixels_are_remembered_by_the_last_one(make_store):
    store = make_store(max_bytes=2 * TILE_BYTES)
    image, other = picture(8, 8), file_of(picture(8, 8, seed=1))
    kinds = [file_of(image), file_of(image, "BMP"), file_of(image, "TIFF")]
    prepared = [take(store, content, detail="low")[0] for content in (kinds[0], other, *kinds[1:])]
    store.release(each.digest for each in prepared)

    newest = file_of(picture(8, 8, seed=2))
    take(store, newest, detail="low")  # in the place of `other`, which was used least recently

    assert list(store._digests) == [source(content, "low").key for content in (kinds[-1], newest)]


def test_a_process_that_ends_within_its_reply_has_lost_the_job():
    jobs = JobProcess("unused", name="jobs", max_waiting=1)
    program = "import sys; sys.stdout.buffer.write(bytes((9, 0, 0, 0)) + b'half')"
    jobs._start = lambda: subprocess.Popen(  # type: ignore[method-assign]
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )

    with pytest.raises(JobLostError):
        jobs.ask_now(b"job", 10.0)


def test_errors_name_the_part(store):
    error = refused(store, b"%PDF-1.7")

    assert (error.status, error.code, error.param) == (
        400,
        "unsupported_media",
        "messages[0].content[1].image_url.url",
    )
    assert error.message.startswith("messages[0].content[1].image_url.url is a PDF file, but only PNG, JPEG")


@pytest.mark.slow
def test_a_process_that_hangs_or_dies_is_replaced(make_store):
    store = make_store(own_process=True, limit_s=0.2)
    content = file_of(picture(8, 8))
    take(store, content)
    os.kill(store.jobs.pid, signal.SIGSTOP)

    assert refused(store, file_of(picture(9, 9))).code == "invalid_image"

    take(store, file_of(picture(10, 10)))
    os.kill(store.jobs.pid, signal.SIGKILL)
    os.waitid(os.P_PID, store.jobs.pid, os.WEXITED | os.WNOWAIT)
    assert take(store, file_of(picture(11, 11)))


def test_without_pillow_the_extra_is_named(make_store, tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.mktemp("path")
    (folder / "PIL.py").write_text("raise ImportError")
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])

    error = refused(make_store(own_process=True), file_of(picture(8, 8)))

    assert NO_PILLOW in error.message and (error.status, error.code) == (400, "unsupported_value")


def test_a_folder_without_room_is_no_fault_of_the_image(store, tmp_path):
    other = ImageStore(VISION, str(tmp_path / "gone"), max_pixels=1_000_000)
    other.jobs, own = store.jobs, other.jobs

    error = refused(other, file_of(picture(8, 8)))

    assert (error.status, error.code) == (503, "no_room") and "No such file" in error.message
    own.close()


def test_bombs_are_refused_in_little_memory(store):
    frames = [picture(8, 8, seed=seed) for seed in range(2)]
    gif = file_of(frames[0], "GIF", save_all=True, append_images=frames[1:])
    begin, end = gif.rindex(b"\x21\xf9"), gif.rindex(b"\x3b")
    take(store, gif[:begin] + gif[begin:end] * 20_000 + b"\x3b")  # only the first frame is read
    for content in (
        png_of(50_000, 50_000, b"x" * 100_000),
        b"II*\0\x08\0\0\0" + struct.pack("<HHHIIHHIII", 2, 256, 4, 1, 1 << 20, 257, 4, 1, 1 << 20, 8),
        b"II*\0\x08\0\0\0" + struct.pack("<HI", 0, 8),  # a loop
        b"BM" + struct.pack("<IHHIIiiHHIIiiII", 54, 0, 0, 54, 40, 1 << 30, 1 << 30, 1, 24, 0, 0, 0, 0, 0, 0),
        b"GIF89a\xff\xff\xff\xff\0\0\0",
        b"\xff\xd8\xff\xc0\0\x11\x08\xff\xff\xff\xff\x03\x01\x22\0\x02\x11\x01\x03\x11\x01",
    ):
        assert 400 <= refused(store, content).status < 500
    assert _peak_bytes(store) < 300 << 20


@pytest.mark.fast_cases(3)
@pytest.mark.parametrize("seed", range(25))
def test_damaged_files_are_refused_or_read(store, seed):
    rng = random.Random(seed)
    for _ in range(20):
        mode, kind, options = MODES[rng.choice(list(MODES))]
        content = bytearray(file_of(picture(rng.randint(1, 80), rng.randint(1, 80), mode), kind, **options))
        if rng.random() < 0.3:
            del content[rng.randrange(len(content)) :]
        for _ in range(rng.choice((0, 1, 4, 40)) if content else 0):
            content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        status, code = _result(store, bytes(content))
        assert status == 200 or (400 <= status < 500 and code), (status, code)
    assert _peak_bytes(store) < 500 << 20


def _result(store: ImageStore, content: bytes) -> tuple[int, str | None]:
    try:
        store.release(image.digest for image in take(store, content))
    except RequestError as error:
        return error.status, error.code
    return 200, None


def _peak_bytes(store: ImageStore) -> int:
    if store.jobs.pid is None:
        take(store, file_of(picture(8, 8)))
    status = Path(f"/proc/{store.jobs.pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) << 10
