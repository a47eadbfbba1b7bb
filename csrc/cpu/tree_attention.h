// Attention of packed query rows over a block-paged KV cache: the arguments, and the plan of the
// work.
#pragma once
#include <cstdint>
#include <optional>
#include <vector>

#include "arena.h"
#include "elements.h"
#include "parallel.h"

namespace fastspec::cpu {

struct KeyRange {
  int64_t first, last;
};

// What a query row sees: a range of consecutive places of its context, then nodes of its tree,
// where node j is bit j at place `root` + j.
struct Sight {
  KeyRange places;
  int64_t root;
  uint64_t nodes[2];
};

constexpr int64_t kMaxTreeNodes = 128;

// Strides count elements and are equal for both caches; a KV head's values are contiguous.
struct AttentionCall {
  Element element;
  const void* query;
  const void* key_cache;
  const void* value_cache;
  void* out;         // [num_rows, num_heads, head_size], contiguous
  float* logsumexp;  // [num_rows, num_heads] or null
  const int32_t* block_table;
  const int32_t* context_lens;
  const int32_t* cu_rows;
  const float* sinks;            // [num_heads] or null
  const int64_t* ancestor_mask;  // [batch, num_nodes, words of 64 nodes], or null for chains
  bool holds_queries;            // whether the rows are the last tokens of their contexts
  int64_t query_token_stride, query_head_stride, block_stride, slot_stride, table_stride;
  int64_t batch, num_rows, num_heads, num_kv_heads, head_size;
  int64_t num_blocks, block_size, max_blocks, num_nodes;
  int64_t sliding_window;
  float scale, softcap;
};

// Consecutive tokens of one sequence for some KV heads, the keys that any of them sees, from the
// start of a key tile on, and the keys that all of them see. Its rows are (KV head, token, query
// head of the KV head).
struct QueryTile {
  int64_t sequence, first_token, num_tokens, first_kv_head, num_kv_heads, num_rows;
  KeyRange keys, shared;
  const Sight* sights;  // of its tokens
};

// Unnormalised softmax of some rows over some keys: the sums of 2^(score - maximum) and of that
// times V.
struct AttentionState {
  float* maximum;  // [rows]
  float* sum;      // [rows]
  float* value;    // [rows, padded_head_size]
};

constexpr int64_t kKeyTile = 64;  // the number of bits of a word
// Scratch that `attend` needs besides a state. Depth is head_size, rounded up to kDepthPadding.
constexpr int64_t kDepthPadding = 32;
struct AttentionScratch {
  float* queries;    // [KV heads, rows of a head up to a multiple of kRowPadding, depth]
  float* keys;       // packed, [1 + KV heads, kKeyTile, depth / 2]
  float* values;     // as keys
  float* weights;    // [rows, kKeyTile]; AMX: bfloat16 [KV heads, rows as in queries, kKeyTile]
  float* lane_sums;  // [rows, kRowPadding]; AMX: factors [rows]
  uint64_t* seen;    // [tokens], bit j where the token sees key j of the tile
};

// Vector code. `attend` overwrites a state with the keys of a range, which starts at a key tile and
// is within one split; `merge` folds the state of later keys into an earlier one; `finish` divides
// and writes the rows of call.out.
struct AttentionKernels {
  void (*attend)(const AttentionCall&, const QueryTile&, KeyRange, const AttentionScratch&,
                 const AttentionState&);
  void (*merge)(const AttentionState& into, const AttentionState& next, int64_t num_rows,
                int64_t value_size);
  void (*finish)(const AttentionCall&, const QueryTile&, const AttentionState&);
};

// Throws std::invalid_argument, which names the tensor, unless all indices are within bounds.
void check_indices(const AttentionCall& call);

// Upper bound of multiply-adds; the indices must have been checked.
int64_t work_of(const AttentionCall& call);

// What each row of the call sees; the indices must have been checked.
std::vector<Sight> sights_of(const AttentionCall& call);

// The plan of attention over the pages of a batch: query tiles, their keys, tasks and memory. Calls
// that differ only in their tensors share it.
class PagedAttention {
 public:
  // The indices of the call must have been checked.
  PagedAttention(const AttentionCall& call, int64_t num_workers);

  static constexpr int64_t kPhases = 2;  // at most
  // Phases: fills call.out.
  void run(const AttentionCall& call, Team::Member& member) const;

 private:
  struct Split {
    int64_t tile;
    KeyRange keys;
  };
  struct Worker {
    AttentionScratch scratch;
    AttentionState state, next;
  };
  struct Memory {
    std::vector<Worker> workers;
    std::vector<AttentionState> splits;
  };

  void add_tiles(const AttentionCall& call, int64_t num_workers);
  Memory take_memory(int64_t head_size, int64_t num_workers, Arena& arena) const;
  void attend_all(const AttentionCall& call, const QueryTile& tile, const Worker& worker) const;

  std::vector<Sight> sights_;
  std::vector<QueryTile> tiles_;
  std::vector<int64_t> shares_;  // the first tile of each task
  std::vector<Split> splits_;    // in the order of tiles; none if tasks are whole tiles
  std::optional<Scratch<Memory>> memory_;
};

// Checks the index tensors (std::invalid_argument names the bad one), then fills call.out.
void attention(const AttentionCall& call);

}  // namespace fastspec::cpu
