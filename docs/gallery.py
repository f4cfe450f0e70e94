"""The pictures of docs/pictures.md, made by the commands that stand there.

python docs/gallery.py [RUN]    RUN is that of `alltokens train quickstart`; it is trained if it is not there

Pages are opened in Debian's chromium (chromium-driver, selenium) and photographed section by section.
"""

from __future__ import annotations

import base64
import io
import os
import shutil
import sys
import tempfile
from pathlib import Path

from PIL import Image
from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service

from alltokens.cli import main as alltokens

IMAGES = Path(__file__).resolve().parent / "images"
WIDTH = 1000  # pixels


def make(run: Path) -> None:
    os.chdir(run.parent)  # pages tell where things lie
    run = Path(run.name)
    if not (run / "config.yaml").is_file():
        _do("train", "quickstart", "--run-dir", str(run))
    twin, labels = run / "quickstart_class", run / "labels"
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        _do("report", str(run), str(twin), "--out", str(folder / "report.html"), "--pictures", "500")
        page = folder / "labels.html"
        _do("labels", "inspect", str(labels), "--data", "scenes", "--split", "train", "--page", str(page))
        models = (str(run), "scenes", "--beside", str(twin))
        _do("explain", *models, "--out", str(folder / "explained.html"), "--measured", "32")
        for part in ("maps", "mixing", "presence", "error", "mixers"):
            shown = models if part in ("maps", "error") else models[:2]
            _do("explain", *shown, "--parts", part, "--most", "3", "--measured", "32", "--out", f"{folder / part}.png")
            _keep(Image.open(folder / f"{part}.png"), f"explain_{part}")
        browser = _browser()
        try:
            for section in ("summary", "curves", "confusion-of-classes", "mixed-samples", "labels-of-tokens"):
                _photograph(browser, folder / "report.html", f"#{section}", f"report_{section.replace('-', '_')}")
            _photograph(browser, folder / "explained.html", "#mixing .mix", "explain_page")
            _photograph(browser, page, "", "labels_page")
        finally:
            browser.quit()


def _do(*words: str) -> None:
    print("alltokens", *words, flush=True)
    if code := alltokens(words):
        sys.exit(code)


def _browser() -> webdriver.Chrome:
    chromium, chromedriver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or chromedriver is None:
        sys.exit("the gallery wants chromium and chromedriver (Debian: chromium chromium-driver)")
    options = Options()
    options.binary_location = chromium
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--window-size={WIDTH},1300"):
        options.add_argument(flag)
    return webdriver.Chrome(options=options, service=Service(chromedriver))


def _photograph(browser: webdriver.Chrome, page: Path, element: str, name: str) -> None:
    """The first element of a page, or its first screen."""
    browser.get(page.resolve().as_uri())
    box = {"x": 0, "y": 0, "width": WIDTH, "height": 1000}
    if element:
        script = "const box = document.querySelector(arguments[0]).getBoundingClientRect(); return box.toJSON()"
        found = browser.execute_script(script, element)
        box = {side: found[side] for side in box}
    shot = {"clip": box | {"scale": 1}, "captureBeyondViewport": True}
    taken = browser.execute_cdp_cmd("Page.captureScreenshot", shot)["data"]
    _keep(Image.open(io.BytesIO(base64.b64decode(taken))), name)


def _keep(picture: Image.Image, name: str) -> None:
    picture = picture.convert("RGB")
    picture.thumbnail((WIDTH, 2 * WIDTH), Image.Resampling.LANCZOS)
    picture.save(IMAGES / f"{name}.webp", quality=80, method=6)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        make(Path(sys.argv[1]).resolve())
    else:
        with tempfile.TemporaryDirectory() as temporary:
            make(Path(temporary) / "quickstart")
