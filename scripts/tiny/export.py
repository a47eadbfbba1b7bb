"""Stage `export`: bf16 weights, tokenizer and model card, as bundled with the package."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from fastspec.drafters.bigram_table import save_bigram
from fastspec.train.bigram import count_bigrams
from scripts.tiny import textbook
from scripts.tiny.corpus import HELD_OUT_PER_1000, LICENSE
from scripts.tiny.evaluate import MAX_NEW_TOKENS, NUM_SPECULATIVE_TOKENS
from scripts.tiny.tokenizer import END_OF_TEXT_ID

OTHER_MODELS = "\n## The EAGLE-3 draft"  # what begins like this was not made here, and stays
CARD = """# The bundled models

Small Llama-type models and their tokenizer, so that speculative decoding runs without a network.
They are trained, not random, but useful only for tests and demonstrations: whatever the prompt,
they write the simple Python of a beginner's textbook.
This file is written by `python -m scripts.tiny export` from `record.json`.

## Data

{modules:,} Python modules in the style of a beginner's textbook and {pages:,} pages about such
modules, assembled from parts by `scripts/tiny/textbook` ({textbook_license}), and the
{library_files} shorter files of CPython {python}'s standard library ({license}).
{training_files:,} files ({train_tokens:,} tokens) are for training; {held_out_files} files
({held_out_tokens:,} tokens) are held out, picked by a hash of the path that selects
{held_out_percent:g} % of files. `prompts.jsonl` comes only from held-out modules and pages.

## Models

| | target | draft |
| --- | --- | --- |
| layers | {target[layers]} | {draft[layers]} |
| hidden size | {target[hidden]} | {draft[hidden]} |
| feed-forward size | {target[intermediate]} | {draft[intermediate]} |
| query / key-value heads | {target[heads]} / 1 | {draft[heads]} / 1 |
| parameters | {target[parameters]:,} | {draft[parameters]:,} |
| trained on | next tokens | the target's distributions |
| steps | {target[steps]:,} | {draft[steps]:,} |
| tokens seen | {target[tokens]:,} | {draft[tokens]:,} |
| minutes of training | {target[minutes]:.0f} | {draft[minutes]:.0f} |
| training loss (running mean) | {target[train_loss]:.3f} | {draft[train_loss]:.3f} |
| held-out loss | {target[held_out_loss]:.3f} | |
| longest context in training | {target[context]} | {draft[context]} |

The target's losses are in nats per token; the draft's is its cross-entropy to the target's
distribution. Weights are bf16. `max_position_embeddings` is {positions}; text beyond the trained
context degrades. Tokenizer: byte-level BPE, {vocab_size} entries; `<|endoftext|>` (id 0) is bos and
eos, and is never added automatically.
{first}
## Distillation

The draft starts from the target's embedding, first and last layers, and learns the target's
distributions on {distillation_rows:,} rows of {draft[context]} tokens:
{distillation_mix}.

## Bigram table

`tiny-target/bigram.json`, for MaG: for each token, the one that follows it most often in the
training files, or the most frequent token of all if none ever follows it.

## Acceptance on the held-out prompts

{prompts} prompts, up to {max_new_tokens} new tokens, a chain of {num_speculative_tokens} tokens,
bf16-rounded weights, fp32 arithmetic. The acceptance rate is accepted / proposed; the acceptance
length is tokens per target step. At temperature 1 each row draws anew which tokens are accepted, so
`all` is not the mean of the other two rows.

| prompts | temperature | acceptance rate | mean acceptance length |
| --- | --- | --- | --- |
{acceptance}
{glide}"""

FIRST_CARD = """
The target continues an earlier one of the same shape and keeps its tokenizer. That one was
trained on CPython's standard library and documentation ({train_tokens:,} tokens) for
{target[steps]:,} steps ({target[tokens]:,} tokens, {target[minutes]:.0f} minutes).
"""

GLIDE_CARD = """
## The GLIDE draft

