"""The models, drafters and caches that `tests.soak` decodes its random requests with."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from fastspec import SpecConfig
from fastspec.drafters.eagle3.model import usual_layers

from .architectures import config_of, random_decoder
from .engine import eagle1_models, eagle3_models
from .engine.assistant_models import random_assistant
from .engine.dflash_models import random_dflash, stored
from .engine.glide_models import random_glide
from .models import VOCAB_SIZE, perturbed, random_model, random_t5

POISONED = 99  # this token's embedding is NaN
MAX_MODEL_LEN = 64

OWN_SPEC = SpecConfig("draft_model", num_speculative_tokens=4)
CHAINS = {
    "lookup": SpecConfig("prompt_lookup", num_speculative_tokens=5, prompt_lookup_min=1),
    "block": SpecConfig("draft_model", 3, rejection_sample_method="block"),
    "greedy drafts": SpecConfig("draft_model", 2, draft_sample_method="greedy"),
    "adaptive": SpecConfig("draft_model", 3, schedule="adaptive", step_costs=[6, 7, 8, 9]),
    "mag": SpecConfig("mag", 4),
    "ngram": SpecConfig("ngram", 2),
    "suffix": SpecConfig("suffix", 2),
    "heuristic": SpecConfig("draft_model", 3, schedule="heuristic"),
    "copies first": SpecConfig("draft_model", 2, suffix_tokens=5),
    "unsure": SpecConfig("draft_model", 4, confidence_threshold=0.5),
    "unsure copies": SpecConfig(
        "draft_model", 3, confidence_threshold=0.6, suffix_tokens=6, rejection_sample_method="block"
    ),
    "clocked copies": SpecConfig("draft_model", 3, schedule="adaptive", suffix_tokens=4),
    "few": SpecConfig("draft_model", 3, disable_by_batch_size=2),
    "coupled": SpecConfig("draft_model", 3, rejection_sample_method="coupled"),
    "coupled few": SpecConfig(
        "draft_model", 3, rejection_sample_method="coupled", disable_by_batch_size=2
    ),
    "coupled lookup": SpecConfig(
        "prompt_lookup", 5, prompt_lookup_min=1, rejection_sample_method="coupled"
    ),
    "shared ngram": SpecConfig(
        "ngram", 3, ngram_store="engine", ngram_guesses=True, rejection_sample_method="coupled"
    ),
}
TREES = {
    "tree": SpecConfig("tree", 3, tree_width=2, tree_nodes=6),
    "cape": SpecConfig("draft_model", 2, cape=True),
    "cascade": SpecConfig("cascade", k_matrix=((2, 4), (0, 0))),
    "coupled tree": SpecConfig("tree", 2, tree_nodes=6, rejection_sample_method="coupled"),
    "copies or a tree": SpecConfig("tree", 2, tree_nodes=5, suffix_tokens=4),
    "copied branch": SpecConfig("tree", 2, tree_nodes=7, tree_suffix=3),
    "looked-up branch": SpecConfig(
        "tree", 3, tree_nodes=6, tree_prompt_lookup=True, draft_sample_method="greedy"
    ),
}
EXIT = {  # of two layers
    "early exit": SpecConfig("early_exit", 2, exit_layer=1),
    "early copies": SpecConfig(
        "early_exit", 3, exit_layer=1, suffix_tokens=5, confidence_threshold=0.4
    ),
}
COPIES = {
    "quantized": SpecConfig("quantized", 3, draft_bits=4),
    "packed draft": SpecConfig("draft_model", 3, draft_bits=4),
    "copy reviews": SpecConfig("cascade", draft_bits=8, k_matrix=((3, 1), (0, 2))),
    "quantized or copies": SpecConfig("quantized", 2, suffix_tokens=5, confidence_threshold=0.5),
}
GLIDE = {
    "glide": SpecConfig("glide", 3),
    "glide copies": SpecConfig("glide", 3, suffix_tokens=5, confidence_threshold=0.3),
    "packed glide": SpecConfig("glide", 2, draft_bits=8, rejection_sample_method="block"),
}
EAGLE_CHAINS = {
    "eagle": SpecConfig("eagle3", 3),
    "eagle block": SpecConfig("eagle3", 3, rejection_sample_method="block"),
    "eagle copies": SpecConfig("eagle3", 3, suffix_tokens=6, confidence_threshold=0.2),
    "eagle adaptive": SpecConfig("eagle3", 3, schedule="adaptive", suffix_tokens=4),
    "packed eagle": SpecConfig("eagle3", 3, draft_bits=8, draft_sample_method="greedy"),
    "coupled eagle": SpecConfig("eagle3", 3, rejection_sample_method="coupled"),
}
EAGLE_TREES = {
    "eagle tree": SpecConfig("eagle3", 3, tree_nodes=7, tree_width=2, draft_bits=4),
    "eagle cape": SpecConfig("eagle3", 2, cape=True),
    "eagle branch": SpecConfig("eagle3", 2, tree_nodes=7, tree_suffix=3),
    "eagle or copies": SpecConfig("eagle3", 2, tree_nodes=6, suffix_tokens=4),
}
DFLASH = {
    "dflash": SpecConfig("dflash", 3),
    "dflash copies": SpecConfig("dflash", 4, suffix_tokens=6, confidence_threshold=0.2),
    "packed dflash": SpecConfig("dflash", 2, draft_bits=8, rejection_sample_method="block"),
    "coupled dflash": SpecConfig("dflash", 4, rejection_sample_method="coupled"),
}
ASSISTANT = {
    "assistant": SpecConfig("gemma_assistant", 3),
    "assistant copies": SpecConfig("gemma_assistant", 3, suffix_tokens=5, confidence_threshold=0.2),
    "assistant tree": SpecConfig("gemma_assistant", 3, tree_nodes=7, tree_width=2),
    "assistant of copy": SpecConfig("cascade", draft_bits=8),
}
# Drafts of these read the cache or the hidden states of a copy of the target.
EAGLE_OF_COPY = {"eagle of copy": SpecConfig("cascade", draft_bits=8)}
GLIDE_OF_COPY = {"glide of copy": SpecConfig("cascade", draft_bits=8)}
RESPELLED = {
    "respelled": SpecConfig("draft_model", 3, heterogeneous_vocab="reencoding"),
    "respelled copies": SpecConfig(
        "draft_model", 3, heterogeneous_vocab="reencoding", suffix_tokens=4
    ),
    "shared tokens": SpecConfig("draft_model", 3, heterogeneous_vocab="intersection"),
}


@dataclass(frozen=True)
class Setting:
    """A model and the drafters beside the engine's own.

    Attributes:
        share: of the requests.
        drafters: options by name, for each kind of draft in `_DRAFTS`.
        num_tokens: room in the small cache.
        shares_prefixes: whether its prompts may share blocks.
    """

    name: str
    share: int
    make: Callable[[], PreTrainedModel]
    drafters: dict[str, dict[str, SpecConfig]]
    num_tokens: int
    shares_prefixes: bool = True

    def drafts(self, target: PreTrainedModel, folder: Path) -> dict[str, Any]:
        """A draft for each kind of drafters."""
        return {kind: _DRAFTS[kind](target, folder) for kind in self.drafters}


def near(target: PreTrainedModel) -> PreTrainedModel:
    """A draft that is often right."""
    return perturbed(target, 0.05).to(target.dtype)


def is_plain_chain(spec: SpecConfig) -> bool:
    """Whether a request's own K is all that limits its drafts."""
    is_chain = not (spec.drafts_trees or spec.cape or spec.method == "cascade")
    return is_chain and spec.suffix_tokens is None and spec.schedule == "constant"


