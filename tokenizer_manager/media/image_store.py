"""`ImageStore`: the images of live requests, and those of the last ones, as files with tiles; each once.

A file is shared by all requests with these pixels. It stays while one of them lives: a request that is submitted again
after a crash names it again. Afterwards it is a cache for the next turn of a chat, which sends its images again; the
least recently used ones make room for others.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from ...launch.child.socket_dir import is_image_name
from ...models.spec.vision_spec import VisionSpec
from ...runtime.config.media_config import MediaConfig
from ...runtime.errors import QueueFullError, RequestError
from ..job_process import JobLostError, JobProcess
from . import worker
from .fetch import MediaFetcher
from .sources import ImageSource
from .worker import ImageRefused, ImageReply, PreparedImage, PrepareImage

_MAX_WAITING: Final = 64
_CPU_LIMIT_S: Final = 10.0
_MAX_PIXELS: Final = 50_000_000


class ImageStore:
    """See the module.

    Attributes:
        vision: of the model.
        jobs: the process that decodes.
        num_taken: images that requests got.
        num_refused: images that were refused, by code of the error.
    """

    def __init__(
        self,
        vision: VisionSpec,
        folder: str,
        settings: MediaConfig = MediaConfig(),  # noqa: B008  (immutable)
        *,
        max_pixels: int = _MAX_PIXELS,
        limit_s: float = _CPU_LIMIT_S,
    ) -> None:
        """Remove the files of an earlier process; start none yet.

        Args:
            vision: of the model.
            folder: for the files.
            settings: from where images may come, and how much of them is kept.
            max_pixels: of an image.
            limit_s: CPU time for one image.
        """
        self.vision = vision
        self._folder = folder
        self._max_pixels = max_pixels
        self._max_bytes = int(settings.mm_cache_gb * 2**30)
        self._detail = settings.mm_detail
        self._fetcher = MediaFetcher(settings)
        self._limit_s = limit_s
        self.jobs = JobProcess(worker.__name__, name="images", max_waiting=_MAX_WAITING)
        self._images: OrderedDict[bytes, _Image] = OrderedDict()  # by digest, the last used one at the end
        self._digests: dict[bytes, bytes] = {}  # by key of the source
        self._tasks: set[asyncio.Task[PreparedImage]] = set()
        self.num_taken = 0
        self.num_refused: Counter[str] = Counter()
        self._remove_lost()

    @property
    def num_bytes(self) -> int:
        """Size of all files."""
        return sum(image.num_bytes for image in self._images.values())

    @property
    def num_files(self) -> int:
        """Images that have one."""
        return len(self._images)

    async def take(self, sources: Sequence[ImageSource]) -> list[PreparedImage]:
        """The tiles of images, in order; `release` them.

        Raises:
            RequestError: an image cannot be used or fetched; names its part.
            QueueFullError: too many images wait, or those of live requests have no room.
        """
        taken: list[PreparedImage] = []
        try:
            for source in sources:
                fetched = await self._fetcher.fetched(source)
                taken.append(await self._take(fetched))  # what is there is released on errors
        except BaseException as error:
            if isinstance(error, RequestError):
                self.num_refused[error.code or "error"] += 1
            self.release(image.digest for image in taken)
            raise
        self.num_taken += len(taken)
        return taken

    def release(self, digests: Iterable[bytes]) -> None:
        """Give images back, each as often as it was taken."""
        for digest in digests:
            self._images[digest].num_users -= 1
        self._make_room(0)

    def close(self) -> None:
        """End the process, and remove all files."""
        self.jobs.close()
        for image in self._images.values():
            Path(image.prepared.path).unlink(missing_ok=True)

    async def _take(self, source: ImageSource) -> PreparedImage:
        image = self._images.get(self._digests.get(source.key, b""))
        if image is None:
            left = asyncio.Event()
            task = asyncio.create_task(self._prepare(source, left))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            try:
                return await asyncio.shield(task)
            except asyncio.CancelledError:  # the client has left; a file that is being written must be known
                left.set()
                task.add_done_callback(self._release_result)
                raise
        image.num_users += 1
        self._images.move_to_end(image.prepared.digest)
        return image.prepared

    def _release_result(self, task: asyncio.Task[PreparedImage]) -> None:
        if not task.cancelled() and task.exception() is None:
            self.release([task.result().digest])

    async def _prepare(self, source: ImageSource, left: asyncio.Event) -> PreparedImage:
        """A new image, taken; `left`: the client has left, so the job need not begin."""
        detail = self._detail if source.detail == "auto" else source.detail
        job = PrepareImage(
            source.content,
            self.vision.family,
            self.vision.processing,
            self.vision.processing.splits and detail != "low",
            self._max_pixels,
            self._folder,
        )
        try:
            answer = await self.jobs.ask(
                msgspec.msgpack.encode(job), self._limit_s, lambda: not left.is_set()
            )
        except JobLostError:
            raise RequestError(
                f"{source.param} takes more than {self._limit_s:g} s of CPU time to decode, or crashes the decoder; "
                "send another file",
                param=source.param,
                code="invalid_image",
            ) from None
        reply: ImageReply = msgspec.msgpack.decode(answer, type=ImageReply)
        if isinstance(reply, ImageRefused):
            text = f"{source.param} {reply.text}"
            raise RequestError(text, param=source.param, code=reply.code, status=reply.status)
        self._add(source, reply)
        return reply

    def _add(self, source: ImageSource, prepared: PreparedImage) -> None:
        key, image = source.key, self._images.get(prepared.digest)
        if image is None:
            image = _Image(prepared, key)
            if image.num_bytes > self._max_bytes:
                Path(prepared.path).unlink(missing_ok=True)
                raise RequestError(
                    f"{source.param} has {image.num_bytes:,} bytes of tiles, the limit of all images is "
                    f"{self._max_bytes:,}; scale it down, or start the server with a larger --mm-cache-gb",
                    param=source.param,
                    code="image_too_large",
                    status=413,
                )
            if not self._make_room(image.num_bytes):
                Path(prepared.path).unlink(missing_ok=True)
                raise QueueFullError(
                    f"the images of running requests take {self.num_bytes:,} bytes of {self._max_bytes:,}, and this "
                    f"one {image.num_bytes:,}; retry later, or start the server with a larger --mm-cache-gb",
                    1,
                )
            self._images[prepared.digest] = image
        if not os.path.exists(prepared.path):  # removed as that of an unused image while it was written again
            del self._images[prepared.digest]
            raise QueueFullError("an image was removed to make room while it was decoded; retry", 1)
        image.num_users += 1
        self._images.move_to_end(prepared.digest)
        self._digests.pop(image.key, None)  # clients can make any number of files with the same pixels
        image.key = key
        self._digests[key] = prepared.digest

    def _make_room(self, num_bytes: int) -> bool:
        """Remove unused images until there is room; whether there is."""
        total = self.num_bytes + num_bytes
        for digest, image in list(self._images.items()):
            if total <= self._max_bytes:
                break
            if not image.num_users:
                total -= image.num_bytes
                del self._images[digest]
                del self._digests[image.key]
                Path(image.prepared.path).unlink(missing_ok=True)
        return total <= self._max_bytes

    def _remove_lost(self) -> None:
        """Remove the files of a tokenizer manager that was lost: its requests are abandoned."""
        with contextlib.suppress(OSError):
            for name in os.listdir(self._folder):
                if is_image_name(name):
                    Path(self._folder, name).unlink(missing_ok=True)


class _Image:
    """An image in the store.

    Attributes:
        key: of the last source that became it.
        num_users: how often it is taken.
    """

    __slots__ = ("key", "num_bytes", "num_users", "prepared")

    def __init__(self, prepared: PreparedImage, key: bytes) -> None:
        self.prepared = prepared
        self.key = key
        self.num_users = 0
        num, height, width, colors = prepared.shape
        self.num_bytes = num * height * width * colors
