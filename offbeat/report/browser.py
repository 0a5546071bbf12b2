"""A headless Chromium, where there is one: draws SVG as PNG, and lets tests see a page as its readers do.

It is spoken to over two pipes in the DevTools protocol, a JSON object before each zero byte.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from types import TracebackType
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
PATIENCE = 60.0  # seconds for one answer
# The browser reads from 3 and writes to 4: this puts the pipes there, then becomes the browser.
STARTER = """
import fcntl, os, sys
pipes = [fcntl.fcntl(int(pipe), fcntl.F_DUPFD, 10) for pipe in sys.argv[1:3]]
for place, pipe in zip((3, 4), pipes):
    os.dup2(pipe, place)
os.execv(sys.argv[3], sys.argv[3:])
"""


class NoBrowser(RuntimeError):
    """There is none, or it does not answer."""


def find() -> str | None:
    """The program: CHROMIUM, where set, or the first of the usual names."""
    return shutil.which(os.environ["CHROMIUM"]) if os.environ.get("CHROMIUM") else next(filter(None, map(
        shutil.which, NAMES)), None)  # fmt: skip


class Browser:
    """One process with one page.

    errors   what the page has complained about since it was opened
    """

    def __init__(self) -> None:
        program = find()
        if program is None:
            raise NoBrowser("no Chromium was found; install one, or set CHROMIUM to its program")
        self.errors: list[str] = []
        self._profile = tempfile.TemporaryDirectory(prefix="offbeat-browser-", ignore_cleanup_errors=True)
        ours_in, theirs_out = os.pipe()
        theirs_in, ours_out = os.pipe()
        arguments = [program, "--headless=new", "--disable-gpu", "--hide-scrollbars", "--no-first-run",
                     "--disable-dev-shm-usage", "--disable-extensions", "--disable-background-networking",
                     "--force-color-profile=srgb", f"--user-data-dir={self._profile.name}",
                     "--remote-debugging-pipe"]  # fmt: skip
        arguments += ["--no-sandbox"] if os.geteuid() == 0 else []  # which root cannot have
        starter = [sys.executable, "-I", "-S", "-c", STARTER, str(theirs_in), str(theirs_out)]
        try:
            self._process = subprocess.Popen(
                [*starter, *arguments, "about:blank"], pass_fds=(theirs_in, theirs_out),
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )  # fmt: skip
        finally:
            os.close(theirs_in)
            os.close(theirs_out)
        self._in, self._out, self._rest, self._number, self._session = ours_in, ours_out, b"", 0, ""
        try:
            targets = self._ask("Target.getTargets")["targetInfos"]
            page = next(target["targetId"] for target in targets if target["type"] == "page")
            self._session = self._ask("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
            for domain in ("Page", "Runtime", "Log"):
                self._ask(f"{domain}.enable")
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        for pipe in (self._in, self._out):
            os.close(pipe)
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._profile.cleanup()

    def open(self, address: str, *, width: float, height: float = 800, dark: bool = False, scale: float = 1) -> None:
        """Show a page at this size of its window."""
        self.errors.clear()
        self._ask("Emulation.setDeviceMetricsOverride", width=int(width), height=int(height), deviceScaleFactor=scale,
                  mobile=False)  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._ask("Emulation.setEmulatedMedia", features=[scheme])
        self._ask("Page.navigate", url=address)
        until = time.monotonic() + PATIENCE
        while self.evaluate("location.href + document.readyState") != f"{address}complete":
            if time.monotonic() > until:
                raise NoBrowser(f"{address} was not shown within {PATIENCE:g} seconds")
            time.sleep(0.02)

    def evaluate(self, script: str) -> Any:
        """The value of an expression in the page."""
        answer = self._ask("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise NoBrowser(f"the page says: {answer['exceptionDetails'].get('text')}")
        return answer["result"].get("value")

    def screenshot(self, *, whole: bool = True) -> bytes:
        """The page as PNG, down to its end or what fits the window."""
        answer = self._ask("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        return base64.b64decode(answer["data"])

    def picture(self, address: str, width: float, height: float, *, scale: float = 2) -> bytes:
        """A picture in a file as PNG of that many times its size."""
        self.open(address, width=round(width), height=round(height), scale=scale)
        return self.screenshot(whole=False)

    def _ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        try:
            os.write(self._out, json.dumps(message).encode() + b"\0")
        except OSError as error:
            raise NoBrowser(f"the browser ended ({error.strerror})") from error
        until = time.monotonic() + PATIENCE
        while True:
            answer = self._next(until)
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise NoBrowser(f"the browser says: {answer['error'].get('message')}")
                result: dict[str, Any] = answer.get("result", {})
                return result
            self._hear(answer)

    def _hear(self, event: dict[str, Any]) -> None:
        told = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            self.errors.append(str(told["exceptionDetails"].get("text")))
        elif event.get("method") == "Runtime.consoleAPICalled" and told.get("type") in ("error", "warning"):
            self.errors.append(str(told.get("args")))
        elif event.get("method") == "Log.entryAdded" and told["entry"].get("level") in ("error", "warning"):
            self.errors.append(str(told["entry"].get("text")))

    def _next(self, until: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._in], [], [], max(0.0, until - time.monotonic()))
            piece = os.read(self._in, 1 << 16) if ready else b""
            if not piece:
                raise NoBrowser("the browser ended" if ready else f"the browser was silent for {PATIENCE:g} seconds")
            self._rest += piece
        text, _, self._rest = self._rest.partition(b"\0")
        answer: dict[str, Any] = json.loads(text)
        return answer
