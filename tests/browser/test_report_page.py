"""The report of runs as people use it: hovering, zooming, hiding lines, sorting, classes of tokens, a small screen."""

import pytest
from selenium.webdriver import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from alltokens.report import write_report
from tests.report.tiny_runs import make_runs

pytestmark = pytest.mark.browser

RANGE = "return charts[arguments[0]].range"


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    return write_report(make_runs(folder), folder / "report.html").file


def plot(browser, number):
    found = browser.driver.find_elements(By.CSS_SELECTOR, "figure.chart .plot")[number]
    browser.scroll_to(found)
    return found


def move(browser, box, x, y=0.5):
    """The pointer to a place of an element, both coordinates in [0, 1]."""
    offset = (round((x - 0.5) * box.size["width"]), round((y - 0.5) * box.size["height"]))
    ActionChains(browser.driver).move_to_element_with_offset(box, *offset).perform()


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1200, 320])
def test_it_opens_without_a_complaint_or_a_request_and_fits_the_screen(browser, page, width, dark):
    browser.open(page, width=width, dark=dark)
    assert browser.run("return charts.length") >= 6
    assert browser.run("return document.documentElement.scrollWidth") <= width
    ground = browser.run("return getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, ground[4:-1].split(","))) < 200) == dark
    browser.run("document.getElementById('theme').click()")
    assert browser.run("return getComputedStyle(document.body).backgroundColor") != ground
    assert browser.complaints() == []
    assert browser.requests() == []


def test_the_pointer_reads_a_curve(browser, page):
    browser.open(page)
    move(browser, plot(browser, 0), 0.97)
    words = browser.tip().split()
    assert words[:2] == ["epoch", "2.000"]
    line = browser.run("return charts[0].data.lines[0]")
    assert float(words[words.index("aligned") + 1]) == pytest.approx(line["y"][1], rel=1e-3)
    assert "±" in words
    browser.driver.find_element(By.TAG_NAME, "body").send_keys(Keys.ESCAPE)
    assert browser.tip() == ""


def test_arrow_keys_read_a_curve_too(browser, page):
    browser.open(page)
    box = plot(browser, 0)
    box.send_keys(Keys.ARROW_RIGHT)
    first = browser.tip()
    box.send_keys(Keys.ARROW_LEFT)
    assert browser.tip() != first
    assert "epoch" in box.get_attribute("aria-label")


def test_dragging_zooms_and_a_double_click_goes_back(browser, page):
    browser.open(page)
    box = plot(browser, 3)
    whole = browser.run(RANGE, 3)
    width = box.size["width"]
    actions = ActionChains(browser.driver).move_to_element_with_offset(box, 0, 0)
    actions.click_and_hold().move_by_offset(width // 4, 0).release().perform()
    near = browser.run(RANGE, 3)
    assert whole[0] < near[0] < near[1] <= whole[1]
    assert not browser.run("return charts[3].reset.hidden")
    ActionChains(browser.driver).double_click(plot(browser, 3)).perform()
    assert browser.run(RANGE, 3) == whole
    plot(browser, 3).send_keys("+")
    assert browser.run(RANGE, 3) != whole
    plot(browser, 3).send_keys(Keys.ESCAPE)
    assert browser.run(RANGE, 3) == whole


def test_a_line_can_be_hidden(browser, page):
    browser.open(page)
    paths = "return document.querySelectorAll('figure.chart')[0].querySelectorAll('path[fill=none]').length"
    assert browser.run(paths) == 2
    browser.run("document.querySelector('figure.chart .legend button').click()")
    assert browser.run(paths) == 1


def test_tables_sort(browser, page):
    browser.open(page)
    names = "return [...document.querySelectorAll('#summary table.sortable tbody th')].map((head) => head.innerText)"
    click = "document.querySelectorAll('#summary table.sortable thead button')[arguments[0]].click()"
    browser.run(click, 1)  # n, the largest first
    assert browser.run(names) == ["aligned", "tokens"]
    browser.run(click, 1)
    assert browser.run(names) == ["tokens", "aligned"]
    browser.run(click, 0)
    assert browser.run(names) == ["aligned", "tokens"]


def test_a_confusion_and_a_square_of_shares_say_what_they_are(browser, page):
    browser.open(page)
    cell = browser.driver.find_element(By.CSS_SELECTOR, "#confusion-of-classes td[data-tip]")
    browser.scroll_to(cell)
    move(browser, cell, 0.5)
    assert "taken for" in browser.tip()
    squares = browser.driver.find_element(By.CSS_SELECTOR, "#mixed-samples .squares")
    browser.scroll_to(squares)
    move(browser, squares, 0.9, 0.9)
    value = browser.run("return JSON.parse(arguments[0].querySelector('script').textContent).values.at(-1)", squares)
    assert browser.tip().replace("\u202f", " ") == f"partner {100 * value:.1f} %"


def test_tokens_say_their_classes_and_a_class_shows_its_heat(browser, page):
    browser.open(page)
    pixels = """const canvas = document.querySelector('.overlay canvas');
    return [...canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data]"""
    box = browser.driver.find_element(By.CSS_SELECTOR, ".overlay .cells")
    browser.scroll_to(box)
    move(browser, box, 0.5)
    name = browser.run("return document.querySelector('.overlay .row-name .name').innerText")
    assert browser.tip().split()[0] == name
    before = browser.run(pixels)
    browser.run("document.querySelector('.overlay .chips button').click()")
    assert browser.run(pixels) != before
    browser.run("document.querySelector('.overlay .chips button').click()")
    assert browser.run(pixels) == before


def test_it_prints(browser, page):
    browser.open(page)
    printed = browser.driver.execute_cdp_cmd("Page.printToPDF", {"printBackground": True})
    assert len(printed["data"]) > 10_000
    browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    heads = browser.driver.find_elements(By.CSS_SELECTOR, "#summary table.sortable thead th")
    assert [head.text for head in heads][:3] == ["run", "n", "best top-1"]
    assert all(chip.is_displayed() for chip in browser.driver.find_elements(By.CSS_SELECTOR, ".overlay .chips button"))
    assert not browser.driver.find_element(By.ID, "theme").is_displayed()
    browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
    assert browser.complaints() == []
