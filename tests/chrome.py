"""A headless Chromium that opens one page and tells what the page did: requests, console, sizes, pictures."""

import asyncio
import base64
import contextlib
import itertools
import os
import shutil
import subprocess
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest

PATHS = ("chromium", "chromium-browser", "google-chrome")
START_SECONDS = 60


def find_chromium() -> str:
    """Its path. Skips the test where there is none, or fails it where services are required."""
    found = next((path for name in PATHS if (path := shutil.which(name))), None)
    if found is None:
        reason = "no Chromium: apt-get install chromium"
        if os.environ.get("CI") or os.environ.get("HSRAY_REQUIRE_SERVICES") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    return found


@dataclass
class Page:
    """A tab. `requests` are URLs other than the page's own, `messages` what the console and the log said."""

    socket: aiohttp.ClientWebSocketResponse
    session_id: str
    numbers: "itertools.count[int]"
    url: str = ""
    requests: list[str] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)
    loaded: bool = False

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self.numbers)
        await self.socket.send_json(
            {"id": number, "method": method, "params": parameters, "sessionId": self.session_id}
        )
        while True:
            answer = await self._next()
            if answer.get("id") == number:
                assert "error" not in answer, (method, answer["error"])
                result: dict[str, Any] = answer["result"]
                return result

    async def open(self, url: str, width: int, height: int, *, dark: bool = False) -> None:
        self.url, self.loaded = url, False
        for domain in ("Page", "Network", "Runtime", "Log"):
            await self.call(f"{domain}.enable")
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])
        await self.call("Page.navigate", url=url)
        while not self.loaded:
            await self._next()

    async def evaluate(self, expression: str) -> Any:
        answer = await self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    async def screenshot(self, path: Path) -> None:
        """The whole page."""
        answer = await self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(answer["data"]))

    async def _next(self) -> dict[str, Any]:
        message: dict[str, Any] = await self.socket.receive_json(timeout=START_SECONDS)
        parameters = message.get("params", {})
        match message.get("method"):
            case "Network.requestWillBeSent" if parameters["request"]["url"] != self.url:
                self.requests.append(parameters["request"]["url"])
            case "Runtime.consoleAPICalled" | "Runtime.exceptionThrown":
                self.messages.append(str(parameters))
            case "Log.entryAdded":
                self.messages.append(parameters["entry"]["text"])
            case "Page.loadEventFired":
                self.loaded = True
        return message


@contextlib.asynccontextmanager
async def open_chromium(folder: Path) -> AsyncIterator[Page]:
    """A fresh browser with its profile in `folder`; gone afterwards."""
    process = subprocess.Popen(
        [
            find_chromium(),
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-background-networking",
            "--disable-sync",
            "--disable-dev-shm-usage",
            "--no-first-run",
            "--hide-scrollbars",
            f"--user-data-dir={folder}",
            "--remote-debugging-port=0",
            "about:blank",
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        port_file = folder / "DevToolsActivePort"
        deadline = time.monotonic() + START_SECONDS
        while not (port_file.exists() and len(port_file.read_text().splitlines()) == 2):
            assert process.poll() is None, "Chromium has ended"
            assert time.monotonic() < deadline, "Chromium did not start"
            await asyncio.sleep(0.1)
        port, path = port_file.read_text().splitlines()
        async with (
            aiohttp.ClientSession() as client,
            client.ws_connect(f"ws://127.0.0.1:{port}{path}", max_msg_size=0) as socket,
        ):
            numbers = itertools.count(1)
            browser = Page(socket, "", numbers)
            target = await _call_browser(browser, "Target.createTarget", url="about:blank")
            attached = await _call_browser(browser, "Target.attachToTarget", targetId=target["targetId"], flatten=True)
            yield Page(socket, attached["sessionId"], numbers)
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


async def _call_browser(browser: Page, method: str, **parameters: Any) -> dict[str, Any]:
    number = next(browser.numbers)
    await browser.socket.send_json({"id": number, "method": method, "params": parameters})
    while True:
        answer: dict[str, Any] = await browser.socket.receive_json(timeout=START_SECONDS)
        if answer.get("id") == number:
            assert "error" not in answer, (method, answer["error"])
            result: dict[str, Any] = answer["result"]
            return result
