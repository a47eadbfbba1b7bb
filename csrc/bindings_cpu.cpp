// The only file of _cpu that knows torch: it unpacks tensors, allocates outputs and registers the
// ops.
#define Py_LIMITED_API 0x030A0000
#include <Python.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include <cmath>
#include <cstdint>
#include <stdexcept>

#include "common/philox.h"
#include "cpu/compact_kv.h"
#include "cpu/kernels.h"
#include "cpu/layers.h"
#include "cpu/linear.h"
#include "cpu/sampling.h"
#include "cpu/store_kv.h"
#include "cpu/tree_attention.h"

namespace fastspec {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

int32_t dtype_code(ScalarType type) {
  switch (type) {
    case ScalarType::Int:
      return aoti_torch_dtype_int32();
    case ScalarType::BFloat16:
      return aoti_torch_dtype_bfloat16();
    case ScalarType::Half:
      return aoti_torch_dtype_float16();
    default:
      return aoti_torch_dtype_float32();
  }
}

// An uninitialised dense tensor, without a trip through torch's dispatcher.
Tensor new_tensor(const std::vector<int64_t>& shape, ScalarType type) {
  std::vector<int64_t> strides(shape.size(), 1);
  for (size_t dim = shape.size(); dim-- > 1;) strides[dim - 1] = strides[dim] * shape[dim];
  AtenTensorHandle handle;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<int64_t>(shape.size()), shape.data(),
                                                  strides.data(), dtype_code(type),
                                                  aoti_torch_device_type_cpu(), 0, &handle));
  return Tensor(handle);
}

Tensor uniform(const Tensor& seed, const Tensor& position, int64_t num, int64_t stream) {
  const int64_t batch = seed.size(0);
  Tensor out = new_tensor({batch, num}, ScalarType::Float);
  const int64_t* seeds = seed.const_data_ptr<int64_t>();
  const int64_t* positions = position.const_data_ptr<int64_t>();
  float* samples = out.mutable_data_ptr<float>();
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t i = 0; i < num; ++i) {
      samples[b * num + i] = philox_uniform(seeds[b], positions[b], stream, i);
    }
  }
  return out;
}

// The public ops find out which argument is wrong; here it only must not get through.
void require(bool fits) {
  if (!fits) throw std::invalid_argument("the arguments do not fit together");
}

bool has_shape(const Tensor& tensor, std::initializer_list<int64_t> shape) {
  if (tensor.dim() != static_cast<int64_t>(shape.size())) return false;
  int64_t dim = 0;
  for (const int64_t size : shape) {
    if (tensor.size(dim++) != size) return false;
  }
  return true;
}

bool is_vector(const Tensor& tensor, int64_t size, ScalarType type) {
  return has_shape(tensor, {size}) && tensor.scalar_type() == type && tensor.is_contiguous();
}

bool is_matrix(const Tensor& tensor, ScalarType type) {
  return tensor.dim() == 2 && tensor.scalar_type() == type &&
         (tensor.stride(1) == 1 || tensor.size(1) <= 1);
}

void require_caches(const Tensor& key_cache, const Tensor& value_cache, int64_t rank = 4) {
  require(key_cache.dim() == rank && value_cache.dim() == rank);
  for (int64_t dim = 0; dim < rank; ++dim) {
    require(dim < rank - 3 || key_cache.size(dim) > 0);
    require(value_cache.size(dim) == key_cache.size(dim));
    require(value_cache.stride(dim) == key_cache.stride(dim));
  }
  require(value_cache.scalar_type() == key_cache.scalar_type());
  require(key_cache.stride(rank - 2) == key_cache.size(rank - 1));
  require(key_cache.stride(rank - 1) == 1);
}

// The rows of new tokens, or of queries, beside a cache.
void require_rows(const Tensor& rows, int64_t num_rows, int64_t num_heads, const Tensor& cache) {
  require(has_shape(rows, {num_rows, num_heads, cache.size(3)}));
  require(rows.scalar_type() == cache.scalar_type());
  require(rows.stride(2) == 1 || rows.size(2) == 1);
}

cpu::Element element(const Tensor& tensor) {
  const ScalarType type = tensor.scalar_type();
  if (type == ScalarType::Float) return cpu::Element::kFloat32;
  if (type == ScalarType::BFloat16) return cpu::Element::kBFloat16;
  require(type == ScalarType::Half);
  return cpu::Element::kFloat16;
}

