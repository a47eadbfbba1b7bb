// Unpacks the tensors of the sampling and verification ops, allocates their outputs, and registers
// them.
#include <string>
#include <tuple>

#include "bindings_cpu.h"
#include "cpu/sampling.h"

namespace fastspec {
namespace {

template <class T>
const T* data_or_null(const OptionalTensor& tensor) {
  return tensor ? tensor->const_data_ptr<T>() : nullptr;
}

template <class T>
T* out(Tensor& tensor) {
  return tensor.mutable_data_ptr<T>();
}

cpu::SamplingParameters sampling_parameters(const OptionalTensor& temperature,
                                            const OptionalTensor& top_k,
                                            const OptionalTensor& top_p,
                                            const OptionalTensor& min_p) {
  return {data_or_null<float>(temperature), data_or_null<int32_t>(top_k),
          data_or_null<float>(top_p), data_or_null<float>(min_p)};
}

// A matrix of logits that starts `offset` elements into a tensor; its rows are the second to last
// dimension.
cpu::LogitsMatrix logits_matrix(const Tensor& logits, int64_t offset) {
  cpu::LogitsType type = cpu::LogitsType::kFloat32;
  if (logits.scalar_type() == ScalarType::BFloat16) type = cpu::LogitsType::kBFloat16;
  if (logits.scalar_type() == ScalarType::Half) type = cpu::LogitsType::kFloat16;
  const cpu::Logits first{logits.const_data_ptr(), logits.size(-1), type};
  return {first.from(offset), logits.size(-2), logits.stride(-2)};
}

cpu::LogitsMatrix allowed_logits(const Tensor& logits, const OptionalTensor& token_bitmask) {
  cpu::LogitsMatrix matrix = logits_matrix(logits, 0);
  if (token_bitmask) {
    matrix.bitmask = reinterpret_cast<const uint32_t*>(token_bitmask->const_data_ptr<int32_t>());
    matrix.bitmask_stride = token_bitmask->stride(0);
  }
  return matrix;
}

// One matrix for each sequence; empty where there are no draft rows.
std::vector<cpu::LogitsMatrix> draft_matrices(const OptionalTensor& draft_logits) {
  std::vector<cpu::LogitsMatrix> matrices;
  for (int64_t b = 0; draft_logits && b < draft_logits->size(0); ++b) {
    matrices.push_back(logits_matrix(*draft_logits, b * draft_logits->stride(0)));
  }
  return matrices;
}

std::tuple<Tensor, Tensor> row_stats(const Tensor& logits, const OptionalTensor& temperature,
                                     const OptionalTensor& top_k, const OptionalTensor& top_p,
                                     const OptionalTensor& min_p,
                                     const OptionalTensor& token_bitmask) {
  Tensor logsumexp = new_tensor({logits.size(0)}, ScalarType::Float);
  Tensor threshold = new_tensor({logits.size(0)}, ScalarType::Float);
  cpu::row_stats(allowed_logits(logits, token_bitmask),
                 sampling_parameters(temperature, top_k, top_p, min_p), out<float>(logsumexp),
                 out<float>(threshold));
  return {logsumexp, threshold};
}

Tensor logits_to_probs(const Tensor& logits, const OptionalTensor& temperature,
                       const OptionalTensor& top_k, const OptionalTensor& top_p,
                       const OptionalTensor& min_p, const OptionalTensor& token_bitmask) {
  Tensor probs = new_tensor({logits.size(0), logits.size(1)}, ScalarType::Float);
  cpu::logits_to_probs(allowed_logits(logits, token_bitmask),
                       sampling_parameters(temperature, top_k, top_p, min_p), out<float>(probs));
  return probs;
}

std::tuple<Tensor, Tensor> sample(const Tensor& logits, const Tensor& uniform_samples,
                                  const OptionalTensor& temperature, const OptionalTensor& top_k,
                                  const OptionalTensor& top_p, const OptionalTensor& min_p,
                                  const OptionalTensor& token_bitmask) {
  Tensor token_ids = new_tensor({logits.size(0)}, ScalarType::Int);
  Tensor logprobs = new_tensor({logits.size(0)}, ScalarType::Float);
  cpu::sample(allowed_logits(logits, token_bitmask),
              sampling_parameters(temperature, top_k, top_p, min_p),
              uniform_samples.const_data_ptr<float>(), uniform_samples.stride(0),
              out<int32_t>(token_ids), out<float>(logprobs));
  return {token_ids, logprobs};
}

std::tuple<Tensor, Tensor, Tensor> verify_chain(
    const Tensor& target_logits, const Tensor& cu_rows, const Tensor& draft_token_ids,
    const Tensor& uniform_samples, const OptionalTensor& draft_logits,
    const OptionalTensor& temperature, const OptionalTensor& top_k, const OptionalTensor& top_p,
    const OptionalTensor& min_p, double lenience, const std::string& method,
    const OptionalTensor& draft_logsumexp, const OptionalTensor& draft_token_map,
    const OptionalTensor& token_bitmask) {
  const int64_t batch = draft_token_ids.size(0), num_draft = draft_token_ids.size(1);
  Tensor output_token_ids = new_tensor({batch, num_draft + 1}, ScalarType::Int);
  Tensor accepted_len = new_tensor({batch}, ScalarType::Int);
  Tensor logprobs = new_tensor({batch, num_draft + 1}, ScalarType::Float);
  const std::vector<cpu::LogitsMatrix> draft = draft_matrices(draft_logits);
  cpu::VerifyChainInputs in = {};
  in.target = allowed_logits(target_logits, token_bitmask);
  in.draft = draft_logits ? draft.data() : nullptr;
  in.draft_logsumexp = data_or_null<float>(draft_logsumexp);
  in.draft_token_map = data_or_null<int32_t>(draft_token_map);
  in.cu_rows = cu_rows.const_data_ptr<int32_t>();
  in.draft_token_ids = draft_token_ids.const_data_ptr<int32_t>();
  in.uniform_samples = uniform_samples.const_data_ptr<float>();
  in.parameters = sampling_parameters(temperature, top_k, top_p, min_p);
  in.batch = batch;
  in.num_draft = num_draft;
  in.lenience = lenience;
  in.block = method == "block";
  cpu::verify_chain(
      in, {out<int32_t>(output_token_ids), out<int32_t>(accepted_len), out<float>(logprobs)});
  return {output_token_ids, accepted_len, logprobs};
}

cpu::SiblingRule sibling_rule_named(const std::string& name) {
  if (name == "target_only") return cpu::SiblingRule::kTargetOnly;
  if (name == "without_replacement") return cpu::SiblingRule::kWithoutReplacement;
  require(name == "with_replacement");
  return cpu::SiblingRule::kWithReplacement;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> verify_tree(
    const Tensor& target_logits, const Tensor& cu_rows, const Tensor& tree_token_ids,
    const Tensor& parents, const Tensor& uniform_samples, const std::string& sibling_rule,
    const OptionalTensor& draft_logits, const OptionalTensor& temperature,
    const OptionalTensor& top_k, const OptionalTensor& top_p, const OptionalTensor& min_p,
    const OptionalTensor& draft_token_map, const OptionalTensor& token_bitmask) {
  const int64_t batch = tree_token_ids.size(0), num_nodes = tree_token_ids.size(1);
  Tensor path = new_tensor({batch, num_nodes}, ScalarType::Int);
  Tensor output_token_ids = new_tensor({batch, num_nodes}, ScalarType::Int);
  Tensor accepted_len = new_tensor({batch}, ScalarType::Int);
  Tensor logprobs = new_tensor({batch, num_nodes}, ScalarType::Float);
  const std::vector<cpu::LogitsMatrix> draft = draft_matrices(draft_logits);
  cpu::VerifyTreeInputs in = {};
  in.target = allowed_logits(target_logits, token_bitmask);
  in.draft = draft_logits ? draft.data() : nullptr;
  in.draft_token_map = data_or_null<int32_t>(draft_token_map);
  in.cu_rows = cu_rows.const_data_ptr<int32_t>();
  in.tree_token_ids = tree_token_ids.const_data_ptr<int32_t>();
  in.parents = parents.const_data_ptr<int32_t>();
  in.uniform_samples = uniform_samples.const_data_ptr<float>();
  in.parameters = sampling_parameters(temperature, top_k, top_p, min_p);
  in.sibling_rule = sibling_rule_named(sibling_rule);
  in.batch = batch;
  in.num_nodes = num_nodes;
  cpu::verify_tree(in, {out<int32_t>(path), out<int32_t>(output_token_ids),
                        out<int32_t>(accepted_len), out<float>(logprobs)});
  return {path, output_token_ids, accepted_len, logprobs};
}

std::tuple<Tensor, Tensor> build_tree(const Tensor& parents) {
  const int64_t batch = parents.size(0), num_nodes = parents.size(1);
  Tensor depths = new_tensor({batch, num_nodes}, ScalarType::Int);
  Tensor ancestor_mask = new_tensor({batch, num_nodes, (num_nodes + 63) / 64}, ScalarType::Long);
  cpu::build_tree(parents.const_data_ptr<int32_t>(), batch, num_nodes, out<int32_t>(depths),
                  reinterpret_cast<uint64_t*>(out<int64_t>(ancestor_mask)));
  return {depths, ancestor_mask};
}

}  // namespace
}  // namespace fastspec

STABLE_TORCH_LIBRARY_IMPL(fastspec, CPU, m) {
  m.impl("row_stats", TORCH_BOX(&fastspec::row_stats));
  m.impl("logits_to_probs", TORCH_BOX(&fastspec::logits_to_probs));
  m.impl("sample", TORCH_BOX(&fastspec::sample));
  m.impl("verify_chain", TORCH_BOX(&fastspec::verify_chain));
  m.impl("verify_tree", TORCH_BOX(&fastspec::verify_tree));
  m.impl("build_tree", TORCH_BOX(&fastspec::build_tree));
}
