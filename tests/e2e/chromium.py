"""A headless Chromium as a test drives it: the DevTools protocol over a pipe, no library.

Messages are JSON that ends with a zero byte, on descriptors 3 and 4 of the browser. One tab; what
its console says and which errors its script throws are kept.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
REPLY_S_MAX = 120.0
POLL_S = 0.05
OPTIONS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-extensions",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--no-proxy-server",
    "--force-color-profile=srgb",
    "--remote-debugging-pipe",
)


def chromium() -> str | None:
    """Its path; None where there is none."""
    for name in NAMES:
        if path := shutil.which(name):  # which may be no more than a hint to install it
            with contextlib.suppress(OSError, subprocess.SubprocessError):
                subprocess.run([path, "--version"], capture_output=True, timeout=60, check=True)
                return path
    return None


class Tab:
    def __init__(self, read: int, write: int) -> None:
        self._read, self._write = read, write
        self._numbers = itertools.count(1)
        self._unread = b""
        self._session = ""
        self.problems: list[str] = []  # errors in its console, exceptions of its script
        made = self.send("Target.createTarget", url="about:blank")
        attached = self.send("Target.attachToTarget", targetId=made["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        give_up_s = time.monotonic() + REPLY_S_MAX
        while True:
            found = self._next(give_up_s)
            if found.get("id") == number:
                assert "error" not in found, (method, found["error"])
                return dict(found["result"])
            self._heard(found)

    def _next(self, give_up_s: float) -> dict[str, Any]:
        while b"\0" not in self._unread:
            ready, _, _ = select.select([self._read], [], [], max(0, give_up_s - time.monotonic()))
            assert ready, "the browser does not answer"
            part = os.read(self._read, 2**20)
            assert part, "the browser has ended"
            self._unread += part
        message, _, self._unread = self._unread.partition(b"\0")
        return dict(json.loads(message))

    def _heard(self, event: dict[str, Any]) -> None:
        said = event.get("params", {})
        match event.get("method"):
            case "Runtime.exceptionThrown":
                self.problems.append(str(said["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if said["type"] in ("error", "warning", "assert"):
                self.problems.append(str(said["args"]))
            case "Log.entryAdded" if said["entry"]["level"] == "error":
                self.problems.append(f"{said['entry']['text']} {said['entry'].get('url', '')}")

    def open(self, url: str) -> None:
        self.send("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'", url)

    def value(self, expression: str) -> Any:
        """Of an expression of JavaScript; a promise is waited for."""
        found = self.send(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, expression: str, what: str, deadline_s: float = 30.0) -> Any:
        """The first true value."""
        give_up_s = time.monotonic() + deadline_s
        while not (value := self.value(expression)):
            assert time.monotonic() < give_up_s, (
                f"waited {deadline_s:.0f} s for {what}; it shows: "
                + str(self.value("document.body.innerText"))[:2000]
            )
            time.sleep(POLL_S)  # poll
        return value

    def look(self, width: int, height: int, is_dark: bool = False) -> None:
        """A window of this size. (Headless Chromium makes none narrower than 500.)"""
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 500,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])

    def text(self, selector: str) -> str:
        return str(self.value(f"document.querySelector({json.dumps(selector)}).innerText"))

    def click(self, selector: str) -> None:
        self.value(f"document.querySelector({json.dumps(selector)}).click()")

    def type(self, selector: str, text: str) -> None:
        """As a keyboard does, over whatever is there."""
        self.value(f"document.querySelector({json.dumps(selector)}).select()")
        self.value(f"document.querySelector({json.dumps(selector)}).focus()")
        self.send("Input.insertText", text=text)

    def press(self, name: str, modifiers: int = 0) -> None:
        key = {"key": name, "code": name, "modifiers": modifiers}
        codes = {"Enter": 13, "Escape": 27, "Tab": 9}
        for kind in ("rawKeyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, windowsVirtualKeyCode=codes[name], **key)

    def screenshot(self, is_whole: bool = False) -> bytes:
        found = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=is_whole)
        return base64.b64decode(found["data"])


@contextlib.contextmanager
def tab(path: str) -> Iterator[Tab]:
    """Of a browser of its own, which ends with it."""
    to_browser, from_browser = os.pipe(), os.pipe()
    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as profile:
        # Descriptors 3 and 4 of the browser; of this process they may be something else.
        wanted = f'exec 3<&{to_browser[0]} 4>&{from_browser[1]}; exec "$@"'
        process = subprocess.Popen(
            ["bash", "-c", wanted, "chromium", path, *OPTIONS, f"--user-data-dir={profile}"],
            pass_fds=(to_browser[0], from_browser[1]),
            env={**os.environ, "HOME": profile},
            stdout=subprocess.DEVNULL,
            stderr=(Path(profile) / "stderr").open("wb"),
            start_new_session=True,
        )
        os.close(to_browser[0])
        os.close(from_browser[1])
        try:
            made = Tab(from_browser[0], to_browser[1])
            yield made
            made._session = ""
            made.send("Browser.close")
        finally:
            os.close(to_browser[1])  # it ends with its pipe
            try:
                process.wait(10.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            os.close(from_browser[0])
