"""`draft_chain`: the bits of the ops in turn, the tokens of the reference, sequences apart."""

from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

from fastspec_kernels import (
    DraftWeights,
    LayerWeights,
    available_backends,
    decoder_layers,
    draft_chain,
    linear,
    quantize_weight,
    quantized_linear,
    rms_norm,
    sample,
)

from .cases import ints

pytestmark = [
    pytest.mark.usefixtures("instruction_set"),
    pytest.mark.skipif("cpu" not in available_backends(), reason="needs the CPU kernels"),
]

SIZE, HEADS, KV_HEADS, HEAD_SIZE, WIDE = 48, 4, 2, 16, 80
VOCAB, COLUMNS, BLOCK, NUM_BLOCKS, STEPS, POSITIONS = 61, 37, 4, 16, 5, 40
EPS = 1e-5
# Sequences of 9, 3 and 6 tokens, of which the last 3, 1 and 2 are read, 5, 2 and 3 drafts.
CONTEXTS, ROWS, NUM_TOKENS = (9, 3, 6), (3, 1, 2), (5, 2, 3)
TABLE = [[3, 7, 1, 12], [5, 2, 0, -1], [8, 14, 9, 4]]
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
SAMPLING = {
    "temperature": torch.tensor([0.0, 1.0, 0.7]),
    "top_k": ints(0, 0, 20),
    "top_p": torch.tensor([1.0, 0.95, 1.0]),
    "min_p": torch.tensor([0.0, 0.01, 0.0]),
}


def chain(
    dtype: torch.dtype, eagle: bool = False, reduced: bool = False, bits: int | None = None
) -> dict[str, Any]:
    """All arguments of a call, but the backend; the same for the same kinds."""
    generator = torch.Generator().manual_seed(7)

    def random(*shape):
        scale = shape[-1] ** -0.5 if len(shape) > 1 else 1.0
        return (scale * torch.randn(*shape, generator=generator)).to(dtype)

    inputs, queries, keys = SIZE * (2 if eagle else 1), HEADS * HEAD_SIZE, KV_HEADS * HEAD_SIZE
    shapes = {
        "attention_norm": (SIZE,),
        "query_weight": (queries, inputs),
        "key_weight": (keys, inputs),
        "value_weight": (keys, inputs),
        "output_weight": (SIZE, queries),
        "mlp_norm": (SIZE,),
        "gate_weight": (WIDE, SIZE),
        "up_weight": (WIDE, SIZE),
        "down_weight": (SIZE, WIDE),
        "query_bias": (queries,),
    }
    layers = [LayerWeights(**{n: random(*s) for n, s in shapes.items()}) for _ in range(2)]
    head, bias = 4 * random(VOCAB, SIZE), random(VOCAB)
    if bits is not None:
        head, bias = quantize_weight(head[:COLUMNS], bits), bias[:COLUMNS].float()
        layers = [
            LayerWeights(
                **{
                    name: quantize_weight(weight, bits)
                    if name.endswith("_weight")
                    else weight.float()
                    if name.endswith("_bias")
                    else weight
                    for name, weight in layer._asdict().items()
                    if weight is not None
                }
            )
            for layer in layers
        ]
    tokens = torch.randperm(VOCAB, generator=generator)[:COLUMNS].int() if reduced else None
    weights = DraftWeights(
        random(VOCAB, SIZE),
        layers,
        random(SIZE),
        head,
        bias,
        tokens,
        random(SIZE) if eagle else None,
    )
    num_slots = NUM_BLOCKS * BLOCK
    angles = torch.randn(POSITIONS, HEAD_SIZE, generator=generator)
    return {
        "token_ids": torch.randint(VOCAB, (sum(ROWS),), generator=generator),
        "weights": weights,
        "key_caches": [random(NUM_BLOCKS, BLOCK, KV_HEADS, HEAD_SIZE) for _ in layers],
        "value_caches": [random(NUM_BLOCKS, BLOCK, KV_HEADS, HEAD_SIZE) for _ in layers],
        "block_table": torch.tensor(TABLE, dtype=torch.int32),
        "context_lens": ints(*CONTEXTS),
        "cu_rows": ints(0, *accumulate(ROWS)),
        "num_tokens": ints(*NUM_TOKENS),
        "uniform_samples": torch.rand(len(ROWS), STEPS, generator=generator),
        "num_columns": COLUMNS,
        "cos": angles.cos(),
        "sin": angles.sin(),
        "hidden": random(sum(ROWS), SIZE) if eagle else None,
        "hidden_cache": torch.zeros(num_slots, SIZE, dtype=dtype) if eagle else None,
        "eps": EPS,
        **SAMPLING,
    }


