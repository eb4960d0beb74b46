"""Ids to text as they come, never half a character."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

INCOMPLETE = "\ufffd"  # what decoders show for bytes that are no character, or not yet
LONGEST = 3  # bytes that may stand open: a character of UTF-8 has four at most
PATIENCE = 8  # ids without any text, after which bytes are taken for broken, not for open


class Text:
    """Gives the text of ids one after the other; bytes of a character that is not whole yet are held back.

    decode  ids to text, as a tokenizer does it: spaces may depend on the token before, so ids are never decoded alone
    before  the ids that stand before (a prompt): their text is taken as given already
    hidden  ids that have no text (control tokens)
    """

    def __init__(
        self, decode: Callable[[Sequence[int]], str], *, before: Sequence[int] = (), hidden: Collection[int] = ()
    ) -> None:
        self._decode = decode
        self._hidden = frozenset(hidden)
        # The window is decoded anew at each id: a piece that is settled, for context, and what came since.
        self._window = [token for token in before if token not in self._hidden]
        self._settled = len(self._window)
        while self._settled and decode(self._window[: self._settled]).endswith(INCOMPLETE):
            self._settled -= 1
        self._given = decode(self._window).rstrip(INCOMPLETE) if self._window else ""
        self._waiting = 0

    def add(self, token: int) -> str:
        """The text that this id completes; empty while a character stands open."""
        if token in self._hidden:
            return ""
        self._window.append(token)
        text = self._decode(self._window)
        self._waiting += 1
        whole = _whole(text, most=LONGEST if self._waiting > PATIENCE else len(text))
        if whole != text and not whole.startswith(self._given):
            return ""  # a decoder that takes back characters until the bytes after them are whole again
        new = whole[len(self._given) :]
        self._given = whole
        self._waiting = 0 if new else self._waiting
        if whole == text:
            self._window = self._window[self._settled :]
            self._settled = len(self._window)
            self._given = self._decode(self._window)
        return new

    def finish(self) -> str:
        """What is still held back: bytes that never became a character show as U+FFFD."""
        return self._decode(self._window)[len(self._given) :] if self._window else ""


def _whole(text: str, *, most: int) -> str:
    """The text without what may be an open character at its end, of `most` signs.

    Some decoders show every byte of a row of characters as incomplete while its last one is: so, first, all of them.
    """
    whole = text.rstrip(INCOMPLETE)
    return text[: max(len(whole), len(text) - most)]
