"""Images in the keys of the prefix cache, in events and in tiers, and in drafts."""

from __future__ import annotations

from array import array

import numpy as np
import pytest
from msgspec.structs import replace

from engine.runtime.feasibility import Capacity
from engine.runtime.messages import MediaItem
from engine.scheduler.media.media_ids import FIRST_ID, MediaIds
from engine.scheduler.prefix_cache.block_events import BlocksStored
from engine.scheduler.prefix_cache.tier_pages import page_keys, root_key
from engine.scheduler.requests.prompt_images import tiles_of
from engine.scheduler.speculation.ngram_proposer import HitRates, NgramProposer
from engine.scheduler.speculation.suffix_index import SuffixIndex

from ..fake_runner import PLACEHOLDER
from ..harness import Harness, Image

ROWS = 4
CAPACITY = Capacity(64, 16, 4, 4, 100, encoder_tile_rows=ROWS)


def item(name: bytes, *runs: int, tiles: int = 1) -> MediaItem:
    return MediaItem(name.ljust(32, b"."), array("i", runs).tobytes(), "/pixels", (tiles, 4, 4, 3))


def keyed(ids: MediaIds, name: bytes) -> bytes:
    """Text, an image of 4 rows, text."""
    images = ids.images_of(array("i", [1, 2, 9, 9, 9, 9, 3, 4]).tobytes(), [item(name, 2, 4)])
    assert images is not None
    return images.keyed_ids


def make(**options: object) -> Harness:
    return Harness(num_encoder_rows=32, encoder_tile_rows=ROWS, num_pages=300, **options)  # type: ignore[arg-type]


def test_ids_count_down_by_digest_and_are_never_reused():
    ids = MediaIds(CAPACITY)
    assert array("i", keyed(ids, b"cat"))[2:6].tolist() == [FIRST_ID] * 4
    assert array("i", keyed(ids, b"dog"))[2:6].tolist() == [FIRST_ID - 1] * 4
    assert array("i", keyed(ids, b"cat"))[2:6].tolist() == [FIRST_ID] * 4
    assert ids.images_of(b"1234", ()) is None


def test_outside_an_image_is_its_digest_and_its_placeholder():
    one, other = MediaIds(CAPACITY), MediaIds(CAPACITY)
    text = array("i", [1, 2, 3]).tobytes()
    cat, dog = keyed(one, b"cat"), keyed(one, b"dog")
    others_dog, others_cat = keyed(other, b"dog"), keyed(other, b"cat")
    assert cat == others_dog and one.portable(cat) != other.portable(others_dog)
    assert (one.portable(cat), one.portable(dog)) == (other.portable(others_cat), other.portable(others_dog))
    assert one.portable(text) == text and one.ordinary(text) == text
    assert array("i", one.ordinary(cat)).tolist() == [1, 2, 9, 9, 9, 9, 3, 4]
    both = one.portable(cat + dog)
    assert both != one.portable(dog + cat) and both != one.portable(cat + cat)


def test_keys_of_tiers_are_those_of_another_process():
    one, other = MediaIds(CAPACITY), MediaIds(CAPACITY)
    keyed(other, b"first")
    root = root_key(b"weights", "")
    cat, others_cat, others_dog = keyed(one, b"cat"), keyed(other, b"cat"), keyed(other, b"dog")
    keys = [*page_keys(root, cat, 2, one.portable)]
    assert keys == [*page_keys(root, others_cat, 2, other.portable)]
    differs = [a != b for a, b in zip(keys, page_keys(root, others_dog, 2, other.portable), strict=True)]
    assert differs == [False, True, True, True], "all pages from the image on"
    assert [*page_keys(root, cat, 2)] != keys


