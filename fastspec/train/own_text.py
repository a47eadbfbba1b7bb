"""Text written by a target, from which its drafts learn best."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fastspec.config import SamplingParams
from fastspec.engine.engine import Engine
from fastspec.models.loading import prompt_ids

_BATCHES = 4  # batches of answers per write


def write_texts(
    engine: Engine,
    prompts: Sequence[str],
    max_tokens: int,
    file: Path,
    advance: Callable[[int], None],
) -> None:
    """Append each prompt with the target's answer, by the chat template, to a file of JSON lines.

    Every other answer is greedy, the rest are sampled at temperature 1, because drafts are used for
    both. Texts already in the file count as done, so an interrupted run continues.

    Args:
        engine: an engine of the target, with a tokenizer.
        max_tokens: maximum length of an answer.
        advance: called with the number of texts so far.
    """
    tokenizer: Any = engine.tokenizer
    written = file.read_bytes() if file.exists() else b""
    done, whole = written.count(b"\n"), written.rfind(b"\n") + 1
    size = _BATCHES * engine.config.max_batch_size
    with file.open("ab") as out:
        out.truncate(whole)
        for first in range(done, len(prompts), size):
            advance(first)
            last = min(first + size, len(prompts))
            ids = [prompt_ids(tokenizer, prompts[index], True) for index in range(first, last)]
            params = [
                SamplingParams(temperature=index % 2, max_tokens=max_tokens, seed=index)
                for index in range(first, last)
            ]
            texts = (
                tokenizer.decode([*output.prompt_token_ids, *output.token_ids])
                for output in engine.generate(ids, params)
            )
            out.write("".join(json.dumps({"text": text}) + "\n" for text in texts).encode())
            out.flush()
    advance(len(prompts))
