"""Random requests without end, a twentieth of them faulty, and everything that must hold of them.

`python -m tests.soak --requests 20000` runs on tiny random models, prints a line of progress now
and then and a JSON summary at the end, and exits with 1 if anything did not hold;
`tests/test_soak.py` runs a short form. Requests join at random, are aborted at random and
preempted, since the caches are small. Each healthy one must have the text that it has alone: a
greedy one by plain decoding, a sampled one with the same seed and drafter, or where that is coupled
without drafts. Each must end once, its
events must add up to its output, no block may be lost, and memory must not grow.
"""

import argparse
import gc
import json
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from fastspec import Engine, EngineConfig, SamplingParams, SpecConfig
from fastspec.drafters import Proposal
from fastspec.engine.request_factory import sample_seed

from .engine.probes import assert_blocks_came_back, count_preemptions
from .models import byte_tokenizer
from .soak_worlds import (
    MAX_MODEL_LEN,
    OWN_SPEC,
    POISONED,
    WORLDS,
    is_plain_chain,
    near,
)

SHIFT = 30  # requests between two moments at which nothing runs
MOST_AT_ONCE = 20
MOST_QUIET = 500  # rounds without an event while requests wait; some read one token at a time
LONGEST_PROMPT = 40
NARROW = "narrow"  # the reference's drafter for a request with a smaller K
SHOWN = 20  # failures in the summary
GROWTH = 1.02  # of objects, and RSS_GROWTH of memory, that counts as flat
RSS_GROWTH = 1.10
FLAT_FROM = 2000  # requests: in shorter runs memory is reported only

FORMS = [
    {"regex": "[a-z0-9 ]{2,20}"},
    {"choice": ["yes", "yellow", "no, never"]},
    {"json": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}},
]
# How each field of SamplingParams is drawn; where a function gives None the field is not passed.
FIELDS = {
    "temperature": lambda rng: rng.choice([0.0, 0.0, 0.7, 1.0, 1.4]),
    "top_k": lambda rng: rng.choice([None, None, 1, 5, 40]),
    "top_p": lambda rng: rng.choice([None, None, 0.5, 0.95]),
    "min_p": lambda rng: rng.choice([None, None, 0.02, 0.3]),
    "seed": lambda rng: rng.choice([0, rng.randrange(2**63)]),
    "max_tokens": lambda rng: rng.choice([1, *[rng.randrange(2, 17)] * 8, None]),
    "stop": lambda rng: rng.choice([None, None, [chr(rng.randrange(32, 127))]]),
    "stop_token_ids": lambda rng: rng.choice([None, [rng.randrange(90)]]),
    "ignore_eos": lambda rng: rng.choice([None, True]),
    "logprobs": lambda rng: rng.choice([None, 0, 3]),
    "prompt_logprobs": lambda rng: rng.choice([None] * 9 + [0, 2]),
    "repetition_penalty": lambda rng: rng.choice([None, None, None, 0.9, 1.3]),
    "presence_penalty": lambda rng: rng.choice([None, None, None, 0.7]),
    "frequency_penalty": lambda rng: rng.choice([None, None, None, -0.2, 0.4]),
    "logit_bias": lambda rng: rng.choice([None, None, {rng.randrange(90): 3.0, 7: -float("inf")}]),
    "bad_words": lambda rng: rng.choice([None, None, None, [[rng.randrange(90)], [3, 4]]]),
    "allowed_token_ids": lambda rng: rng.choice([None] * 7 + [list(range(80))]),
    "min_tokens": lambda rng: rng.choice([None, None, 1]),
    "n": lambda rng: rng.choice([None] * 14 + [2, 3]),
    "num_speculative_tokens": lambda rng: rng.choice([None, None, None, 0, 1, 2]),
    "structured_outputs": lambda rng: rng.choice([None] * 9 + [rng.choice(FORMS)]),
}
# What a form cannot be combined with, or what may leave no token that begins it.
NOT_WITH_FORMS = ("ignore_eos", "min_tokens", "allowed_token_ids", "bad_words")
ABSURD = [
    {"temperature": -1.0},
    {"temperature": float("nan")},
    {"top_p": 0.0},
    {"top_k": "many"},
    {"max_tokens": 0},
    {"n": 0},
    {"stop": [3]},
    {"seed": -1},
    {"num_speculative_tokens": 10**6},
    {"drafter": "nobody"},
    {"drafter": 7},
]
BAD_PROMPTS = [
    [],
    [10**6],
    [-1],
    [1.5],
    [1] * (MAX_MODEL_LEN + 1),
    7,
    None,
    "\ud800",
    [None],
    [[1]],
]


