"""A real browser, Debian's chromium under chromedriver. What the page says, asks for and complains of is watched."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

selenium = pytest.importorskip("selenium")
from selenium import webdriver  # noqa: E402
from selenium.webdriver.chrome.options import Options  # noqa: E402
from selenium.webdriver.chrome.service import Service  # noqa: E402

FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run")


class Browser:
    """Opens one page at a time and judges it."""

    def __init__(self, chromium: str, chromedriver: str) -> None:
        options = Options()
        options.binary_location = chromium
        for flag in FLAGS:
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        self.driver = webdriver.Chrome(options=options, service=Service(chromedriver))

    def open(self, page: Path, *, width: int = 1200, height: int = 900, dark: bool = False) -> None:
        self.size(width, height)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        for log in ("browser", "performance"):
            self.driver.get_log(log)  # what an earlier page left
        self.page = page.resolve().as_uri()
        self.driver.get(self.page)

    def size(self, width: int, height: int) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def scroll_to(self, found: Any) -> None:
        """Bring an element into the middle, and wait until the page has heard of it: scrolling hides the tip."""
        self.run("arguments[0].scrollIntoView({ block: 'center', behavior: 'instant' })", found)
        self.driver.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")

    def complaints(self) -> list[str]:
        """Everything in the console."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def requests(self) -> list[str]:
        """What was asked for besides the page itself and what it carries inside."""
        events = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        asked = [
            event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"
        ]
        assert any(url == self.page for url in asked), "the page's own request was not seen, so nothing is watched"
        return [url for url in asked if url != self.page and not url.startswith("data:")]

    def tip(self) -> str:
        return self.run("return tip.box.hidden ? '' : tip.box.innerText")


@pytest.fixture(scope="session")
def browser():
    chromium, chromedriver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or chromedriver is None:
        pytest.skip("no chromium and chromedriver on this machine")
    browser = Browser(chromium, chromedriver)
    yield browser
    browser.driver.quit()
