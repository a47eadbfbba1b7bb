#include "bindings_cpu_pages.h"

#include <cmath>

namespace fastspec {

static cpu::StoreSide store_side(const Tensor& cache) {
  const int64_t size = cache.element_size();
  cpu::StoreSide side = {};
  side.cache = static_cast<char*>(cache.mutable_data_ptr());
  side.block_stride = cache.stride(0) * size;
  side.slot_stride = cache.stride(1) * size;
  return side;
}

cpu::StoreCall store_call(const Tensor& key_cache, const Tensor& value_cache) {
  require_caches(key_cache, value_cache);
  element(key_cache);
  cpu::StoreCall call = {};
  call.num_heads = key_cache.size(2);
  call.key = store_side(key_cache);
  call.value = store_side(value_cache);
  call.head_bytes = key_cache.size(3) * static_cast<int64_t>(key_cache.element_size());
  call.num_blocks = key_cache.size(0);
  call.block_size = key_cache.size(1);
  return call;
}

void set_slots(const Tensor& slot_mapping, cpu::StoreCall& call) {
  call.num_tokens = slot_mapping.numel();
  require(is_vector(slot_mapping, call.num_tokens, ScalarType::Long));
  call.slot_mapping = slot_mapping.const_data_ptr<int64_t>();
}

cpu::AttentionCall paged_call(int64_t num_rows, int64_t num_heads, const Tensor& key_cache,
                              const Tensor& value_cache, const Tensor& block_table,
                              const Tensor& context_lens, const Tensor& cu_rows, double scale) {
  require_caches(key_cache, value_cache);
  require(block_table.dim() == 2);
  cpu::AttentionCall call = {};
  call.num_rows = num_rows;
  call.num_heads = num_heads;
  call.head_size = key_cache.size(3);
  call.num_blocks = key_cache.size(0);
  call.block_size = key_cache.size(1);
  call.num_kv_heads = key_cache.size(2);
  call.batch = block_table.size(0);
  call.max_blocks = block_table.size(1);
  require(num_heads > 0 && num_heads % call.num_kv_heads == 0);
  require(is_matrix(block_table, ScalarType::Int));
  require(is_vector(context_lens, call.batch, ScalarType::Int));
  require(is_vector(cu_rows, call.batch + 1, ScalarType::Int));
  require(std::isfinite(scale));
  call.element = element(key_cache);
  call.key_cache = key_cache.const_data_ptr();
  call.value_cache = value_cache.const_data_ptr();
  call.block_table = block_table.const_data_ptr<int32_t>();
  call.context_lens = context_lens.const_data_ptr<int32_t>();
  call.cu_rows = cu_rows.const_data_ptr<int32_t>();
  call.block_stride = key_cache.stride(0);
  call.slot_stride = key_cache.stride(1);
  call.table_stride = block_table.stride(0);
  call.scale = static_cast<float>(scale);
  return call;
}

void set_options(cpu::AttentionCall& call, int64_t sliding_window, double softcap,
                 const OptionalTensor& sinks, const OptionalTensor& ancestor_mask) {
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
  // A window longer than any context is off, and its arithmetic must not overflow.
  call.sliding_window = sliding_window < INT32_MAX ? sliding_window : 0;
  call.softcap = static_cast<float>(softcap);
}

}  // namespace fastspec
