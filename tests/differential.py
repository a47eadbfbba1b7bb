"""Random requests, decoded by Hugging Face's `generate` and by our engine with every drafter.

`python -m tests.differential --requests 400` prints what differs, and exits with 1 if anything
does. Greedy requests must equal `generate` in ids, text, log-probabilities (1e-4) and finish
reason; those that sample must equal our own plain decoding, by `rejection_sample_method="coupled"`.
Requests come in batches of 1 to 16 of unlike ones, in caches so small that some are preempted, and
some are aborted on the way: these must be beginnings of what they would have been.
"""

import argparse
import random
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from tqdm import tqdm
from transformers import LogitsProcessorList, PreTrainedModel, PreTrainedTokenizerBase

from fastspec import Engine, EngineConfig, SamplingParams, SpecConfig
from fastspec.config.methods import methods

from .engine.dflash_models import random_dflash, stored
from .engine.eagle3_models import write_folder
from .engine.glide_models import often_right
from .models import EOS_ID, byte_tokenizer, perturbed, random_model

NUM_BLOCKS = 24  # of 16 tokens: room for some four of sixteen requests
TOLERANCE = 1e-4
_K = {"num_speculative_tokens": 4}
_UNSURE = {"suffix_tokens": 7, "confidence_threshold": 0.3}
# More than the methods with their usual options: copies beside drafts that end where they are
# unsure, and cascades that a copy of the target begins.
_VARIANTS = {
    "cape": SpecConfig("draft_model", cape=True, **_K),
    "copies_first": SpecConfig("draft_model", **_UNSURE, **_K),
    "copied_branch": SpecConfig("tree", tree_suffix=5, **_K),
    "glide_copies": SpecConfig("glide", draft_bits=8, **_UNSURE, **_K),
    "copy_reviews": SpecConfig("cascade", draft_bits=4),
    "eagle3_copies": SpecConfig("eagle3", draft_bits=8, **_UNSURE, **_K),
    "eagle3_tree": SpecConfig("eagle3", tree_nodes=9, tree_width=3, **_K),
    "eagle3_of_copy": SpecConfig("cascade", draft_bits=8),
}
_LEFT_OUT = ("auto", "none", "mtp", "gemma_assistant")  # nothing bundled has their drafts
METHODS = (*_VARIANTS, *(name for name in methods() if name not in _LEFT_OUT))


@dataclass
class Case:
    """A request, what it must give, and after how many tokens it is aborted."""

    prompt: list[int]
    params: SamplingParams
    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[float, ...] = ()
    finish_reason: str = ""
    abort_after: int | None = None


class EveryThird:
    """A processor that depends on the last tokens and on how many there are."""

    def __call__(self, input_ids, scores):
        shift = int(input_ids[0, -3:].sum()) + input_ids.shape[1]
        hit = (torch.arange(scores.shape[1]) + shift) % 3 == 0
        return scores - 1.5 * hit


class Occurrences:
    """Presence and frequency penalties for `generate`, which has none, as OpenAI defines them."""

    def __init__(self, params: SamplingParams, prompt_len: int):
        self._params, self._prompt_len = params, prompt_len

    def __call__(self, input_ids, scores):
        counts = torch.bincount(input_ids[0, self._prompt_len :], minlength=scores.shape[1])
        off = self._params.frequency_penalty * counts + self._params.presence_penalty * (counts > 0)
        return scores - off


