"""The browser that the tests of a module share, and a page of it."""

import pytest

from tests.support.tab import HASTE, browser, opened


@pytest.fixture(scope="module")
def chromium():
    with browser() as found:
        yield found


@pytest.fixture(scope="module")
def shared(chromium, board):
    """One page, on the module's board, for the tests that leave it as they find it."""
    with opened(chromium, board, HASTE) as tab:
        yield tab