cpu::StoreSide store_side(const Tensor& tokens, const Tensor& cache) {
  const int64_t size = tokens.element_size();
  return {static_cast<const char*>(tokens.const_data_ptr()),
          static_cast<char*>(cache.mutable_data_ptr()),
          tokens.stride(0) * size,
          tokens.stride(1) * size,
          cache.stride(0) * size,
          cache.stride(1) * size};
}

using OptionalTensor = std::optional<Tensor>;

cpu::Rotation rotation(const Tensor& cos, const Tensor& sin, const Tensor& key) {
  require(has_shape(cos, {key.size(0), cos.size(1)}) && has_shape(sin, {key.size(0), cos.size(1)}));
  const int64_t size = cos.size(1);
  require(size >= 2 && size % 2 == 0 && size <= key.size(2));
  require(cos.scalar_type() == sin.scalar_type());
  require(cos.scalar_type() == ScalarType::Float || cos.scalar_type() == key.scalar_type());
  require(cos.stride(1) == 1 && sin.stride(1) == 1);
  return {element(key),  element(cos), cos.const_data_ptr(), sin.const_data_ptr(), cos.stride(0),
          sin.stride(0), size};
}

void store_kv(const Tensor& key, const Tensor& value, Tensor key_cache, Tensor value_cache,
              const Tensor& slot_mapping, const OptionalTensor& cos, const OptionalTensor& sin) {
  require_caches(key_cache, value_cache);
  element(key_cache);
  cpu::StoreCall call = {};
  call.num_tokens = slot_mapping.numel();
  call.num_heads = key_cache.size(2);
  require_rows(key, call.num_tokens, call.num_heads, key_cache);
  require_rows(value, call.num_tokens, call.num_heads, key_cache);
  require(is_vector(slot_mapping, call.num_tokens, ScalarType::Long));
  require(cos.has_value() == sin.has_value());
  if (cos) call.rotation = rotation(*cos, *sin, key);
  call.key = store_side(key, key_cache);
  call.value = store_side(value, value_cache);
  call.slot_mapping = slot_mapping.const_data_ptr<int64_t>();
  call.head_bytes = key.size(2) * static_cast<int64_t>(key.element_size());
  call.num_blocks = key_cache.size(0);
  call.block_size = key_cache.size(1);
  cpu::store_kv(call);
}

void compact_kv(Tensor key_caches, Tensor value_caches, const Tensor& block_table,
                const Tensor& prefix_lens, const Tensor& path, const Tensor& accepted_len) {
  require_caches(key_caches, value_caches, 5);
  element(key_caches);
  require(block_table.dim() == 2 && path.dim() == 2);
  cpu::CompactCall call = {};
  call.batch = block_table.size(0);
  call.max_blocks = block_table.size(1);
  call.num_nodes = path.size(1);
  require(path.size(0) == call.batch);
  require(is_matrix(block_table, ScalarType::Int) && is_matrix(path, ScalarType::Int));
  require(is_vector(prefix_lens, call.batch, ScalarType::Int));
  require(is_vector(accepted_len, call.batch, ScalarType::Int));
  const int64_t size = key_caches.element_size();
  call.caches[0] = static_cast<char*>(key_caches.mutable_data_ptr());
  call.caches[1] = static_cast<char*>(value_caches.mutable_data_ptr());
  call.num_layers = key_caches.size(0);
  call.num_blocks = key_caches.size(1);
  call.block_size = key_caches.size(2);
  call.layer_stride = key_caches.stride(0) * size;
  call.block_stride = key_caches.stride(1) * size;
  call.slot_stride = key_caches.stride(2) * size;
  call.slot_bytes = key_caches.size(3) * key_caches.size(4) * size;
  call.block_table = block_table.const_data_ptr<int32_t>();
  call.prefix_lens = prefix_lens.const_data_ptr<int32_t>();
  call.path = path.const_data_ptr<int32_t>();
  call.accepted_len = accepted_len.const_data_ptr<int32_t>();
  call.table_stride = block_table.stride(0);
  call.path_stride = path.stride(0);
  cpu::compact_kv(call);
}