def _eagle(module):
    def written(target, folder):
        module.write_folder(folder / module.__name__, target)
        return folder / module.__name__

    return written


def _other_spelling(target: PreTrainedModel, folder: Path) -> Path:
    """A draft whose tokens are pairs of digits and letters too."""
    first = ["00", "01", "10", "11", "ab"]
    rest = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([*first, *rest, "<end>"])}
    merges = [(pair[0], pair[1]) for pair in first]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
    for part in (random_model("llama", seed=3, num_hidden_layers=1), fast):
        part.save_pretrained(folder / "respelled")
    return folder / "respelled"


def _dflash(target: PreTrainedModel, folder: Path) -> Path:
    layers = usual_layers(target.config.num_hidden_layers)  # one engine keeps states of one set
    return stored(random_dflash(target, target_layers=layers), folder / "dflash")


_DRAFTS: dict[str, Callable[[PreTrainedModel, Path], Any]] = {
    "none": lambda target, folder: None,
    "near": lambda target, folder: near(target),
    # A draft of one layer: one of several may write other texts after preemption.
    "glide": lambda target, folder: random_glide(target).to(target.dtype),
    "eagle1": _eagle(eagle1_models),
    "eagle3": _eagle(eagle3_models),
    "respelled": _other_spelling,
    "assistant": lambda target, folder: random_assistant(target),
    "dflash": _dflash,
}


