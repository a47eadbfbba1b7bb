"""The start of cross-attention: a draft that copies before it was trained."""

import pytest
import torch

from fastspec.drafters.glide.dense import DenseGlimpse, block_mask
from fastspec.drafters.glide.model import GlideLlamaConfig, GlideLlamaForCausalLM
from fastspec.train.data import Lesson
from fastspec.train.glide_lookup import _discriminants, start_as_lookup

VOCAB_SIZE, HEAD_SIZE, PERIOD, LENGTH = 32, 64, 24, 72


def a_draft(num_heads, num_kv_heads, num_layers=1):
    torch.manual_seed(0)
    config = GlideLlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=96,
        intermediate_size=32,
        num_hidden_layers=num_layers,
        num_attention_heads=2,
        head_dim=HEAD_SIZE,
        tie_word_embeddings=False,
        large_num_attention_heads=num_heads,
        large_num_key_value_heads=num_kv_heads,
        large_head_dim=HEAD_SIZE,
    )
    return GlideLlamaForCausalLM(config).eval()


def a_lesson(draft, num_rows, seed=0):
    """Texts that repeat themselves; keys tell the token and the one before, values the next one."""
    generator = torch.Generator().manual_seed(seed)
    fixed = torch.Generator().manual_seed(7)
    pieces = torch.stack(
        [torch.randperm(VOCAB_SIZE, generator=generator)[:PERIOD] for _ in range(num_rows)]
    )
    token_ids = pieces.repeat(1, LENGTH // PERIOD + 1)[:, : LENGTH + 1]
    cos, sin = draft.model.rotary_emb(torch.zeros(1), torch.arange(LENGTH)[None])
    slow = draft.model.rotary_emb.inv_freq.repeat(2) < 1 / 40
    layers = []
    for _ in range(draft.config.num_hidden_layers):
        on, before, after = torch.randn(
            3, VOCAB_SIZE, draft.config.large_num_key_value_heads, HEAD_SIZE, generator=fixed
        )
        content = on[token_ids[:, :-1]] * slow
        content[:, 1:] += before[token_ids[:, :-2]] * slow
        keys = content.movedim(2, 1)
        first, second = keys.chunk(2, dim=-1)
        rotated = keys * cos[:, None] + torch.cat((-second, first), dim=-1) * sin[:, None]
        layers.append((rotated, after[token_ids[:, 1:]].movedim(2, 1)))
    valid = torch.ones_like(token_ids).bool()
    return Lesson(token_ids, valid, layers, torch.empty(0))


@torch.no_grad()
def copied(draft, lesson):
    """How often the draft's best token is right once the text has begun anew."""
    valid = lesson.valid[:, :-1]
    glimpse = DenseGlimpse(lesson.layers, block_mask(valid, draft.config.block_size))
    logits = draft(input_ids=lesson.token_ids[:, :-1], use_cache=False, glimpse=glimpse).logits
    right = logits.argmax(dim=-1) == lesson.token_ids[:, 1:]
    return right[:, PERIOD + 8 :].float().mean().item()


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "num_layers"), [(3, 1, 1), (4, 2, 1), (3, 1, 2)]
)
def test_a_fresh_draft_copies(num_heads, num_kv_heads, num_layers):
    draft = a_draft(num_heads, num_kv_heads, num_layers)
    lesson = a_lesson(draft, 64)
    unseen = a_lesson(draft, 16, seed=1)
    assert copied(draft, unseen) < 0.15
    start_as_lookup(draft, lesson)
    assert copied(draft, unseen) > 0.7


def test_padding_is_left_out():
    """What stands in padding, be it NaN, changes nothing."""
    queries = []
    for junk in (0.0, float("nan")):
        draft = a_draft(3, 1)
        lesson = a_lesson(draft, 32)
        lesson.valid[5:, 50:] = False
        for part in lesson.layers[0]:
            part[5:, :, 50:] = junk
        start_as_lookup(draft, lesson)
        queries.append(draft.model.layers[0].cross_attn.q_proj.weight)
    torch.testing.assert_close(*queries)
    assert queries[0].isfinite().all()


def test_text_without_recurring_tokens_is_refused():
    keys = torch.randn(3, 4)
    with pytest.raises(ValueError, match="lookup_rows: too little text; expected rows"):
        _discriminants(keys, torch.arange(3), 5, torch.ones(4, dtype=torch.bool))
