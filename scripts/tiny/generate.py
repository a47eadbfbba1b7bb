"""Stage `generate`: the target's states on corpus text and on text of its own, for the draft."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch
from rich.progress import track
from transformers import LlamaForCausalLM, StaticCache

from fastspec.models.paged_model import cache_name
from scripts.tiny.attention import use_shared_head_attention
from scripts.tiny.optim import windows

PROMPT_LENGTHS = (48, 96, 192)
ROWS = 256
WORKERS = 2
KINDS = {
    "corpus": "of corpus text",
    "repeated": "of repeated pieces of it",
    "greedy": "of the target's greedy text",
    "sampled": "of its text at temperature 1",
}


class Distillation(NamedTuple):
    """Rows of text and what the target thought of them.

    `token_ids` i32[N, S + 1]; `hidden` bf16[N, S, E], the target's final hidden states, of which
    its output embedding makes the logits: a few hundred bytes a token instead of a few thousand.
    """

    token_ids: torch.Tensor
    hidden: torch.Tensor


@torch.inference_mode()
def read_text(model: LlamaForCausalLM, token_ids: torch.Tensor) -> Distillation:
    """The target's states on given text i64[B, S + 1]."""
    hidden = model.model(input_ids=token_ids[:, :-1], use_cache=False).last_hidden_state
    return Distillation(token_ids.int(), hidden)


@torch.inference_mode()
def write_text(
    model: LlamaForCausalLM,
    prompts: torch.Tensor,
    new_tokens: int,
    temperature: float,
    generator: torch.Generator,
) -> Distillation:
    """The target's continuation of prompts i64[B, P] (greedy at temperature 0) and its states."""
    longest = prompts.shape[1] + new_tokens - 1
    cache = StaticCache(config=model.config, max_cache_len=longest)
    token_ids, hidden, step = prompts, [], prompts
    for _ in range(new_tokens):
        given = {cache_name(model.model): cache}
        states = model.model(input_ids=step, **given).last_hidden_state
        hidden.append(states)
        logits = model.lm_head(states[:, -1]).float()
        step = _choose(logits, temperature, generator)
        token_ids = torch.cat((token_ids, step), dim=1)
    return Distillation(token_ids.int(), torch.cat(hidden, dim=1))


def _choose(logits: torch.Tensor, temperature: float, generator: torch.Generator) -> torch.Tensor:
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    return torch.multinomial((logits / temperature).softmax(dim=-1), 1, generator=generator)


def repeat_segments(rows: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Rows i64[B, S] whose text, from a random place on, repeats one segment of 3 to S // 4 tokens.

    Small models fall into loops when greedy; this shows the draft many more of them than it could
    remember, so that it learns to copy.
    """
    count, length = rows.shape
    period = torch.randint(3, max(4, length // 4), (count, 1), generator=generator)
    start = torch.randint(length // 4, (count, 1), generator=generator)
    place = torch.arange(length).expand(count, -1)
    return rows.gather(1, torch.where(place < start, place, start + (place - start) % period))


def make_distillation(
    model: LlamaForCausalLM,
    token_ids: torch.Tensor,
    sizes: dict[str, int],
    context: int,
    seed: int,
) -> Distillation:
    """Rows of the kinds of `KINDS`, `sizes` batches of 256 rows of each.

    The target computes in bf16, as it is bundled. `token_ids` is the training split. Own text
    follows prompts of several lengths.
    """
    torch.set_num_threads(1)
    model = model.bfloat16()
    use_shared_head_attention(model)
    batches = windows(token_ids, ROWS, context, torch.Generator().manual_seed(seed))
    kinds = [kind for kind, size in sizes.items() for _ in range(size)]
    jobs = [(index, kind, next(batches)) for index, kind in enumerate(kinds)]

    def run(job: tuple[int, str, torch.Tensor]) -> Distillation:
        index, kind, rows = job
        generator = torch.Generator().manual_seed(seed + index)
        if kind == "corpus":
            return read_text(model, rows)
        if kind == "repeated":
            return read_text(model, repeat_segments(rows, generator))
        prompt_len = min(PROMPT_LENGTHS[index % len(PROMPT_LENGTHS)], context // 2)
        temperature = 0.0 if kind == "greedy" else 1.0
        new_tokens = context + 1 - prompt_len
        return write_text(model, rows[:, :prompt_len], new_tokens, temperature, generator)

    with ThreadPoolExecutor(WORKERS) as pool:
        parts = list(track(pool.map(run, jobs), "distillation", total=len(jobs)))
    return Distillation(*(torch.cat(column) for column in zip(*parts, strict=True)))


def save_distillation(distillation: Distillation, path: Path) -> None:
    """Writes the rows as one torch file."""
    torch.save(distillation._asdict(), path)


def load_distillation(path: Path) -> Distillation:
    """Reads what `save_distillation` wrote."""
    return Distillation(**torch.load(path, weights_only=True, mmap=True))
