// Unpacks the weights of decoders, and registers `decoder_layers` and `draft_chain`.
#include <algorithm>
#include <cmath>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings_cpu_pages.h"
#include "cpu/decoder_layer.h"
#include "cpu/draft_chain.h"

namespace fastspec {
namespace {

// Data of a dense tensor with the model's dtype.
const void* weight_data(const Tensor& weight, std::initializer_list<int64_t> shape,
                        ScalarType type) {
  require(has_shape(weight, shape) && weight.scalar_type() == type && weight.is_contiguous());
  return weight.const_data_ptr();
}

const void* weight_data(const OptionalTensor& weight, std::initializer_list<int64_t> shape,
                        ScalarType type) {
  return weight ? weight_data(*weight, shape, type) : nullptr;
}

// The tensors of a layer, in the order of `LayerWeights` in fastspec_kernels.
enum LayerTensor {
  kAttentionNorm,
  kQuery,
  kKey,
  kValue,
  kOutput,
  kMlpNorm,
  kGate,
  kUp,
  kDown,
  kQueryBias,
  kKeyBias,
  kValueBias,
  kOutputBias,
  kQueryNorm,
  kKeyNorm,
  kAttentionOutNorm,
  kMlpOutNorm,
  kSinks,
  kNumLayerTensors
};

// Fills in the weights of a layer; sizes and caches are known. Those of the products may be
// quantized, with as many bits as mlp.element, and biases are float32 then.
void set_weights(const OptionalTensor* weights, ScalarType type, cpu::DecoderLayerCall& call) {
  const int64_t size = call.mlp.size, wide = call.mlp.hidden, inputs = call.embedding_size + size;
  const int64_t head_size = call.attention.head_size;
  const int64_t queries = call.attention.num_heads * head_size;
  const int64_t keys = call.attention.num_kv_heads * head_size;
  const auto data = [&](LayerTensor name, std::initializer_list<int64_t> shape) {
    require(weights[name] || name >= kQueryBias);
    return weight_data(weights[name], shape, type);
  };
  call.attention_norm = data(kAttentionNorm, {size});
  call.query_norm = data(kQueryNorm, {head_size});
  call.key_norm = data(kKeyNorm, {head_size});
  call.attention_out_norm = data(kAttentionOutNorm, {size});
  call.mlp_norm = data(kMlpNorm, {size});
  call.mlp_out_norm = data(kMlpOutNorm, {size});
  const bool is_quantized = cpu::is_quantized(call.mlp.element);
  const auto matrix = [&](LayerTensor name, int64_t outputs, int64_t depth) {
    if (!is_quantized) return data(name, {outputs, depth});
    require(weights[name] && is_quantized_weight(*weights[name], outputs, depth));
    require(bits_of(*weights[name]) == call.mlp.element);
    return weights[name]->const_data_ptr();
  };
  const auto projection = [&](LayerTensor name, LayerTensor bias, int64_t outputs, int64_t depth) {
    const ScalarType bias_type = is_quantized ? ScalarType::Float : type;
    return cpu::Projection{matrix(name, outputs, depth),
                           weight_data(weights[bias], {outputs}, bias_type)};
  };
  call.query = projection(kQuery, kQueryBias, queries, inputs);
  call.key = projection(kKey, kKeyBias, keys, inputs);
  call.value = projection(kValue, kValueBias, keys, inputs);
  call.output = projection(kOutput, kOutputBias, size, queries);
  call.mlp.gate = matrix(kGate, wide, size);
  call.mlp.up = matrix(kUp, wide, size);
  call.mlp.down = matrix(kDown, size, wide);
}

cpu::DecoderLayerCall sized_call(int64_t size, const Text& activation) {
  require(size > 0 && (activation == "silu" || activation == "gelu_tanh"));
  cpu::DecoderLayerCall call = {};
  call.mlp.size = size;
  call.mlp.activation = activation == "silu" ? cpu::Activation::kSilu : cpu::Activation::kGeluTanh;
  return call;
}

// Rotation factors, a row for each of `num`.
void set_factors(const OptionalTensor& cos, const OptionalTensor& sin, int64_t num,
                 cpu::DecoderLayerCall& call) {
  require(cos.has_value() == sin.has_value());
  if (!cos) return;
  require(is_matrix(*cos, ScalarType::Float) && is_matrix(*sin, ScalarType::Float));
  call.rotary_size = cos->size(1);
  require(has_shape(*cos, {num, call.rotary_size}) && has_shape(*sin, {num, call.rotary_size}));
  require(call.rotary_size % 2 == 0 && call.rotary_size >= 2);
  call.cos = cos->const_data_ptr<float>();
  call.sin = sin->const_data_ptr<float>();
  call.cos_stride = cos->stride(0);
  call.sin_stride = sin->stride(0);
}

// Layers with pages, weights and options, from what they share. Slots are still missing.
std::vector<cpu::DecoderLayerCall> layer_calls(
    const cpu::DecoderLayerCall& shared, const std::vector<OptionalTensor>& layers,
    const std::vector<Tensor>& key_caches, const std::vector<Tensor>& value_caches,
    int64_t num_rows, double eps, double norm_shift, const Tensor& block_table,
    const Tensor& context_lens, const Tensor& cu_rows, double scale, int64_t sliding_window,
    double softcap, const OptionalTensor& ancestor_mask) {
  const size_t num_layers = key_caches.size();
  require(eps > 0 && num_layers > 0 && value_caches.size() == num_layers);
  require(layers.size() == num_layers * kNumLayerTensors);
  std::vector<cpu::DecoderLayerCall> calls(num_layers, shared);
  for (size_t index = 0; index < num_layers; ++index) {
    const OptionalTensor* weights = &layers[index * kNumLayerTensors];
    const Tensor &key_cache = key_caches[index], &value_cache = value_caches[index];
    cpu::DecoderLayerCall& call = calls[index];
    call.store = store_call(key_cache, value_cache);
    const int64_t head_size = key_cache.size(3);
    require(call.rotary_size <= head_size && weights[kQuery] && weights[kGate]);
    const bool is_quantized = weights[kQuery]->scalar_type() == ScalarType::Byte;
    const int64_t rank = is_quantized ? 3 : 2, tile = is_quantized ? cpu::kOutputTile : 1;
    require(weights[kQuery]->dim() == rank && weights[kGate]->dim() == rank);
    const int64_t queries = weights[kQuery]->size(0) * tile;
    require(queries % head_size == 0);
    call.attention = paged_call(num_rows, queries / head_size, key_cache, value_cache, block_table,
                                context_lens, cu_rows, scale);
    set_options(call.attention, sliding_window, softcap, weights[kSinks], ancestor_mask);
    call.norm = {nullptr, call.attention.element, static_cast<float>(eps),
                 static_cast<float>(norm_shift)};
    call.mlp.hidden = weights[kGate]->size(0) * tile;
    call.mlp.element = is_quantized ? bits_of(*weights[kQuery]) : call.attention.element;
    set_weights(weights, key_cache.scalar_type(), call);
  }
  return calls;
}

// Drops the op's references to hundreds of tensors before its kernels run: afterwards the counters
// are no longer in the processor's caches, and each would wait for memory. The caller holds the
// tensors until the op returns, as Python does.
template <class... Lists>
void let_go(Lists&... lists) {
  (lists.clear(), ...);
}

Tensor decoder_layers(const Tensor& hidden, std::vector<OptionalTensor>& layers,
                      std::vector<Tensor>& key_caches, std::vector<Tensor>& value_caches,
                      double eps, double norm_shift, const Text& activation,
                      const OptionalTensor& cos, const OptionalTensor& sin,
                      const OptionalTensor& embeddings, std::vector<int64_t> kept_layers,
                      std::vector<Tensor> kept_caches, const Tensor& slot_mapping,
                      const Tensor& block_table, const Tensor& context_lens, const Tensor& cu_rows,
                      double scale, int64_t sliding_window, double softcap,
                      const OptionalTensor& ancestor_mask) {
  require(hidden.dim() == 2);
  require(hidden.scalar_type() == ScalarType::Float && hidden.is_contiguous());
  const int64_t num_rows = hidden.size(0);
  cpu::DecoderLayerCall shared = sized_call(hidden.size(1), activation);
  set_factors(cos, sin, num_rows, shared);
  if (embeddings) {
    require(embeddings->dim() == 2 && embeddings->size(0) == num_rows);
    require(embeddings->scalar_type() == ScalarType::Float && embeddings->is_contiguous());
    shared.embedding_size = embeddings->size(1);
    shared.embeddings = embeddings->const_data_ptr<float>();
  }
  require(kept_caches.size() == (kept_layers.empty() ? 0 : 2));
  if (!kept_layers.empty()) {
    shared.kept = store_call(kept_caches[0], kept_caches[1]);
    set_slots(slot_mapping, shared.kept);
    shared.kept_element = element(kept_caches[0]);
    require(shared.kept.num_tokens == num_rows);
    require(kept_caches[0].size(2) == static_cast<int64_t>(kept_layers.size()));
    require(2 * kept_caches[0].size(3) == shared.mlp.size);
  }
  // All layers are checked before the first one writes.
  std::vector<cpu::DecoderLayerCall> calls =
      layer_calls(shared, layers, key_caches, value_caches, num_rows, eps, norm_shift, block_table,
                  context_lens, cu_rows, scale, sliding_window, softcap, ancestor_mask);
  for (size_t head = 0; head < kept_layers.size(); ++head) {
    const int64_t layer = kept_layers[head];
    require(-1 <= layer && layer < static_cast<int64_t>(calls.size()));
    if (layer >= 0) calls[layer].kept_heads.push_back(static_cast<int64_t>(head));
  }
  Tensor out = new_tensor({num_rows, hidden.size(1)}, ScalarType::Float);
  float* rows = out.mutable_data_ptr<float>();
  std::copy_n(hidden.const_data_ptr<float>(), num_rows * hidden.size(1), rows);
  for (cpu::DecoderLayerCall& call : calls) {
    set_slots(slot_mapping, call.store);
    require(call.store.num_tokens == num_rows);
    call.hidden = rows;
  }
  let_go(layers, key_caches, value_caches);
  cpu::decoder_layers(calls);
  return out;
}

cpu::OutputHead head_of(const Tensor& head, const OptionalTensor& bias,
                        const OptionalTensor& tokens, int64_t num_columns, int64_t size,
                        ScalarType type, int64_t vocab_size) {
  cpu::OutputHead out = {};
  out.num_columns = num_columns;
  require(num_columns > 0 && (tokens || num_columns <= vocab_size));
  const bool is_quantized = head.scalar_type() == ScalarType::Byte;
  if (is_quantized) {
    require(is_quantized_weight(head, num_columns, size));
    out.element = bits_of(head);
  } else {
    require(head.dim() == 2 && head.size(0) >= num_columns);
    weight_data(head, {head.size(0), size}, type);
    out.element = element(head);
  }
  out.projection.weight = head.const_data_ptr();
  const int64_t num_biases = bias && bias->dim() == 1 ? bias->size(0) : num_columns;
  require(num_biases >= num_columns);
  const ScalarType bias_type = is_quantized ? ScalarType::Float : type;
  out.projection.bias = weight_data(bias, {num_biases}, bias_type);
  require(!tokens || is_vector(*tokens, num_columns, ScalarType::Int));
  out.tokens = tokens ? tokens->const_data_ptr<int32_t>() : nullptr;
  return out;
}

std::tuple<Tensor, Tensor, Tensor> draft_chain(
    const Tensor& token_ids, const Tensor& embedding, const OptionalTensor& embedding_norm,
    std::vector<OptionalTensor>& layers, const Tensor& norm, const Tensor& head,
    const OptionalTensor& head_bias, const OptionalTensor& head_tokens, int64_t num_columns,
    std::vector<Tensor>& key_caches, std::vector<Tensor>& value_caches,
    const OptionalTensor& hidden, OptionalTensor hidden_cache, double eps, double norm_shift,
    const Text& activation, const OptionalTensor& cos, const OptionalTensor& sin,
    const Tensor& block_table, const Tensor& context_lens, const Tensor& cu_rows, double scale,
    int64_t sliding_window, double softcap, const Tensor& num_tokens, const Tensor& uniform_samples,
    const OptionalTensor& temperature, const OptionalTensor& top_k, const OptionalTensor& top_p,
    const OptionalTensor& min_p, double confidence_threshold, bool keeps_logits) {
  require(token_ids.dim() == 1 && embedding.dim() == 2 && !key_caches.empty());
  const int64_t num_rows = token_ids.size(0), size = embedding.size(1);
  const ScalarType type = key_caches[0].scalar_type();
  cpu::DraftChainCall call = {};
  cpu::DecoderLayerCall shared = sized_call(size, activation);
  set_factors(cos, sin, cos ? cos->size(0) : 0, shared);
  call.num_positions = cos ? cos->size(0) : 0;
  shared.embedding_size = embedding_norm ? size : 0;
  require(is_vector(token_ids, num_rows, ScalarType::Long));
  call.token_ids = token_ids.const_data_ptr<int64_t>();
  call.vocab_size = embedding.size(0);
  call.embedding = weight_data(embedding, {call.vocab_size, size}, type);
  call.embedding_norm = weight_data(embedding_norm, {size}, type);
  call.norm = weight_data(norm, {size}, type);
  require(hidden.has_value() == embedding_norm.has_value() && (hidden || !hidden_cache));
  call.hidden = weight_data(hidden, {num_rows, size}, type);
  if (hidden_cache) {
    require(hidden_cache->dim() == 2);
    require(hidden_cache->size(0) >= key_caches[0].size(0) * key_caches[0].size(1));
    weight_data(hidden_cache, {hidden_cache->size(0), size}, type);
    call.hidden_cache = hidden_cache->mutable_data_ptr();
  }
  call.layers = layer_calls(shared, layers, key_caches, value_caches, num_rows, eps, norm_shift,
                            block_table, context_lens, cu_rows, scale, sliding_window, softcap, {});
  for (const Tensor& cache : key_caches) {
    require(cache.scalar_type() == type && cache.size(1) == key_caches[0].size(1));
  }
  call.head = head_of(head, head_bias, head_tokens, num_columns, size, type, call.vocab_size);
  const int64_t batch = block_table.size(0);
  require(uniform_samples.dim() == 2 && uniform_samples.size(0) == batch);
  require(uniform_samples.scalar_type() == ScalarType::Float && uniform_samples.is_contiguous());
  require(is_vector(num_tokens, batch, ScalarType::Int));
  call.num_steps = uniform_samples.size(1);
  call.uniform_samples = uniform_samples.const_data_ptr<float>();
  call.num_tokens = num_tokens.const_data_ptr<int32_t>();
  call.parameters = sampling_parameters(batch, temperature, top_k, top_p, min_p);
  require(confidence_threshold >= 0 && confidence_threshold <= 1);
  call.has_threshold = confidence_threshold > 0;
  call.least_logprob = static_cast<float>(std::log(confidence_threshold));
  Tensor drawn = new_tensor({batch, call.num_steps}, ScalarType::Int);
  Tensor num_drawn = new_tensor({batch}, ScalarType::Int);
  Tensor logits = new_tensor({batch, keeps_logits ? call.num_steps : 0, num_columns}, type);
  call.out_token_ids = drawn.mutable_data_ptr<int32_t>();
  call.out_num_drawn = num_drawn.mutable_data_ptr<int32_t>();
  call.out_logits = keeps_logits ? logits.mutable_data_ptr() : nullptr;
  let_go(layers, key_caches, value_caches);
  cpu::draft_chain(std::move(call));
  return {drawn, num_drawn, logits};
}

}  // namespace
}  // namespace fastspec

STABLE_TORCH_LIBRARY_IMPL(fastspec, CPU, m) {
  m.impl("decoder_layers", TORCH_BOX(&fastspec::decoder_layers));
  m.impl("draft_chain", TORCH_BOX(&fastspec::draft_chain));
}
