"""A real headless Chromium, driven over its debugging protocol, for the content and the look of pages.

Used for tests and screenshots of the gateway's page. The browser is the system's; nothing is downloaded.
"""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import anyio
import anyio.abc
import anyio.to_thread
import httpx
from websockets.asyncio.client import ClientConnection, connect

#: Names under which distributions install it.
NAMES = ("chromium", "chromium-browser", "google-chrome")

START_TIMEOUT_S = 60.0
CALL_TIMEOUT_S = 30.0


def find_chromium() -> str | None:
    """Return the browser's path; None if none is installed."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Page:
    """A browser tab."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection
        self._number = 0
        # Errors and warnings that the page logged, and uncaught exceptions.
        self.console: list[str] = []

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send one command of the protocol, and return the result. Raises RuntimeError with the browser's error."""
        self._number += 1
        await self._connection.send(json.dumps({"id": self._number, "method": method, "params": params}))
        with anyio.fail_after(CALL_TIMEOUT_S):
            while True:
                message: dict[str, Any] = json.loads(await self._connection.recv())
                self._note(message)
                if message.get("id") == self._number:
                    break
        if "error" in message:
            raise RuntimeError(f"{method}: {message['error']['message']}")
        result: dict[str, Any] = message["result"]
        return result

    def _note(self, message: dict[str, Any]) -> None:
        params = message.get("params", {})
        if message.get("method") == "Runtime.exceptionThrown":
            self.console.append(params["exceptionDetails"].get("exception", {}).get("description", "exception"))
        elif message.get("method") == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.console.append(params["entry"]["text"])

    async def open(self, url: str, *, width: int = 1400, height: int = 900, dark: bool = False) -> None:
        """Navigate to ``url`` without waiting until the page is loaded."""
        await self.call("Runtime.enable")
        await self.call("Log.enable")
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])
        await self.call("Page.navigate", url=url)

    async def run(self, script: str) -> Any:
        """Return the value of a JavaScript expression, awaited if it is a promise. Raises RuntimeError if it throws."""
        answer = await self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{script}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    async def until(self, condition: str, *, timeout_s: float = 20.0) -> None:
        """Wait until an expression is true, checked at each frame that the page draws. Raises RuntimeError if late."""
        script = f"""new Promise((done) => {{
            const end = performance.now() + {timeout_s * 1000};
            const look = () => {{
                let value = false;
                try {{ value = Boolean({condition}); }} catch (error) {{ /* not there yet */ }}
                if (value || performance.now() > end) done(value); else requestAnimationFrame(look);
            }};
            look();
        }})"""
        if not await self.run(script):
            raise RuntimeError(f"still not so after {timeout_s:g} s: {condition}; console: {self.console}")

    async def screenshot(self, path: Path) -> None:
        """Write a PNG of the visible page to ``path``."""
        answer = await self.call("Page.captureScreenshot", format="png")
        await anyio.to_thread.run_sync(path.write_bytes, base64.b64decode(answer["data"]))


@asynccontextmanager
async def open_page(executable: str) -> AsyncIterator[Page]:
    """Start a browser with one empty tab. The browser ends with the block."""
    with TemporaryDirectory(prefix="pdmesh-browser-", ignore_cleanup_errors=True) as profile:
        command = [
            executable,
            "--headless=new",
            # Chromium has no sandbox as root, and tests may run as root.
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--remote-debugging-port=0",
            f"--user-data-dir={profile}",
            "about:blank",
        ]
        async with await anyio.open_process(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as browser:
            try:
                with anyio.fail_after(START_TIMEOUT_S):
                    address = await _address(browser)
                port = address.split("/")[2]
                async with connect(await _tab(port), max_size=None) as connection:
                    yield Page(connection)
            finally:
                browser.kill()


async def _address(browser: anyio.abc.Process) -> str:
    """Return the address of the debugging protocol, which the browser prints. Raises RuntimeError without one."""
    assert browser.stderr is not None
    text = b""
    async for data in browser.stderr:
        text += data
        for line in text.splitlines():
            if line.startswith(b"DevTools listening on "):
                return line.split()[-1].decode()
    raise RuntimeError(f"the browser did not start: {text[-500:].decode(errors='replace')}")


async def _tab(host: str) -> str:
    """Return the debugging address of the only tab."""
    async with httpx.AsyncClient() as client:
        targets = (await client.get(f"http://{host}/json")).json()
    page: str = next(target["webSocketDebuggerUrl"] for target in targets if target["type"] == "page")
    return page
