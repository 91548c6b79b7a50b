"""`PromptImages`: from a rendered prompt and its images to token ids and `MediaItem`s, for all handlers."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ..runtime.messages import MediaItem
from .generation import Prompt
from .media.image_store import ImageStore
from .media.placement import ImagePlacement
from .media.sources import ImageSource
from .prompt_encoder import PromptEncoder


class PlacedPrompt(NamedTuple):
    """A prompt with its images.

    Attributes:
        text: with the texts of images.
        ids: [prompt_len] int32; None: those of the text.
        media: the images, which are taken; see `PromptImages.release`.
    """

    text: str
    ids: array[int] | None = None
    media: tuple[MediaItem, ...] = ()


class PromptImages:
    """The images of prompts; those of a model that does not see images are their texts alone.

    Attributes:
        store: decodes images; None: the model does not see them.
    """

    def __init__(
        self,
        encoder: PromptEncoder,
        store: ImageStore | None = None,
        placement: ImagePlacement | None = None,
    ) -> None:
        """Take the parts."""
        self.store = store
        self._encoder = encoder
        self._placement = placement

    @property
    def are_seen(self) -> bool:
        """Whether the model sees images."""
        return self.store is not None

    async def placed(
        self, prompt: str, sources: Sequence[ImageSource], param: str, *, add_special_tokens: bool = False
    ) -> PlacedPrompt:
        """A prompt with its images. Call it where a disconnect cancels, and `release` the images.

        Args:
            prompt: with a marker of the model's chat template for each image.
            sources: the images, in order.
            param: the field that errors name.
            add_special_tokens: of the tokenizer, before the prompt.

        Raises:
            RequestError: an image cannot be used, or the prompt has not as many markers.
            QueueFullError: too many images wait.
        """
        if self.store is None or self._placement is None:
            return PlacedPrompt(prompt)
        images = await self.store.take(sources)
        try:
            texts = self._placement.texts_of(prompt, images)
            if not images and len(texts) == 1:
                return PlacedPrompt(texts[0])
            ids = await self._ids_of(texts, param, add_special_tokens=add_special_tokens)
            return PlacedPrompt("".join(texts), ids, self._placement.items_of(ids, images))
        except BaseException:
            self.store.release(image.digest for image in images)
            raise

    def without_markers(self, texts: list[str]) -> list[str]:
        """Texts of a client for a prompt, with special tokens of images cut; see `ImagePlacement`.

        Raises:
            RequestError: there are too many.
        """
        cut: list[str] = texts if self._placement is None else self._placement.without_markers(texts)
        return cut

    async def cut_prompts(self, prompts: Sequence[str], param: str) -> list[Prompt]:
        """Rendered prompts without images; ids of those in which special tokens are cut.

        Raises:
            RequestError: a prompt has a marker of an image.
            QueueFullError: too much text waits to be tokenized.
        """
        if self._placement is None:
            return list(prompts)
        made: list[Prompt] = []
        for prompt in prompts:
            texts = self._placement.texts_of(prompt, ())
            made.append(texts[0] if len(texts) == 1 else (await self._ids_of(texts, param)).tolist())
        return made

    def release(self, media: Iterable[MediaItem]) -> None:
        """Give the images of a prompt back that is not started."""
        if self.store is not None:
            self.store.release(item.digest for item in media)

    def close(self) -> None:
        """End the process that decodes, and remove all files."""
        if self.store is not None:
            self.store.close()

    async def _ids_of(
        self, texts: Sequence[str], param: str, *, add_special_tokens: bool = False
    ) -> array[int]:
        """Token ids of texts that are tokenized one by one and joined."""
        first = await self._encoder.encode(texts[:1], add_special_tokens=add_special_tokens, param=param)
        others = await self._encoder.encode(texts[1:], add_special_tokens=False, param=param)
        return array("i", itertools.chain.from_iterable([*first, *others]))
