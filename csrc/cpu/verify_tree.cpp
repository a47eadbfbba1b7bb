#include <algorithm>
#include <numeric>
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
  int64_t node = 0;  // where it stands
  int64_t accepted = 0;
  bool ended = false;
  Row* target = nullptr;  // the rows of `node`
  Row* draft = nullptr;
};

// The arguments that concern one tree.
struct Tree {
  const VerifyTreeInputs& in;
  const Walk& walk;

  int64_t token(int64_t node) const { return in.tree_token_ids[walk.index * in.num_nodes + node]; }
  double uniform(int64_t column) const {
    return in.uniform_samples[walk.index * (in.num_nodes + 1) + column];
  }
  // The first child of the walk's node from `begin` on, num_nodes where there is none.
  int64_t child_from(int64_t begin) const {
    const int32_t* parents = in.parents + walk.index * in.num_nodes;
    while (begin < walk.num_nodes && parents[begin] != walk.node) ++begin;
    return begin;
  }
  int64_t first_child() const { return child_from(walk.node + 1); }
};

// Probabilities of a vocabulary up to a common factor, with sums by chunk.
class Dense {
 public:
  explicit Dense(int64_t size) : weights_(num_chunks(size) * kChunk), sums_(num_chunks(size)) {}

  float* chunk(int64_t chunk) { return weights_.data() + chunk * kChunk; }
  double weight(int64_t token) const { return weights_[token]; }
  double total() const { return std::accumulate(sums_.begin(), sums_.end(), 0.0); }

  void set_sum(int64_t chunk, double sum) { sums_[chunk] = sum; }
  void clear(int64_t token) {
    weights_[token] = 0;
    add_up(token / kChunk);
  }
  void add_up(int64_t chunk) {
    const float* begin = weights_.data() + chunk * kChunk;
    sums_[chunk] = std::accumulate(begin, begin + kChunk, 0.0);
  }
  int64_t draw(double uniform) const {
    double before = 0;
    const double bound = uniform * total();
    const int64_t chunk = draw_chunk(sums_.data(), sums_.size(), bound, &before);
    return chunk * kChunk + draw_from(weights_.data() + chunk * kChunk, kChunk, bound - before);
  }

 private:
  std::vector<float> weights_;
  std::vector<double> sums_;
};

// What is left of target and draft as one drawn sibling after the other is rejected.
class Siblings {
 public:
  Siblings(const Row& target, const Draft& draft)
      : row_(target), draft_row_(draft), size_(target.logits.size) {}

  double target_prob(int64_t token) const {
    if (token < 0 || token >= size_) return 0.0;
    return dense_ ? target_.weight(token) / target_total_ : row_.prob(token);
  }
  double draft_prob(int64_t token) const {
    if (token < 0 || token >= size_) return 0.0;
    return dense_ ? draft_.weight(token) * draft_scale_ : draft_row_.prob(token, size_);
  }

  void reject(int64_t token, bool replaced) {
    if (!dense_) make_dense();
    Dense rest(size_);
    // In the units of target_, whose weights add up to target_total_.
    const auto factor = static_cast<float>(draft_scale_ * target_total_);
    parallel_for(num_chunks(size_), weighings_per_thread(kChunk), [&](int64_t chunk) {
      float taken[kChunk];
      const float* draft = draft_.chunk(chunk);
      for (int64_t i = 0; i < kChunk; ++i) taken[i] = draft[i] * factor;
      std::copy_n(target_.chunk(chunk), kChunk, rest.chunk(chunk));
      rest.set_sum(chunk, sampling_kernels().lists.subtract(rest.chunk(chunk), taken, kChunk));
    });
    if (rest.total() > 0) {
      target_ = std::move(rest);
      target_total_ = target_.total();
    }
    if (replaced || token < 0 || token >= size_) return;
    draft_.clear(token);
    const double total = draft_.total();
    draft_scale_ = total > 0 ? 1.0 / total : 0.0;
  }

  int64_t draw(double uniform) const {
    return dense_ ? target_.draw(uniform) : fastspec::cpu::draw(row_, uniform);
  }

 private:
  void make_dense() {
    target_ = Dense(size_);
    draft_ = Dense(size_);
    parallel_for(num_chunks(size_), weighings_per_thread(kChunk), [&](int64_t chunk) {
      const int64_t begin = chunk * kChunk, size = row_.chunk_size(chunk);
      const auto factor = static_cast<float>(1.0 / row_.sum);
      row_.kernels().weigh(row_.logits.at(begin), size, row_.weighting, factor,
                           target_.chunk(chunk));
      draft_row_.probs(begin, size, draft_.chunk(chunk));
      target_.add_up(chunk);
      draft_.add_up(chunk);
    });
    dense_ = true;
  }

  const Row& row_;
  Draft draft_row_;
  int64_t size_;
  bool dense_ = false;
  Dense target_{0};
  double target_total_ = 1.0;
  Dense draft_{0};
  double draft_scale_ = 1.0;
};

// Where the walk goes on, or the token to end with.
struct Decision {
  int64_t child;  // num_nodes where none is accepted
  int64_t extra;
};

Decision decide_greedy(const Tree& tree) {
  const int64_t best = tree.walk.target->argmax();
  int64_t child = tree.first_child();
  while (child < tree.walk.num_nodes && tree.token(child) != best)
    child = tree.child_from(child + 1);
  return {child, best};
}

// Draws from a row without some of its tokens; from all of it where they are all it has.
int64_t draw_without(const Row& row, const std::vector<int64_t>& tokens, double uniform) {
  std::vector<double> sums(row.chunk_sums, row.chunk_sums + row.chunks());
  float weights[kChunk];
  const auto weigh = [&](int64_t chunk) {
    const int64_t begin = chunk * kChunk, size = row.chunk_size(chunk);
    row.kernels().weigh(row.logits.at(begin), size, row.weighting, 1.0f, weights);
    for (const int64_t token : tokens) {
      if (token >= begin && token < begin + size) weights[token - begin] = 0;
    }
    return std::accumulate(weights, weights + size, 0.0);
  };
  for (const int64_t token : tokens) sums[token / kChunk] = weigh(token / kChunk);
  const double total = std::accumulate(sums.begin(), sums.end(), 0.0);
  if (!(total > 0)) return draw(row, uniform);
  double before = 0;
  const int64_t chunk = draw_chunk(sums.data(), row.chunks(), uniform * total, &before);
  weigh(chunk);
  return chunk * kChunk + draw_from(weights, row.chunk_size(chunk), uniform * total - before);
}

Decision decide_by_mass(const Tree& tree) {
  const Row& row = *tree.walk.target;
  std::vector<int64_t> tokens;
  double mass = 0;
  for (int64_t child = tree.first_child(); child < tree.walk.num_nodes;
       child = tree.child_from(child + 1)) {
    const int64_t token = tree.token(child);
    const double prob = row.prob(token);
    if (!(prob > 0) || std::find(tokens.begin(), tokens.end(), token) != tokens.end()) continue;
    mass += prob;
    if (tree.uniform(tree.walk.node) < mass) return {child, -1};
    tokens.push_back(token);
  }
  return {tree.walk.num_nodes, draw_without(row, tokens, tree.uniform(tree.in.num_nodes))};
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

// Goes on to an accepted child, or ends; writes what that emits.
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

// Takes every walk one node further; rows are read only where a walk comes by.
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
  parallel_for(walks.size(), 1, [&](int64_t i) {
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
