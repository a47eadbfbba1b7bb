"""Text written by a target, from which its drafts learn best."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fastspec.config import SamplingParams
from fastspec.engine.engine import Engine
from fastspec.models.chat import prompt_ids
from fastspec.tools.part_file import part_file

_BATCHES = 4  # batches of answers per write


def write_texts(
    engine: Engine,
    target: str,
    prompts: Sequence[str],
    max_tokens: int,
    file: Path,
    advance: Callable[[int], None],
) -> None:
    """Write each prompt with the target's answer, by the chat template, to a file of JSON lines.

    A line has the ids of both, and their text.

    Every other answer is greedy, the rest are sampled at temperature 1, because drafts are used for
    both. Texts are kept in FILE.part until all are done, so an interrupted run continues; FILE is
    then replaced.

    Args:
        engine: an engine of the target, with a tokenizer.
        target: the target's name, which a run that continues must have in common.
        max_tokens: maximum length of an answer.
        advance: called with the number of texts so far.
    Raises:
        ValueError: no chat template, an answer failed, or FILE.part is of a run with another
            target, other prompts or options, or damaged.
    """
    tokenizer: Any = engine.tokenizer
    size = _BATCHES * engine.config.max_batch_size
    engine_config = [str(engine.config.dtype), str(getattr(tokenizer, "chat_template", None))]
    run = [target, [*prompts], max_tokens, *engine_config]
    with part_file("out", file, "fastspec_texts", run, _is_text) as part:
        texts = [*part.kept]
        for first in range(len(texts), len(prompts), size):
            advance(first)
            last = min(first + size, len(prompts))
            ids = [prompt_ids(tokenizer, prompts[index], True) for index in range(first, last)]
            params = [
                SamplingParams(temperature=index % 2, max_tokens=max_tokens, seed=index)
                for index in range(first, last)
            ]
            for index, output in enumerate(engine.generate(ids, params), first):
                if output.error is not None:
                    raise ValueError(f"prompts: no answer to prompt {index + 1}: {output.error}")
                given, written = list(output.prompt_token_ids), list(output.token_ids)
                text = tokenizer.decode([*given, *written])
                texts.append({"text": text, "prompt_ids": given, "token_ids": written})
                part.add(texts[-1])
        part.finish("".join(json.dumps(text) + "\n" for text in texts))
    advance(len(prompts))


def _is_text(value: Any) -> bool:
    kinds = {"text": str, "prompt_ids": list, "token_ids": list}
    return isinstance(value, dict) and all(isinstance(value.get(n), k) for n, k in kinds.items())
