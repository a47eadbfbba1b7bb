// Checks and unpacks the tensors of penalize, and registers it.
#include <algorithm>

#include "bindings_cpu.h"
#include "cpu/penalize.h"

namespace fastspec {
namespace {

const int32_t* ints(const Tensor& tensor, int64_t size) {
  require(is_vector(tensor, size, ScalarType::Int));
  return tensor.const_data_ptr<int32_t>();
}

const float* floats_or_null(const OptionalTensor& tensor, int64_t size) {
  require(!tensor || is_vector(*tensor, size, ScalarType::Float));
  return tensor ? tensor->const_data_ptr<float>() : nullptr;
}

void require_below(const int32_t* values, int64_t count, int64_t end) {
  require(std::all_of(values, values + count, [&](int32_t i) { return i >= 0 && i < end; }));
}

// Prefix sums of lists of ids, each of them ascending.
void require_lists(const int32_t* sums, int64_t batch, const Tensor& ids) {
  const int32_t* id = ids.const_data_ptr<int32_t>();
  require(sums[0] == 0 && sums[batch] <= ids.size(0) && std::is_sorted(sums, sums + batch + 1));
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t i = sums[b] + 1; i < sums[b + 1]; ++i) require(id[i - 1] < id[i]);
  }
}

void penalize(Tensor logits, const Tensor& row_sequence, const Tensor& row_node,
              const Tensor& tree_token_ids, const Tensor& cu_history, const Tensor& history_ids,
              const Tensor& history_counts, const Tensor& cu_bias, const Tensor& bias_ids,
              const Tensor& bias, const Tensor& bias_until, const OptionalTensor& parents,
              const OptionalTensor& repetition_penalty, const OptionalTensor& presence_penalty,
              const OptionalTensor& frequency_penalty) {
  require(logits.dim() == 2 && tree_token_ids.dim() == 2);
  cpu::PenalizeCall call = {};
  call.element = element(logits);
  call.rows = logits.size(0);
  call.vocab = logits.size(1);
  call.row_stride = logits.stride(0);
  require(call.vocab > 0 && (logits.stride(1) == 1 || call.vocab == 1));
  require(call.rows < 2 || call.row_stride >= call.vocab);
  const int64_t batch = tree_token_ids.size(0);
  call.num_nodes = tree_token_ids.size(1);
  require(call.num_nodes > 0);
  const auto tree = [&](const Tensor& tensor) {
    require(has_shape(tensor, {batch, call.num_nodes}) && tensor.is_contiguous());
    require(tensor.scalar_type() == ScalarType::Int);
    return tensor.const_data_ptr<int32_t>();
  };
  call.tree_token_ids = tree(tree_token_ids);
  call.parents = parents ? tree(*parents) : nullptr;
  call.row_sequence = ints(row_sequence, call.rows);
  call.row_node = ints(row_node, call.rows);
  require_below(call.row_sequence, call.rows, batch);
  require_below(call.row_node, call.rows, call.num_nodes);
  for (int64_t i = 0; parents && i < batch * call.num_nodes; ++i) {
    const int64_t node = i % call.num_nodes;
    require(node == 0 || (call.parents[i] >= -1 && call.parents[i] < node));
  }
  require(history_ids.dim() == 1 && bias_ids.dim() == 1);
  call.cu_history = ints(cu_history, batch + 1);
  call.history_ids = ints(history_ids, history_ids.size(0));
  call.history_counts = ints(history_counts, history_ids.size(0));
  require_lists(call.cu_history, batch, history_ids);
  call.cu_bias = ints(cu_bias, batch + 1);
  call.bias_ids = ints(bias_ids, bias_ids.size(0));
  call.bias = floats_or_null(bias, bias_ids.size(0));
  call.bias_until = ints(bias_until, bias_ids.size(0));
  require_lists(call.cu_bias, batch, bias_ids);
  call.repetition_penalty = floats_or_null(repetition_penalty, batch);
  for (int64_t b = 0; repetition_penalty && b < batch; ++b) require(call.repetition_penalty[b] > 0);
  call.presence_penalty = floats_or_null(presence_penalty, batch);
  call.frequency_penalty = floats_or_null(frequency_penalty, batch);
  call.logits = logits.mutable_data_ptr();
  cpu::penalize(call);
}

}  // namespace
}  // namespace fastspec

STABLE_TORCH_LIBRARY_IMPL(fastspec, CPU, m) { m.impl("penalize", TORCH_BOX(&fastspec::penalize)); }
