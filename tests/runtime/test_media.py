"""Images as ids in a prompt, and which of them can never run."""

from __future__ import annotations

from array import array

from engine.runtime.feasibility import Capacity
from engine.runtime.media import reason_against_images, routing_id, with_image_ids
from engine.runtime.messages import MediaItem


def image(digest: bytes, *runs: int, tiles: int = 1) -> MediaItem:
    return MediaItem(digest.ljust(32, b"."), array("i", runs).tobytes(), "/tmp/pixels", (tiles, 4, 4, 3))


def test_each_image_has_its_id_at_all_its_runs():
    media = [image(b"a", 1, 2, 4, 1), image(b"b", 5, 2)]
    ids = with_image_ids(array("i", [7, 9, 9, 8, 9, 9, 9, 6]).tobytes(), media, [-2, -3])
    assert array("i", ids).tolist() == [7, -2, -2, 8, -2, -3, -3, 6]


def test_an_id_for_routing_is_negative_and_of_the_digest():
    ids = [routing_id(image(digest)) for digest in (b"a", b"b", b"\xff\xff\xff\x7f", b"a")]
    assert ids[0] == ids[3] and len(set(ids)) == 3
    assert all(-(1 << 31) <= each < 0 for each in ids)


def test_an_image_larger_than_the_cache_is_refused_with_the_sums():
    capacity = Capacity(512, 64, 4, 8, 100, num_encoder_rows=64, encoder_tile_rows=8)
    assert reason_against_images([], capacity) is None
    assert reason_against_images([image(b"a", tiles=8)], capacity) is None
    assert reason_against_images([image(b"a", tiles=5), image(b"a", tiles=5)], capacity) is None  # one image
    reason = reason_against_images([image(b"a", tiles=5), image(b"b", tiles=4)], capacity)
    assert reason is not None and "9 tiles with 72 rows" in reason and "holds 64" in reason


def test_a_server_without_a_tower_or_with_stages_or_machines_says_so():
    media = [image(b"a")]
    assert "text only" in str(reason_against_images(media, Capacity(512, 64, 4, 8, 100)))
    assert "--nnodes" in str(reason_against_images(media, Capacity(512, 64, 4, 8, 100, encoder_tile_rows=8)))
    stages = Capacity(512, 64, 4, 8, 100, num_stages=2, num_encoder_rows=64, encoder_tile_rows=8)
    assert "--pp" in str(reason_against_images(media, stages))