`tiny-glide`: a draft with {glide[layers]} layer and {glide[parameters]:,} parameters that also
attends to the keys and values of the target's last layer. For comparison, a plain draft of the same
size ({plain[parameters]:,} parameters) was trained, which is not bundled. Both start from the
embedding and the first layer of `tiny-draft`, and GLIDE's cross-attention starts as a look-up of
what followed the current token earlier (`fastspec.train.glide_lookup`). Both learn the target's
distributions on the same {rows:,} rows in the same order: {mix}.

| | GLIDE | plain |
| --- | --- | --- |
| steps, of {planned_steps:,} planned | {glide[steps]:,} | {plain[steps]:,} |
| tokens seen | {glide[tokens]:,} | {plain[tokens]:,} |
| training loss (running mean) | {glide[train_loss]:.3f} | {plain[train_loss]:.3f} |

The engine's acceptance on the prompts above, chains of {num_speculative_tokens} tokens:

| draft | temperature | acceptance rate | mean acceptance length |
| --- | --- | --- | --- |
{acceptance}

`tiny-draft`, which is one layer deeper and saw {draft[tokens]:,} tokens, is ahead of both in the
previous table: compare GLIDE with the plain draft, which has the same size and training.
"""


def export_model(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Writes one model folder: config, generation config, bf16 weights, tokenizer.

    The config says float32, so that is what the weights are loaded as by default: greedy ids, and
    what is recorded of them, then depend on no rounding. No reader ever sees a half-written folder.
    """
    staged = folder.with_name(folder.name + ".new")
    shutil.rmtree(staged, ignore_errors=True)
    model.bfloat16().save_pretrained(staged)
    config = staged / "config.json"
    fields = json.loads(config.read_text()) | {"dtype": "float32"}
    config.write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n")
    tokenizer.save_pretrained(staged)
    shutil.rmtree(folder, ignore_errors=True)
    staged.rename(folder)


def export_bigram(token_ids: np.ndarray, vocab_size: int, folder: Path) -> None:
    """Counts the bigrams of the training files, each of which begins with `<|endoftext|>`."""
    starts = np.flatnonzero(token_ids == END_OF_TEXT_ID)
    documents = np.split(token_ids, starts[starts > 0])
    save_bigram(count_bigrams(documents, vocab_size), folder / "bigram.json")


def write_card(record: dict[str, Any], assets: Path) -> None:
    """Writes `record.json` and the model card made from it."""
    (assets / "record.json").write_text(json.dumps(record, indent=1) + "\n")
    rows = [
        f"| {row['prompts']} | {row['temperature']:g} | {row['acceptance_rate']:.3f} "
        f"| {row['mean_acceptance_length']:.2f} |"
        for row in record["evaluation"]
    ]
    card = CARD.format(
        **record["corpus"],
        textbook_license=textbook.LICENSE,
        first=_first_card(record["first"]) if "first" in record else "",
        target=record["target"],
        draft=record["draft"],
        distillation_rows=record["distillation"]["rows"],
        distillation_mix=record["distillation"]["mix"],
        acceptance="\n".join(rows),
        prompts=record["num_prompts"],
        license=LICENSE,
        held_out_percent=HELD_OUT_PER_1000 / 10,
        max_new_tokens=MAX_NEW_TOKENS,
        num_speculative_tokens=NUM_SPECULATIVE_TOKENS,
        glide=_glide_card(record["glide"], record["draft"]) if "glide" in record else "",
    )
    path = assets / "MODEL_CARD.md"
    _, mark, others = (path.read_text() if path.exists() else "").partition(OTHER_MODELS)
    path.write_text(card + mark + others)


def _first_card(record: dict[str, Any]) -> str:
    """Of the target that this one went on from."""
    return FIRST_CARD.format(**record["corpus"], target=record["target"])


def _glide_card(record: dict[str, Any], draft: dict[str, Any]) -> str:
    rows = [
        f"| {row['draft']} | {row['temperature']:g} | {row['acceptance_rate']:.3f} "
        f"| {row['mean_acceptance_length']:.2f} |"
        for row in record["evaluation"]
    ]
    return GLIDE_CARD.format(
        **record | {"evaluation": None},
        draft=draft,
        acceptance="\n".join(rows),
        num_speculative_tokens=NUM_SPECULATIVE_TOKENS,
    )
