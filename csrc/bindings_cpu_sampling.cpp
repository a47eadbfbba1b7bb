// Checks and unpacks the tensors of the sampling and verification ops, allocates their outputs, and
// registers them.
#include <algorithm>
#include <cmath>
#include <string>
#include <tuple>

#include "bindings_cpu.h"
#include "cpu/sampling.h"

namespace fastspec {
namespace {

template <class T>
T* out(Tensor& tensor) {
  return tensor.mutable_data_ptr<T>();
}

// A matrix of logits that starts `offset` elements into a tensor; its rows are the second to last
// dimension.
cpu::LogitsMatrix logits_matrix(const Tensor& logits, int64_t offset) {
  const cpu::Logits first{logits.const_data_ptr(), logits.size(-1), element(logits)};
  require(first.size > 0 && (logits.stride(-1) == 1 || first.size == 1));
  return {first.from(offset), logits.size(-2), logits.stride(-2)};
}

cpu::LogitsMatrix allowed_logits(const Tensor& logits, const OptionalTensor& token_bitmask) {
  require(logits.dim() == 2);
  cpu::LogitsMatrix matrix = logits_matrix(logits, 0);
  if (token_bitmask) {
    require(is_matrix(*token_bitmask, ScalarType::Int));
    require(has_shape(*token_bitmask, {matrix.rows, (matrix.logits.size + 31) / 32}));
    matrix.bitmask = reinterpret_cast<const uint32_t*>(token_bitmask->const_data_ptr<int32_t>());
    matrix.bitmask_stride = token_bitmask->stride(0);
  }
  return matrix;
}

// One matrix of `rows` draft rows per sequence; empty if there are none.
std::vector<cpu::LogitsMatrix> draft_matrices(const OptionalTensor& draft_logits, int64_t batch,
                                              int64_t rows, int64_t vocab) {
  std::vector<cpu::LogitsMatrix> matrices;
  if (!draft_logits) return matrices;
  require(draft_logits->dim() == 3 && draft_logits->size(2) <= vocab);
  require(has_shape(*draft_logits, {batch, rows, draft_logits->size(2)}));
  for (int64_t b = 0; b < batch; ++b) {
    matrices.push_back(logits_matrix(*draft_logits, b * draft_logits->stride(0)));
  }
  return matrices;
}

// The column of each target token in the draft rows.
const int32_t* token_map(const OptionalTensor& draft_token_map, const OptionalTensor& draft_logits,
                         int64_t vocab) {
  require(!draft_token_map ||
          (draft_logits && is_vector(*draft_token_map, vocab, ScalarType::Int)));
  return data_or_null<int32_t>(draft_token_map);
}

// Prefix sums of rows, from 0 to at most `num_rows`.
const int32_t* row_sums(const Tensor& cu_rows, int64_t batch, int64_t num_rows) {
  require(is_vector(cu_rows, batch + 1, ScalarType::Int));
  const int32_t* sums = cu_rows.const_data_ptr<int32_t>();
  require(sums[0] == 0 && sums[batch] <= num_rows && std::is_sorted(sums, sums + batch + 1));
  return sums;
}

template <class T>
const T* dense(const Tensor& tensor, std::initializer_list<int64_t> shape, ScalarType type) {
  require(has_shape(tensor, shape) && tensor.scalar_type() == type && tensor.is_contiguous());
  return tensor.const_data_ptr<T>();
}

// Every parent must be an earlier node, or -1; the root's may be anything.
void require_parents(const int32_t* parents, int64_t batch, int64_t num_nodes) {
  for (int64_t b = 0; b < batch; ++b, parents += num_nodes) {
    for (int64_t i = 1; i < num_nodes; ++i) require(parents[i] >= -1 && parents[i] < i);
  }
}

std::tuple<Tensor, Tensor> row_stats(const Tensor& logits, const OptionalTensor& temperature,
                                     const OptionalTensor& top_k, const OptionalTensor& top_p,
                                     const OptionalTensor& min_p,
                                     const OptionalTensor& token_bitmask) {
  require(logits.dim() == 2);
  Tensor logsumexp = new_tensor({logits.size(0)}, ScalarType::Float);
  Tensor threshold = new_tensor({logits.size(0)}, ScalarType::Float);
  cpu::row_stats(allowed_logits(logits, token_bitmask),
                 sampling_parameters(logits.size(0), temperature, top_k, top_p, min_p),
                 out<float>(logsumexp), out<float>(threshold));
  return {logsumexp, threshold};
}

Tensor logits_to_probs(const Tensor& logits, const OptionalTensor& temperature,
                       const OptionalTensor& top_k, const OptionalTensor& top_p,
                       const OptionalTensor& min_p, const OptionalTensor& token_bitmask) {
  require(logits.dim() == 2);
  Tensor probs = new_tensor({logits.size(0), logits.size(1)}, ScalarType::Float);
  cpu::logits_to_probs(allowed_logits(logits, token_bitmask),
                       sampling_parameters(logits.size(0), temperature, top_k, top_p, min_p),
                       out<float>(probs));
  return probs;
}

std::tuple<Tensor, Tensor> sample(const Tensor& logits, const Tensor& uniform_samples,
                                  const OptionalTensor& temperature, const OptionalTensor& top_k,
                                  const OptionalTensor& top_p, const OptionalTensor& min_p,
                                  const OptionalTensor& token_bitmask) {
  require(logits.dim() == 2 && has_shape(uniform_samples, {logits.size(0)}));
  require(uniform_samples.scalar_type() == ScalarType::Float);
  Tensor token_ids = new_tensor({logits.size(0)}, ScalarType::Int);
  Tensor logprobs = new_tensor({logits.size(0)}, ScalarType::Float);
  cpu::sample(allowed_logits(logits, token_bitmask),
              sampling_parameters(logits.size(0), temperature, top_k, top_p, min_p),
              uniform_samples.const_data_ptr<float>(), uniform_samples.stride(0),
              out<int32_t>(token_ids), out<float>(logprobs));
  return {token_ids, logprobs};
}

std::tuple<Tensor, Tensor> sample_coupled(const Tensor& logits, const Tensor& seed,
                                          const Tensor& position, const OptionalTensor& temperature,
                                          const OptionalTensor& top_k, const OptionalTensor& top_p,
                                          const OptionalTensor& min_p,
                                          const OptionalTensor& token_bitmask) {
  require(logits.dim() == 2);
  const int64_t rows = logits.size(0);
  require(is_vector(seed, rows, ScalarType::Long) && is_vector(position, rows, ScalarType::Long));
  Tensor token_ids = new_tensor({rows}, ScalarType::Int);
  Tensor logprobs = new_tensor({rows}, ScalarType::Float);
  cpu::sample_coupled(allowed_logits(logits, token_bitmask),
                      sampling_parameters(rows, temperature, top_k, top_p, min_p),
                      seed.const_data_ptr<int64_t>(), position.const_data_ptr<int64_t>(),
                      out<int32_t>(token_ids), out<float>(logprobs));
  return {token_ids, logprobs};
}

std::tuple<Tensor, Tensor, Tensor> verify_chain(
    const Tensor& target_logits, const Tensor& cu_rows, const Tensor& draft_token_ids,
    const Tensor& uniform_samples, const OptionalTensor& draft_logits,
    const OptionalTensor& temperature, const OptionalTensor& top_k, const OptionalTensor& top_p,
    const OptionalTensor& min_p, double lenience, const Text& method,
    const OptionalTensor& draft_logsumexp, const OptionalTensor& draft_token_map,
    const OptionalTensor& token_bitmask) {
  require(draft_token_ids.dim() == 2);
  const int64_t batch = draft_token_ids.size(0), num_draft = draft_token_ids.size(1);
  Tensor output_token_ids = new_tensor({batch, num_draft + 1}, ScalarType::Int);
  Tensor accepted_len = new_tensor({batch}, ScalarType::Int);
  Tensor logprobs = new_tensor({batch, num_draft + 1}, ScalarType::Float);
  cpu::VerifyChainInputs in = {};
  in.target = allowed_logits(target_logits, token_bitmask);
  const int64_t vocab = in.target.logits.size;
  const auto draft = draft_matrices(draft_logits, batch, num_draft, vocab);
  in.draft = draft_logits ? draft.data() : nullptr;
  require(!draft_logsumexp || draft_logits);
  if (draft_logsumexp) {
    in.draft_logsumexp = dense<float>(*draft_logsumexp, {batch, num_draft}, ScalarType::Float);
  }
  in.draft_token_map = token_map(draft_token_map, draft_logits, vocab);
  in.cu_rows = row_sums(cu_rows, batch, in.target.rows);
  in.draft_token_ids = dense<int32_t>(draft_token_ids, {batch, num_draft}, ScalarType::Int);
  in.uniform_samples = dense<float>(uniform_samples, {batch, num_draft + 1}, ScalarType::Float);
  in.parameters = sampling_parameters(batch, temperature, top_k, top_p, min_p);
  in.batch = batch;
  in.num_draft = num_draft;
  in.lenience = lenience;
  in.block = method == "block";
  require(in.block ? lenience == 1 && !draft_logsumexp : method == "standard");
  require(lenience >= 1 && std::isfinite(lenience));
  cpu::verify_chain(
      in, {out<int32_t>(output_token_ids), out<int32_t>(accepted_len), out<float>(logprobs)});
  return {output_token_ids, accepted_len, logprobs};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> verify_tree(
    const Tensor& target_logits, const Tensor& cu_rows, const Tensor& tree_token_ids,
    const Tensor& parents, const Tensor& uniform_samples, const Text& sibling_rule,
    const OptionalTensor& draft_logits, const OptionalTensor& temperature,
    const OptionalTensor& top_k, const OptionalTensor& top_p, const OptionalTensor& min_p,
    const OptionalTensor& draft_token_map, const OptionalTensor& token_bitmask) {
  require(tree_token_ids.dim() == 2 && tree_token_ids.size(1) > 0);
  const int64_t batch = tree_token_ids.size(0), num_nodes = tree_token_ids.size(1);
  Tensor path = new_tensor({batch, num_nodes}, ScalarType::Int);
  Tensor output_token_ids = new_tensor({batch, num_nodes}, ScalarType::Int);
  Tensor accepted_len = new_tensor({batch}, ScalarType::Int);
  Tensor logprobs = new_tensor({batch, num_nodes}, ScalarType::Float);
  cpu::VerifyTreeInputs in = {};
  in.target = allowed_logits(target_logits, token_bitmask);
  const int64_t vocab = in.target.logits.size;
  const auto draft = draft_matrices(draft_logits, batch, num_nodes, vocab);
  in.draft = draft_logits ? draft.data() : nullptr;
  in.draft_token_map = token_map(draft_token_map, draft_logits, vocab);
  in.cu_rows = row_sums(cu_rows, batch, in.target.rows);
  in.tree_token_ids = dense<int32_t>(tree_token_ids, {batch, num_nodes}, ScalarType::Int);
  in.parents = dense<int32_t>(parents, {batch, num_nodes}, ScalarType::Int);
  require_parents(in.parents, batch, num_nodes);
  in.uniform_samples = dense<float>(uniform_samples, {batch, num_nodes + 1}, ScalarType::Float);
  in.parameters = sampling_parameters(batch, temperature, top_k, top_p, min_p);
  in.sibling_rule = sibling_rule_named<cpu::SiblingRule>(sibling_rule);
  require(draft_logits.has_value() == (in.sibling_rule != cpu::SiblingRule::kTargetOnly));
  in.batch = batch;
  in.num_nodes = num_nodes;
  cpu::verify_tree(in, {out<int32_t>(path), out<int32_t>(output_token_ids),
                        out<int32_t>(accepted_len), out<float>(logprobs)});
  return {path, output_token_ids, accepted_len, logprobs};
}

std::tuple<Tensor, Tensor> build_tree(const Tensor& parents) {
  require(parents.dim() == 2);
  const int64_t batch = parents.size(0), num_nodes = parents.size(1);
  const int32_t* parent = dense<int32_t>(parents, {batch, num_nodes}, ScalarType::Int);
  require_parents(parent, batch, num_nodes);
  Tensor depths = new_tensor({batch, num_nodes}, ScalarType::Int);
  Tensor ancestor_mask = new_tensor({batch, num_nodes, (num_nodes + 63) / 64}, ScalarType::Long);
  cpu::build_tree(parent, batch, num_nodes, out<int32_t>(depths),
                  reinterpret_cast<uint64_t*>(out<int64_t>(ancestor_mask)));
  return {depths, ancestor_mask};
}

}  // namespace
}  // namespace fastspec

STABLE_TORCH_LIBRARY_IMPL(fastspec, CPU, m) {
  m.impl("row_stats", TORCH_BOX(&fastspec::row_stats));
  m.impl("logits_to_probs", TORCH_BOX(&fastspec::logits_to_probs));
  m.impl("sample", TORCH_BOX(&fastspec::sample));
  m.impl("sample_coupled", TORCH_BOX(&fastspec::sample_coupled));
  m.impl("verify_chain", TORCH_BOX(&fastspec::verify_chain));
  m.impl("verify_tree", TORCH_BOX(&fastspec::verify_tree));
  m.impl("build_tree", TORCH_BOX(&fastspec::build_tree));
}