FAULTS = ("propose", "commit", "release", "token_ids")  # how errors of the faulty drafter begin


class FaultyDrafter:
    """Raises, or proposes what no drafter may, most of the time."""

    name = "faulty"

    def __init__(self, rng):
        self._rng = rng

    def propose(self, batch):
        kind = self._rng.randrange(5)
        shape = len(batch.requests), batch.num_speculative_tokens
        if kind == 0:
            raise ZeroDivisionError("propose")
        if kind == 1:
            return None
        if kind == 2:
            return Proposal(torch.zeros(shape))
        return Proposal(torch.full(shape, self._rng.choice([-7, 3, 2**31 - 1]), dtype=torch.int32))

    def commit(self, batch, accepted):
        if self._rng.randrange(4) == 0:
            raise ZeroDivisionError("commit")

    def release(self, request):
        if self._rng.randrange(4) == 0:
            raise ZeroDivisionError("release")


@dataclass
class Sent:
    """A request on its way: what is known of it so far."""

    prompt: list[int]
    params: SamplingParams
    is_aborted: bool = False
    ids: dict[int, list[int]] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)
    outputs: dict[int, list] = field(default_factory=dict)


class World:
    """One model: an engine with a small cache, and one for texts alone."""

    def __init__(self, setting, folder, rng, failures, counts):
        self.name, self.rng = setting.name, rng
        self.failures, self.counts = failures, counts
        self.said = []  # outputs, of which some are predictions of later ones
        self.model, self.draft = (model := setting.make()), near(model)
        self.is_poisoned = bool(model.get_input_embeddings().weight.isnan().any())
        drafts = setting.drafts(model, folder)
        self.specs = {
            name: (spec, drafts[kind])
            for kind, group in setting.drafters.items()
            for name, spec in group.items()
        }
        self.all_drafters = [None, "none", *self.specs]
        self.config = {
            "block_size": (block_size := rng.choice([1, 2, 4, 4, 16])),
            "num_blocks": setting.num_tokens // block_size,
            "prefill_chunk_size": rng.choice([1, 5, 13, 13, 40]),
            "max_batch_size": rng.choice([3, 8, 8, 20]),
            "prefix_caching": setting.shares_prefixes and rng.random() < 0.7,
        }
        small = EngineConfig(max_model_len=MAX_MODEL_LEN, **self.config)
        # Room for a tree behind the longest text: one that the cache cuts off is another tree.
        roomy = EngineConfig(
            max_model_len=MAX_MODEL_LEN,
            block_size=block_size,
            num_blocks=4 * MAX_MODEL_LEN // block_size,
            max_batch_size=1,
        )
        self.engine, self.reference = self._engine(small), self._engine(roomy)
        self.engine.add_drafter("faulty", SpecConfig(num_speculative_tokens=2), FaultyDrafter(rng))
        self.preemptions = count_preemptions(self.engine)

    def _engine(self, config):
        engine = Engine(self.model, self.draft, byte_tokenizer(), spec=OWN_SPEC, config=config)
        for name, given in self.specs.items():
            engine.add_drafter(name, *given)
        return engine

    def shift(self, num_requests):
        """Run so many requests, until nothing is left. Few drafters write them, so that requests of
        one drafter meet, also in shared blocks."""
        self.drafters = self.rng.sample(self.all_drafters, self.rng.choice([1, 2, 4, 4]))
        sent, num_sent, num_quiet = {}, 0, 0
        while num_sent < num_requests or self.engine.has_unfinished:
            for _ in range(self.rng.randrange(4)):
                if num_sent < num_requests and len(sent) < MOST_AT_ONCE:
                    num_sent += 1
                    self._send(sent)
            if sent and self.rng.random() < 0.02:
                self._abort(sent)
            if self.rng.random() < 0.02:
                self._replace_a_drafter(sent)
            try:
                events = self.engine.step()
            except (ZeroDivisionError, ValueError) as error:
                self.counts["errors heard"] += 1
                if not str(error).startswith(FAULTS):
                    self.fail(f"step raised {error!r}")
                continue
            num_quiet = 0 if events or not sent else num_quiet + 1
            if num_quiet > MOST_QUIET:
                return self.fail(f"nothing happens to {[*sent]}")
            for event in events:
                self._note(sent, event)
        for request_id in sent:
            self.fail(f"{request_id} never ended")
        try:
            assert_blocks_came_back(self.engine)
        except AssertionError as error:
            self.fail(f"blocks: {error}")
        if self.engine._loop.inboxes or self.engine._loop.events:
            self.fail("events are left")
        return None

    def fail(self, what):
        self.failures.append(f"{self.name}: {what}")

    def _send(self, sent):
        rng = self.rng
        self.counts["requests"] += 1
        drawn = {name: draw(rng) for name, draw in FIELDS.items()}
        fields = {name: value for name, value in drawn.items() if value is not None}
        prompt = [rng.randrange(90) for _ in range(rng.randrange(1, LONGEST_PROMPT))]
        if rng.random() < 0.4:  # a prefix to share, up to the end of a block or not
            prompt = ([1, 2, 3, 4, 5, 6, 7, 8, 9] * 2)[: rng.randrange(4, 19)] + prompt[:20]
        fields["drafter"] = rng.choice(self.drafters)
        if "structured_outputs" in fields:
            for name in NOT_WITH_FORMS:
                fields.pop(name, None)
        if self.engine.decoder_start_id is not None:
            fields.pop("prompt_logprobs", None)
        if fields["drafter"] == "none":
            fields.pop("num_speculative_tokens", None)
        if rng.random() < 0.05:
            self.counts["faulty"] += 1
            kind = rng.choice(["drafter", "NaN", "parameter", "prompt"])
            if kind == "drafter":
                fields |= {"drafter": "faulty", "temperature": 0.0}
            elif kind == "NaN" and self.is_poisoned:
                prompt[-1] = POISONED
            else:
                bad = rng.choice(BAD_PROMPTS) if kind == "prompt" else prompt
                return self._refused(bad, fields | (rng.choice(ABSURD) if bad is prompt else {}))
        drafter = self.engine._drafter_table[fields["drafter"]].last_drafter
        if getattr(drafter, "copies_texts", False) and rng.random() < 0.4:
            random = [rng.randrange(90) for _ in range(rng.randrange(40))]
            fields["prediction"] = rng.choice([random, prompt[::-1], *self.said[-20:]])
        params = SamplingParams(**fields)
        sent[self.engine.add_request(prompt, params)] = Sent(prompt, params)
        return None

    def _refused(self, prompt, fields):
        """What cannot be run is refused, and leaves nothing."""
        try:
            self.engine.add_request(prompt, SamplingParams(**fields))
        except ValueError:
            self.counts["refused"] += 1
        else:
            self.fail(f"not refused: {prompt!r:.60}, {fields}")

    def _replace_a_drafter(self, sent):
        """A new one knows nothing of the blocks that are shared."""
        in_use = {request.params.drafter for request in sent.values()}
        name = self.rng.choice([*self.specs])
        spec, _ = self.specs[name]
        measures = spec.schedule == "adaptive" and spec.step_costs is None  # in free blocks
        if name not in in_use and not measures:
            self.engine.remove_drafter(name)
            self.engine.add_drafter(name, *self.specs[name])
            self.counts["drafters replaced"] += 1

    def _abort(self, sent):
        request_id = self.rng.choice([*sent])
        sent[request_id].is_aborted = True
        output = self.engine.abort(request_id)
        self.counts["aborted"] += 1
        for one in output.outputs if output else ():
            ids = sent[request_id].ids.setdefault(one.index, [])
            ids[:] = one.token_ids  # its events that nobody has seen are gone
            sent[request_id].texts[one.index] = one.text
            self._end(sent, request_id, one)

    def _note(self, sent, event):
        request = sent.get(event.request_id)
        if request is None or request.outputs.get(event.index):
            self.fail(f"{event.request_id}: an event after its end: {event}")
            return
        request.ids.setdefault(event.index, []).extend(event.token_ids)
        request.texts[event.index] = request.texts.get(event.index, "") + event.text
        if event.output is not None:
            self._end(sent, event.request_id, event.output)

    def _end(self, sent, request_id, output):
        request, index = sent[request_id], output.index
        request.outputs.setdefault(index, []).append(output)
        if len(request.outputs[index]) > 1:
            self.fail(f"{request_id} has ended twice")
        if (output.request_id, output.token_ids) != (request_id, tuple(request.ids[index])):
            self.fail(f"{request_id}: its events are not its output")
        if output.text != request.texts[index]:
            self.fail(f"{request_id}: its texts are {request.texts[index]!r}, not {output.text!r}")
        self.said.append(output.token_ids)
        if len(request.outputs) == request.params.n:
            del sent[request_id]
            for (one,) in request.outputs.values():
                self._compare(request, one)

    def _compare(self, request, output):
        """With the text alone, of which an aborted one has the beginning."""
        params = request.params
        alone = {"n": 1, "seed": sample_seed(params.seed, output.index), **self._way_alone(params)}
        (expected,) = self.reference.generate([request.prompt], replace(params, **alone))
        if alone.get("drafter") == NARROW:
            self.reference.remove_drafter(NARROW)
        self.counts["samples"] += 1
        self.counts[f"ended by {output.finish_reason}"] += 1
        count = len(output.token_ids)
        same = output.token_ids == expected.token_ids[:count]
        if output.finish_reason != "abort" or not request.is_aborted:
            ends = output.finish_reason, output.text, output.error
            same = same and ends == (expected.finish_reason, expected.text, expected.error)
            same = same and count == len(expected.token_ids)
        if same and output.logprobs is not None:
            pairs = zip(output.logprobs, expected.logprobs, strict=False)
            same = all(abs(a - b) < 1e-4 for a, b in pairs)
        if not same:
            self.fail(f"not as alone: {request.prompt}, {params}: {output}, {expected}")

    def _way_alone(self, params):
        """Fields that must give the same text: without drafts, or with a drafter, added here, whose
        own K is the one asked for."""
        spec, draft = self.specs.get(params.drafter, (OWN_SPEC, self.draft))
        num = params.num_speculative_tokens
        if params.temperature == 0 or params.drafter == "none":
            return {"drafter": "none", "num_speculative_tokens": None, "prediction": None}
        if spec.rejection_sample_method == "coupled":
            return {"num_speculative_tokens": 0}
        if not num or not is_plain_chain(spec):
            return {}
        self.reference.add_drafter(NARROW, replace(spec, num_speculative_tokens=num), draft)
        return {"drafter": NARROW, "num_speculative_tokens": None}


