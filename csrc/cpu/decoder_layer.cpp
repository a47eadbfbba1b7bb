#include "decoder_layer.h"

#include <algorithm>

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

struct LayerScratch {
  float *inputs, *query, *key, *value, *branch;
  char *stored_query, *stored_key, *stored_value, *attended;  // in the type of the caches
  PackedRows packed_inputs, packed_attended;
  MlpScratch mlp;
};

LayerScratch take_scratch(const DecoderLayerCall& call, const Sizes& n, Arena& arena) {
  const Element element = call.attention.element;
  const int64_t bytes = size_of(element);
  return {arena.take(n.rows * n.inputs),
          arena.take(n.rows * n.queries),
          arena.take(n.rows * n.keys),
          arena.take(n.rows * n.keys),
          arena.take(n.rows * n.size),
          arena.take<char>(n.rows * n.queries * bytes),
          arena.take<char>(n.rows * n.keys * bytes),
          arena.take<char>(n.rows * n.keys * bytes),
          arena.take<char>(n.rows * n.queries * bytes),
          take_rows(call.mlp.element, n.rows, n.inputs, arena),
          take_rows(call.mlp.element, n.rows, n.queries, arena),
          take_mlp(call.mlp, n.rows, arena)};
}

// Normalises rows of `size` values; without weights it does nothing.
void normalize(const DecoderLayerCall& call, const void* weight, const float* from, int64_t rows,
               int64_t size, float* to) {
  if (weight == nullptr) return;
  Norm norm = call.norm;
  norm.weight = weight;
  for (int64_t row = 0; row < rows; ++row) {
    kernels().layers.rms_norm(from + row * size, norm, size, to + row * size);
  }
}

// Normalises and rotates the heads of a row.
void turn_heads(const DecoderLayerCall& call, const void* norm, int64_t row, int64_t num_heads,
                float* heads) {
  const int64_t size = call.attention.head_size;
  normalize(call, norm, heads, num_heads, size, heads);
  if (call.cos == nullptr) return;
  for (int64_t head = 0; head < num_heads; ++head) {
    kernels().layers.rotate(heads + head * size, call.cos + row * call.cos_stride,
                            call.sin + row * call.sin_stride, call.rotary_size);
  }
}

// One layer, whose phases read results of earlier ones in `scratch`.
class Layer {
 public:
  Layer(const DecoderLayerCall& call, const LayerScratch& scratch)
      : call_(call), scratch_(scratch), n_(call) {}

  static constexpr int64_t kPhases = 7 + PagedAttention::kPhases + kMlpPhases;

  void run(const PagedAttention& attention, Team::Member& member) const {
    share_rows(scratch_.packed_inputs, member,
               [&](int64_t first, int64_t last) { pack_inputs(first, last); });
    const Product products[] = {
        {call_.query.weight, call_.query.bias, scratch_.query, Element::kFloat32, n_.queries},
        {call_.key.weight, call_.key.bias, scratch_.key, Element::kFloat32, n_.keys},
        {call_.value.weight, call_.value.bias, scratch_.value, Element::kFloat32, n_.keys}};
    multiply(scratch_.packed_inputs, products, 3, member);
    const StoreCall store = store_call();
    member.share(n_.rows, [&](int64_t row) { store_heads(row, store); });
    attention.run(attention_call(), member);
    pack(scratch_.attended, call_.attention.element, scratch_.packed_attended, member);
    const Product out = {call_.output.weight, call_.output.bias, scratch_.branch, Element::kFloat32,
                         n_.size};
    multiply(scratch_.packed_attended, &out, 1, member);
    share_rows(scratch_.mlp.input, member,
               [&](int64_t first, int64_t last) { pack_mlp_inputs(first, last); });
    gated_mlp(call_.mlp, scratch_.mlp, scratch_.branch, Element::kFloat32, member);
    member.share(n_.rows, [&](int64_t row) { add_branch(call_.mlp_out_norm, row); });
  }

 private:
  void pack_inputs(int64_t first, int64_t last) const {
    for (int64_t row = first; row < last; ++row) {
      for (const int64_t head : call_.kept_heads) keep_input(row, head);
      float* inputs = scratch_.inputs + row * n_.inputs;
      std::copy_n(call_.embeddings + row * call_.embedding_size, call_.embedding_size, inputs);
      normalize(call_, call_.attention_norm, call_.hidden + row * n_.size, 1, n_.size,
                inputs + call_.embedding_size);
    }
    kernels().linear.pack_rows(scratch_.inputs, Element::kFloat32, scratch_.packed_inputs, first,
                               last);
  }

