#include <algorithm>
#include <memory>
#include <numeric>
#include <optional>
#include <utility>
#include <vector>

#include "parallel.h"
#include "residual.h"
#include "sampling.h"

namespace fastspec::cpu {
namespace {

// One sequence on its way down from the root.
struct Walk {
  int64_t index;
  int64_t num_nodes;
  int64_t node = 0;  // the current node
  int64_t accepted = 0;
  bool ended = false;
  Row* target = nullptr;  // the rows of `node`
  Row* draft = nullptr;
};

// The arguments of one tree.
struct Tree {
  const VerifyTreeInputs& in;
  const Walk& walk;

  int64_t token(int64_t node) const { return in.tree_token_ids[walk.index * in.num_nodes + node]; }
  double uniform(int64_t column) const {
    return in.uniform_samples[walk.index * (in.num_nodes + 1) + column];
  }
  // The first child of the walk's node from `begin` on, num_nodes if there is none.
  int64_t child_from(int64_t begin) const {
    const int32_t* parents = in.parents + walk.index * in.num_nodes;
    while (begin < walk.num_nodes && parents[begin] != walk.node) ++begin;
    return begin;
  }
  int64_t first_child() const { return child_from(walk.node + 1); }
};

// A distribution over the target's vocabulary without some of its tokens.
class Without {
 public:
  // The weights of `all` are known if it has a map.
  Without(const Draft& all, int64_t size) : all_(all), size_(size), sums_(num_chunks(size)) {
    for (int64_t chunk = 0; chunk < num_chunks(size); ++chunk) {
      if (all.known_weights != nullptr) {
        sums_[chunk] = sum_of(all.known_weights + chunk * kChunk, chunk);
      } else if (chunk < all.row->chunks()) {
        sums_[chunk] = all.row->chunk_sums[chunk];
      }
    }
  }

  double prob(int64_t token) const {
    return token < 0 || token >= size_ || removed(token) ? 0.0 : all_.prob(token, size_);
  }
  bool removed(int64_t token) const {
    return std::find(tokens_.begin(), tokens_.end(), token) != tokens_.end();
  }
  void remove(int64_t token) {
    if (token >= 0 && token < size_ && !removed(token)) tokens_.push_back(token);
  }

  // The total remaining probability.
  double total() { return remaining() / all_.row->sum; }
  // The token of the inverse CDF, -1 if nothing remains.
  int64_t draw(double uniform) {
    const double left = remaining();
    if (!(left > 0)) return -1;
    const double bound = uniform * left;
    double before = 0;
    const int64_t chunk = draw_chunk(sums_.data(), num_chunks(size_), bound, &before);
    float weights[kChunk];
    fill(chunk, weights);
    return chunk * kChunk + draw_from(weights, chunk_size(chunk), bound - before);
  }

 private:
  int64_t chunk_size(int64_t chunk) const { return std::min(kChunk, size_ - chunk * kChunk); }

  // The total remaining weight.
  double remaining() {
    float weights[kChunk];
    for (; summed_ < tokens_.size(); ++summed_) {
      const int64_t chunk = tokens_[summed_] / kChunk;
      fill(chunk, weights);
      sums_[chunk] = sum_of(weights, chunk);
    }
    return std::accumulate(sums_.begin(), sums_.end(), 0.0);
  }
  // Sum of the weights above zero; others do not count.
  double sum_of(const float* weights, int64_t chunk) const {
    return sampling_kernels().lists.mass_above(weights, weights, chunk_size(chunk), 0.0f);
  }
  void fill(int64_t chunk, float* weights) const {
    const int64_t begin = chunk * kChunk, size = chunk_size(chunk);
    all_.weigh(begin, size, weights);
    for (const int64_t token : tokens_) {
      if (token >= begin && token < begin + size) weights[token - begin] = 0;
    }
  }

