"""Draft models with another tokenizer that draft text: same output, same distribution."""

import logging
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from fastspec import Engine, EngineConfig, SamplingParams, SpecConfig
from fastspec.drafters import register, unregister
from fastspec.drafters.context import DrafterPlan
from fastspec.drafters.draft_model import DraftModelDrafter
from fastspec.drafters.reencoding import ReencodingDrafter, SpelledTokenizer, share_of_runs
from fastspec.models.loading import load_model, load_tokenizer
from fastspec_kernels.testing import chi_square

from ..models import byte_tokenizer, perturbed, random_model
from .helpers import ALPHA, FILTERED, drawn_counts, exact_distribution, finish, hugging_face_greedy
from .helpers import small_model as small_target
from .probes import request_of

PROMPTS = ["def f(x):\n    return", "caf\u00e9 \u4f60\u597d \U0001f600", "x = [1, 2, 1, 2", "a"]
GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
REENCODING = {"heterogeneous_vocab": "reencoding"}


def byte_level(first, merges, end="<end>"):
    """A byte-level tokenizer whose first ids are these tokens."""
    rest = [char for char in sorted(pre_tokenizers.ByteLevel.alphabet()) if char not in first]
    vocab = {token: index for index, token in enumerate([*first, *rest, end])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end)


def sentencepiece(pre_tokenizer=None, normalizer=None):
    """Words after a space that is written as U+2581, and bytes."""
    words = ["\u2581", "a", "b", "\u2581a", "ab", "\u2581ab"]
    tokens = [*words, *(f"<0x{byte:02X}>" for byte in range(256)), "</s>"]
    vocab = {token: index for index, token in enumerate(tokens)}
    merges = [("\u2581", "a"), ("a", "b"), ("\u2581", "ab")]
    model = models.BPE(vocab=vocab, merges=merges, byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizer
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")


METASPACE = pre_tokenizers.Metaspace(prepend_scheme="first")
PREPENDED = normalizers.Sequence(
    [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
)


def saved(root, name, model, tokenizer):
    model.save_pretrained(root / name)
    tokenizer.save_pretrained(root / name)
    return root / name


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A target that writes bytes of all kinds, whole characters or not, and two drafts."""
    root, target = tmp_path_factory.mktemp("models"), random_model("llama")
    draft = random_model("llama", seed=3, vocab_size=270)
    byte_wise = byte_level(["a", "b", "ab", "\u0120x"], [("a", "b"), ("\u0120", "x")])
    return target, {
        "target": saved(root, "target", target, byte_tokenizer()),
        "bytes": saved(root, "bytes", draft, byte_wise),
        "pieces": saved(root, "pieces", draft, sentencepiece(normalizer=PREPENDED)),
    }


@pytest.mark.parametrize("blocks", [{}, {"block_size": 4, "num_blocks": 34}])
@pytest.mark.parametrize(
    ("draft", "options"),
    [("bytes", {}), ("pieces", {"confidence_threshold": 0.05}), ("bytes", {"suffix_tokens": 6})],
)
def test_greedy_output_is_that_of_plain_decoding(draft, options, blocks, folders):
    """With few blocks requests are preempted, and take turns in the draft model's cache."""
    target, paths = folders
    spec = SpecConfig("draft_model", 4, **REENCODING, **options)
    engine = Engine(paths["target"], paths[draft], spec=spec, config=EngineConfig(**blocks))
    prompts = [*PROMPTS, PROMPTS[0] + " x", PROMPTS[0]]
    outputs = engine.generate(prompts, GREEDY)
    tokenizer = byte_tokenizer()
    expected = [hugging_face_greedy(target, tokenizer(p)["input_ids"], 30) for p in prompts]
    assert [output.token_ids for output in outputs] == expected
    assert engine.stats.num_draft_tokens > 0
    assert bool(engine.stats.num_preemptions) == bool(blocks)


def test_the_draft_model_goes_where_the_target_is(monkeypatch, folders):
    """The stand-in for a GPU is PyTorch's word that there is one."""
    target, paths = folders
    tokenizer = load_tokenizer("target", paths["target"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    engine = Engine(target, paths["bytes"], tokenizer, SpecConfig("draft_model", 4, **REENCODING))
    assert len(engine.generate(PROMPTS, GREEDY)[0].token_ids) == 30


def test_exact_distribution(tmp_path):
    """Where a token of one is two of the other, both ways."""
    target = small_target()
    theirs = byte_level(["a", "b", "c", "d", "ab", "dc"], [("a", "b"), ("d", "c")])
    ours = byte_level(["d", "c", "b", "a", "cd", "bb"], [("c", "d"), ("b", "b")])
    path = saved(tmp_path, "target", target, theirs)
    draft = saved(tmp_path, "draft", perturbed(target, 0.35), ours)
    spec = SpecConfig("draft_model", 2, **REENCODING)
    counts = drawn_counts((path, draft), FILTERED, spec, num_draws=2_000, num_more=2)
    assert chi_square(counts, exact_distribution(target, FILTERED)) > ALPHA


@pytest.mark.parametrize("kind", ["standard", "coupled"])
def test_a_seeded_text_does_not_depend_on_the_batch(kind, folders):
    _, paths = folders
    spec = SpecConfig("draft_model", 3, rejection_sample_method=kind, **REENCODING)
    params = [
        SamplingParams(temperature=0.3, seed=seed, max_tokens=24, ignore_eos=True)
        for seed in range(len(PROMPTS))
    ]
    few = EngineConfig(block_size=4, num_blocks=20)
    together = Engine(paths["target"], paths["bytes"], spec=spec, config=few)
    texts = [output.token_ids for output in together.generate(PROMPTS, params)]
    assert together.stats.num_preemptions > 0
    for prompt, each, text in zip(PROMPTS, params, texts, strict=True):
        engine = Engine(paths["target"], paths["bytes"], spec=spec)
        assert engine.generate([prompt], each)[0].token_ids == text


def drafted(engine, prompts, params):
    """What is drafted after each text, of single requests."""
    drafts, propose = {}, engine.drafter.propose

    def noted(batch):
        proposal = propose(batch)
        for request, row in zip(batch.requests, proposal.token_ids.tolist(), strict=True):
            drafts.setdefault(tuple(request.token_ids), row)
        return proposal

    engine.drafter.propose = noted
    engine.generate(prompts, params)
    return drafts


def test_a_trained_draft_beside_its_own_tokenizer():
    """It is accepted as its tokens are, once the text has left the end of the prompt, where the two
    may cut an indentation in different places."""
    prompts = ["def main():\n    parser = argparse.", "import os\nimport sys\n\n\nclass A:\n"]
    params = SamplingParams(temperature=0, max_tokens=96, ignore_eos=True)
    lengths = []
    for options in ({}, REENCODING):
        engine = Engine("tiny", "tiny-draft", spec=SpecConfig("draft_model", 4, **options))
        engine.generate(prompts, params)
        lengths.append(engine.stats.mean_acceptance_length)
    assert lengths[1] > 0.9 * lengths[0] > 2


def test_drafts_depend_on_the_text_alone(folders):
    """Not on what was drafted before it; a token of the target is many of the draft model's."""
    spec = SpecConfig("draft_model", 4, **REENCODING)
    target, draft = load_model("target", "tiny", EngineConfig()), folders[1]["bytes"]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    tokenizer = load_tokenizer("target", "tiny")
    drafts = drafted(Engine(target, draft, tokenizer, spec), ["import os\nimport "], params)
    texts = [text for text in drafts if len(text) < 20]  # with room for K more
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    anew = drafted(Engine(target, draft, tokenizer, spec), list(map(list, texts)), params)
    assert [anew[text] for text in texts] == [drafts[text] for text in texts]
    assert sum(drafts[text][0] >= 0 for text in texts) > 4


def test_a_draft_model_reads_only_what_is_new(folders):
    _, paths = folders
    engine = Engine(
        paths["target"], paths["bytes"], spec=SpecConfig("draft_model", 3, **REENCODING)
    )
    drafter, read = engine.drafter, []
    forward, chain = drafter.runner.forward, drafter._single_call.write

    def counted(input_ids, *args, **options):
        read.append(len(input_ids))
        return forward(input_ids, *args, **options)

    def counted_chain(input_ids, spans, counts, *args):
        if (drafts := chain(input_ids, spans, counts, *args)) is not None:
            read.extend([len(input_ids), *[1] * (max(drafts[2]) - 1)])
        return drafts

    drafter.runner.forward, drafter._single_call.write = counted, counted_chain
    engine.generate("a" * 60, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    assert read[0] == 59
    assert len(read) > 8
    assert max(read[1:]) < 8


def test_which_one_is_chosen_is_said(folders, caplog):
    _, paths = folders
    assert Engine("tiny", "tiny-draft").spec.heterogeneous_vocab is None
    with caplog.at_level(logging.WARNING):
        engine = Engine("tiny", paths["bytes"])
    assert engine.spec.heterogeneous_vocab == "reencoding"
    assert "its text is re-encoded" in caplog.text
    params = SamplingParams(temperature=0, max_tokens=6)
    assert engine.generate("x = 1", params)[0].token_ids == (
        Engine("tiny", spec="none").generate("x = 1", params)[0].token_ids
    )


def test_what_is_said_follows_the_draft_model(folders):
    _, paths = folders
    engine = Engine("tiny", "tiny-draft")
    for draft, chosen in ((paths["bytes"], "reencoding"), ("tiny-draft", None)):
        engine.enable_spec_dec(draft)
        assert engine.spec.heterogeneous_vocab == chosen
    engine = Engine("tiny", spec="prompt_lookup")  # whose options do not include it
    engine.enable_spec_dec(paths["bytes"])
    assert engine.spec == SpecConfig("prompt_lookup")


def test_where_the_tokens_that_both_have_are_drafted(folders):
    _, paths = folders
    for source, options in [
        (paths["target"], {}),
        ("tiny", {"draft_sample_method": "probabilistic"}),
    ]:
        engine = Engine(source, paths["bytes"], spec=SpecConfig(**options))
        assert engine.spec.heterogeneous_vocab == "intersection"
    byte_wise = byte_tokenizer()
    assert share_of_runs(byte_wise, byte_wise, 5) == 1.0


def test_a_method_of_ones_own_may_run_such_a_draft(folders):
    _, paths = folders

    def build(context):
        model = context.load(context.drafter)

        def drafter(target, block_manager):
            runner = context.runner(model, block_manager)
            return DraftModelDrafter(runner, block_manager, context.vocab_size, True)

        return DrafterPlan([model], drafter)

    register("mine", build, needs_draft=True)
    try:
        engine = Engine(paths["target"], paths["bytes"], spec="mine")
    finally:
        unregister("mine")
    assert engine.spec.heterogeneous_vocab is None


def test_a_draft_begins_once():
    """The target's own beginning is not read behind the draft's."""
    ends = {"bos_token": "<s>", "eos_token": "</s>"}

    def beginning(first, chars):
        tokens = [first, *chars, "</s>"]
        vocab = {token: index for index, token in enumerate(tokens)}
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 0)]
        )
        return SpelledTokenizer(PreTrainedTokenizerFast(tokenizer_object=tokenizer, **ends))

    chars = sorted(pre_tokenizers.ByteLevel.alphabet())
    target, own = beginning("<s>", chars), beginning("<s>", chars[::-1])
    blocks = SimpleNamespace(num_blocks=8, block_size=4)
    paged_model = SimpleNamespace(use_own_columns=lambda size: None, chain_parts=lambda: None)
    runner = SimpleNamespace(vocab_size=300, paged_model=paged_model)
    drafter = ReencodingDrafter(cast(Any, runner), cast(Any, blocks), target, own, 300)
    text = drafter._text_of(request_of([0, 5, 6, 7]))
    assert text.own.token_ids.count(0) == 1
    assert own.spelled(text.own.token_ids[1:]) == target.spelled([5, 6, 7])
    assert text.own.first_read_len == 4


def test_what_cannot_be_encoded_anew_is_refused(folders):
    target, paths = folders
    spec = SpecConfig("draft_model", **REENCODING)
    with pytest.raises(ValueError, match="'reencoding' needs a decoder by its path"):
        Engine(paths["target"], perturbed(target, 0.1), spec=spec)
    with pytest.raises(ValueError, match="'reencoding' needs a decoder by its path"):
        Engine(target, paths["bytes"], spec=spec)
    for options in (
        {"method": "tree"},
        {"method": "cascade"},
        {"cape": True},
        {"draft_sample_method": "probabilistic"},
    ):
        with pytest.raises(ValueError, match="heterogeneous_vocab: expected not 'reencoding'"):
            SpecConfig(**options, **REENCODING)
    with pytest.raises(ValueError, match="drafter: heterogeneous_vocab needs a draft model"):
        Engine(target, spec=SpecConfig(**REENCODING))
    with pytest.raises(ValueError, match="heterogeneous_vocab: not for method 'glide'"):
        SpecConfig("glide", **REENCODING)


@pytest.mark.parametrize(
    "tokenizer",
    [
        byte_level(["ab", "\u0120a"], [("a", "b"), ("\u0120", "a")]),
        sentencepiece(METASPACE),
        sentencepiece(normalizer=PREPENDED),
    ],
    ids=["byte-level", "metaspace", "prepended"],
)
def test_a_text_goes_on_where_its_tokens_end(tokenizer):
    """Nothing is put between them, whatever the tokenizer puts before a text."""
    spelled = SpelledTokenizer(tokenizer)
    assert spelled.is_faithful
    whole = " ab abab\nb a  ab b ab ab a" * 3
    _, ids = spelled.extended([], whole)
    assert spelled.spelled(ids) == whole.encode()
    for cut in range(len(ids)):
        begun = ids[:cut]
        more = spelled.spelled(ids[cut:]).decode()
        start, tail = spelled.extended(begun, more)
        assert spelled.spelled(begun[:start] + tail) == whole.encode(), cut
        assert begun[:start] + tail == ids


def test_a_character_in_two_halves():
    """The target has written the first of its bytes; the draft model writes the whole."""
    spelled = SpelledTokenizer(byte_tokenizer())
    ids = byte_tokenizer()("aé")["input_ids"]
    start, tail = spelled.extended(ids[:2], "é", num_dropped=1)
    assert ids[:2][:start] + tail == ids


def test_requests_by_hand(folders):
    """One that comes while others run, and one that is aborted."""
    target, paths = folders
    engine = Engine(
        paths["target"], paths["bytes"], spec=SpecConfig("draft_model", 3, **REENCODING)
    )
    engine.add_request(PROMPTS[0], GREEDY, "first")
    engine.add_request(PROMPTS[1], GREEDY, "second")
    for _ in range(3):
        engine.step()
    engine.abort("first")
    engine.add_request(PROMPTS[2], GREEDY, "first")
    outputs = finish(engine)
    for name, prompt in (("first", PROMPTS[2]), ("second", PROMPTS[1])):
        expected = hugging_face_greedy(target, byte_tokenizer()(prompt)["input_ids"], 30)
        assert outputs[name].token_ids == expected
