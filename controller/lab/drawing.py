"""Figures as SVG files: the same input gives the same file."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from controller.errors import UsageError

# No date, and names of elements by a salt instead of chance.
_SETTINGS: Any = {"svg.hashsalt": "stellar", "svg.fonttype": "path", "font.size": 8.0}
_METADATA = {"Date": None}


def draw(makers: Mapping[str, Callable[[], Any]], folder: Path) -> list[Path]:
    """Draw figures into a folder.

    Parameters
    ----------
    makers
        Name of a file without ``.svg`` -> what makes its `matplotlib.figure.Figure`.
    folder
        Made where it is not there.

    Returns
    -------
    list of Path
        The files.

    Raises
    ------
    UsageError
        matplotlib is not there, or the folder cannot be written to.
    """
    require_matplotlib()
    import matplotlib as mpl

    paths = []
    with mpl.rc_context():
        # Whatever this user's own settings are.
        mpl.rcdefaults()
        mpl.rcParams.update(_SETTINGS)
        for name, make in makers.items():
            figure, path = make(), folder / f"{name}.svg"
            try:
                folder.mkdir(parents=True, exist_ok=True)
                figure.savefig(path, format="svg", metadata=_METADATA, bbox_inches="tight")
            except OSError as error:
                raise UsageError(
                    f"{path} cannot be written: {error.strerror}.", "Name another folder."
                ) from None
            paths.append(path)
    return paths


def require_matplotlib() -> None:
    """Raise UsageError unless figures can be drawn: ask before long work, not after."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError(
            "Figures need matplotlib, which is not installed.",
            "pip install 'stellar-dataplane[plots]', or leave the folder out.",
        )
