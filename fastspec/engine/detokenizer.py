"""Incremental decoding of tokens to text, with stop strings found at the completing token."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from transformers import PreTrainedTokenizerBase

_INCOMPLETE = "\ufffd"
_MOST_PENDING = 8  # tokens without a complete character before some are decoded regardless
_CUTS = (3, 4, 5, 6)  # tokens that may still belong to a character, from the end
_MOST_CONTEXT = 8  # last tokens of a prompt among which its last character is looked for


@dataclass(eq=False)
class Detokenizer:
    """Decodes token by token, holding back partial characters and possible stop strings.

    The text is what follows the prompt's. Decoders drop the first space of what they decode, so the
    prompt's last tokens are decoded with the first new ones.

    Decoding a window that starts a few tokens back keeps the tokenizer's context-dependent spacing
    right without decoding everything again. The window is bounded: tokens that never complete a
    character are decoded regardless, except for the last few.

    Args:
        stop: strings that end the text.
        keeps_stop: whether the text includes the stop string that ended it.
        skips_special: whether to omit special tokens from the text.
        min_tokens: number of tokens before stop strings take effect.
        prompt_ids: what the decoder reads before the new tokens.
    """

    tokenizer: PreTrainedTokenizerBase
    stop: tuple[str, ...] = ()
    keeps_stop: bool = False
    skips_special: bool = True
    min_tokens: int = 0
    prompt_ids: Sequence[int] = ()

    def __post_init__(self):
        self.text = ""
        self.stopped = False
        self.stop_found: str | None = None
        self._hold = max((len(s) for s in self.stop), default=1) - 1
        self._num_left = self.min_tokens
        self._window = self._context()  # the last ids
        self._num_read = len(self._window)  # how many have their text in the prompt or self.text
        self._num_streamed = 0

    def push(self, token_id: int) -> None:
        """Add one token; sets `stopped` when its text completes a stop string."""
        self._window.append(token_id)
        self._num_left -= 1
        known, extended = self._decode(self._window[: self._num_read]), self._decode(self._window)
        if not extended.startswith(known):  # bytes that break the characters before them
            del self._window[: self._num_read]
            self._num_read, known, extended = 0, "", self._decode(self._window)
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
            known = self._decode(self._window[: self._num_read])
            self._append(self._decode(self._window)[len(known) :], len(self._window))

    def take(self, final: bool = False) -> str:
        """Return new text that is safe to show; `final` includes text held back so far."""
        end = len(self.text)
        if not (final or self.stopped):
            end = max(self._num_streamed, end - self._hold)
        piece = self.text[self._num_streamed : end]
        self._num_streamed = end
        return piece

    def _context(self) -> list[int]:
        """Return the fewest of the prompt's last ids that have text, up to a whole character.

        A decoder drops spaces after skipped special tokens as at the start. An incomplete character
        is left out, because tokens that complete it would have no text of their own.
        """
        last = [*self.prompt_ids[-_MOST_CONTEXT:]]
        for end in range(len(last), 0, -1):
            for start in range(end - 1, -1, -1):
                text = self._decode(last[start:end])
                if (text or start == 0) and not text.endswith(_INCOMPLETE):
                    return last[start:end]
        return []

    def _append(self, piece: str, num_read: int) -> None:
        """Append a piece, the window's new text up to `num_read`; its ids stay as context."""
        found = self._find_stop(piece) if self.stop else None
        self.text += piece
        if found:
            start, end = min(found)
            self.stop_found = self.text[start:end]
            self.text = self.text[: end if self.keeps_stop else start]
            self.stopped = True
        del self._window[: self._num_read]
        self._num_read = num_read - self._num_read

    def _find_stop(self, piece: str) -> list[tuple[int, int]]:
        """Return the start and end in the text of each stop string that the piece completes."""
        if self._num_left > 0:
            return []
        text = self.text[-self._hold :] + piece if self._hold else piece
        first = len(self.text) + len(piece) - len(text)
        ends = {s: max(0, len(text) - len(piece) - len(s) + 1) for s in self.stop}
        places = ((text.find(s, start), len(s)) for s, start in ends.items())
        return [(first + at, first + at + size) for at, size in places if at >= 0]

    def _force(self, known: str, extended: str) -> None:
        """Decode some long-pending tokens; a character has no more than four bytes.

        A cut inside a character shows, because its first bytes decode differently on their own.
        """
        cuts = [len(self._window) - back for back in _CUTS]
        texts = {cut: self._decode(self._window[:cut]) for cut in cuts}
        cut = next((c for c in cuts if extended.startswith(texts[c])), cuts[0])
        piece = texts[cut][len(known) :]
        if piece:
            self._append(piece, cut)
        else:  # tokens without text; those before them still determine spacing
            del self._window[self._num_read : cut]

    def _decode(self, ids: list[int]) -> str:
        return cast(str, self.tokenizer.decode(ids, skip_special_tokens=self.skips_special))