def memory():
    """Live objects, and bytes of the process (0 where the system does not tell)."""
    gc.collect()
    statm = Path("/proc/self/statm")
    pages = int(statm.read_text().split()[1]) if statm.exists() else 0
    return {"objects": len(gc.get_objects()), "rss_mib": pages * 4096 // 2**20}


def run(folder, num_requests, seed=0, progress=lambda done: None):
    """The summary of a run, which writes drafts to a folder; its "failures" are empty if everything
    held."""
    rng, failures, counts = random.Random(seed), [], Counter()
    folders = {each.name: folder / each.name for each in WORLDS}
    for each in folders.values():
        each.mkdir()
    worlds = [World(each, folders[each.name], rng, failures, counts) for each in WORLDS]
    shares = [each.share for each in WORLDS]
    start, samples = time.perf_counter(), []
    for world in worlds:  # each at least once, and what is made at first use is made
        world.shift(SHIFT // 5)
    while counts["requests"] < num_requests:
        (world,) = rng.choices(worlds, shares)
        world.shift(min(SHIFT, num_requests - counts["requests"]))
        if counts["requests"] >= (len(samples) + 1) * num_requests / 20:
            samples.append(memory())
        progress(counts["requests"])
    first, last = samples[0], samples[-1]
    if num_requests >= FLAT_FROM:
        if last["objects"] > GROWTH * first["objects"]:
            failures.append(f"objects grew from {first['objects']} to {last['objects']}")
        if last["rss_mib"] > RSS_GROWTH * first["rss_mib"]:
            failures.append(f"memory grew from {first['rss_mib']} to {last['rss_mib']} MiB")
    counts["preempted"] = sum(world.preemptions[0] for world in worlds)
    return {
        "seed": seed,
        "configs": {world.name: world.config for world in worlds},
        "seconds": round(time.perf_counter() - start, 1),
        **counts,
        "memory": samples,
        "num_failures": len(failures),
        "failures": failures[:SHOWN],
    }


def main():
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    start, shown = time.perf_counter(), 0

    def progress(done):
        nonlocal shown
        if done >= shown + max(SHIFT, options.requests // 40) or done == options.requests:
            shown, seconds = done, time.perf_counter() - start
            print(
                f"{done}/{options.requests} requests, {seconds:.0f} s", file=sys.stderr, flush=True
            )

    with TemporaryDirectory() as folder:
        summary = run(Path(folder), options.requests, options.seed, progress)
    print(json.dumps(summary, indent=2))
    return int(summary["num_failures"] > 0)


if __name__ == "__main__":
    sys.exit(main())
