"""The bundled prompts: pieces of held-out files, cut at the end of a line."""

import itertools
import json
import re
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from scripts.tiny.corpus import Document, is_held_out

LENGTHS = (64, 96, 128, 160)
MAX_PROMPT_TOKENS = 200
PARAGRAPH = re.compile(r"\n\n+(?=\S)")


def choose_prompts(
    documents: list[Document], tokenizer: PreTrainedTokenizerFast, per_kind: int
) -> list[dict[str, str]]:
    """`per_kind` prompts from modules and as many from pages, of held-out ones alone.

    Each starts at a paragraph and ends at a line's end, 64 to 200 tokens later; files take turns.
    Returns `{"id", "source", "text"}` records. Raises `ValueError` when the files are too few.
    """
    held_out = [document for document in documents if is_held_out(document.source)]
    prompts = []
    for kind in ("code", "page"):
        chosen = [document for document in held_out if document.source.startswith(kind + "/")]
        cuts = [_cuts(document, tokenizer, turn) for turn, document in enumerate(chosen)]
        rounds = itertools.chain.from_iterable(itertools.zip_longest(*cuts))
        pieces = list(itertools.islice(filter(None, rounds), per_kind))
        if len(pieces) < per_kind:
            raise ValueError(f"per_kind: {kind} has {len(pieces)} pieces, {per_kind} asked")
        for index, (source, text) in enumerate(pieces):
            prompts.append({"id": f"{kind}-{index:02d}", "source": source, "text": text})
    return prompts


def _cuts(
    document: Document, tokenizer: PreTrainedTokenizerFast, turn: int
) -> list[tuple[str, str]]:
    """Up to 7 pieces of one file, spread over it; `turn` says which length comes first."""
    starts = [match.end() for match in PARAGRAPH.finditer(document.text)]
    spread = starts[:: max(1, len(starts) // 8)][1:8]
    pieces = []
    for index, start in enumerate(spread):
        length = LENGTHS[(turn + index) % len(LENGTHS)]
        text = _grow(document.text[start:], length, tokenizer)
        if len(tokenizer.encode(text)) in range(length, MAX_PROMPT_TOKENS + 1):
            pieces.append((document.source, text))
    return pieces


def _grow(text: str, length: int, tokenizer: PreTrainedTokenizerFast) -> str:
    """The shortest run of whole lines that has `length` tokens and does not end in a blank line."""
    lines = text.split("\n")
    for count in range(1, len(lines) + 1):
        piece = "\n".join(lines[:count])
        if lines[count - 1].strip() and len(tokenizer.encode(piece)) >= length:
            return piece
    return text


def write_prompts(prompts: list[dict[str, str]], path: Path) -> None:
    """One JSON object a line."""
    path.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))


def read_prompts(path: Path) -> list[dict[str, str]]:
    """Reads what `write_prompts` wrote."""
    return [json.loads(line) for line in path.read_text().splitlines()]
