"""The page of `alltokens explain` as people use it: maps, squares and curves under the pointer, a small screen."""

import pytest
from PIL import Image
from selenium.webdriver import ActionChains
from selenium.webdriver.common.by import By

from alltokens.data.scenes import render_scenes
from alltokens.explain import explain
from alltokens.report.explain_page import write_explanation
from tests.explain.test_explanation import subject_of
from tests.explain.test_maps import lvvit, swin
from tests.report.store import HOSTILE

pytestmark = pytest.mark.browser

VALUE = "return JSON.parse(arguments[0].querySelector('script').textContent).values[arguments[1]]"


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("explain")
    for index, pixels in enumerate(render_scenes(4, 40).pictures):
        Image.fromarray(pixels).save(folder / f"{index}.png")
    names = ("cat", "dog", HOSTILE, "tree", "house")
    models = [subject_of(lvvit(dense=True), names=names, name=HOSTILE), subject_of(swin(), 40, name="swin")]
    found = explain(models, [folder], draws=1, classes=["2", "0"])
    return write_explanation(found, folder / "explained.html").file


def point(browser, found, x=0.5, y=0.5):
    browser.scroll_to(found)
    offset = (round((x - 0.5) * found.size["width"]), round((y - 0.5) * found.size["height"]))
    ActionChains(browser.driver).move_to_element_with_offset(found, *offset).perform()


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1200, 320])
def test_it_opens_without_a_complaint_or_a_request_and_fits_the_screen(browser, page, width, dark):
    browser.open(page, width=width, dark=dark)
    assert browser.run("return document.querySelectorAll('main section').length") == 5
    assert browser.run("return document.documentElement.scrollWidth") <= width
    assert browser.run("return document.querySelectorAll('img[src=x]').length") == 0
    assert browser.complaints() == []
    assert browser.requests() == []


def test_the_pointer_reads_a_map_by_its_squares(browser, page):
    browser.open(page)
    maps = browser.driver.find_elements(By.CSS_SELECTOR, "#maps .looks .squares")
    point(browser, maps[0], 0.1, 0.1)
    assert browser.tip() == f"{browser.run(VALUE, maps[0], 0):.2f} of the strongest"
    point(browser, maps[0], 0.9, 0.9)
    assert browser.tip() == f"{browser.run(VALUE, maps[0], 15):.2f} of the strongest"
    point(browser, maps[4], 0.9, 0.1)  # two of attribution, rollout, class attention, then token heat
    assert browser.tip() == f"probability {browser.run(VALUE, maps[4], 3):.2f}"


def test_the_pointer_reads_shares_presence_and_layers(browser, page):
    browser.open(page)
    shares = browser.driver.find_element(By.CSS_SELECTOR, "#mixing .squares")
    point(browser, shares, 0.9, 0.1)
    assert browser.tip().replace("\u202f", " ") == f"partner {100 * browser.run(VALUE, shares, 3):.1f} %"
    presence = browser.driver.find_element(By.CSS_SELECTOR, "#presence .squares")
    point(browser, presence, 0.1, 0.1)
    assert browser.tip() == f"presence {browser.run(VALUE, presence, 0):.2f}\N{MULTIPLICATION SIGN}"
    point(browser, browser.driver.find_element(By.CSS_SELECTOR, "#mixing .plot"), 0.98)
    words = browser.tip().split()
    assert words[:2] == ["layer", "3.000"]
    assert {"area", "TransMix", "TL-Align", "similarity"} <= set(words)


def test_the_table_of_errors_sorts_and_can_be_taken_along(browser, page):
    browser.open(page)
    values = "return [...document.querySelectorAll('#error tbody tr')].map((row) => +row.cells[1].dataset.value)"
    browser.run("document.querySelectorAll('#error thead button')[1].click()")
    assert browser.run(values) == sorted(browser.run(values), reverse=True)
    browser.run("document.querySelectorAll('#error thead button')[1].click()")
    assert browser.run(values) == sorted(browser.run(values))
    link = browser.driver.find_element(By.CSS_SELECTOR, "#error a[download]").get_attribute("href")
    text = browser.run("return atob(arguments[0].split(',')[1])", link)
    assert text.splitlines()[0] == "model,rmse,standard_deviation,draws,pictures"
    assert len(text.splitlines()) == 3
