// Unpacks the tensors of the ops that write to paged caches, and registers them.
#include <initializer_list>

#include "bindings_cuda.h"

namespace fastspec {
namespace {

// Whether the last dimension is contiguous, on the device of `beside`.
bool has_rows(const Tensor& tensor, std::initializer_list<int64_t> shape, ScalarType type,
              const Tensor& beside) {
  return has_shape(tensor, shape) && tensor.scalar_type() == type &&
         tensor.device() == beside.device() &&
         (tensor.stride(-1) == 1 || tensor.size(-1) <= 1 || tensor.numel() == 0);
}

cuda::StoreSide store_side(const Tensor& tokens, const Tensor& cache) {
  const int64_t size = tokens.element_size();
  return {static_cast<const char*>(tokens.const_data_ptr()),
          static_cast<char*>(cache.mutable_data_ptr()), tokens.stride(0) * size,
          tokens.stride(1) * size};
}

cuda::Rotation rotation_of(const Tensor& cos, const Tensor& sin, const Tensor& key) {
  require(cos.dim() == 2);
  const int64_t size = cos.size(1), bytes = cos.element_size();
  require(size >= 2 && size % 2 == 0 && size <= key.size(2));
  require(cos.scalar_type() == ScalarType::Float || cos.scalar_type() == key.scalar_type());
  require(has_rows(cos, {key.size(0), size}, cos.scalar_type(), key));
  require(has_rows(sin, {key.size(0), size}, cos.scalar_type(), key));
  return {static_cast<const char*>(cos.const_data_ptr()),
          static_cast<const char*>(sin.const_data_ptr()),
          cos.stride(0) * bytes,
          sin.stride(0) * bytes,
          size,
          element(cos)};
}

void store_kv(const Tensor& key, const Tensor& value, Tensor key_cache, Tensor value_cache,
              const Tensor& slot_mapping, const OptionalTensor& cos, const OptionalTensor& sin,
              double key_scale, double value_scale) {
  require_caches(key_cache, value_cache, 4);
  require(key_scale == 1 && value_scale == 1);
  const DeviceGuard guard(key_cache.get_device_index());
  const int64_t num_tokens = slot_mapping.numel(), num_heads = key_cache.size(2);
  const int64_t head_size = key_cache.size(3), bytes = key_cache.element_size();
  const ScalarType type = key_cache.scalar_type();
  require(has_rows(key, {num_tokens, num_heads, head_size}, type, key_cache));
  require(has_rows(value, {num_tokens, num_heads, head_size}, type, key_cache));
  require(has_rows(slot_mapping, {num_tokens}, ScalarType::Long, key_cache));
  require(cos.has_value() == sin.has_value());
  cuda::StoreKvCall call = {};
  call.key = store_side(key, key_cache);
  call.value = store_side(value, value_cache);
  if (cos) call.rotation = rotation_of(*cos, *sin, key);
  call.slot_mapping = slot_mapping.const_data_ptr<int64_t>();
  call.num_tokens = num_tokens;
  call.num_heads = num_heads;
  call.head_size = head_size;
  call.num_slots = key_cache.size(0) * key_cache.size(1);
  call.block_size = key_cache.size(1);
  call.block_stride = key_cache.stride(0) * bytes;
  call.slot_stride = key_cache.stride(1) * bytes;
  call.element = element(key_cache);
  check_launch("store_kv", cuda::launch_store_kv(call, current_stream(key_cache)));
}

void compact_kv(Tensor key_caches, Tensor value_caches, const Tensor& block_table,
                const Tensor& prefix_lens, const Tensor& path, const Tensor& accepted_len) {
  require_caches(key_caches, value_caches, 5);
  const DeviceGuard guard(key_caches.get_device_index());
  if (key_caches.scalar_type() != ScalarType::Float8_e4m3fn) element(key_caches);
  require(block_table.dim() == 2 && path.dim() == 2);
  const int64_t batch = block_table.size(0), bytes = key_caches.element_size();
  const ScalarType index = ScalarType::Int;
  require(has_rows(block_table, {batch, block_table.size(1)}, index, key_caches));
  require(has_rows(prefix_lens, {batch}, index, key_caches));
  require(has_rows(path, {batch, path.size(1)}, index, key_caches));
  require(has_rows(accepted_len, {batch}, index, key_caches));
  cuda::CompactKvCall call = {};
  call.key_caches = static_cast<char*>(key_caches.mutable_data_ptr());
  call.value_caches = static_cast<char*>(value_caches.mutable_data_ptr());
  call.block_table = block_table.const_data_ptr<int32_t>();
  call.prefix_lens = prefix_lens.const_data_ptr<int32_t>();
  call.path = path.const_data_ptr<int32_t>();
  call.accepted_len = accepted_len.const_data_ptr<int32_t>();
  call.layer_stride = key_caches.stride(0) * bytes;
  call.block_stride = key_caches.stride(1) * bytes;
  call.slot_stride = key_caches.stride(2) * bytes;
  call.slot_bytes = key_caches.size(3) * key_caches.size(4) * bytes;
  call.table_stride = block_table.stride(0);
  call.path_stride = path.stride(0);
  call.num_layers = key_caches.size(0);
  call.num_blocks = key_caches.size(1);
  call.block_size = key_caches.size(2);
  call.batch = batch;
  call.max_blocks = block_table.size(1);
  call.num_nodes = path.size(1);
  check_launch("compact_kv", cuda::launch_compact_kv(call, current_stream(key_caches)));
}

}  // namespace
}  // namespace fastspec

STABLE_TORCH_LIBRARY_IMPL(fastspec, CUDA, m) {
  m.impl("store_kv", TORCH_BOX(&fastspec::store_kv));
  m.impl("compact_kv", TORCH_BOX(&fastspec::compact_kv));
}
