"""The report in a real browser: nothing is fetched, nothing complains, everything fits on a phone and can be read."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from hsray.report.facts import gather
from hsray.report.page import SECTIONS, make_page
from hsray.store import open_store
from tests.chrome import find_chromium, open_chromium
from tests.small_run import build_small_run
from tests.unit.test_report import NASTY, NOW, put_driver

# The least contrast of any text with what is behind it; WCAG asks for 4.5.
_CONTRAST = """
(() => {
  const channel = v => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const light = c => 0.2126 * channel(c[0]) + 0.7152 * channel(c[1]) + 0.0722 * channel(c[2]);
  const parse = s => s.match(/[\\d.]+/g).map(Number);
  const behind = e => {
    for (; e; e = e.parentElement) {
      const c = parse(getComputedStyle(e).backgroundColor);
      if (c.length < 4 || c[3] > 0) return c;
    }
    return [255, 255, 255];
  };
  let least = [99, ''];
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const e = walk.currentNode.parentElement;
    if (!walk.currentNode.data.trim() || !e.getClientRects().length) continue;
    const [a, b] = [light(parse(getComputedStyle(e).color)), light(behind(e))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < least[0]) least = [ratio, walk.currentNode.data.trim().slice(0, 60)];
  }
  return least;
})()
"""
_SECTIONS = "[...document.querySelectorAll('section')].map(s => [s.id, s.getBoundingClientRect().height])"
_SMALLEST_TEXT = """
Math.min(...[...document.body.querySelectorAll('td, th, p, span, li, code')]
  .filter(e => e.getClientRects().length).map(e => parseFloat(getComputedStyle(e).fontSize)))
"""


@pytest.fixture(scope="module")
def looks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What the browser found, at each width in each colour scheme."""
    find_chromium()
    folder = tmp_path_factory.mktemp("chromium")
    run = build_small_run(str(folder / "run"))
    put_driver(run.store, NOW - 5000, 900.0)
    put_driver(run.store, NOW - 1000, 100.0)
    hsray = run.store.get_json("hsray.json")
    hsray["model"]["name"] = NASTY
    hsray["config"]["path"] = "/very" * 100
    run.overwrite("hsray.json", hsray)
    path = folder / "report.html"
    path.write_text(make_page(gather(open_store(run.url), {}, NOW)))
    return asyncio.run(_look(path, folder / "profile"))


async def _look(path: Path, profile: Path) -> list[dict[str, Any]]:
    found = []
    async with open_chromium(profile) as page:
        for width in (390, 1280):
            for dark in (False, True):
                await page.open(path.as_uri(), width, 844, dark=dark)
                await page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
                found.append(
                    {
                        "width": width,
                        "dark": dark,
                        "scroll_width": await page.evaluate("document.documentElement.scrollWidth"),
                        "sections": await page.evaluate(_SECTIONS),
                        "contrast": await page.evaluate(_CONTRAST),
                        "smallest_text": await page.evaluate(_SMALLEST_TEXT),
                        "background": await page.evaluate("getComputedStyle(document.body).backgroundColor"),
                        "charts": await page.evaluate("document.querySelectorAll('svg[role=img]').length"),
                        "requests": [*page.requests],
                        "messages": [*page.messages],
                    }
                )
    return found


def test_nothing_is_requested_and_nothing_complains(looks: list[dict[str, Any]]) -> None:
    assert [look["requests"] for look in looks] == [[]] * 4
    assert [look["messages"] for look in looks] == [[]] * 4


def test_the_page_is_as_wide_as_the_screen(looks: list[dict[str, Any]]) -> None:
    assert [look["scroll_width"] for look in looks] == [390, 390, 1280, 1280]


def test_every_section_is_seen(looks: list[dict[str, Any]]) -> None:
    for look in looks:
        assert [name for name, _ in look["sections"]] == list(SECTIONS)
        assert min(height for _, height in look["sections"]) > 60
        assert look["charts"] >= 4


def test_text_can_be_read_by_day_and_by_night(looks: list[dict[str, Any]]) -> None:
    for look in looks:
        ratio, text = look["contrast"]
        assert ratio >= 4.5, text
        assert look["smallest_text"] >= 11
    assert looks[0]["background"] != looks[1]["background"]


def test_the_browser_would_have_told(tmp_path: Path) -> None:
    """The checks above see what they look for: a page with a script, a picture and a wide line."""
    find_chromium()
    page_path = tmp_path / "bad.html"
    page_path.write_text(
        "<body><script>console.error('boo')</script><img src='picture.png'><p style='width:2000px;color:#999'>x</p>"
    )

    async def look() -> tuple[list[str], list[str], int, float]:
        async with open_chromium(tmp_path / "profile") as page:
            await page.open(page_path.as_uri(), 390, 844)
            width = await page.evaluate("document.documentElement.scrollWidth")
            return page.requests, page.messages, width, (await page.evaluate(_CONTRAST))[0]

    requests, messages, width, contrast = asyncio.run(look())

    assert [Path(url).name for url in requests] == ["picture.png"]
    assert any("boo" in message for message in messages)
    assert width > 390
    assert contrast < 4.5