def by_kind(*drafters: dict[str, SpecConfig], **others: dict[str, SpecConfig]):
    """Drafters by the kind of draft that they run: those of a near model, or of none; others."""
    kinds: dict[str, dict[str, SpecConfig]] = {"none": {}, "near": {}}
    for group in drafters:
        for name, spec in group.items():
            takes_draft = spec.method in ("draft_model", "tree", "cascade")
            kinds["near" if takes_draft else "none"][name] = spec
    return kinds | others


def _poisoned(model: PreTrainedModel) -> PreTrainedModel:
    with torch.no_grad():
        model.get_input_embeddings().weight[POISONED] = float("nan")
    return model


def _gemma2() -> PreTrainedModel:
    return random_model(
        "gemma2", num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"]
    )


WORLDS = (
    Setting(
        "llama",
        20,
        lambda: _poisoned(random_model("llama", num_hidden_layers=1)),
        by_kind(CHAINS, TREES, COPIES, respelled=RESPELLED),
        num_tokens=144,
    ),
    Setting(
        "gemma2",
        8,
        _gemma2,
        by_kind(CHAINS, TREES, COPIES, EXIT, glide=GLIDE),
        num_tokens=160,
    ),
    Setting(
        "eagle",
        12,
        lambda: _poisoned(random_model("llama")),
        by_kind(
            EXIT,
            eagle3=EAGLE_CHAINS | EAGLE_TREES | EAGLE_OF_COPY,
            glide=GLIDE_OF_COPY,
            dflash=DFLASH,
        ),
        num_tokens=128,
    ),
    Setting(
        "gemma4",
        6,
        lambda: _poisoned(random_decoder(config_of("gemma4_text"))),
        by_kind(assistant=ASSISTANT),
        num_tokens=160,
    ),
    Setting(
        "qwen3",
        8,
        lambda: random_model("qwen3", num_hidden_layers=2),
        by_kind(eagle1=EAGLE_CHAINS | EAGLE_TREES | EAGLE_OF_COPY, glide=GLIDE | GLIDE_OF_COPY),
        num_tokens=144,
    ),
    # Chains only: siblings change the order of sums.
    Setting(
        "bfloat16",
        8,
        lambda: _poisoned(random_model("llama").to(torch.bfloat16)),
        by_kind(CHAINS, COPIES, EXIT, eagle3=EAGLE_CHAINS | EAGLE_OF_COPY, glide=GLIDE),
        num_tokens=144,
    ),
    Setting(
        "t5",
        2,
        lambda: random_t5(vocab_size=VOCAB_SIZE),
        by_kind(CHAINS),
        num_tokens=80,
        shares_prefixes=False,
    ),
    Setting(
        "mamba2",
        1,
        lambda: random_model("mamba2", num_hidden_layers=1),
        by_kind({"lookup": CHAINS["lookup"], "copies first": CHAINS["copies first"]}),
        num_tokens=160,
        shares_prefixes=False,
    ),
)
