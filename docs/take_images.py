"""Take the images of the viewer in docs/images from run folders, with Debian's Chromium.

python docs/take_images.py RUN SWEEP
"""

import argparse
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Browser, Page, sync_playwright

IMAGES = Path(__file__).parent / "images"
PATIENCE_MS = 180_000


def main() -> None:
    """Take every image, and print what is written."""
    parser = argparse.ArgumentParser(description="Take the images of the viewer in docs/images.")
    parser.add_argument("run", help="a finished run of conf=sums")
    parser.add_argument("sweep", help="a sweep")
    chosen = parser.parse_args()
    program = shutil.which("chromium")
    if program is None:
        sys.exit("chromium is not on PATH: install Debian's package chromium")
    with sync_playwright() as driver:
        # Chromium's own sandbox does not start as root; the pages are those of this repository.
        browser = driver.chromium.launch(executable_path=program, args=["--no-sandbox"])
        with viewer(chosen.run) as link:
            take_run(browser, link)
        with viewer(chosen.sweep) as link, image(browser, "viewer_sweep", 1100, 785) as page:
            page.emulate_media(color_scheme="dark")
            page.goto(link)
            page.locator(".parallel").wait_for()
        browser.close()


def take_run(browser: Browser, link: str) -> None:
    """Take a run's curves, tasks, a group, the tokens of an episode, a phone, and a played task."""
    with image(browser, "viewer_run", 1280, 925) as page:
        page.goto(f"{link}?smooth=0.6")
        page.locator("canvas").first.wait_for()
    with image(browser, "viewer_tasks", 1280, 800) as page:
        page.goto(f"{link}/tasks?sort=success")
        page.locator(".heat").first.wait_for()
    # Early in training, the members of a group differ most; the best of them comes first.
    with image(browser, "viewer_group", 1280, 660) as page:
        page.goto(f"{link}/episodes?order=advantage&way=down&last_step=20")
        page.locator("tbody a[href*='/group?']").first.click()
        page.locator(".member").first.wait_for()
    # The weights that wrote the last evaluation are there, so that the scores are of them.
    with image(browser, "viewer_tokens", 1280, 960) as page:
        page.emulate_media(color_scheme="dark")
        page.goto(f"{link}/episodes?source=eval/trained&success=no&order=tokens&way=down")
        page.locator("tbody a[href*='/episode?']").first.click()
        page.get_by_role("link", name="Tokens", exact=True).click()
        page.get_by_role("button", name="Show alternatives and KL").click()
        page.get_by_text("at temperature").wait_for()
        point_at_the_strongest_token(page)
    with image(browser, "viewer_phone", 400, 800) as page:
        page.goto(f"{link}/episodes?first_step=1&order=reward&way=down")
        page.locator(".histogram").wait_for()
    with image(browser, "viewer_play", 1100, 730) as page:
        page.goto(f"{link}/play?index=3")
        page.get_by_role("button", name="Start").click()
        page.get_by_role("button", name="The model").click()
        page.get_by_text("Reply by the model").wait_for()


def point_at_the_strongest_token(page: Page) -> None:
    """Show the numbers of the token with the strongest colour."""
    tokens = page.locator("[data-token]")
    heats = tokens.evaluate_all("all => all.map((each) => +each.style.getPropertyValue('--heat'))")
    tokens.nth(heats.index(max(heats))).hover()
    page.locator(".tip").wait_for()


@contextmanager
def viewer(target: str) -> Iterator[str]:
    """Serve the target, and yield the link to its page."""
    command = [Path(sys.executable).with_name("openenv-pipe"), "view", target]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as server:
        printed = ""
        for line in server.stdout or ():
            printed += line
            if found := re.search(r"http://\S+", line):
                break
        else:
            sys.exit(printed)
        try:
            yield found[0]
        finally:
            server.terminate()


@contextmanager
def image(browser: Browser, name: str, width: int, height: int) -> Iterator[Page]:
    """Yield a page to be prepared, then write what it shows as NAME.png."""
    page = browser.new_page(viewport={"width": width, "height": height})
    page.set_default_timeout(PATIENCE_MS)
    yield page
    path = IMAGES / f"{name}.png"
    page.screenshot(path=path)
    page.close()
    print(f"{path}: {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
