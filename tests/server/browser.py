"""A headless Chromium for tests of the chat page."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

HAS_SELENIUM = importlib.util.find_spec("selenium") is not None
if HAS_SELENIUM:
    from selenium.webdriver import Chrome
    from selenium.webdriver.chrome.options import Options
    from selenium.webdriver.chrome.service import Service

ARGUMENTS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--window-size=1280,860",
)


def missing() -> str:
    """What a browser test lacks here; empty where it can run."""
    if not HAS_SELENIUM:
        return "selenium is not installed"
    for program in ("chromium", "chromedriver"):
        if shutil.which(program) is None:
            return f"{program} is not installed: apt-get install chromium chromium-driver"
    return ""


def require_browser() -> None:
    """Skip the test where there is no browser; in CI that is a failure."""
    if reason := missing():
        if os.environ.get("CI") == "true":
            pytest.fail(f"CI tests the chat page in a browser, and {reason}")
        pytest.skip(reason)


@contextmanager
def chromium(profile: Path) -> Iterator[Chrome]:
    """A browser with a profile of its own, whose console is kept.

    Args:
        profile: an empty folder.
    """
    options = Options()
    options.binary_location = str(shutil.which("chromium"))
    for argument in (*ARGUMENTS, f"--user-data-dir={profile}"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = Chrome(options=options, service=Service(str(shutil.which("chromedriver"))))
    try:
        driver.set_page_load_timeout(30)
        yield driver
    finally:
        driver.quit()