// What the attention ops have in common; without options, and without outputs.
cpu::AttentionCall attention_call(const Tensor& query, const Tensor& key_cache,
                                  const Tensor& value_cache, const Tensor& block_table,
                                  const Tensor& context_lens, const Tensor& cu_rows, double scale) {
  require_caches(key_cache, value_cache);
  require(query.dim() == 3 && block_table.dim() == 2);
  cpu::AttentionCall call = {};
  call.num_rows = query.size(0);
  call.num_heads = query.size(1);
  call.head_size = query.size(2);
  call.num_blocks = key_cache.size(0);
  call.block_size = key_cache.size(1);
  call.num_kv_heads = key_cache.size(2);
  call.batch = block_table.size(0);
  call.max_blocks = block_table.size(1);
  require(call.num_heads > 0 && call.num_heads % call.num_kv_heads == 0);
  require_rows(query, call.num_rows, call.num_heads, key_cache);
  require(is_matrix(block_table, ScalarType::Int));
  require(is_vector(context_lens, call.batch, ScalarType::Int));
  require(is_vector(cu_rows, call.batch + 1, ScalarType::Int));
  require(std::isfinite(scale));
  call.element = element(query);
  call.query = query.const_data_ptr();
  call.key_cache = key_cache.const_data_ptr();
  call.value_cache = value_cache.const_data_ptr();
  call.block_table = block_table.const_data_ptr<int32_t>();
  call.context_lens = context_lens.const_data_ptr<int32_t>();
  call.cu_rows = cu_rows.const_data_ptr<int32_t>();
  call.query_token_stride = query.stride(0);
  call.query_head_stride = query.stride(1);
  call.block_stride = key_cache.stride(0);
  call.slot_stride = key_cache.stride(1);
  call.table_stride = block_table.stride(0);
  call.scale = static_cast<float>(scale);
  return call;
}

std::tuple<Tensor, Tensor> tree_attention(const Tensor& query, const Tensor& key_cache,
                                          const Tensor& value_cache, const Tensor& block_table,
                                          const Tensor& context_lens, const Tensor& cu_rows,
                                          double scale, int64_t sliding_window, double softcap,
                                          const OptionalTensor& sinks,
                                          const OptionalTensor& ancestor_mask,
                                          bool return_logsumexp) {
  cpu::AttentionCall call =
      attention_call(query, key_cache, value_cache, block_table, context_lens, cu_rows, scale);
  require(!sinks || is_vector(*sinks, call.num_heads, ScalarType::Float));
  require(std::isfinite(softcap) && softcap >= 0 && sliding_window >= 0);
  call.holds_queries = true;
  if (ancestor_mask) {
    require(ancestor_mask->dim() == 3 && ancestor_mask->is_contiguous());
    call.num_nodes = ancestor_mask->size(1);
    require(call.num_nodes >= 1 && call.num_nodes <= cpu::kMaxTreeNodes);
    require(has_shape(*ancestor_mask, {call.batch, call.num_nodes, (call.num_nodes + 63) / 64}));
    require(ancestor_mask->scalar_type() == ScalarType::Long);
    call.ancestor_mask = ancestor_mask->const_data_ptr<int64_t>();
  }
  call.sinks = sinks ? sinks->const_data_ptr<float>() : nullptr;
  // A window longer than any context is none, and its arithmetic must not overflow.
  call.sliding_window = sliding_window < INT32_MAX ? sliding_window : 0;
  call.softcap = static_cast<float>(softcap);
  Tensor out = new_tensor({call.num_rows, call.num_heads, call.head_size}, query.scalar_type());
  call.out = out.mutable_data_ptr();
  Tensor logsumexp = return_logsumexp
                         ? new_tensor({call.num_rows, call.num_heads}, ScalarType::Float)
                         : new_tensor({0}, ScalarType::Float);
  call.logsumexp = return_logsumexp ? logsumexp.mutable_data_ptr<float>() : nullptr;
  cpu::attention(call);
  return {out, logsumexp};
}

Tensor cross_attention(const Tensor& query, const Tensor& key_cache, const Tensor& value_cache,
                       const Tensor& block_table, const Tensor& context_lens, const Tensor& cu_rows,
                       double scale) {
  cpu::AttentionCall call =
      attention_call(query, key_cache, value_cache, block_table, context_lens, cu_rows, scale);
  Tensor out = new_tensor({call.num_rows, call.num_heads, call.head_size}, query.scalar_type());
  call.out = out.mutable_data_ptr();
  cpu::attention(call);
  return out;
}

// The shape of rows in any number of leading dimensions.
std::vector<int64_t> shape_of_rows(const Tensor& rows) {
  require(rows.dim() > 0);
  return {rows.sizes().begin(), rows.sizes().end()};
}

