"""GLIDE: the published architecture over pages, the same output, and the published bugs absent."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from fastspec import Engine, EngineConfig, SamplingParams, SpecConfig
from fastspec.glide import GlideLlamaConfig, GlideLlamaForCausalLM, load_glide
from fastspec.glide.paged import GlideRunner
from fastspec.models.paged_model import PagedModel, Span
from fastspec.runner import ModelRunner
from fastspec.train.glide import make_glide
from fastspec_kernels.testing import chi_square

from ..models import EOS_ID, VOCAB_SIZE, random_model
from .test_greedy import GREEDY, PROMPTS, hugging_face_greedy
from .test_sampling import ALPHA, FILTERED, PLAIN, drawn_counts, exact_law
from .test_sampling import VOCAB_SIZE as SMALL_VOCAB

GLIDE = SpecConfig(method="glide")


def random_glide(target, num_layers=1, seed=3, **shape):
    """A draft of a shape unlike the target's, with weights large enough to matter."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 40, "intermediate_size": 56, "num_attention_heads": 5}
    sizes |= {"num_key_value_heads": 5, "head_dim": 8} | shape
    model = make_glide(target, num_layers, **sizes).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=1.5 * parameter.shape[-1] ** -0.5)
            else:
                parameter.uniform_(0.5, 1.5)
    return model


def often_right(target, seed=3):
    """The target itself as draft, but for cross-attention, which disturbs it a little."""
    torch.manual_seed(seed)
    model = make_glide(target, target.config.num_hidden_layers).eval()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.cross_attn.o_proj.weight.normal_(std=0.005)
    return model


def rms_norm(x, weight, eps):
    return weight * x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()


