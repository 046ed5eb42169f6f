"""Markdown for the sections of docs/simulated-results.md."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


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