def test_tiles_of_a_run_that_text_interrupts():
    tiles = tiles_of(item(b"cat", 2, 6, 10, 1, 20, 5, tiles=3), 4)
    assert [tile.spans for tile in tiles] == [
        ((2, 4, 0),),
        ((6, 2, 0), (10, 1, 2), (20, 1, 3)),
        ((21, 4, 0),),
    ]
    assert [(tile.start, tile.end) for tile in tiles] == [(2, 6), (6, 21), (21, 25)]
    rows = array("i", [0, 3, 4, 2, 8, 2, 11, 1, 6, 1, 11, 1]).tobytes()
    mixed = tiles_of(replace(item(b"cat", 2, 6, 10, 4, tiles=4), rows=rows), 4)
    assert [(tile.number, tile.spans) for tile in mixed] == [
        (0, ((2, 3, 0),)),
        (1, ((5, 2, 0), (12, 1, 2))),
        (2, ((7, 1, 0), (10, 1, 1), (11, 1, 3), (13, 1, 3))),
    ], "tiles may alternate, a row may come again, and a tile without rows is none"
    whole = tiles_of(item(b"cat", 0, 8, tiles=2), 4)
    assert [tile.spans for tile in whole] == [((0, 4, 0),), ((4, 4, 0),)]


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("host", [0.0, 1.0])
def test_two_images_never_share_a_page(page_size, host):
    """The prompts have equal ids; what they share ends where the images begin."""
    harness = make(
        page_size=page_size, num_host_pages=100 if host else 0, cache={"kv_host_size": host}, overlap=0
    )
    prompt = list(range(20, 45))
    for name in ("cat", "dog", "cat"):
        harness.submit(name + str(len(harness.answers)), prompt=prompt, images=[Image(name, 4, 18)])
        harness.run_until_idle()
    cached = [answer.rows[-1].usage.cached_tokens for answer in harness.answers.values()]
    assert cached[:2] == [0, 18 // page_size * page_size]
    assert cached[2] == (len(prompt) + 16 - 1) // page_size * page_size


def test_events_have_the_placeholder_and_hashes_of_the_digest():
    """Two engines, which have seen other images before, announce the same blocks."""
    announced = []
    for before in ((), ("dog", "cow")):
        harness = make(page_size=16, records_blocks=True)
        for name in before:
            harness.submit(prompt=[7] * 20, images=[Image(name, 4, 2)])
        harness.run_until_idle()
        harness.scheduler.take_block_events()
        harness.submit(prompt=[6] * 20, images=[Image("cat", 4, 2)])
        harness.run_until_idle()
        events = [each for each in harness.scheduler.take_block_events() if isinstance(each, BlocksStored)]
        announced.append(events)
    assert announced[0] == announced[1]
    ids = array("i", b"".join(event.token_ids for event in announced[0])).tolist()
    assert ids[:24] == [6] * 2 + [PLACEHOLDER] * 16 + [6] * 6


def test_an_image_is_never_drafted():
    text = np.array([8, 9, -2, -2, 7, 8, 9], dtype=np.int32)
    proposer = NgramProposer(text, HitRates([0.9] * 8))
    assert proposer.match_len and proposer.chances(3) == [] and proposer.drafts(3) == []
    proposer = NgramProposer(np.array([8, 9, 5, -2, 7, 8, 9], dtype=np.int32), HitRates([0.9] * 8))
    assert len(proposer.chances(3)) == 1 and proposer.drafts(3) == [5]
    proposer.observe([5, 4])
    answers = SuffixIndex(64)
    answers.add(1, [8, 9, 5, -2, 7])
    proposer = NgramProposer(np.array([6, 8, 9], dtype=np.int32), HitRates([0.9] * 8), answers, 1)
    assert proposer.drafts(3) == [5]


def test_pins_and_sessions_keep_a_prompt_with_an_image():
    harness = make(cache={"pin_fraction": 0.5})
    harness.submit(prompt=[6] * 9, images=[Image("cat", 3, 2)], message={"keep_s": 60.0, "session": "s"})
    harness.run_until_idle()
    assert harness.scheduler.report(harness.now_s).pinned_tokens == 20
