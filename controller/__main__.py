"""``python -m controller``."""

from controller.cli import main

main()
