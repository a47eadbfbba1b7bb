// The only file of _cpu that knows torch: it unpacks tensors, allocates outputs and registers the ops.
#define Py_LIMITED_API 0x030A0000
#include <Python.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include "common/philox.h"
#include "cpu/kernels.h"
#include "cpu/store_kv.h"
#include "cpu/tree_attention.h"

namespace fastspec {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

Tensor uniform(const Tensor& seed, const Tensor& position, int64_t num, int64_t stream) {
  const int64_t batch = seed.size(0);
  Tensor out = torch::stable::new_empty(seed, {batch, num}, ScalarType::Float);
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

cpu::StoreSide store_side(const Tensor& tokens, const Tensor& cache) {
  const int64_t size = tokens.element_size();
  return {static_cast<const char*>(tokens.const_data_ptr()),
          static_cast<char*>(cache.mutable_data_ptr()),
          tokens.stride(0) * size,
          tokens.stride(1) * size,
          cache.stride(0) * size,
          cache.stride(1) * size};
}

void store_kv(const Tensor& key, const Tensor& value, Tensor key_cache, Tensor value_cache,
              const Tensor& slot_mapping) {
  cpu::StoreCall call = {};
  call.key = store_side(key, key_cache);
  call.value = store_side(value, value_cache);
  call.slot_mapping = slot_mapping.const_data_ptr<int64_t>();
  call.num_tokens = key.size(0);
  call.num_heads = key.size(1);
  call.head_bytes = key.size(2) * static_cast<int64_t>(key.element_size());
  call.num_blocks = key_cache.size(0);
  call.block_size = key_cache.size(1);
  cpu::store_kv(call);
}

cpu::Element element(const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case ScalarType::Float:
      return cpu::Element::kFloat32;
    case ScalarType::BFloat16:
      return cpu::Element::kBFloat16;
    default:
      return cpu::Element::kFloat16;
  }
}

Tensor tree_attention(const Tensor& query, const Tensor& key_cache, const Tensor& value_cache,
                      const Tensor& block_table, const Tensor& context_lens, const Tensor& cu_rows,
                      double scale, int64_t sliding_window, double softcap,
                      const std::optional<Tensor>& sinks) {
  cpu::AttentionCall call = {};
  call.num_rows = query.size(0);
  call.num_heads = query.size(1);
  call.head_size = query.size(2);
  Tensor out = torch::stable::new_empty(query, {call.num_rows, call.num_heads, call.head_size});
  call.element = element(query);
  call.query = query.const_data_ptr();
  call.key_cache = key_cache.const_data_ptr();
  call.value_cache = value_cache.const_data_ptr();
  call.out = out.mutable_data_ptr();
  call.block_table = block_table.const_data_ptr<int32_t>();
  call.context_lens = context_lens.const_data_ptr<int32_t>();
  call.cu_rows = cu_rows.const_data_ptr<int32_t>();
  call.sinks = sinks ? sinks->const_data_ptr<float>() : nullptr;
  call.query_token_stride = query.stride(0);
  call.query_head_stride = query.stride(1);
  call.block_stride = key_cache.stride(0);
  call.slot_stride = key_cache.stride(1);
  call.table_stride = block_table.stride(0);
  call.batch = block_table.size(0);
  call.max_blocks = block_table.size(1);
  call.num_blocks = key_cache.size(0);
  call.block_size = key_cache.size(1);
  call.num_kv_heads = key_cache.size(2);
  call.sliding_window = sliding_window;
  call.scale = static_cast<float>(scale);
  call.softcap = static_cast<float>(softcap);
  cpu::tree_attention(call);
  return out;
}

std::string instruction_set() { return cpu::kernels().name; }

}  // namespace
}  // namespace fastspec

STABLE_TORCH_LIBRARY_IMPL(fastspec, CPU, m) {
  m.impl("uniform", TORCH_BOX(&fastspec::uniform));
  m.impl("store_kv", TORCH_BOX(&fastspec::store_kv));
  m.impl("tree_attention", TORCH_BOX(&fastspec::tree_attention));
}

STABLE_TORCH_LIBRARY_IMPL(fastspec, CompositeExplicitAutograd, m) {
  m.impl("cpu_instruction_set", TORCH_BOX(&fastspec::instruction_set));
}

// Importing the module runs the registrations above; it has no Python names of its own.
PyMODINIT_FUNC PyInit__cpu(void) {
  static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_cpu", nullptr, -1, nullptr};
  return PyModule_Create(&module);
}
