"""What tests of different drafters share: prompts, expected ids, distributions, whole runs."""

from hashlib import blake2b
from itertools import product

import numpy as np
import torch

from fastspec import Engine, EngineConfig, SamplingParams
from fastspec.train.new_drafts import make_glide
from fastspec_kernels import logits_to_probs
from fastspec_kernels.testing import chi_square

from ..models import perturbed, random_model
from .eagle3_models import write_folder

PROMPTS = [[1, 2, 3], list(range(5, 22)), [40, 7] * 17, [9]]
NUM_TOKENS = 28  # over the ends of blocks and windows
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)


_GREEDY_TEXTS = {}  # many tests build the same model


def hugging_face_greedy(model, prompt, max_new_tokens=NUM_TOKENS):
    """The new ids, whatever ends a text, of a model that its config and its weights describe."""
    digest = blake2b(repr((type(model), model.config._attn_implementation)).encode())
    digest.update(model.config.to_json_string().encode())
    for tensor in model.state_dict().values():
        digest.update(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy())
    key = digest.digest(), tuple(prompt), max_new_tokens
    if key not in _GREEDY_TEXTS:
        _GREEDY_TEXTS[key] = generated_greedily(model, prompt, max_new_tokens)
    return _GREEDY_TEXTS[key]


def ids_of(outputs):
    return [list(output.token_ids) for output in outputs]


def generated_greedily(model, prompt, max_new_tokens=NUM_TOKENS):
    """The same for a model with hooks or with functions of its own."""
    input_ids = torch.tensor([prompt])
    out = model.generate(
        input_ids,
        attention_mask=torch.ones_like(input_ids),
        max_new_tokens=max_new_tokens,
        eos_token_id=None,
        do_sample=False,
        pad_token_id=0,
    )
    return tuple(out[0, 1 if model.config.is_encoder_decoder else len(prompt) :].tolist())


def finish(engine):
    """Outputs of step() until nothing is left, by request."""
    outputs = {}
    while engine.has_unfinished:
        outputs |= {event.request_id: event.output for event in engine.step() if event.output}
    return outputs


# Sampling: texts of LENGTH tokens out of a small vocabulary, compared with their distribution

VOCAB_SIZE, LENGTH, PROMPT = 6, 3, [1, 4, 2]
ALPHA = 1e-6
PLAIN = {"temperature": 1.3}
FILTERED = {"temperature": 1.7, "top_k": 5, "top_p": 0.9, "min_p": 0.03}


def drafter_for(kind, target, folder, num_known=None):
    """A drafter of a kind, of random weights or near the target's; an EAGLE-3 draft in a folder."""
    if kind == "eagle3":
        write_folder(folder, target, num_known=num_known)
        return folder
    if kind == "early_exit":
        return None
    return make_glide(target) if kind == "glide" else perturbed(target, 0.2)


def small_model():
    return random_model("llama", seed=4, vocab_size=VOCAB_SIZE, bos_token_id=0, eos_token_id=0)


def small_pair():
    model = small_model()
    return model, perturbed(model, 0.35)


@torch.no_grad()
def exact_distribution(model, sampling, prompt=PROMPT):
    """Probability of each text of LENGTH tokens, indexed by its ids."""
    texts = torch.tensor(list(product(range(VOCAB_SIZE), repeat=LENGTH)))
    prompts = torch.tensor([prompt] * len(texts))
    if model.config.is_encoder_decoder:
        ids = torch.nn.functional.pad(texts[:, :-1], (1, 0), value=0)  # the start token
        logits = model(input_ids=prompts, decoder_input_ids=ids).logits
    else:
        logits = model(torch.cat([prompts, texts[:, :-1]], dim=1)).logits[:, len(prompt) - 1 :]
    types = {"top_k": torch.int32}
    rows = {
        name: torch.full((texts.numel(),), value, dtype=types.get(name, torch.float32))
        for name, value in sampling.items()
    }
    probs = logits_to_probs(logits.flatten(0, 1), **rows, backend="reference").view(logits.shape)
    distribution = probs.gather(2, texts[:, :, None])[:, :, 0].double().prod(dim=1).numpy()
    return (distribution / distribution.sum()).reshape((VOCAB_SIZE,) * LENGTH)


def drawn_counts(models, sampling, spec, num_draws=2_000, prompt=PROMPT, num_more=0):
    """How often each text of LENGTH tokens was drawn, from a target and a drafter or None.

    num_more: tokens that each text goes on with, so that the last draft is whole too.
    """
    model, drafter = models
    engine = Engine(model, drafter, spec=spec, config=EngineConfig(max_batch_size=512))
    params = [
        SamplingParams(**sampling, seed=seed, max_tokens=LENGTH + num_more, ignore_eos=True)
        for seed in range(num_draws)
    ]
    counts = np.zeros((VOCAB_SIZE,) * LENGTH)
    for output in engine.generate([prompt] * num_draws, params):
        counts[output.token_ids[:LENGTH]] += 1
    assert spec.method == "none" or engine.stats.num_draft_tokens > 0
    return counts


def p_value(models, sampling, spec, prompt=PROMPT, **draws):
    """That of texts drawn from a target and a drafter, under the target's exact distribution."""
    counts = drawn_counts(models, sampling, spec, prompt=prompt, **draws)
    return chi_square(counts, exact_distribution(models[0], sampling, prompt))
