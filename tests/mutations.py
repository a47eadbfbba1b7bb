"""The table of `tests/mutants.py`: file, text that occurs once in it, what replaces it, tests.

`path` is the instruction set of vector code whose object is compiled again and tested.
"""

from typing import NamedTuple

CHAIN = "tests/kernels/test_verify_chain.py tests/kernels/test_verify_chain_options.py"
TREE = "tests/kernels/test_verify_tree.py"
LAW = "tests/kernels/test_distribution.py"
ATTENTION = "tests/kernels/test_tree_attention.py tests/kernels/test_tree_attention_masks.py"
CACHE = "tests/kernels/test_store_kv.py tests/kernels/test_compact_kv.py"
PENALTIES = "tests/kernels/test_penalize.py"
EMULATED_TREE, EMULATED_ROWS = (
    "tests/cuda/test_emulated_tree.py",
    "tests/cuda/test_emulated_rows.py",
)
QUANTIZED = "tests/kernels/test_quantized_linear.py"
GREEDY, TREES = "tests/engine/test_greedy.py", "tests/engine/test_token_trees.py"
SAMPLING = "tests/engine/test_sampling.py"
SHARES = "tests/triton/test_attention_shares.py tests/triton/test_attention.py"
PREFIXES = "tests/engine/test_prefix_caching.py tests/engine/test_prefix_blocks.py"


class Mutation(NamedTuple):
    file: str
    old: str
    new: str
    tests: str
    path: str = ""


def _of(file: str, tests: str, *pairs: tuple[str, str], path: str = "") -> list[Mutation]:
    return [Mutation(file, old, new, tests, path) for old, new in pairs]