  void keep_input(int64_t row, int64_t head) const {
    const StoreCall& kept = call_.kept;
    const int64_t slot = kept.slot_mapping[row], half = n_.size / 2;
    if (slot < 0) return;
    const float* from = call_.hidden + row * n_.size;
    for (const StoreSide& side : {kept.key, kept.value}) {
      char* to = slot_of(kept, side, slot) + head * kept.head_bytes;
      kernels().layers.narrow(from, half, call_.kept_element, to);
      from += half;
    }
  }

  StoreCall store_call() const {
    StoreCall store = call_.store;
    const auto fill = [&](StoreSide& side, const char* from) {
      side.from = from;
      side.token_stride = store.num_heads * store.head_bytes;
      side.head_stride = store.head_bytes;
    };
    fill(store.key, scratch_.stored_key);
    fill(store.value, scratch_.stored_value);
    return store;
  }

  void store_heads(int64_t row, const StoreCall& store) const {
    const AttentionCall& attention = call_.attention;
    float* query = scratch_.query + row * n_.queries;
    float* key = scratch_.key + row * n_.keys;
    turn_heads(call_, call_.query_norm, row, attention.num_heads, query);
    turn_heads(call_, call_.key_norm, row, attention.num_kv_heads, key);
    const auto narrow = [&](const float* from, int64_t size, char* to) {
      kernels().layers.narrow(from, size, attention.element,
                              to + row * size * size_of(attention.element));
    };
    narrow(query, n_.queries, scratch_.stored_query);
    narrow(key, n_.keys, scratch_.stored_key);
    narrow(scratch_.value + row * n_.keys, n_.keys, scratch_.stored_value);
    store_token(store, row);
  }

  AttentionCall attention_call() const {
    AttentionCall attention = call_.attention;
    attention.query = scratch_.stored_query;
    attention.query_token_stride = n_.queries;
    attention.query_head_stride = attention.head_size;
    attention.out = scratch_.attended;
    return attention;
  }

  // hidden += norm(branch)
  void add_branch(const void* norm, int64_t row) const {
    float* branch = scratch_.branch + row * n_.size;
    normalize(call_, norm, branch, 1, n_.size, branch);
    kernels().layers.add(branch, n_.size, call_.hidden + row * n_.size);
  }

  void pack_mlp_inputs(int64_t first, int64_t last) const {
    for (int64_t row = first; row < last; ++row) {
      add_branch(call_.attention_out_norm, row);
      normalize(call_, call_.mlp_norm, call_.hidden + row * n_.size, 1, n_.size,
                scratch_.branch + row * n_.size);
    }
    kernels().linear.pack_rows(scratch_.branch, Element::kFloat32, scratch_.mlp.input, first, last);
  }

  const DecoderLayerCall& call_;
  const LayerScratch& scratch_;
  const Sizes n_;
};

// Multiply-adds of a layer.
int64_t work_of(const DecoderLayerCall& call) {
  const Sizes n(call);
  const int64_t outputs = n.queries + 2 * n.keys;
  const int64_t products = outputs * n.inputs + n.size * n.queries + products_of_a_row(call.mlp);
  return n.rows * products + work_of(call.attention);
}

bool have_same_pages(const DecoderLayerCall& a, const DecoderLayerCall& b) {
  return a.attention.num_blocks == b.attention.num_blocks &&
         a.attention.block_size == b.attention.block_size;
}

bool are_alike(const DecoderLayerCall& a, const DecoderLayerCall& b) {
  const AttentionCall &left = a.attention, &right = b.attention;
  return left.num_heads == right.num_heads && left.num_kv_heads == right.num_kv_heads &&
         left.head_size == right.head_size && left.element == right.element &&
         a.mlp.hidden == b.mlp.hidden && a.mlp.element == b.mlp.element;
}

}  // namespace

void decoder_layers(const std::vector<DecoderLayerCall>& calls) {
  // Layers share their indices, and most of them the number of pages, so one check covers these.
  const DecoderLayerCall* checked = nullptr;
  for (const DecoderLayerCall& call : calls) {
    if (checked != nullptr && have_same_pages(*checked, call)) continue;
    check_slots(call.store);
    if (call.kept.num_heads > 0) check_slots(call.kept);
    check_indices(call.attention);
    checked = &call;
  }
  auto first = calls.begin();
  if (first->attention.num_rows == 0) return;
  while (first != calls.end()) {
    const auto last = std::find_if_not(
        first, calls.end(), [&](const DecoderLayerCall& call) { return are_alike(*first, call); });
    const int64_t workers = workers_for((last - first) * work_of(*first), kProductsPerWorker);
    const PagedAttention attention(first->attention, workers);
    const Scratch<LayerScratch> scratch(
        [&](Arena& arena) { return take_scratch(*first, Sizes(*first), arena); });
    Team(workers, (last - first) * Layer::kPhases).run([&](Team::Member& member) {
      for (auto call = first; call != last; ++call) Layer(*call, *scratch).run(attention, member);
    });
    first = last;
  }
}

}  // namespace fastspec::cpu