Tensor linear(const Tensor& input, const Tensor& weight, const OptionalTensor& bias) {
  std::vector<int64_t> shape = shape_of_rows(input);
  require(weight.dim() == 2);
  cpu::LinearCall call = {};
  call.element = element(weight);
  call.num_outputs = weight.size(0);
  call.depth = weight.size(1);
  require(input.is_contiguous() && weight.is_contiguous() && (!bias || bias->is_contiguous()));
  require(input.scalar_type() == weight.scalar_type() && shape.back() == call.depth);
  require(!bias ||
          (has_shape(*bias, {call.num_outputs}) && bias->scalar_type() == weight.scalar_type()));
  shape.back() = call.num_outputs;
  Tensor out = new_tensor(shape, input.scalar_type());
  call.num_rows = call.num_outputs == 0 ? 0 : out.numel() / call.num_outputs;
  call.input = input.const_data_ptr();
  call.weight = weight.const_data_ptr();
  call.bias = bias ? bias->const_data_ptr() : nullptr;
  call.out = out.mutable_data_ptr();
  cpu::linear(call);
  return out;
}

bool is_float32(const Tensor& tensor, std::initializer_list<int64_t> shape) {
  return has_shape(tensor, shape) && tensor.scalar_type() == ScalarType::Float &&
         tensor.is_contiguous();
}

Tensor rms_norm(const Tensor& input, const Tensor& weight, double eps) {
  const std::vector<int64_t> shape = shape_of_rows(input);
  const int64_t size = shape.back();
  require(input.scalar_type() == ScalarType::Float && input.is_contiguous());
  require(size > 0 && is_float32(weight, {size}) && eps > 0);
  Tensor out = new_tensor(shape, ScalarType::Float);
  cpu::rms_norm(input.const_data_ptr<float>(), weight.const_data_ptr<float>(), input.numel() / size,
                size, static_cast<float>(eps), out.mutable_data_ptr<float>());
  return out;
}

Tensor gated_mlp(const Tensor& input, const Tensor& gate_weight, const Tensor& up_weight,
                 const Tensor& down_weight) {
  const std::vector<int64_t> shape = shape_of_rows(input);
  const int64_t size = shape.back(), hidden = gate_weight.size(0);
  require(input.scalar_type() == ScalarType::Float && input.is_contiguous() && size > 0);
  require(is_float32(gate_weight, {hidden, size}) && is_float32(up_weight, {hidden, size}));
  require(is_float32(down_weight, {size, hidden}));
  Tensor out = new_tensor(shape, ScalarType::Float);
  cpu::gated_mlp({input.const_data_ptr<float>(), gate_weight.const_data_ptr<float>(),
                  up_weight.const_data_ptr<float>(), down_weight.const_data_ptr<float>(),
                  out.mutable_data_ptr<float>(), input.numel() / size, size, hidden});
  return out;
}

