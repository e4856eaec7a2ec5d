"""Drive headless Chromium in its DevTools protocol, over a pipe: this takes no driver, no package.

With ``--remote-debugging-pipe`` Chromium reads messages from its file 3 and writes to its file 4:
JSON, each ended by NUL (Chromium, content/browser/devtools/devtools_pipe_handler.cc). The methods
are those of https://chromedevtools.github.io/devtools-protocol/.
"""

import base64
import contextlib
import json
import os
import pathlib
import select
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

TIMEOUT_S = 60.0
_OPTIONS = (
    "--headless",
    "--remote-debugging-pipe",
    "--no-sandbox",  # as root it takes none; it reads our own pages alone
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-dev-shm-usage",
    "--disable-gpu",
    "--host-resolver-rules=MAP * ~NOTFOUND",  # a page that asks elsewhere gets no answer
)


class Page:
    """A page in the browser, and what it complained about and asked for since it was opened."""

    def __init__(self, *, to_browser: int, from_browser: int) -> None:
        self._to_browser, self._from_browser = to_browser, from_browser
        self._number = 0
        self._buffer = b""
        self._session: Mapping[str, str] = {}
        self._events: list[dict[str, Any]] = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self._session = {"sessionId": session}
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")
        self._call("Emulation.setScrollbarsHidden", hidden=True)

    def resize(self, *, width: int, height: int) -> None:
        """Give the page another size, in pixels."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._call("Emulation.setDeviceMetricsOverride", **size)

    def darken(self, *, is_dark: bool) -> None:
        """Have the reader prefer dark or light pages."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, url: str) -> None:
        """Load a page with all that it needs."""
        self._events.clear()
        answer = self._call("Page.navigate", url=url)
        assert "errorText" not in answer, (url, answer)
        self._wait_for_load()

    def evaluate(self, script: str) -> Any:
        """Return the value of a JavaScript expression, or what its promise comes to."""
        options = {"awaitPromise": True, "returnByValue": True, "userGesture": True}
        answer = self._call("Runtime.evaluate", expression=script, **options)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def follow(self, link: str) -> None:
        """Click on what a CSS selector names, and wait until the page behind it is loaded."""
        self._events.clear()
        self.evaluate(f"document.querySelector({json.dumps(link)}).click()")
        self._wait_for_load()

    def write(self, text: str) -> None:
        """Type a text where the focus is."""
        self._call("Input.insertText", text=text)

    def picture(self, *, height: int) -> bytes:
        """Return the page's uppermost part as PNG."""
        size = self._call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "scale": 1, "width": size["width"]}
        clip["height"] = min(height, size["height"])
        return base64.b64decode(
            self._call("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)["data"]
        )

    def requests(self) -> Sequence[str]:
        """Return the addresses that the page has asked for."""
        return [event["request"]["url"] for event in self._of("Network.requestWillBeSent")]

    def errors(self) -> Sequence[object]:
        """Return what the page's console shows in red."""
        return [
            *self._of("Runtime.exceptionThrown"),
            *(each for each in self._of("Runtime.consoleAPICalled") if each["type"] == "error"),
            *(each for each in self._of("Log.entryAdded") if each["entry"]["level"] == "error"),
        ]

    def _wait_for_load(self) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not self._of("Page.loadEventFired"):
            self._read(deadline)

    def _of(self, event: str) -> list[dict[str, Any]]:
        return [each["params"] for each in self._events if each["method"] == event]

    def _call(self, method: str, **params: object) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params, **self._session}
        os.write(self._to_browser, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + TIMEOUT_S
        while (answer := self._read(deadline)).get("id") != self._number:
            pass
        assert "error" not in answer, (method, answer)
        result: dict[str, Any] = answer["result"]
        return result

    def _read(self, deadline: float) -> dict[str, Any]:
        """Return the browser's next message; keep it if it is an event."""
        while b"\0" not in self._buffer:
            left_s = max(0.0, deadline - time.monotonic())
            assert select.select([self._from_browser], [], [], left_s)[0], "Chromium is silent"
            received = os.read(self._from_browser, 1 << 20)
            assert received, "Chromium has ended"
            self._buffer += received
        first, self._buffer = self._buffer.split(b"\0", 1)
        message: dict[str, Any] = json.loads(first)
        if "method" in message:
            self._events.append(message)
        return message


@contextlib.contextmanager
def open_page(program: str, folder: pathlib.Path) -> Iterator[Page]:
    """Run Chromium with a page; what it keeps and what it logs are in the folder."""
    (browser_reads, we_write), (we_read, browser_writes) = os.pipe(), os.pipe()
    # Only bash can give a file any number, and Chromium takes no other than 3 and 4.
    command = ("/bin/bash", "-c", f'exec "$@" 3<&{browser_reads} 4>&{browser_writes}', "bash")
    with (folder / "log").open("wb") as log:
        browser = subprocess.Popen(  # noqa: S603 - the arguments are this file's own
            [*command, program, *_OPTIONS, f"--user-data-dir={folder / 'profile'}"],
            pass_fds=(browser_reads, browser_writes),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    os.close(browser_reads)
    os.close(browser_writes)
    try:
        yield Page(to_browser=we_write, from_browser=we_read)
    finally:
        os.close(we_write)  # Chromium ends with its pipe
        os.close(we_read)
        browser.wait(TIMEOUT_S)