  const Draft all_;
  const int64_t size_;
  std::vector<int64_t> tokens_;
  size_t summed_ = 0;  // tokens whose chunks have been summed without them
  std::vector<double> sums_;
};

// The remainders of target and draft as drawn siblings are rejected one by one. A rejection
// subtracts target_total_ * draft_scale_ * draft from the target, which is never less than what
// remained of the rejected token, so max(target - taken_ * draft, 0) remains in any case.
class Siblings {
 public:
  Siblings(const Row& target, const Draft& draft)
      : target_(target), draft_(draft), size_(target.logits.size) {}
  Siblings(const Siblings&) = delete;  // draft_ may point into weights_

  double target_prob(int64_t token) const {
    if (token < 0 || token >= size_) return 0.0;
    const double gone = taken_ > 0 ? taken_ * draft_.prob(token, size_) : 0.0;
    return std::max(target_.prob(token) - gone, 0.0) / target_total_;
  }
  double draft_prob(int64_t token) const {
    if (token < 0 || token >= size_) return 0.0;
    return (left_ ? left_->prob(token) : draft_.prob(token, size_)) * draft_scale_;
  }

  void reject(int64_t token, bool replaced) {
    if (draft_.token_map != nullptr && draft_.known_weights == nullptr) find_weights();
    const double taken = taken_ + target_total_ * draft_scale_;
    std::vector<double> sums = Residual(target_, draft_, 1.0 / taken).sums();
    const double total = std::accumulate(sums.begin(), sums.end(), 0.0);
    if (taken * total > kRounding) {
      taken_ = taken;
      target_total_ = taken * total;
      sums_ = std::move(sums);
    }
    if (replaced) return;
    if (!left_) left_.emplace(draft_, size_);
    left_->remove(token);
    const double left = left_->total();
    draft_scale_ = left > 0 ? 1.0 / left : 0.0;
  }

  int64_t draw(double uniform) const {
    if (sums_.empty()) return fastspec::cpu::draw(target_, uniform);
    return Residual(target_, draft_, 1.0 / taken_).draw(sums_.data(), uniform);
  }

 private:
  // The maximum sum of the difference of two equal rows.
  static constexpr double kRounding = 0x1p-22;

  // Looking up columns takes longer than weighing them, and each rejection reads the whole row.
  void find_weights() {
    weights_.reset(new float[size_]);
    parallel_for(num_chunks(size_), weighings_per_thread(2 * kChunk), [&](int64_t chunk) {
      const int64_t begin = chunk * kChunk;
      draft_.weigh(begin, std::min(kChunk, size_ - begin), weights_.get() + begin);
    });
    draft_.known_weights = weights_.get();
  }

