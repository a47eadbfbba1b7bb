"""Text of a growing token sequence, with stop strings found at the token that completes them."""

from dataclasses import dataclass
from typing import cast

from transformers import PreTrainedTokenizerBase

_INCOMPLETE = "\ufffd"
_MOST_PENDING = 8  # tokens without a whole character before some are taken as they are
_CUTS = (3, 4, 5, 6)  # tokens that may still belong to a character, from the end


@dataclass(eq=False)
class Detokenizer:
    """Decodes token by token, holding back half characters and what may become a stop string.

    Decoding a window that starts a few tokens back keeps the tokenizer's context-dependent spacing
    right without decoding everything again. The window is bounded: of tokens that never make a
    character all but the last few are taken as they are.

    Args:
        stop: strings that end the text.
        keeps_stop: whether it ends after such a string, not before it.
        skips_special: whether special tokens have no text.
        min_tokens: tokens before which no such string counts.
    """

    tokenizer: PreTrainedTokenizerBase
    stop: tuple[str, ...] = ()
    keeps_stop: bool = False
    skips_special: bool = True
    min_tokens: int = 0

    def __post_init__(self):
        self.text = ""
        self.stopped = False
        self._hold = max((len(s) for s in self.stop), default=1) - 1
        self._num_left = self.min_tokens
        self._window: list[int] = []  # the last ids
        self._num_read = 0  # of them, those whose text is in self.text
        self._num_streamed = 0

    def push(self, token_id: int) -> None:
        """Add one token; sets `stopped` when its text completes a stop string."""
        self._window.append(token_id)
        self._num_left -= 1
        known, extended = self._decode(self._num_read), self._decode(len(self._window))
        piece = extended[len(known) :]
        if (piece and not piece.endswith(_INCOMPLETE)) or (
            self.stop and self._find_stop(piece.rstrip(_INCOMPLETE))
        ):
            self._append(piece, len(self._window))
        elif len(self._window) - self._num_read >= _MOST_PENDING:
            self._force(known, extended)

    def finish(self) -> None:
        """Add the text of an incomplete last character."""
        if not self.stopped:
            known, extended = self._decode(self._num_read), self._decode(len(self._window))
            self._append(extended[len(known) :], len(self._window))

    def take(self, final: bool = False) -> str:
        """Text not taken yet and safe to show; `final` includes what was held back."""
        end = len(self.text)
        if not (final or self.stopped):
            end = max(self._num_streamed, end - self._hold)
        piece = self.text[self._num_streamed : end]
        self._num_streamed = end
        return piece

    def _append(self, piece: str, num_read: int) -> None:
        """Take a piece, the text of the window up to `num_read`; the ids of it stay as context."""
        found = self._find_stop(piece) if self.stop else None
        self.text += piece
        if found:
            self.text = self.text[: min(found)[self.keeps_stop]]
            self.stopped = True
        del self._window[: self._num_read]
        self._num_read = num_read - self._num_read

    def _find_stop(self, piece: str) -> list[tuple[int, int]]:
        """Where in the text stop strings begin and end that the piece would complete."""
        if self._num_left > 0:
            return []
        text = self.text[-self._hold :] + piece if self._hold else piece
        first = len(self.text) + len(piece) - len(text)
        ends = {s: max(0, len(text) - len(piece) - len(s) + 1) for s in self.stop}
        places = ((text.find(s, start), len(s)) for s, start in ends.items())
        return [(first + at, first + at + size) for at, size in places if at >= 0]

    def _force(self, known: str, extended: str) -> None:
        """Read some of the tokens that have waited long: a character has no more than four bytes.

        A cut inside a character would show, because its first bytes alone decode otherwise.
        """
        cuts = [len(self._window) - back for back in _CUTS]
        texts = {cut: self._decode(cut) for cut in cuts}
        cut = next((c for c in cuts if extended.startswith(texts[c])), cuts[0])
        piece = texts[cut][len(known) :]
        if piece:
            self._append(piece, cut)
        else:  # tokens without text, and what stands before them still decides on spaces
            del self._window[self._num_read : cut]

    def _decode(self, num: int) -> str:
        """The text of the first ids of the window."""
        ids, skips = self._window[:num], self.skips_special
        return cast(str, self.tokenizer.decode(ids, skip_special_tokens=skips))
