"""``python -m refold``: the command line."""

from .cli import main

main()
