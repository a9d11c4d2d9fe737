"""A real Chromium for the tests of pages: opened at a width and on a ground, asked by script, its console and requests read.

One browser serves a test process; each page is a fresh load in it. Layout is judged by boxes, not by pixels.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
needs_browser = pytest.mark.skipif(
    CHROMIUM is None or DRIVER is None,
    reason="Chromium and its driver are not installed (apt-get install chromium chromium-driver)",
)
ARTEFACTS = Path(os.environ.get("FARSTATE_ARTEFACTS", Path(__file__).parent / "artefacts"))
"""Where pictures of the pages are kept."""

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-quic"),
    *("--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--host-resolver-rules=MAP * ~NOTFOUND"),
    *("--hide-scrollbars", "--force-color-profile=srgb"),
)
TALL = 30_000
"""A window so high that everything is in sight, and so drawn."""

# What probes can call. `overlaps` compares all visible text: of each chart among itself, and of the page's blocks.
_HELPERS = """
const wait = (ms) => new Promise((done) => setTimeout(done, ms));
const root = document.documentElement;
/* Until nothing on the page has changed while several frames were drawn. */
async function rest() {
  let changes = 0;
  const watch = new MutationObserver(() => { changes += 1; });
  watch.observe(document.body, { subtree: true, childList: true, attributes: true, characterData: true });
  for (let quiet = 0; quiet < 3; quiet += 1) {
    const before = changes;
    for (let frame = 0; frame < 2; frame += 1) await new Promise((done) => requestAnimationFrame(done));
    await wait(40);
    if (changes !== before) quiet = -1;
  }
  watch.disconnect();
}
const unseen = (element) => { const part = element.closest('thead, .unseen, .skip'); return part !== null && part.getBoundingClientRect().width < 2; };
const seen = (element) => element.checkVisibility({ checkOpacity: true, checkVisibilityCSS: true }) && !unseen(element);
const texts = (svg) => [...svg.querySelectorAll('text')].filter((t) => t.textContent.trim() && t.getAttribute('opacity') !== '0' && seen(t))
  .map((t) => ({ text: t.textContent, box: t.getBoundingClientRect() }));
const drawnPaths = (id, mark) => [...document.querySelectorAll(`#${CSS.escape(id)} .mark-${mark} path`)].filter((p) => (p.getAttribute('d') || '').length > 8);
const count = (id, mark) => drawnPaths(id, mark).length;
const colours = (id) => [...new Set(drawnPaths(id, 'line').map((p) => p.getAttribute('stroke')).filter((c) => c && c !== 'none'))].sort();
const luminance = (colour) => { const c = colour.match(/[\\d.]+/g).slice(0, 3).map((v) => { v /= 255; return v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; });
  return 0.2126 * c[0] + 0.7152 * c[1] + 0.0722 * c[2]; };
