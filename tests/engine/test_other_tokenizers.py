"""Draft models with another tokenizer draft the tokens that both have, losslessly."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from fastspec import Engine, EngineConfig, SamplingParams, SpecConfig
from fastspec.models.shared_vocabulary import spellings, with_vocabulary_of

from ..architectures import config_of, random_decoder
from ..models import VOCAB_SIZE, byte_tokenizer, perturbed, random_model
from .glide_models import make_glide
from .helpers import ALPHA, FILTERED, hugging_face_greedy, p_value, small_model

PROMPTS = ["def f(x):", "ab", "x = [1, 2, 1, 2]"]
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
MERGES = [("a", "b"), ("\u0120", "x")]  # " x" as GPT-2 writes it


def other_tokenizer():
    """Bytes in another order, two pairs of them, and an end of another name."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet(), reverse=True)
    tokens = ["<end>", *alphabet, *map("".join, MERGES)]
    vocab = {symbol: index for index, symbol in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


def renumbered(model):
    """The same model for the ids of the other tokenizer."""
    theirs, ours = spellings(byte_tokenizer()), spellings(other_tokenizer())
    id_of = {spelling: index for index, spelling in theirs.items()}
    rows = [id_of.get(ours[index], 0) for index in range(len(ours))]
    rows[0] = 256
    draft = perturbed(model, 0.0)
    with torch.no_grad():
        for weight in {id(w): w for w in draft.parameters() if len(w) == VOCAB_SIZE}.values():
            weight[: len(rows)] = weight[rows].clone()
    return draft


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root, target = tmp_path_factory.mktemp("models"), random_model("llama")
    for name, model, tokenizer in (
        ("target", target, byte_tokenizer()),
        ("draft", renumbered(target), other_tokenizer()),
        ("glide", make_glide(target), other_tokenizer()),
    ):
        model.save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
    return target, root


@pytest.mark.parametrize(
    ("method", "options"),
    [("draft_model", {}), ("draft_model", {"cape": True}), ("tree", {}), ("cascade", {})],
)
def test_greedy_output_is_that_of_plain_decoding(method, options, folders):
    target, root = folders
    draft = [root / "draft"] if method == "cascade" else root / "draft"
    config = EngineConfig(block_size=4, num_blocks=34)
    engine = Engine(root / "target", draft, spec=SpecConfig(method, **options), config=config)
    outputs = engine.generate(PROMPTS, GREEDY)
    tokenizer = byte_tokenizer()
    expected = [hugging_face_greedy(target, tokenizer(p)["input_ids"], 20) for p in PROMPTS]
    assert [output.token_ids for output in outputs] == expected
    assert engine.stats.num_accepted_tokens > 0


def test_the_same_model_under_other_ids_is_always_right(folders):
    """All bytes and the end are shared, so nothing is lost on the way."""
    engine = Engine(folders[1] / "target", folders[1] / "draft")
    engine.generate(PROMPTS, GREEDY)
    assert engine.stats.acceptance_rate == 1.0
    assert f"drafting 257 of {VOCAB_SIZE} tokens" in repr(engine)


@pytest.mark.parametrize("kind", ["gemma3n_text", "gemma4_text", "mamba"])
def test_models_that_read_ids_or_their_head_elsewhere(kind, tmp_path):
    """Gemma has embeddings for each layer, Mamba asks for the dtype of its head."""
    sizes = {"vocab_size": VOCAB_SIZE, "eos_token_id": 256}
    if kind != "mamba":
        sizes |= {"vocab_size_per_layer_input": VOCAB_SIZE, "hidden_size_per_layer_input": 8}
    target = random_decoder(config_of(kind, **sizes))
    renumbered(target).save_pretrained(tmp_path)
    other_tokenizer().save_pretrained(tmp_path)
    engine = Engine(target, tmp_path, tokenizer=byte_tokenizer())
    engine.generate(PROMPTS, replace(GREEDY, allowed_token_ids=range(256)))
    assert engine.stats.acceptance_rate == 1.0


def stub(*tokens):
    vocab = {token: index for index, token in enumerate(tokens)}
    return SimpleNamespace(get_vocab=lambda: vocab, all_special_ids=[], eos_token_id=None)


@pytest.mark.parametrize("method", ["draft_model", "tree"])
def test_sampled_output_has_the_targets_distribution(method):
    """Where the two share four of six tokens."""
    model = small_model()
    own, target = stub("x", "c", "a", "f", "e", "ab"), stub("a", "b", "c", "d", "e", "f")
    draft = with_vocabulary_of(perturbed(model, 0.35), own, target, 6)
    assert draft.get_output_embeddings().token_ids.tolist() == [0, 2, 4, 5]
    assert model.config.vocab_size == len(model.get_input_embeddings().weight) == 6
    spec = SpecConfig(method, 2)
    assert p_value((model, draft), FILTERED, spec, num_more=2) > ALPHA


def test_a_token_that_the_draft_lacks_is_read_as_the_mean_of_its_pieces():
    model = random_model("llama", vocab_size=4, bos_token_id=0, eos_token_id=0)
    weight = model.get_input_embeddings().weight
    draft = with_vocabulary_of(model, stub("a", "b", "ab", "z"), stub("abb", "ab", "q"), 5)
    read = draft.get_input_embeddings().weight
    torch.testing.assert_close(read[0], (weight[2] + weight[1]) / 2)
    torch.testing.assert_close(read[1], weight[2])
    assert not read[2:].any()


def test_spellings_of_different_tokenizers_agree():
    sentencepiece = stub("\u2581the", "<0x0A>", "\u00e9")
    byte_level = stub("\u0120the", "\u010a", "\u00c3\u00a9")
    expected = {0: b" the", 1: b"\n", 2: "\u00e9".encode()}
    assert spellings(sentencepiece) == spellings(byte_level) == expected
    gemma = stub("\u2581the", "\n", "\u00e9", "\u0120")
    assert spellings(gemma) == expected | {3: "\u0120".encode()}
    named = stub("<s>", "a")
    named.all_special_ids = [0]
    assert spellings(named) == {0: "<s>", 1: b"a"}


def test_what_cannot_be_shared_is_refused(folders):
    model = random_model("llama", vocab_size=2, bos_token_id=0, eos_token_id=0)
    with pytest.raises(ValueError, match=r"^drafter: its tokenizer has no token in common"):
        with_vocabulary_of(model, stub("a", "b"), stub("c"), 1)
    with pytest.raises(ValueError, match=r"^drafter: its tokenizer differs from the target's"):
        Engine(folders[1] / "target", folders[1] / "glide", spec="glide")