MUTATIONS = [
    *_of(
        "csrc/cpu/verify_chain.cpp",
        f"{CHAIN} {LAW}",
        ("uniform * prob < in.lenience * chain", "uniform * prob <= in.lenience * chain"),
        ("chain.proposals[chain.num_proposals] >= 0", "chain.proposals[chain.num_proposals] > 0"),
        (
            "i <= chain.num_proposals; ++i) {\n    const bool",
            "i < chain.num_proposals; ++i) {\n    const bool",
        ),
        ("grown / draft : 1.0);", "grown / draft : 0.5);"),
        ("rest + 1.0 - scale;", "rest + 1.0;"),
        (
            "(chain.index + 1) * (in.num_draft + 1) - 1]",
            "(chain.index + 1) * (in.num_draft + 1) - 2]",
        ),
        ("chain.factor = scales[length];", ""),
    ),
    *_of(
        "csrc/cpu/residual.cpp",
        f"{CHAIN} {LAW}",
        ("begin] = kInfinity;", "begin] = 0.0f;"),
        ("(uniform * total - before) * unit_", "uniform * total - before"),
        ("weigh(chunk, nullptr) / unit_", "weigh(chunk, nullptr)"),
        ("factor * draft.row->sum / target.sum", "draft.row->sum / target.sum"),
        ("std::min(ratio, kMost)", "ratio"),
    ),
    *_of(
        "csrc/cpu/residual.cpp",
        TREE,
        ("draft_.known_weights + begin;", "draft_.known_weights;"),
        ("known = column < count ?", "known = column <= count ?"),
    ),
    *_of(
        "csrc/cpu/rows.inl",
        f"{TREE} {LAW}",
        ("smaller(end, draft.size)", "end"),
        ("i += kLanes) store(out + i, zero)", "i += kLanes) store(out + i, broadcast(1.0f))"),
        path="avx2",
    ),
    *_of(
        "csrc/cpu/verify_tree.cpp",
        f"{TREE} {LAW}",
        ("mass += prob;", "mass = prob;"),
        ("return {child, -1};\n    left.remove(token);", "return {child, -1};"),
        ("== SiblingRule::kWithReplacement", "!= SiblingRule::kWithReplacement"),
        ("taken_ * draft_.prob(token, size_)", "draft_.prob(token, size_)"),
        ("left > 0 ? 1.0 / left : 0.0", "left > 0 ? 1.0 : 0.0"),
        ("taken_ + target_total_ * draft_scale_", "taken_ + target_total_"),
        ("sums_[chunk] = sum_of(weights, chunk);", ""),
        ("sum_of(all.known_weights + chunk * kChunk, chunk)", "sum_of(all.known_weights, chunk)"),
    ),
    *_of(
        "csrc/cpu/compact_kv.cpp",
        CACHE,
        ("prefix + 1 + i)", "prefix + i)"),
        ("task / 2 * call.layer_stride", "0 * call.layer_stride"),
    ),
    *_of(
        "csrc/cpu/store_kv.cpp",
        CACHE,
        ("first * cos[i].wide() - second", "first * cos[i].wide() + second"),
        ("second * cos[i + half].wide()", "second * cos[i].wide()"),
        ("if (slot < 0) return;", "if (slot < -1) return;"),
    ),
    *_of(
        "csrc/cpu/match_suffix.cpp",
        "tests/kernels/test_match_suffix.py",
        ("if (counted > longest ||", "if (counted >= longest ||"),
        ("std::min(count, call.max_match)", "count"),
        ("std::min<int64_t>(seen_to - i, matched[i - seen_from])", "matched[i - seen_from]"),
    ),
    *_of(
        "csrc/cpu/penalize.cpp",
        PENALTIES,
        ("x > 0 ? x / repetition : x * repetition", "x / repetition"),
        ("depth < call.bias_until[entry]", "depth <= call.bias_until[entry]"),
        ("x -= each + presence;", "x -= each;"),
        ("node - 1 : call.parents", "0 : call.parents"),
    ),
    *_of(
        "csrc/cpu/tree_attention_sights.cpp",
        ATTENTION,
        ("tree.root + oldest, 0", "tree.root + oldest - 1, 0"),
        ("if (depths[node] < oldest)", "if (depths[node] <= oldest)"),
        ("(uint64_t{1} << left) - 1", "(uint64_t{1} << left)"),
    ),
    *_of(
        "csrc/cpu/tree_attention.inl",
        ATTENTION,
        ("into.sum[row] * keep + next", "into.sum[row] + next"),
        ("call.sinks[at.head] * kLog2E", "call.sinks[at.head]"),
        path="avx2",
    ),
    *_of(
        "csrc/cpu/tree_attention.cpp",
        "tests/kernels/test_decoder_layers.py",
        ("if (n > 0 && splits_[n - 1].tile == t) return;", "if (n > 0) return;"),
    ),
    *_of(
        "csrc/cpu/tree_attention.cpp",
        ATTENTION,
        ("shares == 1 || at >= end_of_share", "shares == 1 || at > end_of_share"),
    ),
    *_of(
        "csrc/cpu/decoder_layer.cpp",
        "tests/kernels/test_decoder_layers.py",
        ("left.num_heads == right.num_heads &&", ""),
        ("    check_indices(call.attention);\n", ""),
        ("add_branch(call_.attention_out_norm, row);", ""),
        (" + head * kept.head_bytes", ""),
        ("      from += half;\n", ""),
        ("    if (slot < 0) return;\n    const float* from", "    const float* from"),
        ("if (call.kept.num_heads > 0) check_slots(call.kept);", ""),
        (
            "* call_.embedding_size, call_.embedding_size, inputs)",
            ", call_.embedding_size, inputs)",
        ),
    ),
    *_of(
        "csrc/cpu/attention_packed.inl",
        ATTENTION,
        ("<< (kLaneBits - 1 - bit)", "<< bit"),
        ("scratch.seen[row / group]", "scratch.seen[row % group]"),
        path="avx2",
    ),
    *_of(
        "csrc/cpu/attention_amx.inl",
        ATTENTION,
        ("if (!masked || !wild) {", "if (true) {"),
        ("all |= (rows &", "all |= (0xffffu &"),
        ("group_sums[key / kBlock]", "group_sums[0]"),
        ("native(decays[r])", "native(1.0f)"),
        ("keys.keys[key] + head * size", "keys.keys[key]"),
        ("in_place ? call.slot_stride", "in_place ? call.head_size"),
        path="amx",
    ),
    *_of(
        "csrc/cpu/linear_dot.inl",
        "tests/kernels/test_linear.py",
        ("weight + (n + kOutputTile) * depth", "weight + n * depth"),
        ("rows + steps, 64", "rows, 64"),
        path="amx",
    ),
    *_of(
        "csrc/cpu/linear_dot.inl",
        "tests/kernels/test_layers_of_a_decoder.py",
        ("if (n + kOutputTile < out.depth) return;", "return;"),
        ("product.activation, out, block + i, n", "product.activation, out, block, n"),
        ("(i * kStep + n) / 2", "i * kStep / 2"),
        path="amx",
    ),
    *_of(
        "csrc/cpu/linear.cpp",
        "tests/kernels/test_decoder_layers.py",
        ("first = std::max<int64_t>(first - tasks_of(i), 0);", ""),
        ("if (first < tasks_of(i)) {", "if (first == 0) {"),
    ),
    *_of(
        "csrc/cpu/linear.inl",
        "tests/kernels/test_linear.py",
        ("      sums += load_rest", "      load_rest"),
        ("sums[r][i / outputs] = sum_some", "sum_some"),
        ("if (whole < depth) add(whole, [&]", "if (depth < 0) add(whole, [&]"),
        path="avx2",
    ),
    *_of(
        "csrc/cpu/linear_quantized.inl",
        QUANTIZED,
        ("values = left < kNativeLanes ?", "values = left < 1 ?"),
        ("constexpr float kLeast = 1e-30f;", "constexpr float kLeast = 1e-36f;"),
        ("kInfinity - kInfinity : is_zero", "0.0f : is_zero"),
        ("half == 0 ? weights : weights >> 4", "half == 1 ? weights : weights >> 4"),
        ("scale * row[r * stride].scales[half]", "scale * row[r * stride].scales[0]"),
        ("-kZero * row[r * stride].sums[half]", "-kZero * row[r].sums[half]"),
        ("outputs < kNativeLanes ? outputs : kNativeLanes, sums", "kNativeLanes, sums"),
        path="portable",
    ),
    *_of(
        "csrc/cpu/linear_quantized.inl",
        QUANTIZED,
        (
            "_mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w))",
            "_mm256_maddubs_epi16(w, _mm256_sign_epi8(x, w))",
        ),
        ("_mm256_cvtps_epi32(x)", "_mm256_cvttps_epi32(x)"),
        path="avx2",
    ),
    *_of(
        "csrc/cpu/linear_quantized.inl",
        QUANTIZED,
        ("_mm512_mask_sub_epi8(x, is_negative, _mm512_setzero_si512(), x)", "x"),
        path="avx512",
    ),
    *_of(
        "csrc/cpu/linear_quantized.inl",
        QUANTIZED,
        (
            "constexpr int kZero = bits == 4 ? 8 : 128;",
            "constexpr int kZero = bits == 4 ? 8 : 127;",
        ),
        path="avx512_bf16",
    ),
    *_of(
        "kernels/fastspec_kernels/reference/quantized.py",
        QUANTIZED,
        (
            "(groups * (values / squares)).sum(-1, keepdim=True)",
            "(groups * values).sum(-1, keepdim=True) / squares",
        ),
        ("scales.clone(memory_format=torch.contiguous_format)", "scales.contiguous()"),
    ),
    *_of(
        "csrc/cpu/draft_chain.cpp",
        "tests/kernels/test_draft_chain.py",
        ("context_lens_[b] + 1;", "context_lens_[b];"),
        ("      round_row(to);\n", ""),
        ("&hidden_[kept * size_]);  // kept", "&hidden_[b * size_]);  // kept"),
        ("if (count <= step + 1) continue;", "if (count <= step) continue;"),
        ("to.push_back(values[sequence])", "to.push_back(values[0])"),
        ("    check_indices(last);\n", ""),
    ),
    *_of(
        "csrc/cpu/decoder_layer.cpp",
        "tests/kernels/test_quantized_layers.py",
        (" && a.mlp.element == b.mlp.element;", ";"),
    ),
    *_of(
        "csrc/cuda/verify_tree.cu",
        EMULATED_TREE,
        ("tree_.uniform(node_) < mass", "tree_.uniform(child) < mass"),
        ("if (removes && !removed) draft_left", "if (!removed) draft_left"),
        ("for (int model = reads_draft ? 0 : 1;", "for (int model = 1;"),
    ),
    *_of(
        "csrc/cuda/statistics.cuh",
        EMULATED_ROWS,
        ("if (weight >= sampling.min_p) {", "if (weight > 0.9f * sampling.min_p) {"),
    ),
    *_of(
        "csrc/cuda/filter.cuh",
        EMULATED_ROWS,
        ("while (sum + bins[bin] < need)", "while (sum + bins[bin] <= need)"),
    ),
    *_of(
        "csrc/cuda/plan.h",
        "tests/cuda/test_emulation.py -k plan",
        ("2 * (bytes + 1024) <= limits.shared_bytes + 1024", "bytes <= limits.shared_bytes"),
        ("num_rows * plan.cluster > limits.multiprocessors;", "true;"),
    ),
    *_of(
        "kernels/fastspec_kernels/triton/attention_shares.py",
        SHARES,
        ("before = ends <= slot", "before = ends < slot"),
        ("base + needed <= room, parts, 1)", "base <= room, parts, 1)"),
        ("// unit + 1  # a window", "// unit  # a window"),
        ("unit = tl.where(step < run, chunk, run)", "unit = run + chunk * 0"),
        ("V.few_rows, 1, chunk)", "V.few_rows, chunk, 1)"),
    ),
    *_of(
        "kernels/fastspec_kernels/triton/attention_kernels.py",
        SHARES,
        ("(parts > 1) & (begin >= stop)", "begin >= stop"),
        ("(unit < RUN) & (index * unit % RUN == 0)", "(index * unit % RUN == 0)"),
        ("(unit < RUN) & (index * unit % RUN == 0)", "(index < 0)"),
        ("begins = (index <= first) | ", "begins = "),
        ("range(first // AT_ONCE * AT_ONCE, end, AT_ONCE)", "range(first, end, AT_ONCE)"),
        ("        if unit == RUN:  # chunks", "        if unit < 0:  # chunks"),
        ("there = (part < per_group) & ", "there = "),
        (
            "(index >= first) & (index < end)\n            place",
            "(index >= first)\n            place",
        ),
        ("    if length == 0:\n        return\n", ""),
    ),
    *_of(
        "kernels/fastspec_kernels/triton/attention_softmax.py",
        SHARES,
        ("mixed = mixed * decay[:, None]", "mixed = mixed * 1.0"),
        ("value = tl.where(finite, value, 0.0)", "pass"),
        ("sink * LOG2_E - base", "sink - base"),
        ("(base + tl.log2(total)) * LN_2", "base + tl.log2(total)"),
        ("tl.fma(other_total, other_decay, total * decay)", "tl.fma(other_total, decay, total)"),
    ),
    *_of(
        "kernels/fastspec_kernels/triton/attention_masks.py",
        SHARES,
        ("keys[None, :] <= position[:, None]", "keys[None, :] < position[:, None]"),
        ("> (position - sliding_window)[:, None]", ">= (position - sliding_window)[:, None]"),
        ("high = high & _low_bits(num_tokens - 64)", "pass"),
        ("tl.where((node & 32) == 0, low", "tl.where((node & 64) == 0, low"),
    ),
    *_of(
        "kernels/fastspec_kernels/triton/float8.py",
        "tests/kernels/test_float8_caches.py",
        ("+ 0x7FFFF + ((clamped >> 20) & 1)", "+ 0x80000"),
        ("size < 0.015625", "size < 0.0078125"),
        ("tl.minimum(tl.abs(x), LARGEST)", "tl.abs(x)"),
    ),
    *_of(
        "kernels/fastspec_kernels/triton/float8.py",
        "-m check tests/triton/test_compile_attention.py -k 90",
        ("stored.to(tl.float8e4nv, bitcast=True)", "stored.to(tl.float8e5, bitcast=True)"),
    ),
    *_of(
        "csrc/cuda/store_kv.cu",
        "tests/cuda/test_emulated_cache.py",
        ("slot < 0 || slot >= call.num_slots", "slot < 0"),
        ("__fmul_rn(x[0][j], s[1][j])", "__fmul_rn(x[0][j], s[0][j])"),
    ),
    *_of(
        "csrc/cuda/compact_kv.cu",
        "tests/cuda/test_emulated_cache.py",
        ("to < 0 || from == to ? -1 : from", "from == to ? -1 : from"),
        ("smaller(__ldg(call.accepted_len + b), call.num_nodes)", "call.num_nodes"),
        ("const int64_t word = part * kThreads", "const int64_t word = 0 * part"),
    ),
    *_of(
        "kernels/fastspec_kernels/triton/rows.py",
        "tests/triton/test_weights.py",
        ("token % distance + tl.arange", "tl.arange"),
        ("tl.where(gone, 0.0, weights)", "weights"),
    ),
    *_of(
        "kernels/fastspec_kernels/triton/residual.py",
        f"tests/triton/test_weights.py {CHAIN} -k triton",
        ("tl.where(rest >= MASS_UNIT, rest, 0.0)", "tl.where(rest >= 0.0, rest, 0.0)"),
        ("(target_prob * weight)", "target_prob"),
    ),
    *_of(
        "kernels/fastspec_kernels/triton/chain_draw.py",
        f"{CHAIN} -k triton",
        ("tl.where(here, lost, 0)", "0"),
        ("tl.load(verdict.draft_best + at)", "best"),
        (
            "weights = to_mass(weights_of(x, tl.max(x, 0), scale))",
            "weights = (weights_of(x, tl.max(x, 0), scale) * 2147483648.0 + 0.5).to(tl.int64)",
        ),
    ),
    *_of(
        "kernels/fastspec_kernels/triton/tree_rules.py",
        "tests/kernels/test_verify_tree.py -k triton",
        ("tl.where(gone == 0, weights, 0.0)", "weights"),
    ),
    *_of(
        "kernels/fastspec_kernels/triton/tree_walk.py",
        "tests/kernels/test_verify_tree.py -k triton",
        (
            "weights = to_mass(weights_of(x, tl.max(x, 0), scale))",
            "weights = (weights_of(x, tl.max(x, 0), scale) * 2147483648.0 + 0.5).to(tl.int64)",
        ),
    ),
    *_of(
        "kernels/fastspec_kernels/triton/chain_verdict.py",
        f"{CHAIN} -k triton",
        ("tl.minimum(num, stop), stop", "num, stop"),
        ("(length < num) & (greedy == 0)", "(greedy == 0)"),
    ),
    *_of(
        "fastspec/engine/verify.py",
        f"{GREEDY} {TREES} {SAMPLING} tests/engine/test_verdicts.py",
        ("is_whole = accepted_len == proposed", "is_whole = accepted_len != proposed"),
        ("[-1] not in parents", "[-1] in parents"),
        ("len(request.token_ids) - 1 - start, most", "len(request.token_ids) - start, most"),
    ),
    *_of(
        "fastspec/engine/acceptance.py",
        f"{SAMPLING} tests/engine/test_tree_sampling.py tests/engine/test_samples.py",
        ("places + (places >= extra)", "places"),
    ),
    *_of(
        "fastspec/engine/acceptance.py",
        "tests/engine/test_parameters.py -k seed_is_a_text",
        ("lengths[owners] + depths[owners, nodes]", "lengths[owners]"),
    ),
    *_of(
        "fastspec/drafters/tree/copied.py",
        "tests/engine/test_mixed_trees.py",
        ("(parents == self._node[:, None]) & (self._matched == level)[:, None]", "parents >= 0"),
        ("above[:, 0] = self._node", "above[:, 0] = 0"),
        ("draft_logits[requests, rows] = -torch.inf", "pass"),
    ),
    *_of(
        "kernels/fastspec_kernels/backend.py",
        "tests/kernels/test_in_pytorch.py",
        ("            increment_version(written)", "            pass"),
    ),
    *_of(
        "kernels/fastspec_kernels/library.py",
        "tests/kernels/test_in_pytorch.py",
        ('_library.impl(_op, torch.library.fallthrough_kernel, "Autograd")', "pass"),
    ),
    *_of(
        "fastspec/drafters/suffix_first.py",
        "tests/engine/test_suffix_first.py",
        ("if draft_logits is not None:\n                nodes", "if False:\n                nodes"),
        ("token_map[device_tensor(new, torch.int64, device)] = columns", "pass"),
        ("counts[place], writers[place] = len(copy),", "counts[place], writers[place] = 1,"),
    ),
    *_of(
        "fastspec/engine/prefix_index.py",
        PREFIXES,
        ("parent = contents[-1] if contents else root", "parent = root"),
    ),
    *_of(
        "fastspec/engine/block_manager.py",
        f"{PREFIXES} tests/engine/test_requests.py",
        ("missing > self.num_free - num_idle", "missing > self.num_free"),
    ),
    *_of(
        "kernels/fastspec_kernels/triton/product_kernels.py",
        "tests/triton/test_products.py",
        ("            block -= passed\n", ""),
        ("range(0, depth, SLICES * BLOCK_K)", "range(0, depth, BLOCK_K)"),
        ("weight, out, size = weights[i], outs[i], sizes[i]", "weight, out = weights[i], outs[i]"),
        ("bias = biases[i]", "bias = biases[0]"),
        ("activated(gate, SILU) * up", "activated(up, SILU) * gate"),
        (
            "stored = (n < size)[:, None] & (t < num_rows)[None, :]",
            "stored = (n < size)[:, None] & (t >= 0)[None, :]",
        ),
    ),
    *_of(
        "kernels/fastspec_kernels/triton/products.py",
        "tests/triton/test_products.py",
        ("is_narrow = len(rows) <= 8", "is_narrow = len(rows) <= 9"),
        ("return len(rows) <= FEW_ROWS and", "return len(rows) <= FEW_ROWS + 1 and"),
        ("sizes = size, gate.stride(0)", "sizes = size, size"),
        ("if weight is None or (bias is None and present):", "if weight is None:"),
        ("if not (is_like and is_next and part.is_contiguous()):", "if not (is_like and is_next):"),
        ("if not (is_like and is_next and part.is_contiguous()):", "if not is_next:"),
    ),
    *_of(
        "fastspec/engine/loop.py",
        "tests/engine/test_first_step.py",
        ("if num <= most and", "if num <= most + 1 and"),
        ("self.prefill(ends + requests, most)", "self.prefill(requests, most)"),
        ("if not (ends and scheduler.awaits_prefix):", "if True:"),
        ("requests, others, batch_size)", "requests, others, len(running))"),
        ("(is_first or not reads_target)", "is_first"),
        ("(is_first or not reads_target)", "True"),
        ("not request.lacks_prompt_logprobs and (is_first", "(is_first"),
        ('"prefill" if reads_text else "verify"', '"verify"'),
    ),
    *_of(
        "fastspec/engine/speculation.py",
        "tests/engine/test_first_step.py",
        ("return not is_free or request", "return request"),
        ("or request.num_prompt_tokens == 1:", "or False:"),
        (" and not self.spec.synthetic_acceptance_rate", ""),
    ),
    *_of(
        "fastspec/models/graphs.py",
        "tests/engine/test_graphs.py",
        ("a <= b <= factor * a for", "b <= factor * a for"),
        ("RARE_FACTOR if is_rare else NEAR_FACTOR", "NEAR_FACTOR"),
        ("times <= RARE_TIMES", "times < RARE_TIMES"),
        ("if len(self) > most:", "if False:"),
        (
            "            if is_prompt:\n                logger",
            "            if False:\n                logger",
        ),
        (
            "if near is None and is_prompt and (is_early or not",
            "if near is None and (is_early or not",
        ),
        ("if asked.batch + added <= larger.batch:", "if True:"),
    ),
    *_of(
        "fastspec/models/layout.py",
        "tests/engine/test_graphs.py",
        ("min(num_nodes or self.num_tokens,", "min(self.num_tokens,"),
    ),
    *_of(
        "fastspec/models/graphs.py",
        "tests/engine/test_graphed_drafts.py",
        ("del self[oldest], self._occurred[oldest]", "del self[oldest]"),
    ),
    *_of(
        "fastspec/models/loading.py",
        "tests/engine/test_devices.py",
        (
            "if devices != {torch.empty(0, device=device).device}:",
            "if model.device != torch.empty(0, device=device).device:",
        ),
        ("        move_side_by_side(model, device)  # first", "        pass  # first"),
    ),
    *_of(
        "fastspec/drafters/context.py",
        "tests/engine/test_devices.py",
        ("replace(self.config, device=str(self.target_model.device))", "self.config"),
    ),
    *_of(
        "fastspec/drafters/graphed_drafts.py",
        "tests/engine/test_graphed_drafts.py",
        ("span.slot(place, size) if step < num else -1", "span.slot(place, size)"),
        ("place + 1 for place in places", "place for place in places"),
        ("end + min(step, num - 1) for", "end + step - 1 for"),
        ("padded(slots, shape.num_rows, -1)", "padded(slots, shape.num_rows, 0)"),
        ("logits[: len(spans), :num_steps].clone()", "logits[: len(spans), :num_steps]"),
        ("others == [keeps_logits, *draw_inputs]", "True"),
        ("and num_steps <= steps <= most_steps", "and steps <= most_steps"),
        ("times <= RARE_TIMES", "times < RARE_TIMES"),
        ("if min(counts) < num_steps:", "if False:"),
        (
            "key = shape, num_steps, keeps_logits, *draw_inputs",
            "key = shape, num_steps, *draw_inputs",
        ),
        ("runner.draft_view_values(later, False)[0]", "runner.draft_view_values(later, True)[0]"),
        (
            "set_draft_view(following, per_token, per_sequence[:num_rows], False)",
            "set_draft_view(following, per_token, per_sequence[:num_rows], True)",
        ),
        ("ids = picked.clamp(min=0).long()", "ids = picked.clamp(min=1).long()"),
        ("wide += padded(per_token, shape.num_tokens)", "wide += padded([], shape.num_tokens)"),
        ("narrow += padded(per_sequence, shape.batch)", "narrow += padded([], shape.batch)"),
    ),
    *_of(
        "fastspec/drafters/hidden_states.py",
        "tests/engine/test_graphed_drafts.py",
        ("self._unwritten + 2, size", "self._unwritten, size"),
        ("x.start + x.count <= x.target_len for x in filled", "x.count for x in filled"),
        ("torch.where(known, slots, self._slots_of_parents(spans, parents))", "slots"),
    ),
    *_of(
        "fastspec/models/graphs.py",
        "tests/engine/test_graphed_drafts.py",
        ("            buffer[: len(values)].copy_(values)\n", "            pass\n"),
    ),
    *_of(
        "fastspec/models/paged_model.py",
        "tests/engine/test_packed_drafts.py",
        ("[*layers, *own_layers], weight_bits", "layers, weight_bits"),
    ),
    *_of(
        "fastspec/drafters/suffix.py",
        "tests/engine/test_suffix.py",
        ("            del links[len(known) :]", "            pass"),
        ("if depth == 0:", "if False:"),
    ),
    *_of(
        "fastspec/engine/schedule.py",
        "tests/engine/test_adaptive.py",
        ("pace.length = pace.num_idle = 0", "pace.length = 0"),
    ),
    *_of(
        "fastspec/engine/block_manager.py",
        "tests/engine/test_samples.py",
        ("self._index.next_key(request.contents, request.token_ids, request.root)", "None"),
    ),
    *_of(
        "fastspec/engine/loop.py",
        "tests/engine/test_failing_drafters.py",
        (
            "                ended.append((request, end.error is not None))",
            "                self._remove(request, end.error is not None)",
        ),
    ),
]
