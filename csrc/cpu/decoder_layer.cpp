#include "decoder_layer.h"

#include <algorithm>
#include <memory>

#include "arena.h"
#include "kernels.h"

namespace fastspec::cpu {
namespace {

struct Sizes {
  explicit Sizes(const DecoderLayerCall& call)
      : rows(call.attention.num_rows),
        size(call.mlp.size),
        inputs(call.embedding_size + size),
        queries(call.attention.num_heads * call.attention.head_size),
        keys(call.attention.num_kv_heads * call.attention.head_size) {}
  const int64_t rows, size, inputs, queries, keys;  // values of a row
};

struct Scratch {
  float *inputs, *normed, *query, *key, *value, *branch;
  char *stored_query, *stored_key, *stored_value, *attended;  // in the type of the caches
  char *packed, *packed_attended;
};

Scratch take_scratch(const DecoderLayerCall& call, const Sizes& n, Arena& arena) {
  const LinearKernels& kernel = kernels().linear;
  const Element element = call.attention.element;
  const int64_t bytes = size_of(element);
  return {arena.take(n.rows * n.inputs),
          arena.take(n.rows * n.size),
          arena.take(n.rows * n.queries),
          arena.take(n.rows * n.keys),
          arena.take(n.rows * n.keys),
          arena.take(n.rows * n.size),
          arena.take<char>(n.rows * n.queries * bytes),
          arena.take<char>(n.rows * n.keys * bytes),
          arena.take<char>(n.rows * n.keys * bytes),
          arena.take<char>(n.rows * n.queries * bytes),
          arena.take<char>(kernel.packed_bytes(element, n.rows, n.inputs)),
          arena.take<char>(kernel.packed_bytes(element, n.rows, n.queries))};
}

// Rows of `size` values; without weights nothing happens.
void normalize(const DecoderLayerCall& call, const void* weight, const float* from, int64_t rows,
               int64_t size, float* to) {
  if (weight == nullptr) return;
  Norm norm = call.norm;
  norm.weight = weight;
  for (int64_t row = 0; row < rows; ++row) {
    kernels().layers.rms_norm(from + row * size, norm, size, to + row * size);
  }
}

// Normalises and rotates the heads of all rows.
void turn_heads(const DecoderLayerCall& call, const void* norm, int64_t num_rows, int64_t num_heads,
                float* heads) {
  const int64_t size = call.attention.head_size;
  normalize(call, norm, heads, num_rows * num_heads, size, heads);
  if (call.cos == nullptr) return;
  for (int64_t row = 0; row < num_rows; ++row) {
    for (int64_t head = 0; head < num_heads; ++head) {
      kernels().layers.rotate(heads + (row * num_heads + head) * size,
                              call.cos + row * call.cos_stride, call.sin + row * call.sin_stride,
                              call.rotary_size);
    }
  }
}

void store_heads(const DecoderLayerCall& call, const Scratch& scratch) {
  StoreCall store = call.store;
  const int64_t token_bytes = store.num_heads * store.head_bytes;
  const auto fill = [&](StoreSide& side, const char* from) {
    side.from = from;
    side.token_stride = token_bytes;
    side.head_stride = store.head_bytes;
  };
  fill(store.key, scratch.stored_key);
  fill(store.value, scratch.stored_value);
  store_kv(store);
}

// scratch.branch = what attention adds to the hidden rows.
void attend(const DecoderLayerCall& call, const Sizes& n, const Scratch& scratch) {
  const KernelTable& kernel = kernels();
  AttentionCall attention = call.attention;
  const Element element = attention.element;
  for (int64_t row = 0; row < n.rows; ++row) {
    float* inputs = scratch.inputs + row * n.inputs;
    std::copy_n(call.embeddings + row * call.embedding_size, call.embedding_size, inputs);
    normalize(call, call.attention_norm, call.hidden + row * n.size, 1, n.size,
              inputs + call.embedding_size);
  }
  const PackedRows rows = {element, n.rows, n.inputs, scratch.packed};
  kernel.linear.pack(scratch.inputs, Element::kFloat32, rows);
  const Product products[] = {
      {call.query.weight, call.query.bias, scratch.query, Element::kFloat32, n.queries},
      {call.key.weight, call.key.bias, scratch.key, Element::kFloat32, n.keys},
      {call.value.weight, call.value.bias, scratch.value, Element::kFloat32, n.keys}};
  multiply(rows, products, 3);
  turn_heads(call, call.query_norm, n.rows, attention.num_heads, scratch.query);
  turn_heads(call, call.key_norm, n.rows, attention.num_kv_heads, scratch.key);
  kernel.layers.narrow(scratch.query, n.rows * n.queries, element, scratch.stored_query);
  kernel.layers.narrow(scratch.key, n.rows * n.keys, element, scratch.stored_key);
  kernel.layers.narrow(scratch.value, n.rows * n.keys, element, scratch.stored_value);
  store_heads(call, scratch);
  attention.query = scratch.stored_query;
  attention.query_token_stride = n.queries;
  attention.query_head_stride = attention.head_size;
  attention.out = scratch.attended;
  cpu::attention(attention);
  const PackedRows attended = {element, n.rows, n.queries, scratch.packed_attended};
  kernel.linear.pack(scratch.attended, element, attended);
  const Product out = {call.output.weight, call.output.bias, scratch.branch, Element::kFloat32,
                       n.size};
  multiply(attended, &out, 1);
}

}  // namespace

void decoder_layer(const DecoderLayerCall& call) {
  const Sizes n(call);
  if (n.rows == 0) return;
  const LayerKernels& kernel = kernels().layers;
  Arena measure;
  take_scratch(call, n, measure);
  const std::unique_ptr<Line[]> memory(new Line[measure.used]);
  Arena arena{memory.get()};
  const Scratch scratch = take_scratch(call, n, arena);
  attend(call, n, scratch);
  normalize(call, call.attention_out_norm, scratch.branch, n.rows, n.size, scratch.branch);
  kernel.add(scratch.branch, n.rows * n.size, call.hidden);
  normalize(call, call.mlp_norm, call.hidden, n.rows, n.size, scratch.normed);
  gated_mlp(
      {call.mlp, scratch.normed, Element::kFloat32, scratch.branch, Element::kFloat32, n.rows});
  normalize(call, call.mlp_out_norm, scratch.branch, n.rows, n.size, scratch.branch);
  kernel.add(scratch.branch, n.rows * n.size, call.hidden);
}

}  // namespace fastspec::cpu
