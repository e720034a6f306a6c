"""Finds the Chromium, or Chrome, that this machine has. Run as a script, it fails with a sentence if there is none."""

import shutil
import sys

NAMES = (
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
    "/Applications/Chromium.app/Contents/MacOS/Chromium",
)
MISSING = (
    "The browser tests need Chromium or Chrome, and there is none: install it (Debian, Ubuntu: apt install chromium; "
    "macOS: brew install --cask google-chrome), and run make test-browser again."
)


def find_chromium() -> str | None:
    """Its path, or None."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


if __name__ == "__main__":
    sys.exit(None if find_chromium() else MISSING)
