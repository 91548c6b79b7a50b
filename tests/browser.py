"""A real browser for tests: headless Chromium, driven over a pipe with its DevTools protocol (`apt install chromium`).

`Browser` is one process with a fresh profile; `Tab` is one page: it types, clicks, presses keys, waits, and collects
what the page requested and what went wrong in it. Names are not resolved, so that only addresses are reachable.
"""

from __future__ import annotations

import base64
import itertools
import json
import os
import queue
import shutil
import subprocess
import threading
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

CHROMIUM: Final = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
MISSING: Final = "there is no Chromium here (Debian: apt install chromium)"
WAIT_S: Final = 30.0  # a bound for what takes milliseconds on an idle machine
FLAGS: Final = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-extensions",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
    "--force-device-scale-factor=1",
    "--hide-scrollbars",
)
_KEYS: Final = {"Enter": 13, "Escape": 27, "Tab": 9, " ": 32, "ArrowDown": 40}
_SHIFT: Final = 8
_MAX_NAVIGATIONS: Final = 5


class PageError(AssertionError):
    """A script failed, or what was waited for did not happen."""


class Browser:
    """One Chromium. A context manager."""

    def __init__(self, folder: Path) -> None:
        """Start it, with its profile in `folder`."""
        assert CHROMIUM is not None, MISSING
        to_read, self._write = os.pipe()
        self._read, to_write = os.pipe()
        # The browser reads file descriptor 3 and writes 4.
        redirect = f'exec "$@" 3<&{to_read} 4>&{to_write} 2>/dev/null'
        self._process = subprocess.Popen(
            [
                *("bash", "-c", redirect, "bash", CHROMIUM, *FLAGS),
                *(f"--user-data-dir={folder / 'profile'}", "--remote-debugging-pipe", "about:blank"),
            ],
            pass_fds=(to_read, to_write),
            cwd=folder,
        )
        os.close(to_read)
        os.close(to_write)
        self._ids = itertools.count(1)
        self._messages: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._tabs: dict[str, Tab] = {}
        threading.Thread(target=self._receive, name="browser", daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        self._process.wait(WAIT_S)
        os.close(self._write)

    def open(
        self,
        url: str = "about:blank",
        *,
        size: tuple[int, int] = (1280, 800),
        features: dict[str, str] | None = None,
        beside: Tab | None = None,
    ) -> Tab:
        """A new page without the storage of others, or `beside` one, with its storage.

        Args:
            url: to open.
            size: of the window, in CSS pixels.
            features: media features, such as {"prefers-color-scheme": "dark"}.
        """
        context = beside.context if beside else self.call("Target.createBrowserContext")["browserContextId"]
        target = self.call("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        tab = self._tabs[session] = Tab(self, session, target, context, owns_context=beside is None)
        tab.prepare(size, features or {})
        tab.go(url)
        return tab

    def num_pages(self) -> int:
        """How many pages are open, the first empty one included."""
        return sum(info["type"] == "page" for info in self.call("Target.getTargets")["targetInfos"])

    def call(self, method: str, *, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """One command of the protocol; events that come before its answer go to their tabs."""
        number = next(self._ids)
        message = {"id": number, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._messages.get(timeout=2 * WAIT_S)
            if answer is None:
                raise PageError(f"the browser ended during {method}")
            if answer.get("id") == number:
                if "error" in answer:
                    raise PageError(f"{method}: {answer['error']}")
                result: dict[str, Any] = answer["result"]
                return result
            if (tab := self._tabs.get(answer.get("sessionId", ""))) is not None:
                tab.on_event(answer.get("method", ""), answer.get("params", {}))

    def _receive(self) -> None:
        rest = b""
        with os.fdopen(self._read, "rb", buffering=0) as pipe:
            while part := pipe.read(1 << 16):
                *whole, rest = (rest + part).split(b"\0")
                for each in whole:
                    self._messages.put(json.loads(each))
        self._messages.put(None)


class Tab:
    """One page.

    Attributes:
        context: owns the storage.
        urls: what it requested.
        problems: errors of scripts, violations of its policy, messages of severity error.
    """

    def __init__(
        self, browser: Browser, session: str, target: str, context: str, *, owns_context: bool
    ) -> None:
        self._browser = browser
        self._session = session
        self._target = target
        self._owns_context = owns_context
        self.context = context
        self.urls: list[str] = []
        self.problems: list[str] = []

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command for this page."""
        return self._browser.call(method, session=self._session, **parameters)

    def prepare(self, size: tuple[int, int], features: dict[str, str]) -> None:
        """Begin to collect, and set the window."""
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")
        self.resize(*size)
        media = [{"name": name, "value": value} for name, value in features.items()]
        self.call("Emulation.setEmulatedMedia", features=media)

    def resize(self, width: int, height: int) -> None:
        """Set the size of the window."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def close(self) -> None:
        """Close the page; its storage and its process go with it, unless it was opened beside another."""
        if self._owns_context:
            self._browser.call("Target.disposeBrowserContext", browserContextId=self.context)
        else:
            self._browser.call("Target.closeTarget", targetId=self._target)

    def go(self, url: str) -> None:
        """Open a page and wait until it is loaded."""
        self.call("Page.navigate", url=url)
        self.wait(
            "document.readyState === 'complete' && location.href !== 'about:blank'"
            if url != "about:blank"
            else "true"
        )

    def on_event(self, name: str, event: dict[str, Any]) -> None:
        """Keep what tests ask for."""
        match name:
            case "Network.requestWillBeSent":
                self.urls.append(event["request"]["url"])
            case "Runtime.exceptionThrown":
                details = event["exceptionDetails"]
                self.problems.append(details.get("exception", {}).get("description") or details["text"])
            case "Log.entryAdded" if event["entry"]["level"] == "error":
                self.problems.append(f"{event['entry']['source']}: {event['entry']['text']}")
            case "Runtime.consoleAPICalled" if event["type"] == "error":
                self.problems.append(str(event["args"]))

    def run(self, script: str) -> Any:
        """The value of an expression, which may be a promise.

        Raises:
            PageError: it failed.
        """
        answer = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            raise PageError(f"{script}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def wait(self, condition: str) -> Any:
        """Wait until an expression is true; its value.

        Raises:
            PageError: it did not become true.
        """
        loop = (
            f"new Promise((done) => {{ const end = Date.now() + {WAIT_S * 1000}; let value; const look = () => {{ "
            f"try {{ value = ({condition}); }} catch {{ value = undefined; }} "
            "if (value) done(value instanceof Node ? true : value); else if (Date.now() < end) setTimeout(look, 10); "
            "else done(value); }; look(); })"
        )
        value = None
        for _ in range(_MAX_NAVIGATIONS):  # a page that is left takes its scripts along
            try:
                value = self.run(loop)
                break
            except PageError as error:
                if "navigated" not in str(error) and "context" not in str(error):
                    raise
        if not value:
            raise PageError(
                f"this did not become true: {condition}; problems: {self.problems}; page: {self.text()[:2000]}"
            )
        return value

    def text(self, selector: str = "body") -> str:
        """The visible text of an element."""
        return str(self.run(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''"))

    def click(self, selector: str) -> None:
        """Click in the middle of an element, with the mouse."""
        place = self.wait(
            f"(() => {{ const box = document.querySelector({json.dumps(selector)}); if (!box) return null; "
            "box.scrollIntoView({ block: 'center' }); const { x, y, width, height } = box.getBoundingClientRect(); "
            "return width && height ? { x: x + width / 2, y: y + height / 2 } : null; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **place)

    def type(self, text: str) -> None:
        """Enter text where the focus is."""
        self.call("Input.insertText", text=text)

    def press(self, key: str, *, shift: bool = False) -> None:
        """Press and release a key."""
        code = _KEYS[key]
        text = {"Enter": "\r", " ": " "}.get(key)
        about = {"key": key, "code": "Space" if key == " " else key, "windowsVirtualKeyCode": code}
        about |= {"modifiers": _SHIFT if shift else 0}
        self.call("Input.dispatchKeyEvent", type="keyDown", **about, **({"text": text} if text else {}))
        self.call("Input.dispatchKeyEvent", type="keyUp", **about)

    def screenshot(self, path: Path) -> None:
        """Write a PNG of the window."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))
