"""``python -m refold.bench`` is ``refold bench``."""

from .cli import main

if __name__ == "__main__":
    main()
