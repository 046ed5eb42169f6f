"""Markdown for the sections of docs/simulated-results.md."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

_WIDTH = 120
# Beginnings of lines that stay as they are.
_WHOLE = ("|", "#", "!")


def wrapped(text: str) -> str:
    """The same with paragraphs and list entries in lines of at most 120 columns."""
    blocks: list[list[str]] = []
    for line in text.splitlines():
        goes_on = blocks and blocks[-1][0] and not blocks[-1][0].startswith(_WHOLE)
        if goes_on and line and not line.startswith((*_WHOLE, "* ")):
            blocks[-1].append(line)
        else:
            blocks.append([line])
    return "\n".join(
        block[0]
        if block[0].startswith(_WHOLE)
        else textwrap.fill(
            " ".join(block),
            _WIDTH,
            subsequent_indent="  " * block[0].startswith("* "),
            break_long_words=False,
            break_on_hyphens=False,
        )
        for block in blocks
    )


def table(head: Sequence[str], rows: Sequence[Sequence[str]], left: int = 0) -> str:
    """A Markdown table; the first `left` columns hold words, the others numbers."""
    ruler = ["---" if index < left else "---:" for index in range(len(head))]
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, ruler, *rows))


def bold_if(text: str, condition: bool) -> str:
    """The text, bold on a condition."""
    return f"**{text}**" if condition else text


def listed(values: Sequence[Any]) -> str:
    """``a, b and c``."""
    texts = [str(value) for value in values]
    return " and ".join(filter(None, [", ".join(texts[:-1]), *texts[-1:]]))


def counted(count: int, what: str) -> str:
    """``1 job``, ``2 jobs``."""
    return f"{count} {what}{'s' * (count != 1)}"


def critical_delay(delay_us: float | None) -> str:
    """A critical delay in a table; None: stable up to 10 ms."""
    return "> 10,000" if delay_us is None else f"{delay_us:.1f}"