const contrast = (a, b) => { const [x, y] = [luminance(a), luminance(b)]; return (Math.max(x, y) + 0.05) / (Math.min(x, y) + 0.05); };
function ground(element) {
  for (let e = element; e; e = e.parentElement) {
    const colour = getComputedStyle(e).backgroundColor;
    if (colour !== 'rgba(0, 0, 0, 0)' && colour !== 'transparent') return colour;
  }
  return 'rgb(255, 255, 255)';
}
function layout() {
  const out = { overflow: root.scrollWidth - root.clientWidth, overlaps: [], clipped: [], widths: {}, contrast: [] };
  for (const svg of document.querySelectorAll('.chart svg.marks')) {
    const frame = svg.getBoundingClientRect();
    if (!seen(svg) || frame.width === 0) continue;
    out.widths[svg.closest('.chart').id] = frame.width / svg.closest('figure').getBoundingClientRect().width;
    const found = texts(svg);
    for (const [i, a] of found.entries()) {
      if (a.box.left < frame.left - 1 || a.box.right > frame.right + 1 || a.box.top < frame.top - 1 || a.box.bottom > frame.bottom + 1) out.clipped.push([svg.closest('.chart').id, a.text]);
      for (const b of found.slice(i + 1)) {
        if (a.box.left < b.box.right - 1 && b.box.left < a.box.right - 1 && a.box.top < b.box.bottom - 3 && b.box.top < a.box.bottom - 3) out.overlaps.push([svg.closest('.chart').id, a.text, b.text]);
      }
    }
  }
  // Lines of text outside the charts: each text node's own boxes, against those of all others near it.
  const lines = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT, {
    acceptNode: (node) => node.textContent.trim() && !node.parentElement.closest('script, style, noscript, svg, .chart, .unseen, #vg-tooltip-element, .skip') && seen(node.parentElement)
      ? NodeFilter.FILTER_ACCEPT : NodeFilter.FILTER_REJECT,
  });
  const styles = new Map();
  while (walker.nextNode()) {
    const node = walker.currentNode, parent = node.parentElement;
    const range = document.createRange();
    range.selectNodeContents(node);
    const scroll = parent.closest('.scroll, .data');
    const frame = scroll && scroll.getBoundingClientRect();
    const stuck = Boolean(parent.closest('.data thead'));
    for (const box of range.getClientRects()) {
      if (box.width < 2 || (frame && (box.right > frame.right || box.left < frame.left || box.bottom > frame.bottom || box.top < frame.top))) continue;
      if (!stuck) lines.push({ text: node.textContent.trim().slice(0, 60), box, node, top: parent });
    }
    const style = getComputedStyle(parent);
    const key = style.color + ground(parent);
    if (!styles.has(key)) styles.set(key, [contrast(style.color, ground(parent)), parent.tagName + '.' + parent.className, node.textContent.trim().slice(0, 40)]);
  }
  for (const t of document.querySelectorAll('.chart svg.marks text')) {
    if (t.textContent === '✕' || !seen(t) || !t.closest('.role-axis-label, .role-axis-title, .role-title, .role-legend-label')) continue;
    const key = getComputedStyle(t).fill;
    if (!styles.has('svg' + key)) styles.set('svg' + key, [contrast(key, ground(t.closest('.chart'))), 'svg text', t.textContent]);
  }
  lines.sort((a, b) => a.box.top - b.box.top);
  for (const [i, a] of lines.entries()) {
    for (let j = i + 1; j < lines.length && lines[j].box.top < a.box.bottom - 4; j += 1) {
      const b = lines[j];
      if (a.node !== b.node && a.box.left < b.box.right - 1 && b.box.left < a.box.right - 1) out.overlaps.push(['page', a.text, b.text]);
    }
  }
  out.contrast = [...styles.values()].filter((each) => each[0] < 4.5);
  return out;
}
"""


class Browser:
    """A headless Chromium, driven over its protocol."""

    def __init__(self, profile: Path) -> None:
        from selenium import webdriver
        from selenium.webdriver.chrome.service import Service

        options = webdriver.ChromeOptions()
        options.binary_location = str(CHROMIUM)
        for flag in (*FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        self.driver = webdriver.Chrome(options=options, service=Service(executable_path=str(DRIVER)))
        self.driver.set_script_timeout(120)
        self.driver.set_page_load_timeout(120)

    def open(self, page: Path, width: int = 1400, height: int = TALL, *, dark: bool = False, fragment: str = "") -> None:
        """Load a page afresh; a window of the default height draws all of its charts, which is waited for."""
        self.driver.get("about:blank")
        self.size(width, height)
        self.protocol(
            "Emulation.setEmulatedMedia",
            media="",
            features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}],
        )
        self.read_logs()
        self.driver.get(page.resolve().as_uri() + fragment)
        if height >= TALL:
            self.drawn()

    def theme(self, *, dark: bool = False, still: bool = False) -> None:
        """The ground that the reader prefers, and whether nothing is to move."""
        wanted = {
            "prefers-color-scheme": "dark" if dark else "light",
            "prefers-reduced-motion": "reduce" if still else "no-preference",
        }
        features = [{"name": name, "value": value} for name, value in wanted.items()]
        self.protocol("Emulation.setEmulatedMedia", media="", features=features)

    def size(self, width: int, height: int = TALL) -> None:
        """The window, in CSS pixels."""
        self.protocol("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def drawn(self) -> None:
        """Wait until every chart that can be in sight is drawn."""
        found = self.run(
            "const all = () => [...document.querySelectorAll('.chart')].filter((c) => !c.closest('[hidden], details:not([open])')).every((c) => c.querySelector('svg.marks') || c.matches('.problem'));"
            "for (let i = 0; i < 3000 && !all(); i += 1) await wait(20);"
            "await rest(); return all();"
        )
        assert found, "some charts were not drawn within a minute"

    def run(self, body: str) -> Any:
        """What the body of an async function returns, with the helpers above in reach."""
        answer = self.driver.execute_async_script(
            f"const done = arguments[arguments.length - 1]; (async () => {{ {_HELPERS} {body} }})()"
            ".then((value) => done({ value }), (error) => done({ error: String(error && error.stack || error) }));"
        )
        assert "error" not in answer, answer["error"]
        return answer.get("value")

    def protocol(self, command: str, **values: Any) -> Any:
        """A command of the DevTools protocol."""
        return self.driver.execute_cdp_cmd(command, values)

    def read_logs(self) -> tuple[list[str], list[str]]:
        """Since the last reading: what the console said, and the addresses of all requests."""
        console = [f"{entry['level']}: {entry['message']}" for entry in self.driver.get_log("browser")]
        requests = []
        for entry in self.driver.get_log("performance"):
            message = json.loads(entry["message"])["message"]
            if message["method"] in ("Network.requestWillBeSent", "Network.webSocketCreated"):
                parameters = message["params"]
                requests.append(parameters["request"]["url"] if "request" in parameters else parameters["url"])
        return console, requests

    def point(self, x: float, y: float) -> dict[str, str]:
        """Move the pointer there; the lines of the tooltip that opens."""
        for place in ((x - 2, y - 2), (x, y)):
            self.protocol("Input.dispatchMouseEvent", type="mouseMoved", x=place[0], y=place[1])
        return dict(
            self.run(
                "const tip = () => document.querySelector('#vg-tooltip-element.visible');"
                "for (let i = 0; i < 100 && !tip(); i += 1) await wait(20);"
                "return tip() ? [...tip().querySelectorAll('tr')].map((r) => [...r.children].map((c) => c.textContent.replace(/:$/, ''))) : [];"
            )
        )

    def picture(self, path: Path) -> Path:
        """The page as a PNG, of a very long one the beginning."""
        size = self.run("return { width: root.clientWidth, height: Math.ceil(document.body.getBoundingClientRect().bottom) };")
        clip = {"x": 0, "y": 0, "width": size["width"], "height": min(size["height"], 8_000), "scale": 1}
        data = self.protocol("Page.captureScreenshot", format="png", optimizeForSpeed=True, clip=clip)["data"]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(data))
        return path

    def pdf(self, path: Path) -> Path:
        """The page as it is printed."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(self.protocol("Page.printToPDF", printBackground=False)["data"]))
        return path


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """The process's one browser."""
    one = Browser(tmp_path_factory.mktemp("profile"))
    yield one
    one.driver.quit()
