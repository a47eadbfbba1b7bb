// The launchers of the CUDA kernels: raw device pointers and a stream, no framework.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>

namespace fastspec::cuda {

// The partitioning of a kernel. Results do not depend on it.
struct Plan {
  int32_t cluster;  // thread blocks that share a row: 1, 2, 4 or 8; 1 if Limits has no clusters
  int32_t threads;  // per block, a multiple of 32
  int32_t staged;   // whether a row is kept in the shared memory of its blocks
};

// The targets of a kernel's code on the current device: PTX and machine code, 10 * major + minor
// each. They differ if the driver compiled older PTX.
struct Image {
  int32_t ptx_version;
  int32_t binary_version;
};

enum class Element : int32_t { kFloat32, kBFloat16, kFloat16 };

constexpr int64_t kMaxVocab = (int64_t{1} << 20) - 1;  // weights of 2^44 add up in 64 bits

// Rows of logits, the last dimension contiguous; strides count elements.
struct Logits {
  const void* data;
  const int32_t* bitmask;  // [rows, words], or null: everything is allowed
  int64_t row_stride;
  int64_t bitmask_stride;
  int64_t num_rows;
  int64_t size;  // of the vocabulary, at most kMaxVocab
  Element element;
};

// One value per sequence each, or null: off.
struct SamplingParameters {
  const float* temperature;
  const int32_t* top_k;
  const float* top_p;
  const float* min_p;
};

struct PenalizeCall {
  void* logits;                   // [R, V], rows row_stride elements apart
  const int32_t* row_sequence;    // [R]; rows without a sequence or node are unchanged
  const int32_t* row_node;        // [R]
  const int32_t* tree_token_ids;  // [B, N]
  const int32_t* parents;         // [B, N], or null: chains
  const int32_t* cu_history;      // [B + 1]
  const int32_t* history_ids;
  const int32_t* history_counts;
  const int32_t* cu_bias;  // [B + 1]
  const int32_t* bias_ids;
  const float* bias;
  const int32_t* bias_until;
  const float* repetition_penalty;  // [B], or null: off, as the next two
  const float* presence_penalty;
  const float* frequency_penalty;
  int64_t row_stride;
  int64_t num_rows;
  int64_t vocab;
  int64_t batch;
  int64_t num_nodes;
  Element element;
};

enum class SiblingRule : int32_t { kTargetOnly, kWithoutReplacement, kWithReplacement };

struct VerifyTreeCall {
  Logits target;
  Logits draft;  // rows of [B, N]; data null under kTargetOnly
  int64_t draft_batch_stride;
  const int32_t* draft_token_map;
  const int32_t* cu_rows;         // [B + 1]
  const int32_t* tree_token_ids;  // [B, N]
  const int32_t* parents;         // [B, N]
  const float* uniform_samples;   // [B, N + 1]
  SamplingParameters parameters;  // per sequence
  int64_t batch;
  int64_t num_nodes;
  SiblingRule rule;
  int32_t* path;              // [B, N]
  int32_t* output_token_ids;  // [B, N]
  int32_t* accepted_len;      // [B]
  float* logprobs;            // [B, N]
};

struct BuildTreeCall {
  const int32_t* parents;  // [B, N]
  int64_t batch;
  int64_t num_nodes;
  int32_t* depths;         // [B, N]
  int64_t* ancestor_mask;  // [B, N, ceil(N / 64)]
};

// New keys or values [T, G, D] and their cache; strides in bytes.
struct StoreSide {
  const char* from;
  char* cache;
  int64_t token_stride;
  int64_t head_stride;
};

// Factors of the first `size` values of each key head, [T, size]; size 0: keys are copied.
struct Rotation {
  const char* cos;
  const char* sin;
  int64_t cos_stride;  // in bytes
  int64_t sin_stride;
  int64_t size;
  Element element;
};

struct StoreKvCall {
  StoreSide key;
  StoreSide value;
  Rotation rotation;
  const int64_t* slot_mapping;  // [T]; a token whose slot is not in the cache is skipped
  int64_t num_tokens;
  int64_t num_heads;
  int64_t head_size;
  int64_t num_slots;
  int64_t block_size;
  int64_t block_stride;  // of both caches, in bytes; the heads of a slot are contiguous
  int64_t slot_stride;
  Element element;
};

struct CompactKvCall {
  char* key_caches;  // [num_layers, num_blocks, block_size] slots
  char* value_caches;
  const int32_t* block_table;   // [B, max_blocks]
  const int32_t* prefix_lens;   // [B]
  const int32_t* path;          // [B, N]
  const int32_t* accepted_len;  // [B]
  int64_t layer_stride;         // of both caches, in bytes; a slot is contiguous
  int64_t block_stride;
  int64_t slot_stride;
  int64_t slot_bytes;
  int64_t table_stride;  // in elements
  int64_t path_stride;
  int64_t num_layers;
  int64_t num_blocks;
  int64_t block_size;
  int64_t batch;
  int64_t max_blocks;
  int64_t num_nodes;
};

cudaError_t launch_penalize(const PenalizeCall& call, cudaStream_t stream);
cudaError_t launch_verify_tree(const VerifyTreeCall& call, const Plan& plan, cudaStream_t stream);
cudaError_t launch_build_tree(const BuildTreeCall& call, cudaStream_t stream);
cudaError_t launch_store_kv(const StoreKvCall& call, cudaStream_t stream);
cudaError_t launch_compact_kv(const CompactKvCall& call, cudaStream_t stream);

// The image of verify_tree represents all kernels, which are compiled for the same architectures.
cudaError_t image_of_verify_tree(Image* image);

// samples[b, i] = number i of (seed[b], position[b], stream_id); samples is [batch, num],
// contiguous.
cudaError_t launch_uniform(const int64_t* seed, const int64_t* position, float* samples,
                           int64_t batch, int64_t num, uint32_t stream_id, cudaStream_t stream);

}  // namespace fastspec::cuda
