"""Stage `loops`: the target learns from its own greedy text not to repeat itself.

By unlikelihood (Welleck et al., Neural Text Generation with Unlikelihood Training, 2019): what goes
on with a loop gets less likely, and next-token training goes on beside it.
"""

import copy
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from transformers import LlamaForCausalLM

from scripts.tiny.attention import use_shared_head_attention
from scripts.tiny.generate import write_text
from scripts.tiny.loop import Batch, LoopOptions, TrainingLoop
from scripts.tiny.optim import windows
from scripts.tiny.target import held_out_windows, load_token_ids, next_token_loss
from scripts.tiny.tokenizer import END_OF_TEXT_ID

LENGTH = 192
PROMPT_LENGTHS = (4, 8, 16, 48)
ROWS_OF_TEXT = 128  # written at a time, by each of two threads
LONGEST_PERIOD = 64
LEAST_RUN = 12  # tokens that agree with those a period before, beside a whole period
JUDGED_ROWS = 64


def looping(token_ids: torch.Tensor) -> torch.Tensor:
    """Which tokens of i64[B, S] go on with a loop: bool [B, S].

    So many tokens up to there repeat what was one period before: a whole period, and 12 at least.
    """
    count, length = token_ids.shape
    marked = torch.zeros(count, length, dtype=torch.bool)
    place = torch.arange(length)
    for period in range(1, min(LONGEST_PERIOD, length - 1) + 1):
        agrees = torch.zeros(count, length, dtype=torch.bool)
        agrees[:, period:] = token_ids[:, period:] == token_ids[:, :-period]
        last_other = torch.where(agrees, -1, place).cummax(dim=1).values
        marked |= agrees & (place - last_other > max(period, LEAST_RUN))
    return marked


def unlikelihood_loss(
    model: LlamaForCausalLM, tokens: torch.Tensor, marked: torch.Tensor
) -> torch.Tensor:
    """Of rows i64[B, S + 1]: mean cross-entropy, plus the mean of -log(1 - p) of what is marked.

    The first half of the rows is text of the corpus, the second half the target's own, of which
    `marked` bool[B / 2, S] tells the tokens that should be less likely; the others count as zeros.
    So there is the less to avoid the fewer loops there are.
    """
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
    half = len(tokens) // 2
    log_probs = logits.float().log_softmax(dim=-1)
    learnt = cross_entropy(logits[:half].float().flatten(0, 1), tokens[:half, 1:].flatten())
    prob = log_probs[half:].gather(2, tokens[half:, 1:, None])[..., 0].exp()
    avoided = -torch.log1p(-prob.clamp(max=1 - 1e-4))
    return learnt + (avoided * marked).mean()


def beginnings(
    token_ids: torch.Tensor, count: int, length: int, generator: torch.Generator
) -> torch.Tensor:
    """Prompts i64[count, length] from the corpus: every other one is how a document begins."""
    starts = (token_ids[:-LENGTH] == END_OF_TEXT_ID).nonzero()[:, 0] + 1
    chosen = starts[torch.randint(len(starts), (count,), generator=generator)]
    anywhere = torch.randint(len(token_ids) - LENGTH, (count,), generator=generator)
    chosen[1::2] = anywhere[1::2]
    return torch.stack([token_ids[start : start + length] for start in chosen]).long()


def train_without_loops(
    model: LlamaForCausalLM, out: Path, options: LoopOptions, rows: int, seed: int
) -> dict[str, float]:
    """Trains on as many rows of own text as of the corpus, new text every few steps.

    The record gets the held-out loss and the part of the tokens of greedy text that are in loops.
    """
    train_ids, held_out_ids = load_token_ids(out, "train"), load_token_ids(out, "held_out")
    judged = held_out_windows(held_out_ids, options.context)
    generator = torch.Generator().manual_seed(seed)
    corpus = windows(train_ids, rows, LENGTH, generator)
    own = _own_text(model, train_ids, rows, generator)
    judged_prompts = beginnings(
        held_out_ids, JUDGED_ROWS, PROMPT_LENGTHS[1], torch.Generator().manual_seed(seed)
    )
    loss_on = torch.compile(unlikelihood_loss, dynamic=False, disable=not options.compiled)

    def draw() -> Batch:
        text = next(own)
        return torch.cat((next(corpus), text)), looping(text)[:, 1:]

    def loss_of(batch: Batch) -> torch.Tensor:
        return loss_on(model, *batch)

    @torch.inference_mode()
    def evaluate() -> dict[str, float]:
        losses = [next_token_loss(model, part) for part in judged.split(rows)]
        text = _write(model, [judged_prompts])
        marked = looping(text)[:, PROMPT_LENGTHS[1] :]
        return {
            "held_out_loss": torch.stack(losses).mean().item(),
            "looping": marked.float().mean().item(),
        }

    return TrainingLoop(model, options, draw, loss_of, evaluate).run()


def _own_text(
    model: LlamaForCausalLM, token_ids: torch.Tensor, rows: int, generator: torch.Generator
) -> Iterator[torch.Tensor]:
    """Batches i64[rows, LENGTH + 1] of greedy text, with loops in all rows but some of the last."""
    turn = 0
    while True:
        prompts = []
        for _ in range(2):
            length = PROMPT_LENGTHS[turn % len(PROMPT_LENGTHS)]
            prompts.append(beginnings(token_ids, ROWS_OF_TEXT, length, generator))
            turn += 1
        text = _write(model, prompts).clone()  # no inference tensor, which could not be learnt from
        loops = looping(text).sum(dim=1)
        text = text[loops.argsort(descending=True)]
        useful = max(rows, int((loops > 0).sum()) // rows * rows)
        yield from text[:useful][torch.randperm(useful, generator=generator)].split(rows)


@torch.inference_mode()
def _write(model: LlamaForCausalLM, prompts: list[torch.Tensor]) -> torch.Tensor:
    """Greedy text i64[B, LENGTH + 1] after prompts of one length each, by a thread for each."""
    writer = copy.deepcopy(model).bfloat16().eval()
    use_shared_head_attention(writer)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)

    def run(part: torch.Tensor) -> torch.Tensor:
        new_tokens = LENGTH + 1 - part.shape[1]
        return write_text(writer, part, new_tokens, 0.0, torch.Generator()).token_ids.long()

    with ThreadPoolExecutor(len(prompts)) as pool:
        text = torch.cat(list(pool.map(run, prompts)))
    torch.set_num_threads(threads)
    return text
