// Unpacks the tensors of the ops on paged caches, allocates their outputs, and registers them.
#include <string>
#include <tuple>
#include <vector>

#include "bindings_cpu_pages.h"
#include "cpu/compact_kv.h"

namespace fastspec {
namespace {

// Checks the rows of new tokens, or of queries, against a cache.
void require_rows(const Tensor& rows, int64_t num_rows, int64_t num_heads, const Tensor& cache) {
  require(has_shape(rows, {num_rows, num_heads, cache.size(3)}));
  require(rows.scalar_type() == cache.scalar_type());
  require(rows.stride(2) == 1 || rows.size(2) == 1);
}

void take_tokens(const Tensor& tokens, cpu::StoreSide& side) {
  const int64_t size = tokens.element_size();
  side.from = static_cast<const char*>(tokens.const_data_ptr());
  side.token_stride = tokens.stride(0) * size;
  side.head_stride = tokens.stride(1) * size;
}

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
              const Tensor& slot_mapping, const OptionalTensor& cos, const OptionalTensor& sin,
              double key_scale, double value_scale) {
  cpu::StoreCall call = store_call(key_cache, value_cache);
  set_slots(slot_mapping, call);
  require(key_scale == 1 && value_scale == 1);
  require_rows(key, call.num_tokens, call.num_heads, key_cache);
  require_rows(value, call.num_tokens, call.num_heads, key_cache);
  require(cos.has_value() == sin.has_value());
  if (cos) call.rotation = rotation(*cos, *sin, key);
  take_tokens(key, call.key);
  take_tokens(value, call.value);
  cpu::store_kv(call);
}

void compact_kv(Tensor key_caches, Tensor value_caches, const Tensor& block_table,
                const Tensor& prefix_lens, const Tensor& path, const Tensor& accepted_len) {
  require_caches(key_caches, value_caches, 5);
  if (key_caches.scalar_type() != ScalarType::Float8_e4m3fn) element(key_caches);
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

cpu::AttentionCall attention_call(const Tensor& query, const Tensor& key_cache,
                                  const Tensor& value_cache, const Tensor& block_table,
                                  const Tensor& context_lens, const Tensor& cu_rows, double scale,
                                  double value_scale) {
  require(query.dim() == 3 && value_scale == 1);
  cpu::AttentionCall call = paged_call(query.size(0), query.size(1), key_cache, value_cache,
                                       block_table, context_lens, cu_rows, scale);
  require_rows(query, call.num_rows, call.num_heads, key_cache);
  call.query = query.const_data_ptr();
  call.query_token_stride = query.stride(0);
  call.query_head_stride = query.stride(1);
  return call;
}

std::tuple<Tensor, Tensor> tree_attention(const Tensor& query, const Tensor& key_cache,
                                          const Tensor& value_cache, const Tensor& block_table,
                                          const Tensor& context_lens, const Tensor& cu_rows,
                                          double scale, int64_t sliding_window, double softcap,
                                          const OptionalTensor& sinks,
                                          const OptionalTensor& ancestor_mask,
                                          bool return_logsumexp, double value_scale) {
  cpu::AttentionCall call = attention_call(query, key_cache, value_cache, block_table, context_lens,
                                           cu_rows, scale, value_scale);
  set_options(call, sliding_window, softcap, sinks, ancestor_mask);
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
                       double scale, double value_scale) {
  cpu::AttentionCall call = attention_call(query, key_cache, value_cache, block_table, context_lens,
                                           cu_rows, scale, value_scale);
  Tensor out = new_tensor({call.num_rows, call.num_heads, call.head_size}, query.scalar_type());
  call.out = out.mutable_data_ptr();
  cpu::attention(call);
  return out;
}

}  // namespace
}  // namespace fastspec

STABLE_TORCH_LIBRARY_IMPL(fastspec, CPU, m) {
  m.impl("store_kv", TORCH_BOX(&fastspec::store_kv));
  m.impl("compact_kv", TORCH_BOX(&fastspec::compact_kv));
  m.impl("tree_attention", TORCH_BOX(&fastspec::tree_attention));
  m.impl("cross_attention", TORCH_BOX(&fastspec::cross_attention));
}
