"""From text to tokens and back, and where a text ends; whatever framework computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from refold.errors import ArgumentError, CheckpointError, MissingDependency


class Text:
    """The text of one row, piece by piece as its tokens come.

    What may still change is held back: the bytes of half a character, and the beginning of a stop string.

    Attributes:
        ended: Whether a stop string has come; it is not part of the text, and neither is what follows.
    """

    def __init__(self, decode: Callable[[list[int]], str], stop_strings: Sequence[str] = ()) -> None:
        self.decode, self.stop_strings = decode, tuple(stop_strings)
        self.tokens: list[int] = []
        self.shown = ""
        self.ended = False

    def feed(self, tokens: Sequence[int], last: bool = False) -> str:
        """Take more tokens, and return the text that they add; with ``last``, all that was held back as well."""
        if self.ended:
            return ""
        self.tokens += tokens
        text = self.decode(self.tokens)
        found = [(place + len(stop), place) for stop in self.stop_strings if (place := text.find(stop)) >= 0]
        self.ended = bool(found)
        if found:
            text = text[: min(found)[1]]  # of several, the one that is complete first, however many tokens came at once
        elif not last:
            if text.endswith("\ufffd") or not text.startswith(self.shown):
                return ""
            text = text[: len(text) - self._begun(text)]
        added = text[len(self.shown) :]
        self.shown = max(self.shown, text, key=len)
        return added

    def _begun(self, text: str) -> int:
        """Return the length of the longest end of ``text`` with which a stop string begins."""
        return max((n for stop in self.stop_strings for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)


def check_stop_strings(stop_strings: Sequence[str]) -> None:
    """Refuse what is no list of texts.

    Raises:
        ArgumentError: it is none, or holds an empty text.
    """
    if isinstance(stop_strings, str) or not all(isinstance(stop, str) and stop for stop in stop_strings):
        raise ArgumentError(f"stop strings must be texts that are not empty; got {stop_strings!r}.")


def tokenizer(directory: Path) -> tuple[Callable[[str], list[int]], Callable[[list[int]], str]]:
    """Return the encoder and decoder of a checkpoint's ``tokenizer.json``; the first refuses what is no text.

    Raises:
        CheckpointError: there is none, or it is damaged.
        MissingDependency: the package tokenizers is not installed.
    """
    path = directory / "tokenizer.json"
    if not path.exists():
        raise CheckpointError(f"{directory} has no tokenizer.json; give the prompt as --token-ids.")
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise MissingDependency(f"{path} needs the package tokenizers (pip install refold[hf]).") from error
    try:
        found = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises a bare Exception for a file it cannot parse
        raise CheckpointError(f"{path} is not a tokenizer ({error}).") from error

    def encode(text: str) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:  # bytes that are no text reach Python as such halves of characters
            raise ArgumentError(f"the prompt is not text in UTF-8, from character {error.start} on.") from error
        return found.encode(text).ids

    return encode, found.decode


def parse_ids(text: str) -> list[int]:
    """Return token ids that are separated by commas or spaces.

    Raises:
        ArgumentError: something else is between them.
    """
    try:
        return [int(part) for part in text.replace(",", " ").split()]
    except ValueError as error:
        raise ArgumentError(f"--token-ids must be integers separated by commas or spaces; got {text!r}.") from error
