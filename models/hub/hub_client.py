"""`HubClient`: the requests to the hub: the listing of a revision, and the contents of files.

A request fails at once if the hub cannot be reached, so that a start without network falls back to what is on the disk.
A hub that asks to wait (429 and 503 with `Retry-After`) is asked again later. Redirects to a storage host lose the
token: httpx drops it with the change of host.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from email.utils import parsedate_to_datetime
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self
from urllib.parse import quote

from ...runtime.errors import ConfigError
from ...runtime.installation import __version__
from .listing import Listing, RepoFile, parse_listing

if TYPE_CHECKING:
    import httpx

_MAX_WAIT_S: Final = 300.0
_MAX_WAITS: Final = 5
_BACKOFF_S: Final = 2.0
_BUSY: Final = (429, 502, 503, 504)


class HubUnreachableError(ConfigError):
    """No answer: no network, no such host, a timeout, offline mode."""


class HubAbsentError(ConfigError):
    """There is no such model, or this user may not see it."""


class HubClient:
    """A connection to the hub; a context manager.

    Args:
        sleep: waits for seconds.
        on_wait: called with a line before each wait.

    Attributes:
        endpoint: the hub's address.
    """

    def __init__(
        self,
        *,
        sleep: Callable[[float], None] = time.sleep,
        on_wait: Callable[[str], None] = lambda _line: None,
    ) -> None:
        import httpx
        from huggingface_hub import constants, get_token

        self.endpoint = constants.ENDPOINT
        self._offline = constants.HF_HUB_OFFLINE
        # Not `build_hf_headers`: it asks the hub for a list of programs first, to name the one that runs this.
        token = None if constants.HF_HUB_DISABLE_IMPLICIT_TOKEN else get_token()
        self._has_token = token is not None
        self._client = httpx.Client(
            headers={"User-Agent": f"engine/{__version__}"}
            | ({"Authorization": f"Bearer {token}"} if token else {}),
            follow_redirects=True,
            timeout=httpx.Timeout(constants.HF_HUB_DOWNLOAD_TIMEOUT, connect=constants.HF_HUB_ETAG_TIMEOUT),
        )
        self._sleep = sleep
        self._on_wait = on_wait

    def listing(self, repo: str, revision: str) -> Listing:
        """The files of a revision.

        Raises:
            HubUnreachableError: see the class.
            HubAbsentError: see the class.
            ConfigError: no such revision, no access, or the answer is not that of a hub.
        """
        import httpx

        url = f"{self.endpoint}/api/models/{repo}/revision/{quote(revision, safe='')}"
        with self._get(url, f"{repo}@{revision}", {}, params={"blobs": "true"}) as response:
            try:
                response.read()
                answer = response.json()
            except httpx.TransportError as error:
                raise HubUnreachableError(f"{self.endpoint}: {_reason(error)}") from error
            except ValueError:
                answer = None
        return parse_listing(repo, answer)

    @contextlib.contextmanager
    def content(
        self, repo: str, commit: str, file: RepoFile, start: int
    ) -> Iterator[tuple[int, Iterator[bytes]]]:
        """The content of a file from byte `start` on: the byte where it really begins, and the blocks.

        Raises:
            HubUnreachableError: there was no answer; an interruption of the content raises `httpx.TransportError`.
            ConfigError: the hub refuses the file.
        """
        url = f"{self.endpoint}/{repo}/resolve/{commit}/{quote(file.path)}"
        headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={start}-"} if start else {})
        with self._get(url, f"{repo}: {file.path}", headers) as response:
            begins = start if response.status_code == 206 and _starts_at(response, start) else 0
            yield begins, response.iter_bytes()

    @contextlib.contextmanager
    def _get(
        self, url: str, what: str, headers: Mapping[str, str], params: Mapping[str, str] | None = None
    ) -> Iterator[httpx.Response]:
        import httpx

        if self._offline:
            raise HubUnreachableError("HF_HUB_OFFLINE is set")
        for attempt in range(_MAX_WAITS + 1):
            request = self._client.build_request("GET", url, headers=dict(headers), params=params)
            try:
                response = self._client.send(request, stream=True)
            except (httpx.TransportError, httpx.TooManyRedirects, httpx.InvalidURL) as error:
                raise HubUnreachableError(f"{self.endpoint}: {_reason(error)}") from error
            try:
                if response.status_code not in _BUSY or attempt == _MAX_WAITS:
                    self._check(response, what)
                    yield response
                    return
                wait_s = _retry_after_s(response, time.time()) or _BACKOFF_S * 2**attempt
            finally:
                response.close()
            if wait_s > _MAX_WAIT_S:
                raise ConfigError(
                    f"{what}: {self.endpoint} answers {response.status_code} and asks to wait {wait_s:.0f} s; try later"
                    + ("" if self._has_token else ", or with HF_TOKEN, which has higher limits")
                )
            self._on_wait(f"{self.endpoint} answers {response.status_code}: asking again in {wait_s:.0f} s")
            self._sleep(wait_s)

    def _check(self, response: httpx.Response, what: str) -> None:
        """Raise the error of an answer other than 2xx."""
        status, code = response.status_code, response.headers.get("X-Error-Code", "")
        if status < 300:
            return
        said = response.headers.get("X-Error-Message", "")
        if (
            str(response.url.host) not in self.endpoint and not code
        ):  # a storage host, without the hub's headers
            raise ConfigError(
                f"{what}: the storage host {response.url.host} answers {status}; try again later"
            )
        if code == "GatedRepo" or (status == 403 and not code):
            repo = what.partition(":")[0].partition("@")[0]
            login = "" if self._has_token else ", then set HF_TOKEN or run `hf auth login`"
            who = "the user of HF_TOKEN" if self._has_token else "you"
            raise ConfigError(
                f"{what}: access must be granted; accept the terms at {self.endpoint}/{repo} as {who}{login}"
            )
        if status == 401 and self._has_token and "nvalid" in said:
            raise ConfigError(
                f"{what}: the hub refuses the token ({said}); correct HF_TOKEN or run `hf auth login`"
            )
        if code == "RevisionNotFound":
            repo, _, revision = what.partition("@")
            raise ConfigError(f"{repo}: there is no revision {revision!r}; give a branch, a tag or a commit")
        if code == "EntryNotFound":
            raise ConfigError(f"{what}: the file is not in the repository any more; pull again")
        if status in (401, 404):
            raise HubAbsentError(what)
        raise ConfigError(
            f"{what}: {self.endpoint} answers {status} {said or response.reason_phrase}; try again later"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.close()


def _starts_at(response: httpx.Response, start: int) -> bool:
    value: str = response.headers.get("Content-Range", "")
    return value.removeprefix("bytes ").startswith(f"{start}-")


def _retry_after_s(response: httpx.Response, now_s: float) -> float | None:
    """Seconds that the hub asks to wait: a number, or a date."""
    value = response.headers.get("Retry-After", "")
    if value.strip().isdigit():
        return float(value)
    with contextlib.suppress(ValueError, TypeError):
        return max(0.0, parsedate_to_datetime(value).timestamp() - now_s)
    return None


def _reason(error: Exception) -> str:
    import httpx

    if isinstance(error, httpx.ConnectTimeout):
        return "no connection in time"
    if isinstance(error, httpx.TimeoutException):
        return "no answer in time"
    if isinstance(error, httpx.ProxyError):
        return f"the proxy refuses: {error}"
    return str(error) or type(error).__name__
