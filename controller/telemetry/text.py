"""What all views for people share: the width of a terminal, and paragraphs that keep to it."""

from __future__ import annotations

import textwrap

WIDTH = 80


def wrapped(text: str, indent: str = "", width: int = WIDTH) -> str:
    """One paragraph; all lines but the first are indented by two more.

    Parameters
    ----------
    text
        Words; one that is longer than a line is broken.
    indent
        Before each line.
    width
        Characters a line.
    """
    return textwrap.fill(
        text, width, initial_indent=indent, subsequent_indent=indent + "  ",
        break_on_hyphens=False,
    )  # fmt: skip
