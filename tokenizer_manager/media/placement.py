"""`ImagePlacement`: where the images of a chat stand in its prompt.

The chat template writes a marker for each image, which is replaced by the family's text. The tokens of a text that a
client writes must not become those of an image: such a text is cut inside of the token, and its parts are tokenized
one by one.
"""

from __future__ import annotations

import re
import secrets
from array import array
from collections.abc import Sequence
from typing import Any, Final

from ...models.spec.vision_spec import VisionSpec
from ...models.tokenizer.tokenizer import Tokenizer
from ...runtime.errors import ConfigError, RequestError
from ...runtime.media import runs_of
from ...runtime.messages import MediaItem
from .processors import llava_next
from .processors.families import PROCESSORS
from .sources import ImageSource
from .worker import PreparedImage

_CUT: Final = f"zq{secrets.token_hex(12)}qz"
"""Where a text is cut. Clients cannot know it, and templates change no letters."""
_MAX_CUTS: Final = 10_000


class ImagePlacement:
    """See the module."""

    def __init__(self, vision: VisionSpec, tokenizer: Tokenizer) -> None:
        """Check that the tokenizer knows the placeholder.

        Raises:
            ConfigError: it does not.
        """
        found = tokenizer.token_to_id(vision.image_token)
        if found != vision.image_token_id:
            raise ConfigError(
                f"the model's image_token_id is {vision.image_token_id}, but its tokenizer has the id {found} for "
                f"{vision.image_token!r}; download both again, or serve its text with --language-model-only"
            )
        self._vision = vision
        self._processor = PROCESSORS[vision.family]
        self._special = re.compile(self._processor.special_texts(vision))

    def without_markers(self, value: Any) -> Any:
        """The input of a template: its texts with special tokens of images cut, and images as parts of their kind.

        Raises:
            RequestError: there are more than `_MAX_CUTS`, whose texts would occupy the event loop.
        """
        num_cuts = 0

        def cut(found: re.Match[str]) -> str:
            nonlocal num_cuts
            num_cuts += 1
            if num_cuts > _MAX_CUTS:
                raise RequestError(
                    f"the texts have more than {_MAX_CUTS:,} special tokens of images; shorten them",
                    param="messages",
                    code="invalid_value",
                )
            return f"{found[0][0]}{_CUT}{found[0][1:]}"

        def walk(value: Any) -> Any:
            if isinstance(value, str):
                return self._special.sub(cut, value)
            if isinstance(value, list):
                return [walk(each) for each in value]
            if isinstance(value, dict):
                if isinstance(value.get("source"), ImageSource):
                    return {"type": "image"}
                return {walk(key): walk(each) for key, each in value.items()}
            return value

        return walk(value)

    def texts_of(self, prompt: str, images: Sequence[PreparedImage]) -> list[str]:
        """The texts to tokenize one by one, without special tokens, of a rendered prompt.

        Raises:
            RequestError: the template has not written a marker for each image.
        """
        begin, *others = prompt.split(self._vision.marker)
        if len(others) != len(images):
            raise RequestError(
                f"the chat template of this model has written {len(others)} of {len(images)} images; send them in "
                "messages of the user, or give the server another template with --chat-template",
                param="messages",
                code="chat_template_error",
            )
        texts = [begin]
        for image, text in zip(images, others, strict=True):
            texts += [self._processor.prompt_text(self._vision, image.rows, image.columns), text]
        return "".join(texts).split(_CUT)

    def items_of(self, ids: array[int], images: Sequence[PreparedImage]) -> tuple[MediaItem, ...]:
        """The images of a prompt, with their positions.

        Args:
            ids: [prompt_len] int32, of `texts_of`.

        Raises:
            RequestError: a text has become the placeholder, which a normalizer of the tokenizer may do.
        """
        runs = _found_runs(ids, self._vision.image_token_id)
        if sum(length for _, length in runs) != sum(map(self._num_rows, images)):
            raise RequestError(
                f"a text of the messages is read as {self._vision.image_token} by this model; write it in another way",
                param="messages",
                code="invalid_value",
            )
        items = []
        for image in images:
            left, own, order = self._num_rows(image), array("i"), array("i")
            while left:
                start, length = runs.pop(0)
                own.extend((start, length))
                left -= length
            if self._vision.processing.pinpoints:
                order.extend(each for piece in self._rows_of(image) for each in piece)
            items.append(MediaItem(image.digest, own.tobytes(), image.path, image.shape, order.tobytes()))
        return tuple(items)

    def _num_rows(self, image: PreparedImage) -> int:
        return sum(length for _, length in self._rows_of(image))

    def _rows_of(self, image: PreparedImage) -> list[tuple[int, int]]:
        """(first, length) of the rows in the place of an image."""
        if self._vision.processing.pinpoints:
            return llava_next.rows_of(self._vision, image.rows, image.columns)
        tiles, height, width, _ = image.shape
        return [(0, tiles * self._vision.rows_of(height, width))]


def num_image_tokens(media: Sequence[MediaItem]) -> int:
    """Positions of a prompt that are those of images."""
    return sum(length for item in media for _, length in runs_of(item))


def _found_runs(ids: array[int], token_id: int) -> list[tuple[int, int]]:
    """[(start, length)] of each run of a token."""
    runs: list[tuple[int, int]] = []
    start, end = 0, 0
    while True:
        try:
            start = ids.index(token_id, end)
        except ValueError:
            return runs
        end = start
        while end < len(ids) and ids[end] == token_id:
            end += 1
        runs.append((start, end - start))