def rotated(x, positions, theta):
    """x [T, H, D] by the angles position * theta ** (-2 i / D), first half with second half."""
    half = x.shape[-1] // 2
    angle = positions[:, None, None] * theta ** (-torch.arange(half).double() / half)
    cos, sin = angle.cos(), angle.sin()
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def attended(query, key, value, visible):
    """[T, H, D] over [S, G, D], visible [T, S]."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = torch.einsum("thd,shd->hts", query, key) * query.shape[-1] ** -0.5
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1).nan_to_num()
    return torch.einsum("hts,shd->thd", weights, value).flatten(1)


@torch.no_grad()
def dense_glide(model, token_ids, target_layers, visible):
    """The architecture of the paper in float64, from the published weight names alone.

    target_layers: keys and values [S, G, D] for each draft layer; visible [T, S].
    """
    weights = {name: tensor.double() for name, tensor in model.state_dict().items()}
    config = model.config
    theta, eps = config.rope_parameters["rope_theta"], config.rms_norm_eps
    positions = torch.arange(len(token_ids)).double()
    causal = positions[:, None] >= positions
    x = weights["model.embed_tokens.weight"][token_ids]
    for index, (large_key, large_value) in enumerate(target_layers):

        def linear(name, states, index=index):
            return states @ weights[f"model.layers.{index}.{name}.weight"].T

        def norm(name, states, index=index):
            return rms_norm(states, weights[f"model.layers.{index}.{name}.weight"], eps)

        h = norm("input_layernorm", x)
        q, k, v = (
            linear(f"self_attn.{n}_proj", h).unflatten(-1, (-1, config.head_dim)) for n in "qkv"
        )
        q, k = rotated(q, positions, theta), rotated(k, positions, theta)
        x = x + linear("self_attn.o_proj", attended(q, k, v, causal))
        q = linear("cross_attn.q_proj", x).unflatten(-1, (-1, config.large_head_dim))
        out = attended(
            rotated(q, positions, theta), large_key.double(), large_value.double(), visible
        )
        x = x + linear("cross_attn.o_proj", out)
        h = norm("post_attention_layernorm", x)
        gated = torch.nn.functional.silu(linear("mlp.gate_proj", h)) * linear("mlp.up_proj", h)
        x = x + linear("mlp.down_proj", gated)
    x = rms_norm(x, weights["model.norm.weight"], eps)
    return x @ weights["lm_head.weight"].T


def runners_of(target, draft, block_size=4):
    num_blocks = 90
    runner = ModelRunner(PagedModel(target, "auto"), num_blocks, block_size, 16)
    num_layers = draft.config.num_hidden_layers
    caches = [runner.caches[layer] for layer in sorted(runner.caches)[-num_layers:]]
    for pair in runner.caches.values():
        for part in pair:
            part.fill_(float("nan"))  # a slot that is read before it is written shows
    return runner, GlideRunner(PagedModel(draft, "auto"), caches, num_blocks, block_size, 16)


def target_pages(runner, layer, table, length):
    """Keys and values [S, G, D] of one sequence as they lie in the pages."""
    return tuple(part[table].flatten(0, 1)[:length] for part in runner.caches[layer])


@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("heads", [{}, {"num_key_value_heads": 4}], ids=["gqa", "mha"])
@torch.inference_mode()
def test_paged_passes_equal_the_dense_architecture(num_layers, heads):
    """Ragged; a prompt longer than 128 tokens; one and two tokens before the drafts."""
    target = random_model("llama", **heads)
    draft = random_glide(target, num_layers, num_key_value_heads=1)
    runner, glide_runner = runners_of(target, draft)
    generator = torch.Generator().manual_seed(8)
    order = torch.randperm(90, generator=generator).tolist()
    texts = [torch.randint(255, (n,), generator=generator).tolist() for n in (151, 9)]
    tables = [order[:45], order[45:50]]
    lengths = [146, 5]  # of which the target has cached all but the last
    target_lens = [length - 1 for length in lengths]
    runner.prefill(
        [text[:n] for text, n in zip(texts, target_lens, strict=True)],
        [Span(table, 0, n) for table, n in zip(tables, target_lens, strict=True)],
    )
    starts = [length - 1 - extra for length, extra in zip(lengths, (0, 1), strict=True)]

    def spans(firsts, counts):
        rows = zip(tables, firsts, counts, target_lens, strict=True)
        return [Span(t, first, count, target_len=n) for t, first, count, n in rows]

    glide_runner.prefill(
        [text[:start] for text, start in zip(texts, starts, strict=True)], spans([0, 0], starts)
    )
    counts = [length - start for length, start in zip(lengths, starts, strict=True)]
    assert counts == [1, 2]
    firsts, rows = starts, [[], []]
    for _ in range(5):
        ids = [
            token
            for text, first, count in zip(texts, firsts, counts, strict=True)
            for token in text[first : first + count]
        ]
        logits = glide_runner.forward(torch.tensor(ids), spans(firsts, counts))
        for kept, part in zip(rows, logits.split(counts), strict=True):
            kept.append(part)
        firsts = [first + count for first, count in zip(firsts, counts, strict=True)]
        counts = [1, 1]
    for text, table, start, n, kept in zip(texts, tables, starts, target_lens, rows, strict=True):
        layers = [
            target_pages(runner, layer, table, n)
            for layer in range(len(runner.caches) - num_layers, len(runner.caches))
        ]
        place, key = torch.arange(len(text))[:, None], torch.arange(n)
        visible = (key <= place) | (place >= start)
        expected = dense_glide(draft, text, layers, visible)[start : start + 5 + (n < 9)]
        actual = torch.cat(kept).double()
        assert (actual - expected).abs().max() < 1e-5 * expected.abs().max()


def test_cross_attention_matters():
    target = random_model("llama")
    draft = random_glide(target)
    runner, glide_runner = runners_of(target, draft)
    runner.prefill([[1, 2, 3]], [Span([0], 0, 3)])
    ids = torch.tensor([1, 2, 3, 4])
    with torch.inference_mode():
        blind, seeing = (glide_runner.forward(ids, [Span([0], 0, 4, target_len=n)]) for n in (0, 3))
    assert blind.isfinite().all()
    assert seeing.isfinite().all()
    assert (blind - seeing).abs().max() > 0.1


@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("num_draft", [1, 3, 6])
def test_greedy_output_is_that_of_plain_decoding(num_layers, num_draft):
    target = random_model("llama")
    expected = [hugging_face_greedy(target, prompt) for prompt in PROMPTS]
    spec = SpecConfig("glide", num_draft)
    config = EngineConfig(max_batch_size=3, block_size=4, prefill_chunk_size=7)
    engine = Engine(target, random_glide(target, num_layers), spec=spec, config=config)
    outputs = engine.generate(PROMPTS, GREEDY)
    assert [output.token_ids for output in outputs] == expected


def test_a_good_draft_is_accepted_and_named():
    target = random_model("llama")
    expected = [hugging_face_greedy(target, prompt) for prompt in PROMPTS]
    engine = Engine(target, often_right(target), spec=GLIDE)
    outputs = engine.generate(PROMPTS, GREEDY)
    assert [output.token_ids for output in outputs] == expected
    assert 0.5 < engine.stats.acceptance_rate < 1
    assert {writer for output in outputs for writer in output.drafters} == {None, "glide"}


@pytest.mark.parametrize("spec", [SpecConfig("glide", 4, cape=True), SpecConfig("tree", 4)])
@pytest.mark.parametrize("num_layers", [1, 2])
def test_greedy_output_with_trees_over_glide(spec, num_layers):
    target = random_model("llama")
    expected = [hugging_face_greedy(target, prompt) for prompt in PROMPTS]
    config = EngineConfig(max_batch_size=3, block_size=4)
    for draft in (often_right(target), random_glide(target, num_layers)):
        engine = Engine(target, draft, spec=spec, config=config)
        outputs = engine.generate(PROMPTS, GREEDY)
        assert [output.token_ids for output in outputs] == expected


@pytest.mark.parametrize("architecture", ["mistral", "qwen3", "gpt_neox", "gemma3"])
def test_other_targets(architecture):
    target = random_model(architecture)
    expected = [hugging_face_greedy(target, prompt) for prompt in PROMPTS]
    engine = Engine(target, random_glide(target), spec=GLIDE)
    outputs = engine.generate(PROMPTS, GREEDY)
    assert [output.token_ids for output in outputs] == expected


def test_preemption_and_prefix_caching():
    target = random_model("llama")
    prompts = [[*range(5, 25), last] for last in (1, 2, 3)]
    expected = [hugging_face_greedy(target, prompt) for prompt in prompts]
    config = EngineConfig(block_size=4, num_blocks=36, prefix_caching=True)
    engine = Engine(target, often_right(target), spec=GLIDE, config=config)
    outputs = engine.generate(prompts, GREEDY)
    assert [output.token_ids for output in outputs] == expected


def test_text_ends_at_an_end_token_inside_a_draft():
    """An accepted end token is the last one: nothing is appended behind it."""
    target = random_model("llama")
    tokens = hugging_face_greedy(target, [1, 2, 3])
    stop = next(t for n, t in enumerate(tokens) if n >= 4 and tokens.index(t) == n)
    params = SamplingParams(temperature=0, max_tokens=40, stop_token_ids=[stop], ignore_eos=True)
    output = Engine(target, often_right(target), spec=GLIDE).generate([[1, 2, 3]], params)[0]
    assert output.token_ids == tokens[: tokens.index(stop) + 1]
    short = SamplingParams(temperature=0, max_tokens=7, ignore_eos=True)
    output = Engine(target, often_right(target), spec=GLIDE).generate([[1, 2, 3]], short)[0]
    assert output.token_ids == tokens[:7]


@pytest.mark.parametrize(
    ("sampling", "cape"),
    [(PLAIN, False), (FILTERED, False), (FILTERED, True)],
    ids=["plain", "filtered", "filtered-cape"],
)
def test_exact_distribution(sampling, cape):
    target = random_model("llama", seed=4, vocab_size=SMALL_VOCAB, bos_token_id=0, eos_token_id=0)
    bins = [(0.4, 2), (1.0, 1)] if cape else None
    spec = SpecConfig("glide", 2, cape=cape, cape_bins=bins)
    counts = drawn_counts((target, random_glide(target)), sampling, spec)
    assert chi_square(counts, exact_law(target, sampling)) > ALPHA


def test_glide_is_remembered_when_speculation_is_switched():
    target = random_model("llama")
    expected = hugging_face_greedy(target, [1, 2, 3])
    engine = Engine(target)
    engine.enable_spec_dec(often_right(target), n_spec_tokens=1, use_glide_drafter=True)
    for use_glide_drafter in (False, True):
        engine.disable_spec_dec()
        assert engine.generate([[1, 2, 3]], GREEDY)[0].token_ids == expected
        engine.enable_spec_dec(n_spec_tokens=4, use_glide_drafter=use_glide_drafter)
        output = engine.generate([[1, 2, 3]], GREEDY)[0]
        assert output.token_ids == expected
        assert "glide" in output.drafters
    engine.clear_spec_dec()
    with pytest.raises(ValueError, match="drafter"):
        engine.enable_spec_dec(use_glide_drafter=True)
    engine.enable_spec_dec(target)
    with pytest.raises(ValueError, match="use_glide_drafter: the drafter to enable is no GLIDE"):
        engine.enable_spec_dec(use_glide_drafter=True)


def test_glide_below_trees_is_remembered():
    target = random_model("llama")
    engine = Engine(target, often_right(target), spec=SpecConfig("glide", cape=True))
    engine.disable_spec_dec()
    engine.enable_spec_dec(n_spec_tokens=2, use_glide_drafter=True)
    assert "glide" in engine.generate([[1, 2, 3]], GREEDY)[0].drafters


def test_switching_on_in_the_middle_of_a_text():
    target = random_model("llama")
    expected = hugging_face_greedy(target, [1, 2, 3])
    engine = Engine(target, often_right(target), spec=GLIDE)
    engine.disable_spec_dec()
    engine.add_request([1, 2, 3], GREEDY)
    output = None
    for step in range(60):
        if step in (12, 30):
            engine.enable_spec_dec(n_spec_tokens=2)
        if step == 20:
            engine.disable_spec_dec()
        output = next((e.output for e in engine.step() if e.output is not None), output)
        if output is not None:
            break
    assert output is not None
    assert output.token_ids == expected


PUBLISHED = {
    "architectures": ["GlideLlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 40,
    "intermediate_size": 56,
    "num_hidden_layers": 1,
    "num_attention_heads": 5,
    "num_key_value_heads": 5,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "bos_token_id": EOS_ID,
    "eos_token_id": EOS_ID,
    "large_hidden_size": 64,
    "large_num_attention_heads": 4,
}
LAYER = "model.layers.0."
NAMES = {
    "model.embed_tokens.weight",
    "model.norm.weight",
    "lm_head.weight",
    f"{LAYER}input_layernorm.weight",
    f"{LAYER}post_attention_layernorm.weight",
    *(f"{LAYER}self_attn.{name}_proj.weight" for name in "qkvo"),
    *(f"{LAYER}cross_attn.{name}_proj.weight" for name in "qo"),
    *(f"{LAYER}mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
}


def test_published_folder_loads_and_round_trips(tmp_path):
    target = random_model("llama", num_key_value_heads=4)
    draft = random_glide(target)
    published, saved = tmp_path / "published", tmp_path / "saved"
    published.mkdir()
    weights = {name: tensor.contiguous() for name, tensor in draft.state_dict().items()}
    assert set(weights) == NAMES
    save_file(weights, published / "model.safetensors", metadata={"format": "pt"})
    (published / "config.json").write_text(json.dumps(PUBLISHED))
    loaded = load_glide(published, EngineConfig())
    assert loaded.config.large_head_dim == 16
    assert loaded.config.large_num_key_value_heads == 4
    loaded.save_pretrained(saved)
    again = load_file(saved / "model.safetensors")
    assert set(again) == NAMES
    for name, tensor in weights.items():
        assert torch.equal(again[name], tensor)
    outputs = [
        Engine(target, model, spec=GLIDE).generate(PROMPTS, GREEDY)
        for model in (draft, loaded, load_glide(saved, EngineConfig()))
    ]
    runs = [
        [(output.token_ids, output.stats.num_accepted_tokens) for output in part]
        for part in outputs
    ]
    assert runs[0] == runs[1] == runs[2]


def test_models_that_do_not_fit_are_refused(tmp_path):
    target = random_model("llama")
    with pytest.raises(ValueError, match="drafter: GLIDE needs a GLIDE model, got Llama"):
        Engine(target, random_model("llama"), spec=GLIDE)
    with pytest.raises(ValueError, match="drafter: method 'glide' needs a draft model"):
        Engine(target, spec=GLIDE)
    with pytest.raises(ValueError, match="method 'glide', not 'draft_model'"):
        Engine(target, random_glide(target), spec=SpecConfig("draft_model"))
    other = random_glide(random_model("llama", num_key_value_heads=4))
    with pytest.raises(ValueError, match=r"drafter: was made for .*\(4, 16\).*\(2, 16\)"):
        Engine(target, other, spec=GLIDE)
    deep = random_glide(target, 3)
    with pytest.raises(ValueError, match="drafter: has 3 layers, the target 2"):
        Engine(random_model("llama", num_hidden_layers=2), deep, spec=GLIDE)
    shape = {"hidden_size": 40, "num_attention_heads": 5, "intermediate_size": 56}
    plain = LlamaForCausalLM(GlideLlamaConfig(**shape, vocab_size=VOCAB_SIZE))
    plain.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"drafter: cannot load .* is not a GLIDE model"):
        load_glide(tmp_path, EngineConfig())


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"large_num_attention_heads": 5, "large_num_key_value_heads": 2}, "large_num_attention"),
        ({"block_size": 0}, "block_size"),
        ({"use_remap": True}, "use_remap"),
    ],
)
def test_shapes_that_do_not_fit_together(fields, named):
    with pytest.raises(ValueError, match=named):
        GlideLlamaConfig(**fields)


def test_a_glide_model_runs_as_glide_whatever_it_is_called():
    """Passed as an object it needs no flag; without cross-attention it would only be worse."""
    target = random_model("llama")
    model: GlideLlamaForCausalLM = often_right(target)
    engine = Engine(target, model)
    assert "glide" in engine.generate([[1, 2, 3]], GREEDY)[0].drafters
