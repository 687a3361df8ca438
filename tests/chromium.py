"""The browser of the checks that `make browser-test` runs."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from playwright.sync_api import Browser, sync_playwright

WIDE, LAPTOP, PHONE = ({"width": w, "height": h} for w, h in ((1400, 900), (1366, 768), (390, 844)))


@contextmanager
def chromium() -> Iterator[Browser]:
    """A headless Chromium, which must be installed."""
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    assert path, "no Chromium; install it (apt-get install chromium)"
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield started
        started.close()