KINDS = pytest.mark.parametrize(
    "kind",
    [
        {},
        {"eagle": True, "reduced": True},
        {"bits": 8, "reduced": True},
        {"eagle": True, "bits": 4},
    ],
    ids=["plain", "eagle", "8 bits", "eagle in 4 bits"],
)


def one_sequence(call: dict[str, Any], b: int) -> dict[str, Any]:
    """The call for one of its sequences alone, over the same caches."""
    first, last = sum(ROWS[:b]), sum(ROWS[: b + 1])
    per_sequence = "block_table", "context_lens", "num_tokens", "uniform_samples", *SAMPLING
    alone = {name: call[name][b : b + 1] for name in per_sequence}
    states = call["hidden"]
    return (
        call
        | alone
        | {
            "token_ids": call["token_ids"][first:last],
            "hidden": states if states is None else states[first:last],
            "cu_rows": ints(0, last - first),
        }
    )


def step_by_step(call: dict[str, Any], b: int) -> tuple[list[int], list[Tensor]]:
    """Draft after one sequence with the other ops."""
    own = one_sequence(call, b)
    weights, dtype, table = call["weights"], call["weights"].norm.dtype, TABLE[b]
    ids, states, place = own["token_ids"], own["hidden"], CONTEXTS[b] - ROWS[b]
    tokens, kept = [], []
    for step in range(NUM_TOKENS[b]):
        places = range(place, place + len(ids))
        slots = torch.tensor([table[p // BLOCK] * BLOCK + p % BLOCK for p in places])
        embedded = weights.embedding[ids]
        if weights.embedding_norm is not None:
            embedded = rms_norm(embedded, weights.embedding_norm, EPS)
        hidden = decoder_layers(
            (embedded if states is None else states).float(),
            weights.layers,
            call["key_caches"],
            call["value_caches"],
            slots,
            own["block_table"],
            ints(place + len(ids)),
            ints(0, len(ids)),
            eps=EPS,
            cos=call["cos"][list(places)],
            sin=call["sin"][list(places)],
            embeddings=None if states is None else embedded.float(),
        ).to(dtype)
        if call["hidden_cache"] is not None:
            call["hidden_cache"][slots] = hidden
        normed = rms_norm(hidden[-1:], weights.norm, EPS)
        if weights.head.dtype == torch.uint8:
            logits = quantized_linear(normed, weights.head, COLUMNS, weights.head_bias)
        else:
            logits = linear(normed, weights.head[:COLUMNS], weights.head_bias[:COLUMNS])
        sampling = {name: own[name] for name in SAMPLING}
        column, _ = sample(logits, own["uniform_samples"][:, step], **sampling)
        token = column if weights.head_tokens is None else weights.head_tokens[column.long()]
        tokens.append(int(token))
        kept.append(logits[0])
        states = None if states is None else hidden[-1:]
        ids, place = token.long(), place + len(ids)
    return tokens, kept


@KINDS
@DTYPES
def test_has_the_bits_of_the_ops_that_it_is_made_of(kind, dtype):
    call, other = chain(dtype, **kind), chain(dtype, **kind)
    drawn, counts, logits = draft_chain(**call, keeps_logits=True)
    assert counts.tolist() == [*NUM_TOKENS]
    for b, num in enumerate(NUM_TOKENS):
        tokens, kept = step_by_step(other, b)
        assert drawn[b].tolist() == tokens + [-1] * (STEPS - num)
        assert torch.equal(logits[b, :num], torch.stack(kept))
        assert not logits[b, num:].any()
    for name in ("key_caches", "value_caches"):
        assert all(map(torch.equal, call[name], other[name]))
    if call["hidden_cache"] is not None:
        assert torch.equal(call["hidden_cache"], other["hidden_cache"])


@KINDS
@DTYPES
def test_draws_the_tokens_of_the_reference(kind, dtype):
    ours, theirs = chain(dtype, **kind), chain(dtype, **kind)
    drawn, counts, logits = draft_chain(**ours, keeps_logits=True)
    expected = draft_chain(**theirs, keeps_logits=True, backend="reference")
    assert torch.equal(counts, expected[1])
    tolerance = {torch.float32: 2e-4, torch.bfloat16: 0.15, torch.float16: 0.02}[dtype]
    tolerance = max(tolerance, 0.15 if kind.get("bits") else 0.0)
    agreeing = 0
    for b, num in enumerate(NUM_TOKENS):
        for step in range(num):
            # After another token, which rounding may draw, logits are of another sequence.
            assert (logits[b, step] - expected[2][b, step]).abs().max() <= tolerance
            if drawn[b, step] != expected[0][b, step]:
                break
            agreeing += 1
    exact = dtype == torch.float32 and not kind.get("bits")
    assert agreeing == sum(NUM_TOKENS) if exact else agreeing >= sum(NUM_TOKENS) - 3


@KINDS
def test_sequences_do_not_depend_on_each_other(kind):
    dtype = torch.bfloat16
    drawn, counts, logits = draft_chain(**chain(dtype, **kind), keeps_logits=True)
    for b, num in enumerate(NUM_TOKENS):
        found = draft_chain(**one_sequence(chain(dtype, **kind), b), keeps_logits=True)
        assert torch.equal(found[0][0], drawn[b])
        assert found[1][0] == counts[b]
        assert torch.equal(found[2][0, :num], logits[b, :num])


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_drafts_end_where_they_are_unsure(backend):
    whole = chain(torch.float32)
    drawn, _, logits = draft_chain(**whole, keeps_logits=True, backend=backend)
    sure = []
    for b, num in enumerate(NUM_TOKENS):
        rows = {name: x[b : b + 1].expand(num).contiguous() for name, x in SAMPLING.items()}
        uniforms = whole["uniform_samples"][b, :num]
        _, logprobs = sample(logits[b, :num], uniforms, **rows)
        sure.append(logprobs.cumsum(0).exp().tolist())
    for least in (0.5, 0.05, 1e-3):
        call = chain(torch.float32) | {"confidence_threshold": least}
        found, counts, none = draft_chain(**call, backend=backend)
        assert none.shape == (len(ROWS), 0, COLUMNS)
        for b, num in enumerate(NUM_TOKENS):
            unsure = [step for step in range(num) if sure[b][step] < least]
            expected = min([step + 1 for step in unsure], default=num)
            assert counts[b] == expected
            tokens = drawn[b, :expected].tolist() + [-1] * (STEPS - expected)
            assert found[b].tolist() == tokens


def test_reads_token_0_after_an_invalid_row():
    call = chain(torch.float32)
    call["weights"] = call["weights"]._replace(head_bias=torch.full((VOCAB,), torch.nan))
    drawn, counts, _ = draft_chain(**call)
    assert counts.tolist() == [*NUM_TOKENS]
    assert (drawn == -1).all()
    _, counts, _ = draft_chain(**call, confidence_threshold=0.1)
    assert counts.tolist() == [1, 1, 1]


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_no_sequences_draw_nothing(backend):
    call = one_sequence(chain(torch.float32), 0)
    per_sequence = "block_table", "context_lens", "num_tokens", "uniform_samples", *SAMPLING
    call |= {name: call[name][:0] for name in (*per_sequence, "token_ids")} | {"cu_rows": ints(0)}
    drawn, counts, logits = draft_chain(**call, keeps_logits=True, backend=backend)
    assert drawn.shape == (0, STEPS)
    assert counts.shape == (0,)
    assert logits.shape == (0, STEPS, COLUMNS)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("token_ids", torch.full((6,), VOCAB), r"token_ids: expected tokens from 0 to 60"),
        ("token_ids", torch.full((6,), -1), r"token_ids: expected tokens from 0 to 60"),
        ("num_tokens", ints(5, 0, 3), r"num_tokens: expected from 1 to 5, got \[5, 0, 3\]"),
        ("num_tokens", ints(6, 1, 3), r"num_tokens: expected from 1 to 5, got \[6, 1, 3\]"),
        ("cu_rows", ints(0, 3, 3, 6), r"cu_rows: expected a row of each sequence"),
        ("cos", torch.ones(12, HEAD_SIZE), r"cos: expected factors of 13 positions, got 12"),
        ("cos", torch.ones(0, HEAD_SIZE), r"cos: expected factors of 13 positions, got 0"),
        ("context_lens", ints(9, 15, 6), r"context_lens\[1\]|block_table\[1\]"),
        ("context_lens", ints(9, 12, 6), r"block_table\[1\]"),  # in the second pass
        ("num_columns", VOCAB + 1, r"num_columns: expected at most 61"),
        (
            "confidence_threshold",
            1.5,
            r"confidence_threshold: .* from 0 to 1, got 1.5",
        ),
        ("hidden", torch.zeros(6, SIZE), r"hidden: expected with weights.embedding_norm"),
        ("hidden_cache", torch.zeros(99, SIZE), r"hidden_cache: expected None without hidden"),
    ],
)
def test_refuses_what_would_read_or_write_elsewhere(backend, name, value, message):
    call = chain(torch.float32)
    before = [cache.clone() for cache in call["key_caches"]]
    if name == "cos":
        call["sin"] = value
    with pytest.raises(ValueError, match=message):
        draft_chain(**call | {name: value}, backend=backend)
    assert all(map(torch.equal, before, call["key_caches"]))


def test_refuses_a_wrong_embedding_or_head():
    call = chain(torch.float32, eagle=True, reduced=True)
    weights = call["weights"]
    tokens = weights.head_tokens.clone()
    tokens[3] = VOCAB
    for changed, message in [
        ({"head_tokens": tokens}, "weights.head_tokens: expected tokens from 0 to 60"),
        ({"head_tokens": tokens[1:]}, r"weights.head_tokens: expected shape \[37\]"),
        ({"norm": weights.norm[1:]}, r"weights.norm: expected shape \[48\]"),
        ({"head_bias": weights.head_bias[:20]}, "weights.head_bias: expected 37 values, got 20"),
        ({"embedding": weights.embedding.T}, "weights"),
        ({"layers": []}, "weights.layers: expected a LayerWeights"),
    ]:
        with pytest.raises(ValueError, match=message):
            draft_chain(**call | {"weights": weights._replace(**changed)})
    with pytest.raises(ValueError, match="weights: expected DraftWeights, got tuple"):
        draft_chain(**call | {"weights": tuple(weights)})
    for hidden_cache in (call["hidden_cache"][1:], call["hidden_cache"][:0]):
        with pytest.raises(ValueError, match="hidden_cache: expected a row for each of 64 slots"):
            draft_chain(**call | {"hidden_cache": hidden_cache})


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_refuses_positions_beyond_32_bits(backend, tmp_path):
    call = one_sequence(chain(torch.float32), 0) | {"cos": None, "sin": None, "sliding_window": 8}
    size = KV_HEADS * HEAD_SIZE
    values = torch.from_file(str(tmp_path / "sparse"), shared=True, size=2**30 + size + 2)
    pages = values.as_strided((3, 2**30, KV_HEADS, HEAD_SIZE), (1, 1, HEAD_SIZE, 1))
    call |= {"key_caches": [pages] * 2, "value_caches": [pages] * 2}
    call |= {"block_table": ints([0, 1, 2]), "context_lens": ints(2**31 - 1)}
    with pytest.raises(ValueError, match=r"num_tokens: expected room for as many positions"):
        draft_chain(**call, backend=backend)
    assert not values[-2 * size :].any()


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_tiny_thresholds_are_on(backend):
    call = chain(torch.float32) | {"confidence_threshold": 1e-50}
    call["weights"] = call["weights"]._replace(head_bias=torch.full((VOCAB,), torch.nan))
    assert draft_chain(**call, backend=backend)[1].tolist() == [1, 1, 1]


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_no_sequences_are_checked_as_well(backend):
    call = one_sequence(chain(torch.float32), 0)
    per_sequence = "block_table", "context_lens", "num_tokens", "uniform_samples", *SAMPLING
    call |= {name: call[name][:0] for name in per_sequence} | {"cu_rows": ints(0)}
    with pytest.raises(ValueError, match="cu_rows"):
        draft_chain(**call, backend=backend)


def test_tokens_that_a_pass_overwrites_are_refused():
    call = chain(torch.float32)
    tokens = call["key_caches"][0].fill_(0).view(torch.int32).flatten()
    call["weights"] = call["weights"]._replace(head_tokens=tokens[32 * BLOCK :][:COLUMNS])
    with pytest.raises(ValueError, match="head_tokens"):
        draft_chain(**call)
