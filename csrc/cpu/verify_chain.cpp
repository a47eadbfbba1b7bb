#include <algorithm>
#include <limits>
#include <vector>

#include "parallel.h"
#include "sampling.h"

namespace fastspec::cpu {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// One sequence that takes part.
struct Chain {
  int64_t index;
  const int32_t* proposals;
  int64_t num_proposals;
  Row* target = nullptr;  // num_proposals + 1 rows
  Row* draft = nullptr;   // num_proposals rows; null where proposals are certain, or none is read
  int64_t accepted = 0;
  bool running = true;

  bool greedy() const { return target->sampling.greedy(); }
  bool rejected() const { return accepted < num_proposals; }
};

bool all_valid(const Chain& chain) {
  bool valid = true;
  for (int64_t i = 0; i <= chain.num_proposals; ++i) valid &= chain.target[i].valid;
  for (int64_t i = 0; chain.draft != nullptr && i < chain.num_proposals; ++i) {
    valid &= chain.draft[i].valid;
  }
  return valid;
}

Chain add_chain(const VerifyChainInputs& in, int64_t b, RowBatch& batch) {
  Chain chain{b, in.draft_token_ids + b * in.num_draft, 0};
  const int64_t rows = int64_t{in.cu_rows[b + 1]} - in.cu_rows[b];
  const int64_t limit = std::min(in.num_draft, rows - 1);
  while (chain.num_proposals < limit && chain.proposals[chain.num_proposals] >= 0) {
    ++chain.num_proposals;
  }
  const Sampling sampling = in.parameters.at(b);
  for (int64_t i = 0; i <= chain.num_proposals; ++i) {
    Row& row = batch.add(in.target.row(in.cu_rows[b] + i), sampling);
    if (i == 0) chain.target = &row;
  }
  if (in.draft == nullptr || sampling.greedy()) return chain;
  for (int64_t i = 0; i < chain.num_proposals; ++i) {
    Row& row = batch.add(in.draft[b].row(i), sampling);
    if (i == 0) chain.draft = &row;
  }
  return chain;
}

bool accepts(const VerifyChainInputs& in, const Chain& chain) {
  const int64_t i = chain.accepted;
  const int64_t token = chain.proposals[i];
  if (chain.greedy()) return token == chain.target[i].argmax();
  const double draft_prob = chain.draft == nullptr ? 1.0 : chain.draft[i].prob(token);
  const double uniform = in.uniform_samples[chain.index * (in.num_draft + 1) + i];
  return uniform * draft_prob < in.lenience * chain.target[i].prob(token);
}

// Judges the proposals in order; rows are weighed only as they are reached.
void judge(const VerifyChainInputs& in, std::vector<Chain>& chains, RowBatch& batch) {
  std::vector<Row*> rows;
  for (int64_t i = 0; i <= in.num_draft; ++i) {
    rows.clear();
    for (Chain& chain : chains) {
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

// The weights max(lenience * target - draft, 0) of a rejected chain, chunk by chunk.
class Residual {
 public:
  Residual(const Chain& chain, double lenience)
      : target_(chain.target[chain.accepted]),
        draft_(chain.draft == nullptr ? nullptr : chain.draft + chain.accepted),
        rejected_(chain.proposals[chain.accepted]),
        lenience_(lenience) {}

  // The sum of one chunk's weights.
  double sum(int64_t chunk) const {
    const int64_t position = rejected_ - chunk * kChunk;
    const bool holds_rejected = position >= 0 && position < target_.chunk_size(chunk);
    if (target_.chunk_sums[chunk] <= 0) return 0;
    if (draft_ == nullptr && !holds_rejected) return target_.chunk_sums[chunk];
    float weights[kChunk];
    return weigh(chunk, weights);
  }

  // Fills kChunk weights and returns their sum.
  double weigh(int64_t chunk, float* weights) const {
    const int64_t begin = chunk * kChunk, size = target_.chunk_size(chunk);
    std::fill(weights + size, weights + kChunk, 0.0f);
    // A point mass only takes its token out, so the scale of the other weights does not matter.
    const double factor = draft_ == nullptr ? 1.0 : lenience_ / target_.sum;
    target_.kernels().weigh(target_.logits.at(begin), size, target_.weighting,
                            static_cast<float>(factor), weights);
    float draft_weights[kChunk] = {};
    weigh_draft(chunk, draft_weights);
    return sampling_kernels().lists.subtract(weights, draft_weights, kChunk);
  }

 private:
  void weigh_draft(int64_t chunk, float* weights) const {
    const int64_t begin = chunk * kChunk;
    if (draft_ == nullptr) {
      const int64_t position = rejected_ - begin;
      if (position >= 0 && position < kChunk) weights[position] = kInfinity;
    } else if (chunk < draft_->chunks()) {
      draft_->kernels().weigh(draft_->logits.at(begin), draft_->chunk_size(chunk),
                              draft_->weighting, static_cast<float>(1.0 / draft_->sum), weights);
    }
  }

  const Row& target_;
  const Row* draft_;
  int64_t rejected_;
  double lenience_;
};

int64_t draw_residual(const Residual& residual, const double* chunk_sums, int64_t chunks,
                      double uniform) {
  double total = 0, before = 0;
  for (int64_t chunk = 0; chunk < chunks; ++chunk) total += chunk_sums[chunk];
  if (!(total > 0)) return -1;
  const int64_t chunk = draw_chunk(chunk_sums, chunks, uniform * total, &before);
  float weights[kChunk];
  residual.weigh(chunk, weights);
  return chunk * kChunk + draw_from(weights, kChunk, uniform * total - before);
}

int64_t draw_extra(const VerifyChainInputs& in, const Chain& chain, const double* residual_sums) {
  const Row& row = chain.target[chain.accepted];
  const int64_t width = in.num_draft + 1;
  const double uniform = in.uniform_samples[chain.index * width + in.num_draft];
  if (chain.rejected() && !chain.greedy()) {
    const Residual residual(chain, in.lenience);
    const int64_t token = draw_residual(residual, residual_sums, row.chunks(), uniform);
    if (token >= 0) return token;
  }
  return draw(row, uniform);
}

// Draws the token after the accepted ones and writes the outputs of every chain.
void finish(const VerifyChainInputs& in, const std::vector<Chain>& chains,
            const VerifyChainOutputs& out) {
  const int64_t count = static_cast<int64_t>(chains.size());
  const int64_t chunks = num_chunks(in.target.logits.size);
  const int64_t grain = jobs_per_thread(std::min(in.target.logits.size, kChunk));
  std::vector<double> residual_sums(count * chunks);
  parallel_for(count * chunks, in.draft == nullptr ? count * chunks : grain, [&](int64_t job) {
    const Chain& chain = chains[job / chunks];
    if (!chain.rejected() || chain.greedy()) return;
    residual_sums[job] = Residual(chain, in.lenience).sum(job % chunks);
  });
  parallel_for(count, grain, [&](int64_t i) {
    const Chain& chain = chains[i];
    const int64_t offset = chain.index * (in.num_draft + 1);
    const int64_t extra = draw_extra(in, chain, residual_sums.data() + i * chunks);
    for (int64_t j = 0; j <= chain.accepted; ++j) {
      const int64_t token = j < chain.accepted ? chain.proposals[j] : extra;
      out.output_token_ids[offset + j] = static_cast<int32_t>(token);
      out.logprobs[offset + j] = static_cast<float>(chain.target[j].log_prob(token));
    }
    out.accepted_len[chain.index] = static_cast<int32_t>(chain.accepted);
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
  std::vector<Chain> valid;
  for (const Chain& chain : chains) {
    if (all_valid(chain)) {
      valid.push_back(chain);
    } else {
      out.accepted_len[chain.index] = -1;
    }
  }
  judge(in, valid, batch);
  finish(in, valid, out);
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