def random_case(rng: random.Random, greedy: bool) -> Case:
    """A prompt and any of the parameters that change what is written."""
    prompt = [rng.randrange(256) for _ in range(rng.choice((1, 3, 9, 17, 33, 60)))]
    if rng.random() < 0.3:
        prompt = (prompt[:5] * 14)[: rng.randrange(20, 70)]  # something to look up

    def maybe(share: float, value):
        return value() if rng.random() < share else None

    given = {
        "repetition_penalty": maybe(0.3, lambda: rng.choice((0.8, 1.1, 1.5))),
        "presence_penalty": maybe(0.25, lambda: rng.uniform(-1, 2)),
        "frequency_penalty": maybe(0.25, lambda: rng.uniform(-0.5, 1)),
        "logit_bias": maybe(
            0.25,
            lambda: {
                rng.randrange(263): rng.choice((-3.0, 2.0, 4.0, -torch.inf)) for _ in range(6)
            },
        ),
        "bad_words": maybe(
            0.25, lambda: [[rng.randrange(256) for _ in range(n)] for n in (1, 1, 2)]
        ),
        "allowed_token_ids": maybe(0.15, lambda: [*sorted(rng.sample(range(256), 90)), EOS_ID]),
        "logits_processors": maybe(0.2, lambda: [EveryThird()]),
        "stop_token_ids": maybe(0.4, lambda: rng.sample(range(256), 12)),
        "min_tokens": maybe(0.3, lambda: rng.randrange(8)),
        "logprobs": maybe(0.6, lambda: rng.randrange(4)),
        "ignore_eos": maybe(0.1, lambda: True),
    }
    if "min_tokens" in given and given["min_tokens"] is None:
        given["stop"] = maybe(0.3, lambda: [chr(rng.randrange(33, 127)) for _ in range(4)])
    if not greedy:
        given |= {
            "temperature": rng.choice((0.5, 1.0, 1.4)),
            "top_k": maybe(0.3, lambda: rng.choice((3, 20, 300))),
            "top_p": maybe(0.3, lambda: rng.choice((0.5, 0.95))),
            "min_p": maybe(0.2, lambda: 0.05),
        }
    given = {name: value for name, value in given.items() if value is not None}
    shared = {"max_tokens": rng.randrange(8, 26), "seed": rng.randrange(2**40)}
    params = SamplingParams(**{"temperature": 0.0, **shared, **given})
    abort_after = rng.randrange(1, 8) if rng.random() < 0.08 else None
    return Case(prompt, params, abort_after=abort_after)


