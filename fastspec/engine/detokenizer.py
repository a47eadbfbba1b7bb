"""Text of a growing token sequence, with stop strings found at the token that completes them."""

from typing import cast

from transformers import PreTrainedTokenizerBase

_INCOMPLETE = "\ufffd"


class Detokenizer:
    """Decodes token by token, holding back half characters and what may become a stop string.

    Decoding a window that starts a few tokens back keeps the tokenizer's context-dependent spacing
    right without decoding everything again.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: tuple[str, ...]):
        self.text = ""
        self.stopped = False
        self._tokenizer = tokenizer
        self._stop = stop
        self._hold = max((len(s) for s in stop), default=1) - 1
        self._ids: list[int] = []
        self._window_start = 0  # first id of the decoded window
        self._window_read = 0  # ids of the window whose text is in self.text
        self._num_streamed = 0

    def push(self, token_id: int) -> None:
        """Add one token; sets `stopped` when its text completes a stop string."""
        self._ids.append(token_id)
        known = self._decode(self._window_start, self._window_read)
        extended = self._decode(self._window_start, len(self._ids))
        if extended.endswith(_INCOMPLETE) or len(extended) <= len(known):
            return
        self._append(extended[len(known) :])
        self._window_start, self._window_read = self._window_read, len(self._ids)

    def finish(self) -> None:
        """Add the text of an incomplete last character."""
        if self.stopped:
            return
        known = self._decode(self._window_start, self._window_read)
        self._append(self._decode(self._window_start, len(self._ids))[len(known) :])

    def take(self, final: bool = False) -> str:
        """Text not taken yet and safe to show; `final` includes what was held back."""
        end = len(self.text)
        if not (final or self.stopped):
            end = max(self._num_streamed, end - self._hold)
        piece = self.text[self._num_streamed : end]
        self._num_streamed = end
        return piece

    def _append(self, piece: str) -> None:
        searched_from = max(0, len(self.text) - self._hold)
        self.text += piece
        found = [at for s in self._stop if (at := self.text.find(s, searched_from)) >= 0]
        if found:
            self.text = self.text[: min(found)]
            self.stopped = True

    def _decode(self, start: int, end: int) -> str:
        return cast(str, self._tokenizer.decode(self._ids[start:end], skip_special_tokens=True))