template <class T>
const T* data_or_null(const OptionalTensor& tensor) {
  return tensor ? tensor->const_data_ptr<T>() : nullptr;
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

std::tuple<Tensor, Tensor> row_stats(const Tensor& logits, const OptionalTensor& temperature,
                                     const OptionalTensor& top_k, const OptionalTensor& top_p,
                                     const OptionalTensor& min_p,
                                     const OptionalTensor& token_bitmask) {
  require(!token_bitmask);
  Tensor logsumexp = new_tensor({logits.size(0)}, ScalarType::Float);
  Tensor threshold = new_tensor({logits.size(0)}, ScalarType::Float);
  cpu::row_stats(logits_matrix(logits, 0), sampling_parameters(temperature, top_k, top_p, min_p),
                 logsumexp.mutable_data_ptr<float>(), threshold.mutable_data_ptr<float>());
  return {logsumexp, threshold};
}

Tensor logits_to_probs(const Tensor& logits, const OptionalTensor& temperature,
                       const OptionalTensor& top_k, const OptionalTensor& top_p,
                       const OptionalTensor& min_p, const OptionalTensor& token_bitmask) {
  require(!token_bitmask);
  Tensor probs = new_tensor({logits.size(0), logits.size(1)}, ScalarType::Float);
  cpu::logits_to_probs(logits_matrix(logits, 0),
                       sampling_parameters(temperature, top_k, top_p, min_p),
                       probs.mutable_data_ptr<float>());
  return probs;
}

std::tuple<Tensor, Tensor> sample(const Tensor& logits, const Tensor& uniform_samples,
                                  const OptionalTensor& temperature, const OptionalTensor& top_k,
                                  const OptionalTensor& top_p, const OptionalTensor& min_p,
                                  const OptionalTensor& token_bitmask) {
  require(!token_bitmask);
  Tensor token_ids = new_tensor({logits.size(0)}, ScalarType::Int);
  Tensor logprobs = new_tensor({logits.size(0)}, ScalarType::Float);
  cpu::sample(logits_matrix(logits, 0), sampling_parameters(temperature, top_k, top_p, min_p),
              uniform_samples.const_data_ptr<float>(), uniform_samples.stride(0),
              token_ids.mutable_data_ptr<int32_t>(), logprobs.mutable_data_ptr<float>());
  return {token_ids, logprobs};
}

std::tuple<Tensor, Tensor, Tensor> verify_chain(
    const Tensor& target_logits, const Tensor& cu_rows, const Tensor& draft_token_ids,
    const Tensor& uniform_samples, const OptionalTensor& draft_logits,
    const OptionalTensor& temperature, const OptionalTensor& top_k, const OptionalTensor& top_p,
    const OptionalTensor& min_p, double lenience, const std::string& method,
    const OptionalTensor& draft_logsumexp, const OptionalTensor& draft_token_map,
    const OptionalTensor& token_bitmask) {
  require(method == "standard" && !draft_logsumexp && !draft_token_map && !token_bitmask);
  const int64_t batch = draft_token_ids.size(0), num_draft = draft_token_ids.size(1);
  Tensor output_token_ids = new_tensor({batch, num_draft + 1}, ScalarType::Int);
  Tensor accepted_len = new_tensor({batch}, ScalarType::Int);
  Tensor logprobs = new_tensor({batch, num_draft + 1}, ScalarType::Float);
  std::vector<cpu::LogitsMatrix> draft;
  for (int64_t b = 0; draft_logits && b < batch; ++b) {
    draft.push_back(logits_matrix(*draft_logits, b * draft_logits->stride(0)));
  }
  cpu::verify_chain(
      {logits_matrix(target_logits, 0), draft_logits ? draft.data() : nullptr,
       cu_rows.const_data_ptr<int32_t>(), draft_token_ids.const_data_ptr<int32_t>(),
       uniform_samples.const_data_ptr<float>(),
       sampling_parameters(temperature, top_k, top_p, min_p), batch, num_draft, lenience},
      {output_token_ids.mutable_data_ptr<int32_t>(), accepted_len.mutable_data_ptr<int32_t>(),
       logprobs.mutable_data_ptr<float>()});
  return {output_token_ids, accepted_len, logprobs};
}

std::string instruction_set() { return cpu::kernels().name; }

}  // namespace
}  // namespace fastspec

STABLE_TORCH_LIBRARY_IMPL(fastspec, CPU, m) {
  m.impl("uniform", TORCH_BOX(&fastspec::uniform));
  m.impl("row_stats", TORCH_BOX(&fastspec::row_stats));
  m.impl("logits_to_probs", TORCH_BOX(&fastspec::logits_to_probs));
  m.impl("sample", TORCH_BOX(&fastspec::sample));
  m.impl("verify_chain", TORCH_BOX(&fastspec::verify_chain));
  m.impl("store_kv", TORCH_BOX(&fastspec::store_kv));
  m.impl("compact_kv", TORCH_BOX(&fastspec::compact_kv));
  m.impl("rms_norm", TORCH_BOX(&fastspec::rms_norm));
  m.impl("gated_mlp", TORCH_BOX(&fastspec::gated_mlp));
  m.impl("linear", TORCH_BOX(&fastspec::linear));
  m.impl("tree_attention", TORCH_BOX(&fastspec::tree_attention));
  m.impl("cross_attention", TORCH_BOX(&fastspec::cross_attention));
}

STABLE_TORCH_LIBRARY_IMPL(fastspec, CompositeExplicitAutograd, m) {
  m.impl("cpu_instruction_set", TORCH_BOX(&fastspec::instruction_set));
}

// Importing the module runs the registrations above; it has no Python names of its own.
PyMODINIT_FUNC PyInit__cpu(void) {
  static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_cpu", nullptr, -1, nullptr};
  return PyModule_Create(&module);
}
