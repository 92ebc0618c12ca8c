"""Open reports in a headless Chromium from disk: curves, controls, keys, themes, and no network."""

from __future__ import annotations

import json

import pytest

from mkd.commands.report import main
from tests.report.browser import CHROMIUM, Browser
from tests.report.run_files import full_run, write_run

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
RANGES = "charts.drawn().map(({plot}) => [plot.scales.x.min, plot.scales.x.max])"
INK = """(() => [...document.querySelectorAll("#plots canvas")].map((canvas) => {
  const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  const colours = new Set();
  for (let i = 0; i < pixels.length; i += 4)
    if (pixels[i + 3] > 200) colours.add(`${pixels[i]},${pixels[i + 1]},${pixels[i + 2]}`);
  return [...colours];
}))()"""
BLUE, ORANGE = "0,114,178", "213,94,0"  # of the first and the second run in the light theme


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """Write the report of two runs, the first with everything and the second with two keys."""
    root = tmp_path_factory.mktemp("report")
    records = [{"iteration": i, "loss": 3 / i, "kd_loss": -1.0} for i in range(1, 201)]
    full_run(root / "a")
    write_run(root / "b", records)
    assert main([str(root / "a"), str(root / "b"), "--out", str(root / "r.html")]) == 0
    return root / "r.html"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with Browser(tmp_path_factory.mktemp("profile")) as started:
        yield started


@pytest.fixture
def page(browser, report):
    """Open the report, and check at the end that nothing went wrong in it."""
    browser.problems.clear()
    browser.open(report)
    yield browser
    assert browser.problems == []


def keys(page):
    return page.evaluate("[...document.querySelectorAll('.plot h4')].map((one) => one.firstChild.data)")


def test_curves_are_drawn_in_the_colours_of_their_runs(page):
    assert keys(page)[:2] == ["loss", "kd_loss"] and "eval/mmlu/accuracy" in keys(page)
    inks = dict(zip(keys(page), page.evaluate(INK), strict=True))
    assert {BLUE, ORANGE} <= set(inks["loss"]) and BLUE in inks["grad_norm"]
    assert ORANGE not in inks["eval/mmlu/accuracy"]
    assert all(tuple(limits) == (0, 200) for limits in page.evaluate(RANGES))


def test_a_drag_zooms_all_plots_and_a_double_click_resets(page):
    left, top, width, height = page.evaluate(
        "(() => { const b = document.querySelector('.u-over').getBoundingClientRect();"
        "return [b.left, b.top, b.width, b.height]; })()"
    )
    page.drag((left + width / 4, top + height / 2), (left + width / 2, top + height / 2))
    ranges = page.evaluate(RANGES)
    assert len(ranges) == len(keys(page))
    assert all(abs(low - 50) < 2 and abs(high - 100) < 2 for low, high in ranges)
    for count in (1, 2):
        for kind in ("mousePressed", "mouseReleased"):
            place = {"x": left + width / 2, "y": top + height / 2, "button": "left", "clickCount": count}
            page.call("Input.dispatchMouseEvent", type=kind, **place)
    page.settle()
    assert all(tuple(limits) == (0, 200) for limits in page.evaluate(RANGES))


def test_the_keyboard_moves_the_cursor_and_zooms(page):
    page.evaluate("document.querySelector('.plot').focus()")
    head = "document.querySelector('.readout th').textContent"
    assert page.evaluate(head) == "last"
    page.key("ArrowRight")
    first = page.evaluate(head)
    page.key("ArrowRight")
    assert (first, page.evaluate(head)) == ("iteration 1", "iteration 2")
    page.key("+")
    assert all(tuple(limits) == (50, 150) for limits in page.evaluate(RANGES))
    page.key("Escape")
    assert all(tuple(limits) == (0, 200) for limits in page.evaluate(RANGES))


def change(page, name, value):
    """Set a control as a user does: a box by `checked`, others by `value`."""
    field = "checked" if isinstance(value, bool) else "value"
    page.evaluate(
        f"(() => {{ const control = document.getElementById('{name}');"
        f"control.{field} = {json.dumps(value)};"
        "for (const type of ['input', 'change'])"
        "control.dispatchEvent(new Event(type, {bubbles: true})); })()"
    )
    page.settle()


def test_log_scale_smoothing_axis_metrics_and_runs(page):
    before = page.evaluate(INK)
    change(page, "smoothing", "0.9")
    assert page.evaluate(INK) != before
    change(page, "log", True)
    assert page.evaluate("charts.drawn().every(({plot}) => plot.scales.y.distr === 3)")
    change(page, "axis", "consumed_tokens")
    assert page.evaluate(RANGES)[0] == [0, 409600]  # run b has no tokens
    change(page, "axis", "iteration")
    page.evaluate("document.querySelector('[data-key=\"loss\"]').click()")
    assert keys(page)[0] == "kd_loss"
    page.evaluate("document.querySelectorAll('#run-toggles button')[0].click()")
    empty = page.evaluate("[...document.querySelectorAll('.plot .empty')].length")
    assert empty == len(keys(page))  # run b has a negative kd_loss alone, of which there is no logarithm
    change(page, "log", False)
    assert page.evaluate(INK.replace("#plots", ".plot:first-child"))[0].count(ORANGE) == 1


def test_light_dark_and_print(page, report, tmp_path):
    """The system's theme is followed; print is light."""
    colour = "getComputedStyle(document.body).backgroundColor"
    assert page.evaluate(colour) == "rgb(255, 255, 255)"
    page.screenshot(tmp_path / "light.png")
    page.open(report, dark=True)
    assert page.evaluate(colour) == "rgb(20, 23, 26)" and BLUE not in page.evaluate(INK)[0]
    page.screenshot(tmp_path / "dark.png")
    from PIL import Image

    light, dark = (Image.open(tmp_path / f"{name}.png").convert("L") for name in ("light", "dark"))
    assert sum(light.histogram()[200:]) > 0.7 * 1280 * 900 > sum(dark.histogram()[200:])
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.evaluate(colour) == "rgb(255, 255, 255)" and BLUE in page.evaluate(INK)[0]
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert page.evaluate(colour) == "rgb(20, 23, 26)"


def test_a_narrow_window_scrolls_tables_only(page, report):
    page.open(report, width=420)
    assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")


def test_runs_without_curves_and_long_runs(browser, tmp_path):
    """One record, a run that is NaN throughout, a thinned-out run, and text that tries to be a script."""
    evil = "</script><script>throw 1</script>"
    records = [{"iteration": i, "loss": (i * 37 % 101) / 50, evil: 1.0} for i in range(9000)]
    folders = [
        write_run(
            tmp_path / "one", [{"iteration": 5, "loss": 1.0}], events_jsonl='{"text": "' + "<b>" + '"}'
        ),
        write_run(tmp_path / "nothing", []),
        write_run(tmp_path / "nan", [{"iteration": i, "loss": None} for i in range(5)]),
        write_run(tmp_path / "long", records),
    ]
    assert main([*map(str, folders), "--out", str(tmp_path / "r.html")]) == 0
    browser.problems.clear()
    browser.open(tmp_path / "r.html")
    assert browser.problems == []
    assert {tuple(limits) for limits in browser.evaluate(RANGES)} == {(0, 8999)}
    assert "mean of" in browser.evaluate("document.querySelector('#curves .note').textContent")