  const Row& target_;
  Draft draft_;
  const int64_t size_;
  std::unique_ptr<float[]> weights_;  // of the draft by target token, if columns are mapped
  double taken_ = 0.0;
  double target_total_ = 1.0;
  std::vector<double> sums_;  // of the remaining target over `taken_`, by chunk
  std::optional<Without> left_;
  double draft_scale_ = 1.0;
};

// Where the walk continues, or the token to end with.
struct Decision {
  int64_t child;  // num_nodes if none is accepted
  int64_t extra;
};

Decision decide_greedy(const Tree& tree) {
  const int64_t best = tree.walk.target->argmax();
  int64_t child = tree.first_child();
  while (child < tree.walk.num_nodes && tree.token(child) != best)
    child = tree.child_from(child + 1);
  return {child, best};
}

Decision decide_by_mass(const Tree& tree) {
  const Row& row = *tree.walk.target;
  Without left({&row, -1, nullptr}, row.logits.size);
  double mass = 0;
  for (int64_t child = tree.first_child(); child < tree.walk.num_nodes;
       child = tree.child_from(child + 1)) {
    const int64_t token = tree.token(child);
    const double prob = row.prob(token);
    if (!(prob > 0) || left.removed(token)) continue;
    mass += prob;
    if (tree.uniform(tree.walk.node) < mass) return {child, -1};
    left.remove(token);
  }
  const double uniform = tree.uniform(tree.in.num_nodes);
  const int64_t token = left.draw(uniform);
  return {tree.walk.num_nodes, token >= 0 ? token : draw(row, uniform)};
}

Decision decide_drawn(const Tree& tree) {
  Siblings left(*tree.walk.target, {tree.walk.draft, -1, tree.in.draft_token_map});
  for (int64_t child = tree.first_child(); child < tree.walk.num_nodes;
       child = tree.child_from(child + 1)) {
    const int64_t token = tree.token(child);
    if (tree.uniform(child) * left.draft_prob(token) < left.target_prob(token)) return {child, -1};
    left.reject(token, tree.in.sibling_rule == SiblingRule::kWithReplacement);
  }
  return {tree.walk.num_nodes, left.draw(tree.uniform(tree.in.num_nodes))};
}

// Moves to an accepted child, or ends; writes the emitted token.
void advance(const VerifyTreeInputs& in, Walk& walk, const VerifyTreeOutputs& out) {
  const Tree tree{in, walk};
  const bool drawn = in.sibling_rule != SiblingRule::kTargetOnly;
  const Decision decision = walk.target->sampling.greedy()   ? decide_greedy(tree)
                            : drawn && walk.draft != nullptr ? decide_drawn(tree)
                                                             : decide_by_mass(tree);
  walk.ended = decision.child == walk.num_nodes;
  const int64_t token = walk.ended ? decision.extra : tree.token(decision.child);
  const int64_t at = walk.index * in.num_nodes + walk.accepted;
  out.output_token_ids[at] = static_cast<int32_t>(token);
  out.logprobs[at] = static_cast<float>(walk.target->log_prob(token));
  if (walk.ended) return;
  out.path[at] = static_cast<int32_t>(decision.child);
  walk.node = decision.child;
  ++walk.accepted;
}

void clear_outputs(const VerifyTreeInputs& in, int64_t b, const VerifyTreeOutputs& out) {
  const int64_t begin = b * in.num_nodes, end = begin + in.num_nodes;
  std::fill(out.path + begin, out.path + end, -1);
  std::fill(out.output_token_ids + begin, out.output_token_ids + end, -1);
  std::fill(out.logprobs + begin, out.logprobs + end, 0.0f);
}

// Advances every walk by one node; only rows that a walk reaches are read.
void advance_all(const VerifyTreeInputs& in, const std::vector<Walk*>& walks,
                 const VerifyTreeOutputs& out) {
  RowBatch batch(2 * walks.size(), in.target.logits.size);
  for (Walk* walk : walks) {
    const Sampling sampling = in.parameters.at(walk->index);
    const int64_t row = in.cu_rows[walk->index] + walk->node;
    walk->target = &batch.add(in.target.row(row), sampling, in.target.allowed(row));
    const bool has_children = Tree{in, *walk}.first_child() < walk->num_nodes;
    const bool reads_draft = in.draft != nullptr && !sampling.greedy() && has_children;
    walk->draft =
        reads_draft ? &batch.add(in.draft[walk->index].row(walk->node), sampling) : nullptr;
  }
  batch.scan();
  batch.weigh(batch.valid_rows());
  parallel_for(walks.size(), weighings_per_thread(in.target.logits.size), [&](int64_t i) {
    Walk& walk = *walks[i];
    if (walk.target->valid && (walk.draft == nullptr || walk.draft->valid)) {
      advance(in, walk, out);
    } else {
      clear_outputs(in, walk.index, out);
      walk.accepted = -1;
      walk.ended = true;
    }
  });
}

}  // namespace

void verify_tree(const VerifyTreeInputs& in, const VerifyTreeOutputs& out) {
  std::vector<Walk> walks;
  for (int64_t b = 0; b < in.batch; ++b) {
    clear_outputs(in, b, out);
    const int64_t rows = int64_t{in.cu_rows[b + 1]} - in.cu_rows[b];
    walks.push_back({b, std::min(rows, in.num_nodes)});
    walks.back().ended = rows <= 0;
  }
  for (;;) {
    std::vector<Walk*> going;
    for (Walk& walk : walks) {
      if (!walk.ended && static_cast<int64_t>(going.size()) < kRowsPerSlab / 2) {
        going.push_back(&walk);
      }
    }
    if (going.empty()) break;
    advance_all(in, going, out);
  }
  for (const Walk& walk : walks) out.accepted_len[walk.index] = static_cast<int32_t>(walk.accepted);
}

}  // namespace fastspec::cpu