@torch.no_grad()
def hugging_face(case: Case, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Case:
    """What `generate` gives for a greedy request, by its own processors where it has them."""
    params, prompt_len = case.params, len(case.prompt)
    ends = [*params.stop_token_ids, *([] if params.ignore_eos else [EOS_ID])]
    own = LogitsProcessorList([Occurrences(params, prompt_len), *params.logits_processors])
    allowed = params.allowed_token_ids
    bad_words = [list(word) for word in params.bad_words]
    bias = {(token_id,): value for token_id, value in (params.logit_bias or {}).items()}
    # `generate` leaves out the bad words that end a text.
    bias |= {(end,): -torch.inf for end in ends if (end,) in params.bad_words}
    input_ids = torch.tensor([case.prompt])
    out = model.generate(
        input_ids,
        attention_mask=torch.ones_like(input_ids),
        do_sample=False,
        max_new_tokens=params.max_tokens,
        min_new_tokens=params.min_tokens or None,
        eos_token_id=ends or None,
        pad_token_id=0,
        repetition_penalty=params.repetition_penalty,
        bad_words_ids=bad_words or None,
        sequence_bias=bias or None,
        prefix_allowed_tokens_fn=None if allowed is None else lambda b, ids: list(allowed),
        logits_processor=own,
        stop_strings=list(params.stop) or None,
        tokenizer=tokenizer if params.stop else None,
        output_scores=True,
        return_dict_in_generate=True,
    )
    token_ids = out.sequences[0, prompt_len:].tolist()
    rows = torch.cat(out.scores).float().log_softmax(-1)
    logprobs = [float(row[i]) for row, i in zip(rows, token_ids, strict=True)]
    is_ended = token_ids[-1] in ends
    text = tokenizer.decode(token_ids[:-1] if is_ended else token_ids, skip_special_tokens=True)
    found = [at for stop in params.stop if (at := text.find(stop)) >= 0]
    return replace(
        case,
        token_ids=tuple(token_ids),
        text=text[: min(found)] if found else text,
        logprobs=tuple(logprobs),
        finish_reason="stop" if found or is_ended else "length",
    )


def expected_cases(
    count: int, seed: int, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> list[Case]:
    """Requests with what they must give, greedy ones by `generate`, others by plain decoding."""
    rng = random.Random(seed)
    cases = [random_case(rng, greedy=index % 3 > 0) for index in range(count)]
    plain = Engine(model, tokenizer=tokenizer, spec=spec_of("none"), config=config_of(512))
    bar = tqdm(cases, "Hugging Face and plain", file=sys.stderr, disable=count < 100)
    expected = []
    for case in bar:
        if case.params.temperature == 0:
            expected.append(hugging_face(case, model, tokenizer))
            continue
        (out,) = plain.generate([case.prompt], case.params)
        expected.append(
            replace(
                case,
                token_ids=out.token_ids,
                text=out.text,
                logprobs=out.logprobs or (),
                finish_reason=out.finish_reason,
            )
        )
    return expected


def config_of(num_blocks: int) -> EngineConfig:
    return EngineConfig(num_blocks=num_blocks, max_batch_size=16, max_model_len=128)


def spec_of(method: str) -> SpecConfig:
    """Its options in this test."""
    if method in _VARIANTS:
        return replace(_VARIANTS[method], rejection_sample_method="coupled")
    options = {"num_speculative_tokens": 4, "rejection_sample_method": "coupled"}
    match method:
        case "cascade":
            return SpecConfig(method, k_matrix=[[2, 2], [0, 3]], rejection_sample_method="coupled")
        case "prompt_lookup":
            return SpecConfig(method, prompt_lookup_max=2, **options)
        case "early_exit":
            return SpecConfig(method, exit_layer=1, **options)
        case _:
            return SpecConfig(method, **options)


def engine_of(
    method: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, seed: int
) -> Engine:
    """An engine with little room, and drafts that are often right, but for EAGLE's."""
    spec = spec_of(method)
    with TemporaryDirectory() as folder:
        drafter = _drafter_of(method, spec, model, Path(folder))
        return Engine(model, drafter, tokenizer, spec, config_of(NUM_BLOCKS))


def _drafter_of(method: str, spec: SpecConfig, model: PreTrainedModel, folder: Path):
    if method.startswith("eagle3"):
        write_folder(folder, model, num_known=200)
        return folder
    if spec.method == "dflash":
        return stored(random_dflash(model), folder)
    if spec.method == "glide" or method == "copy_reviews":
        return often_right(model)
    if spec.method == "cascade":
        return [perturbed(model, 0.1), perturbed(model, 0.4, seed=2)]
    return perturbed(model, 0.2) if spec.method in ("draft_model", "tree") else None


def run(engine: Engine, cases: list[Case], rng: random.Random) -> list[str]:
    """Decode all of them, in waves; what differs from what was expected, in words."""
    faults: list[str] = []
    waiting = list(enumerate(cases))
    running: dict[str, tuple[int, Case, list[str]]] = {}
    while waiting or running:
        if not running or rng.random() < 0.3:
            wave = waiting[: rng.randrange(1, 17)]
            del waiting[: len(wave)]
            for index, case in wave:
                running[engine.add_request(case.prompt, case.params)] = index, case, []
        for event in engine.step():
            if event.request_id not in running:
                continue  # aborted in this loop
            index, case, texts = running[event.request_id]
            texts.append(event.text)
            if event.output is not None:
                del running[event.request_id]
                faults += _differences(index, case, event.output, "".join(texts))
            elif case.abort_after is not None and len(texts) >= case.abort_after:
                out = engine.abort(event.request_id)
                if out is not None:
                    del running[event.request_id]
                    if out.token_ids != case.token_ids[: len(out.token_ids)]:
                        faults.append(f"request {index}, aborted: {out.token_ids} of {case}")
    return faults


def _differences(index: int, case: Case, out, streamed: str) -> list[str]:
    pairs = {
        "token_ids": (out.token_ids, case.token_ids),
        "text": (out.text, case.text),
        "streamed text": (streamed, case.text),
        "finish_reason": (out.finish_reason, case.finish_reason),
    }
    faults = [f"request {index}, {n}: {a!r}, not {b!r}" for n, (a, b) in pairs.items() if a != b]
    if case.params.logprobs is not None and not faults:
        far = max(abs(a - b) for a, b in zip(out.logprobs, case.logprobs, strict=True))
        faults += [f"request {index}, logprobs off by {far}"] if far > TOLERANCE else []
        for top, token_id in zip(out.top_logprobs or (), out.token_ids, strict=False):
            best = list(top.values())[: case.params.logprobs]
            if token_id not in top or best != sorted(best, reverse=True):
                faults.append(f"request {index}, top_logprobs: {top}")
    return [f"{fault} ({out.error or _given(case.params)})" for fault in faults]


def _given(params: SamplingParams) -> dict:
    """The parameters that are not their defaults."""
    default = SamplingParams()
    return {n: v for n, v in vars(params).items() if v != getattr(default, n)}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=400, help="for each method")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS)
    args = parser.parse_args(arguments)
    model, tokenizer = random_model("llama"), byte_tokenizer()
    cases = expected_cases(args.requests, args.seed, model, tokenizer)
    total = 0
    for method in args.methods:
        engine = engine_of(method, model, tokenizer, args.seed)
        faults = run(engine, cases, random.Random(args.seed))
        total += len(faults)
        stats = engine.stats
        print(
            f"{method:14} {len(cases)} requests, {len(faults)} faults,"
            f" {stats.num_output_tokens} tokens, {stats.mean_acceptance_length:.2f} a pass"
        )
        for fault in faults[:5]:
            print("   ", fault)
    return int(total > 0)


if __name__ == "__main__":
    sys.exit(main())
