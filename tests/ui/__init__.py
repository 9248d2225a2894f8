"""The page at /ui in a real browser, see test_page.py."""
