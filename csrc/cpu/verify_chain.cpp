#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "parallel.h"
#include "residual.h"
#include "sampling.h"

namespace fastspec::cpu {
namespace {

// One sequence that takes part.
struct Chain {
  int64_t index;
  const int32_t* proposals;
  int64_t num_proposals;
  Row* target = nullptr;  // num_proposals + 1 rows
  Row* draft = nullptr;   // num_proposals rows; null if proposals are point masses, or not read
  int64_t accepted = 0;
  bool running = true;
  bool ends_invalid = false;  // the row after the last proposal cannot be used
  bool valid = true;
  double factor = 1.0;                  // of the target in the residual
  const Row* rejected_draft = nullptr;  // the draft row at the first rejection

  bool greedy() const { return target->sampling.greedy(); }
  bool rejected() const { return accepted < num_proposals; }
};

// Ends a chain at the first invalid row of either model; the sequence fails if it gets there.
void cut_at_invalid_row(Chain& chain) {
  for (int64_t i = 0; i <= chain.num_proposals; ++i) {
    const bool has_draft = chain.draft != nullptr && i < chain.num_proposals;
    if (chain.target[i].valid && (!has_draft || chain.draft[i].valid)) continue;
    chain.num_proposals = i;
    chain.ends_invalid = true;
  }
}

Chain add_chain(const VerifyChainInputs& in, int64_t b, RowBatch& batch) {
  Chain chain{b, in.draft_token_ids + b * in.num_draft, 0};
  const int64_t rows = int64_t{in.cu_rows[b + 1]} - in.cu_rows[b];
  const int64_t limit = std::min(in.num_draft, rows - 1);
  while (chain.num_proposals < limit && chain.proposals[chain.num_proposals] >= 0) {
    ++chain.num_proposals;
  }
  const Sampling sampling = in.parameters.at(b);
  for (int64_t i = in.cu_rows[b]; i <= in.cu_rows[b] + chain.num_proposals; ++i) {
    Row& row = batch.add(in.target.row(i), sampling, in.target.allowed(i));
    if (chain.target == nullptr) chain.target = &row;
    row.likely_needed = i == in.cu_rows[b];
  }
  chain.factor = in.lenience;
  if (in.draft == nullptr || in.draft_logsumexp != nullptr || sampling.greedy()) return chain;
  for (int64_t i = 0; i < chain.num_proposals; ++i) {
    Row& row = batch.add(in.draft[b].row(i), sampling);
    if (i == 0) chain.draft = &row;
    row.likely_needed = i == 0;
  }
  return chain;
}

Draft draft_at(const VerifyChainInputs& in, const Chain& chain, int64_t i) {
  const Row* row = chain.draft == nullptr ? nullptr : chain.draft + i;
  return {row, chain.proposals[i], in.draft_token_map};
}

// exp(logit / temperature - logsumexp) of proposal i; NaN if undefined.
double prob_by_logsumexp(const VerifyChainInputs& in, const Chain& chain, int64_t i) {
  constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
  const double logsumexp = in.draft_logsumexp[chain.index * in.num_draft + i];
  if (!std::isfinite(logsumexp)) return kNaN;
  Row row{};
  row.logits = in.draft[chain.index].row(i);
  const int64_t column = draft_at(in, chain, i).column(chain.proposals[i], in.target.logits.size);
  if (column < 0 || column >= row.logits.size) return 0.0;
  const double logit = row.logit(column);
  if (logit == -std::numeric_limits<double>::infinity()) return 0.0;
  const double prob = std::exp(logit / chain.target->sampling.temperature - logsumexp);
  return std::isfinite(prob) ? prob : kNaN;
}

// The draft probability of proposal i.
double draft_prob(const VerifyChainInputs& in, const Chain& chain, int64_t i) {
  if (in.draft == nullptr) return 1.0;
  if (in.draft_logsumexp != nullptr) return prob_by_logsumexp(in, chain, i);
  return draft_at(in, chain, i).prob(chain.proposals[i], in.target.logits.size);
}

bool accepts(const VerifyChainInputs& in, Chain& chain) {
  const int64_t i = chain.accepted;
  const int64_t token = chain.proposals[i];
  const double prob = draft_prob(in, chain, i);
  chain.valid = !std::isnan(prob);
  const double uniform = in.uniform_samples[chain.index * (in.num_draft + 1) + i];
  return uniform * prob < in.lenience * chain.target[i].prob(token);
}

// Verifies greedy chains, which need weights only for log-probabilities. A chain that reaches an
// invalid row becomes invalid.
void verify_greedy(std::vector<Chain>& chains, RowBatch& batch) {
  std::vector<Row*> rows;
  for (Chain& chain : chains) {
    if (!chain.greedy()) continue;
    chain.running = false;
    while (chain.rejected() &&
           chain.proposals[chain.accepted] == chain.target[chain.accepted].argmax()) {
      ++chain.accepted;
    }
    chain.valid = chain.rejected() || !chain.ends_invalid;
    for (int64_t i = 0; chain.valid && i <= chain.accepted; ++i) rows.push_back(chain.target + i);
  }
  batch.weigh(rows);
}

// Verifies the proposals in order; rows are weighed only when reached. Validity is as above.
void verify_in_order(const VerifyChainInputs& in, std::vector<Chain>& chains, RowBatch& batch) {
  std::vector<Row*> rows;
  for (int64_t i = 0; i <= in.num_draft; ++i) {
    rows.clear();
    for (Chain& chain : chains) {
      if (!chain.rejected() && chain.ends_invalid) chain.running = chain.valid = false;
      if (!chain.running) continue;
      rows.push_back(chain.target + i);
      if (chain.draft != nullptr && chain.rejected()) rows.push_back(chain.draft + i);
    }
    if (rows.empty()) return;
    batch.weigh(rows);
    for (Chain& chain : chains) {
      if (!chain.running) continue;
      chain.running = chain.rejected() && accepts(in, chain);
      if (chain.running) ++chain.accepted;
    }
  }
}

// Target over draft probability of each prefix of a chain, clamped to 1 at each step.
std::vector<double> prefix_scales(const VerifyChainInputs& in, const Chain& chain) {
  std::vector<double> scales{1.0};
  for (int64_t i = 0; i < chain.num_proposals; ++i) {
    const double grown = scales.back() * chain.target[i].prob(chain.proposals[i]);
    const double draft = draft_prob(in, chain, i);
    scales.push_back(grown == 0 ? 0.0 : grown < draft ? grown / draft : 1.0);
  }
  return scales;
}

// The probability of accepting a prefix of `length` proposals if no longer one was accepted.
double prefix_threshold(const VerifyChainInputs& in, const Chain& chain, int64_t length,
                        double scale) {
  if (length == chain.num_proposals) return scale;
  const Row& target = chain.target[length];
  double rest = scale * (1.0 - target.prob(chain.proposals[length]));
  if (chain.draft != nullptr) {
    const std::vector<double> sums = Residual(target, draft_at(in, chain, length), scale).sums();
    rest = std::accumulate(sums.begin(), sums.end(), 0.0);
  }
  const double denominator = rest + 1.0 - scale;
  return denominator > 0 ? rest / denominator : 1.0;
}

// Block verification: accepts the longest prefix that passes.
void verify_blocks(const VerifyChainInputs& in, std::vector<Chain>& chains, RowBatch& batch) {
  std::vector<Row*> rows;
  for (Chain& chain : chains) {
    if (chain.greedy()) continue;
    const int64_t count = chain.num_proposals + (chain.ends_invalid ? 0 : 1);
    for (int64_t i = 0; i < count; ++i) rows.push_back(chain.target + i);
    for (int64_t i = 0; chain.draft != nullptr && i < chain.num_proposals; ++i) {
      rows.push_back(chain.draft + i);
    }
  }
  batch.weigh(rows);
  // Across chains if there are several, otherwise across the chunks of the only one.
  const int64_t grain = weighings_per_thread((in.num_draft + 1) * in.target.logits.size);
  parallel_for(chains.size(), grain, [&](int64_t c) {
    Chain& chain = chains[c];
    if (chain.greedy()) return;
    const std::vector<double> scales = prefix_scales(in, chain);
    const float* uniform = in.uniform_samples + chain.index * (in.num_draft + 1);
    int64_t length = chain.num_proposals;
    while (length > 0 &&
           !(uniform[length - 1] < prefix_threshold(in, chain, length, scales[length]))) {
      --length;
    }
    chain.accepted = length;
    chain.factor = scales[length];
    chain.running = false;
  });
}

// Weighs the draft rows of rejections in `late` if only their log-sum-exp is known yet.
void read_rejected_drafts(const VerifyChainInputs& in, std::vector<Chain>& chains, RowBatch& late) {
  std::vector<Chain*> rejected;
  for (Chain& chain : chains) {
    if (!chain.valid || chain.greedy() || !chain.rejected()) continue;
    if (chain.draft != nullptr) chain.rejected_draft = chain.draft + chain.accepted;
    if (in.draft_logsumexp != nullptr) rejected.push_back(&chain);
  }
  for (Chain* chain : rejected) {
    late.add(in.draft[chain->index].row(chain->accepted), chain->target->sampling);
  }
  late.scan();
  late.weigh(late.valid_rows());
  for (size_t i = 0; i < rejected.size(); ++i) {
    Chain& chain = *rejected[i];
    Row& row = late[i];
    const double logsumexp = in.draft_logsumexp[chain.index * in.num_draft + chain.accepted];
    row.sum = std::exp(logsumexp - row.max / row.sampling.temperature);
    chain.rejected_draft = &row;
    chain.valid = row.valid;
  }
}

Residual residual_of(const VerifyChainInputs& in, const Chain& chain) {
  const int64_t token = chain.proposals[chain.accepted];
  return {chain.target[chain.accepted], Draft{chain.rejected_draft, token, in.draft_token_map},
          chain.factor};
}

int64_t draw_extra(const VerifyChainInputs& in, const Chain& chain, const double* residual_sums) {
  const double uniform = in.uniform_samples[(chain.index + 1) * (in.num_draft + 1) - 1];
  if (chain.rejected() && !chain.greedy()) {
    const int64_t token = residual_of(in, chain).draw(residual_sums, uniform);
    if (token >= 0) return token;
  }
  return draw(chain.target[chain.accepted], uniform);
}

// Draws the token after the accepted ones and writes the outputs of every chain.
void finish(const VerifyChainInputs& in, const std::vector<Chain>& chains,
            const VerifyChainOutputs& out) {
  const int64_t count = static_cast<int64_t>(chains.size());
  const int64_t chunks = num_chunks(in.target.logits.size);
  const int64_t grain = weighings_per_thread(2 * std::min(in.target.logits.size, kChunk));
  std::vector<double> residual_sums(count * chunks);
  parallel_for(count * chunks, in.draft == nullptr ? count * chunks : grain, [&](int64_t job) {
    const Chain& chain = chains[job / chunks];
    if (!chain.valid || !chain.rejected() || chain.greedy()) return;
    residual_sums[job] = residual_of(in, chain).sum(job % chunks);
  });
  parallel_for(count, grain, [&](int64_t i) {
    const Chain& chain = chains[i];
    out.accepted_len[chain.index] = static_cast<int32_t>(chain.valid ? chain.accepted : -1);
    if (!chain.valid) return;
    const int64_t offset = chain.index * (in.num_draft + 1);
    const int64_t extra = draw_extra(in, chain, residual_sums.data() + i * chunks);
    for (int64_t j = 0; j <= chain.accepted; ++j) {
      const int64_t token = j < chain.accepted ? chain.proposals[j] : extra;
      out.output_token_ids[offset + j] = static_cast<int32_t>(token);
      out.logprobs[offset + j] = static_cast<float>(chain.target[j].log_prob(token));
    }
  });
}

void verify_slab(const VerifyChainInputs& in, int64_t begin, int64_t end,
                 const VerifyChainOutputs& out) {
  RowBatch batch((end - begin) * (2 * in.num_draft + 1), in.target.logits.size);
  std::vector<Chain> chains;
  for (int64_t b = begin; b < end; ++b) {
    if (in.cu_rows[b + 1] > in.cu_rows[b]) chains.push_back(add_chain(in, b, batch));
  }
  batch.scan();
  for (Chain& chain : chains) cut_at_invalid_row(chain);
  verify_greedy(chains, batch);
  if (in.block) verify_blocks(in, chains, batch);
  verify_in_order(in, chains, batch);
  RowBatch late(in.draft_logsumexp == nullptr ? 0 : end - begin, in.target.logits.size);
  read_rejected_drafts(in, chains, late);
  finish(in, chains, out);
}

}  // namespace

void verify_chain(const VerifyChainInputs& in, const VerifyChainOutputs& out) {
  const int64_t width = in.num_draft + 1;
  std::fill(out.output_token_ids, out.output_token_ids + in.batch * width, -1);
  std::fill(out.logprobs, out.logprobs + in.batch * width, 0.0f);
  std::fill(out.accepted_len, out.accepted_len + in.batch, 0);
  const int64_t step = std::max<int64_t>(1, kRowsPerSlab / (2 * in.num_draft + 1));
  for (int64_t begin = 0; begin < in.batch; begin += step) {
    verify_slab(in, begin, std::min(in.batch, begin + step), out);
  }
}

}  // namespace fastspec::cpu
