"""`MediaIds`: gives each image a negative token id, so that the prefix cache tells images apart by its ordinary keys.

The placeholder of a model is one token id, whatever the image. In the scheduler the prompt of a request has the
image's own id at these positions (`PromptImages.keyed_ids`): two prompts have equal keys only if their images are
equal. The runner gets the ordinary ids.

    prompt       <s> look <image> <image> <image> at this
    input_ids     1   17    49190   49190   49190  33  54       for the runner
    keyed_ids     1   17       -2      -2      -2  33  54       for the prefix cache, shared prefixes, drafts

Ids are counted up by digest and never reused while the process lives, so equal ids mean equal images without a
collision. They mean nothing outside: what leaves the process has the digest (`portable`) or the placeholder
(`ordinary`). An image costs some 200 bytes for the life of the process.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Final

from ...runtime.feasibility import Capacity
from ...runtime.media import runs_of, tile_rows, with_image_ids
from ...runtime.messages import MediaItem
from ..requests.prompt_images import PromptImages, rope_axes, tiles_of

FIRST_ID: Final = -2
"""The first image's; -1 separates answers in `SuffixIndex`."""


class MediaIds:
    """See the module."""

    def __init__(self, capacity: Capacity) -> None:
        """`capacity`: of the runner; it says how many rows images have."""
        self._capacity = capacity
        self._ids: dict[bytes, int] = {}
        self._images: list[tuple[bytes, int]] = []  # digest and placeholder, by FIRST_ID - id

    def images_of(self, input_ids: bytes, media: Sequence[MediaItem]) -> PromptImages | None:
        """The images of a prompt; None if it has none."""
        if not media:
            return None
        ids = [self._id_of(item, memoryview(input_ids).cast("i")) for item in media]
        sizes = [tile_rows(item, self._capacity) for item in media]
        tiles = [
            tiles_of(item, rows, -(-rows // self._capacity.encoder_tile_rows))
            for item, rows in zip(media, sizes, strict=True)
        ]
        rope = b""
        if self._capacity.has_rope_axes:
            rope = rope_axes(media, len(memoryview(input_ids).cast("i")), self._capacity.encoder_row_pixels)
        runs = [run for item in media for run in runs_of(item)] if self._capacity.images_are_whole else []
        return PromptImages(
            input_ids,
            with_image_ids(input_ids, media, ids),
            tuple(tile for each in tiles for tile in each),
            tuple(each[-1].end for each in tiles),
            rope,
            tuple((start, start + length) for start, length in runs),
        )

    def _id_of(self, item: MediaItem, input_ids: memoryview) -> int:
        known = self._ids.get(item.digest)
        if known is None:
            start, _ = next(runs_of(item))
            known = self._ids[item.digest] = FIRST_ID - len(self._images)
            self._images.append((item.digest, input_ids[start]))
        return known

    def portable(self, token_ids: bytes) -> bytes:
        """Bytes to hash instead of `token_ids`: they mean the same in another process.

        Without images these are the token ids. Otherwise each image is named by its number among them, and its digest
        follows.
        """
        ids = self._found(token_ids)
        if not ids:
            return token_ids
        names = {image_id: -1 - number for number, image_id in enumerate(ids)}
        renamed = array("i", [names.get(each, each) for each in memoryview(token_ids).cast("i")])
        return renamed.tobytes() + b"".join(self._images[FIRST_ID - image_id][0] for image_id in ids)

    def ordinary(self, token_ids: bytes) -> bytes:
        """The token ids with the model's placeholder for each image."""
        ids = self._found(token_ids)
        if not ids:
            return token_ids
        names = {image_id: self._images[FIRST_ID - image_id][1] for image_id in ids}
        return array("i", [names.get(each, each) for each in memoryview(token_ids).cast("i")]).tobytes()

    def _found(self, token_ids: bytes) -> list[int]:
        """The images in a run of tokens, in order of appearance; at once, as long as no image has come."""
        if not self._images:
            return []
        values = memoryview(token_ids).cast("i")
        return [*dict.fromkeys(each for each in values if each < 0)]
