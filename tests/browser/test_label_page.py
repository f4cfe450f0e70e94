"""The page of a label store as people use it: hovering, keys, sorting, classes, a small screen."""

import pytest
import torch
from PIL import Image

from alltokens.core.label_maps import LabelMap
from alltokens.data.sources import open_source
from alltokens.labels.manifest import Description
from alltokens.labels.writer import LabelWriter
from alltokens.report.label_page import write_label_page
from tests.report.store import HOSTILE, NAMES, make_store

pytestmark = pytest.mark.browser

KEYS = "return [...document.querySelectorAll('.card')].map((card) => card.card.entry.key)"
PIXELS = """const canvas = document.querySelectorAll('.card canvas')[arguments[0]];
return [...canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data]"""


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("label-page")
    store, pictures = make_store(folder)
    return write_label_page(store, open_source(pictures, class_names=NAMES), folder / "labels.html").file


def choose(browser, control, value):
    script = """const control = document.getElementById(arguments[0]);
    if (control.type === 'checkbox') control.checked = arguments[1]; else control.value = arguments[1];
    control.dispatchEvent(new Event('input', { bubbles: true }))"""
    browser.run(script, control, value)


def point(browser, card, x, y):
    """Move the pointer to a place of a card's picture, both coordinates in [0, 1]."""
    from selenium.webdriver import ActionChains
    from selenium.webdriver.common.by import By

    box = browser.driver.find_elements(By.CSS_SELECTOR, ".card .cells")[card]
    offset = (round((x - 0.5) * box.size["width"]), round((y - 0.5) * box.size["height"]))
    ActionChains(browser.driver).move_to_element_with_offset(box, *offset).perform()


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1200, 320])
def test_it_opens_without_a_complaint_or_a_request_and_fits_the_screen(browser, page, width, dark):
    browser.open(page, width=width, dark=dark)
    assert browser.run("return document.querySelectorAll('.card').length") == 4
    assert browser.run("return document.documentElement.scrollWidth") <= width
    browser.run("document.querySelector('.card button[title=Larger]').click()")
    assert browser.run("return document.getElementById('large').open")
    assert browser.run("return document.documentElement.scrollWidth") <= width
    assert browser.complaints() == []
    assert browser.requests() == []


def test_the_pointer_reads_a_cell(browser, page):
    browser.open(page)
    assert browser.run(KEYS)[0] == "cat/really-a-dog.png"
    point(browser, 0, 0.25, 0.25)
    words = browser.tip().split()
    assert words[words.index("dog") + 2] == "80.0"
    assert words[words.index("cat") + 2] == "10.0"
    assert words[words.index("others") + 1] == "10.0"
    choose(browser, "sort", "runner_up_size")
    assert browser.run(KEYS)[0] == "dog/beside-a-cat.png"
    point(browser, 0, 0.75, 0.75)
    assert browser.tip().split()[0] == "cat"
    point(browser, 0, 0.25, 0.75)
    assert browser.tip().split()[0] == "dog"


def test_arrow_keys_read_cells_too(browser, page):
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    browser.open(page)
    choose(browser, "sort", "runner_up_size")
    box = browser.driver.find_element(By.CSS_SELECTOR, ".card .cells")
    box.send_keys(Keys.ARROW_RIGHT)  # the first key lands in the middle: of 2 x 2 cells, the last
    assert browser.tip().split()[0] == "cat"
    box.send_keys(Keys.ARROW_LEFT)
    assert browser.tip().split()[0] == "dog"
    assert "dog" in box.get_attribute("aria-label")
    box.send_keys(Keys.ESCAPE)
    assert browser.tip() == ""


@pytest.mark.parametrize(
    ("order", "first"),
    [("doubt", "cat/really-a-dog.png"), ("entropy", "dog/unsure.png"), ("key", "cat/clear.png")],
)
def test_sorting(browser, page, order, first):
    browser.open(page)
    choose(browser, "sort", order)
    assert browser.run(KEYS)[0] == first


def test_filters(browser, page):
    browser.open(page)
    choose(browser, "disagreeing", True)
    assert browser.run(KEYS) == ["cat/really-a-dog.png"]
    assert browser.run("return document.getElementById('count').textContent") == "1 of 4 pictures"
    choose(browser, "disagreeing", False)
    choose(browser, "folder", "1")
    assert sorted(browser.run(KEYS)) == ["dog/beside-a-cat.png", "dog/unsure.png"]
    choose(browser, "search", "UNSURE")
    assert browser.run(KEYS) == ["dog/unsure.png"]


def test_a_class_shows_its_heat_and_gives_the_classes_back(browser, page):
    browser.open(page)
    choose(browser, "sort", "runner_up_size")
    before = browser.run(PIXELS, 0)
    browser.run("document.querySelectorAll('.card')[0].querySelector('.chips button[data-id=\"0\"]').click()")
    heat = browser.run(PIXELS, 0)
    assert heat != before
    reds = heat[::4]
    assert reds[3] > reds[0] + 80  # cat: 0.7 in the last cell, 0.2 in the first
    browser.run("document.querySelectorAll('.card')[0].querySelector('.chips button[data-id=\"0\"]').click()")
    assert browser.run(PIXELS, 0) == before
    choose(browser, "show", "none")
    assert set(browser.run(PIXELS, 0)) == {0}


def test_a_hostile_name_is_read_as_text(browser, page):
    browser.open(page)
    choose(browser, "search", "unsure")
    point(browser, 0, 0.5, 0.5)
    assert HOSTILE in browser.tip()
    assert browser.run("return document.querySelectorAll('img[src=x]').length") == 0


def test_hundreds_of_pictures_are_drawn_only_where_one_looks(browser, tmp_path):
    count, grid = 400, 18
    (tmp_path / "pictures" / "a").mkdir(parents=True)
    (tmp_path / "pictures" / "b").mkdir()
    keys = [f"{'ab'[index % 2]}/{index:04d}.jpg" for index in range(count)]
    for index, key in enumerate(keys):
        Image.new("RGB", (32, 32), (index % 256, 90, 150)).save(tmp_path / "pictures" / key)
    generator = torch.Generator().manual_seed(0)
    scores, ids = torch.randn(count, 9, grid, grid, generator=generator).topk(5, dim=1)
    writer = LabelWriter(tmp_path / "store", Description((grid, grid), 5, 9))
    writer.append(keys, LabelMap(ids.int(), scores.half(), torch.zeros(count, grid, grid).half()))
    page = write_label_page(writer.finish(), open_source(tmp_path / "pictures"), tmp_path / "x.html", pictures=count)
    assert page.bytes < 5_000_000
    browser.open(page.file)
    took = browser.run("const [it] = performance.getEntriesByType('navigation'); return it.domContentLoadedEventEnd")
    assert took < 2_000  # milliseconds
    drawn = browser.run("return cards.filter((card) => card.drawn).length")
    assert drawn < 60
    browser.run("scrollTo({ top: document.body.scrollHeight, behavior: 'instant' })")
    browser.driver.execute_async_script("setTimeout(arguments[0], 300)")
    assert browser.run("return shown.at(-1).drawn")
    assert browser.run("return cards.filter((card) => card.drawn).length") < 120
