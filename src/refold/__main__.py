"""``refold`` and ``python -m refold``: the command line. Its version is told before a command is imported."""

import sys

from . import __version__


def main() -> None:
    """Run the command line."""
    if sys.argv[1:] == ["--version"]:
        sys.stdout.write(f"refold {__version__}\n")
        return
    from .cli import main as run

    run()


if __name__ == "__main__":
    main()
