"""`LocalImages`: the images of the chats of an `LLM`, decoded in a process of their own as in the server."""

from __future__ import annotations

import asyncio
import base64
import io
import tempfile
from array import array
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NamedTuple

from ..models.spec.vision_spec import VisionSpec
from ..models.tokenizer.tokenizer import Tokenizer
from ..runtime.config.media_config import MediaConfig
from ..runtime.errors import RequestError
from ..runtime.messages import MediaItem
from ..tokenizer_manager.conversation.conversation import image_sources
from ..tokenizer_manager.conversation.planner import AnswerPlan
from ..tokenizer_manager.media.image_store import ImageStore
from ..tokenizer_manager.media.placement import ImagePlacement

_OBJECTS: Final = ("image", "image_pil")
"""Types of parts with an image of Pillow or an array, under their own name."""


class PlacedChat(NamedTuple):
    """The token ids of a chat, and its images, which are to be released."""

    ids: list[int]
    media: tuple[MediaItem, ...]


class LocalImages:
    """See the module. Several threads may use it.

    Attributes:
        placement: for the planner of chats.
    """

    def __init__(self, vision: VisionSpec, tokenizer: Tokenizer, settings: MediaConfig) -> None:
        """Make the folder; start nothing yet.

        Raises:
            ConfigError: the tokenizer does not know the placeholder.
        """
        self.placement = ImagePlacement(vision, tokenizer)
        self._tokenizer = tokenizer
        self._folder = tempfile.TemporaryDirectory(prefix="engine-images-", ignore_cleanup_errors=True)
        self._store = ImageStore(vision, self._folder.name, settings)
        # The store belongs to one thread; the caller's may have an event loop of its own.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="images")

    def placed(self, plan: AnswerPlan) -> PlacedChat:
        """The prompt of a plan.

        Raises:
            RequestError: an image cannot be used.
        """
        sources = image_sources(plan.conversation.messages)
        images = self._thread.submit(asyncio.run, self._store.take(sources)).result() if sources else []
        try:
            texts = self.placement.texts_of(plan.prompt, images)
            ids = [
                token for text in texts for token in self._tokenizer.encode(text, add_special_tokens=False)
            ]
            return PlacedChat(ids, self.placement.items_of(array("i", ids), images))
        except BaseException:
            self._release(image.digest for image in images)
            raise

    def release(self, media: Sequence[MediaItem]) -> None:
        """Give images back."""
        if media:
            self._release(item.digest for item in media)

    def close(self) -> None:
        """End the process, and remove the files."""
        self._thread.submit(self._store.close).result()
        self._thread.shutdown()
        self._folder.cleanup()

    def _release(self, digests: Any) -> None:
        self._thread.submit(self._store.release, list(digests)).result()


def with_image_urls(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """The message with images of Pillow and arrays as the chat API has them: `data:` URLs of lossless files.

    Raises:
        RequestError: an array is no image.
    """
    content = message.get("content")
    if not isinstance(content, Sequence) or isinstance(content, str | bytes):
        return message
    return {**message, "content": [_part(part) for part in content]}


def _part(part: object) -> object:
    if not isinstance(part, Mapping) or part.get("type") not in _OBJECTS:
        return part
    image: Any = part.get(part["type"])
    if hasattr(image, "__array_interface__") and not hasattr(image, "save"):
        import PIL.Image

        try:
            image = PIL.Image.fromarray(image)
        except (TypeError, ValueError) as error:
            raise RequestError(f"an array of a message is no image: {error}; pass [H, W, 3] uint8") from None
    if not hasattr(image, "save"):
        return part
    file = io.BytesIO()
    image.save(file, "TIFF" if image.mode in ("CMYK", "F", "LAB", "YCbCr", "HSV") else "PNG")
    return {
        "type": "image_url",
        "image_url": {"url": f"data:;base64,{base64.b64encode(file.getvalue()).decode()}"},
    }
