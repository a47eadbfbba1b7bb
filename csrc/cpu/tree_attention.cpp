// The plan of an attention call: which query tile meets which keys, on which thread, with which memory.
#include "tree_attention.h"

#include <algorithm>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels.h"
#include "parallel.h"

namespace fastspec::cpu {
namespace {

constexpr int64_t kSplit = 512;            // keys; fixed, as the order of sums depends on it
constexpr int64_t kRowsPerTile = 64;
constexpr int64_t kTasksPerThread = 4;     // fewer query tiles than this: contexts are split too
constexpr int64_t kSerialWork = 1 << 20;   // multiply-adds that one thread does before another wakes up

[[noreturn]] void fail(const std::string& field, int64_t index, int64_t least, int64_t most,
                       const std::string& why, int64_t actual) {
  throw std::invalid_argument(field + "[" + std::to_string(index) + "]: expected from " +
                              std::to_string(least) + " to " + std::to_string(most) + why +
                              ", got " + std::to_string(actual));
}

void check_sequence(const AttentionCall& call, int64_t b) {
  const int64_t first = call.cu_rows[b], last = call.cu_rows[b + 1];
  if (last < first || last > call.num_rows) {
    fail("cu_rows", b + 1, first, call.num_rows, " (the rows of query)", last);
  }
  if (last == first) return;
  const int64_t context = call.context_lens[b], capacity = call.max_blocks * call.block_size;
  if (context < last - first || context > capacity) {
    fail("context_lens", b, last - first, capacity, " (query rows; room in block_table)", context);
  }
  const int32_t* blocks = call.block_table + b * call.table_stride;
  for (int64_t i = 0; i * call.block_size < context; ++i) {
    if (blocks[i] < 0 || blocks[i] >= call.num_blocks) {
      fail("block_table", b, 0, call.num_blocks - 1, " in the used entries", blocks[i]);
    }
  }
}

void check_indices(const AttentionCall& call) {
  if (call.cu_rows[0] != 0) fail("cu_rows", 0, 0, 0, "", call.cu_rows[0]);
  for (int64_t b = 0; b < call.batch; ++b) check_sequence(call, b);
  const int64_t end = call.cu_rows[call.batch];
  if (end != call.num_rows) {
    fail("cu_rows", call.batch, call.num_rows, call.num_rows, " (the rows of query)", end);
  }
}

// The keys that at least one row of the tile sees, widened to the start of their key tile.
KeyRange key_range(const AttentionCall& call, const QueryTile& tile) {
  const int64_t oldest = tile.first_position - call.sliding_window + 1;
  const int64_t first = call.sliding_window > 0 ? std::max<int64_t>(oldest, 0) : 0;
  return {first / kKeyTile * kKeyTile, tile.first_position + tile.num_tokens};
}

int64_t num_splits(KeyRange range) {
  return (range.last + kSplit - 1) / kSplit - range.first / kSplit;
}

// Splits start at multiples of kSplit, whatever the range.
KeyRange nth_split(KeyRange range, int64_t n) {
  const int64_t start = (range.first / kSplit + n) * kSplit;
  return {std::max(start, range.first), std::min(start + kSplit, range.last)};
}

struct TileTask {
  QueryTile tile;
  KeyRange range;
  int64_t num_rows;
};

struct SplitTask {
  const TileTask* tile;
  KeyRange range;
};

struct Plan {
  std::vector<TileTask> tiles;
  int64_t max_rows = 0, num_splits = 0, work = 0;
};

Plan make_plan(const AttentionCall& call) {
  Plan plan;
  const int64_t group = call.num_heads / call.num_kv_heads;
  const int64_t tokens_per_tile = std::max<int64_t>(1, kRowsPerTile / group);
  for (int64_t b = 0; b < call.batch; ++b) {
    const int64_t end = call.cu_rows[b + 1];
    for (int64_t token = call.cu_rows[b]; token < end; token += tokens_per_tile) {
      const int64_t num_tokens = std::min(tokens_per_tile, end - token);
      const QueryTile tile = {b, token, num_tokens, call.context_lens[b] - (end - token)};
      const KeyRange range = key_range(call, tile);
      plan.tiles.push_back({tile, range, num_tokens * group});
      plan.max_rows = std::max(plan.max_rows, num_tokens * group);
      plan.num_splits += num_splits(range);
      plan.work += num_tokens * call.num_heads * (range.last - range.first) * call.head_size * 2;
    }
  }
  return plan;
}

struct alignas(64) Line {
  float lane[16];
};

// Hands out uninitialised memory by the cache line; without a base it only measures.
struct Arena {
  Line* base = nullptr;
  int64_t used = 0;

  float* take(int64_t size) {
    float* const taken = base == nullptr ? nullptr : base[used].lane;
    used += (size + 15) / 16;
    return taken;
  }
};

struct Worker {
  AttentionScratch scratch;
  AttentionState state, next;
};

AttentionState take_state(Arena& arena, int64_t rows, int64_t head_size) {
  return {arena.take(rows), arena.take(rows), arena.take(rows * padded(head_size))};
}

Worker take_worker(Arena& arena, int64_t rows, int64_t head_size) {
  return {{arena.take(rows * head_size), arena.take(kKeyTile * head_size),
           arena.take(kKeyTile * padded(head_size)), arena.take(kKeyTile * kMaxTileRows),
           arena.take(kRowPadding * rows)},
          take_state(arena, rows, head_size),
          take_state(arena, rows, head_size)};
}

class Workers {
 public:
  Workers(int64_t count, int64_t rows, int64_t head_size) : count(count) {
    Arena measure;
    for (int64_t i = 0; i < count; ++i) take_worker(measure, rows, head_size);
    memory_.reset(new Line[measure.used]);
    Arena arena{memory_.get()};
    for (int64_t i = 0; i < count; ++i) workers_.push_back(take_worker(arena, rows, head_size));
  }
  const Worker& operator[](int64_t i) const { return workers_[i]; }
  const int64_t count;

 private:
  std::unique_ptr<Line[]> memory_;
  std::vector<Worker> workers_;
};

// One thread takes a query tile through all its splits.
void run_by_tiles(const AttentionCall& call, const Plan& plan, const Workers& workers) {
  const AttentionKernels& kernel = kernels().attention;
  const int64_t num_tasks = plan.tiles.size() * call.num_kv_heads;
  for_each_task(num_tasks, workers.count, [&](int64_t task, int64_t worker) {
    const auto& [scratch, state, next] = workers[worker];
    const TileTask& tile = plan.tiles[task / call.num_kv_heads];
    const int64_t kv_head = task % call.num_kv_heads;
    kernel.attend(call, tile.tile, kv_head, nth_split(tile.range, 0), scratch, state);
    for (int64_t split = 1; split < num_splits(tile.range); ++split) {
      kernel.attend(call, tile.tile, kv_head, nth_split(tile.range, split), scratch, next);
      kernel.merge(state, next, tile.num_rows, padded(call.head_size));
    }
    kernel.finish(call, tile.tile, kv_head, state);
  });
}

// Few tiles on long contexts: every split is a task of its own and keeps its state for a second pass.
void run_by_splits(const AttentionCall& call, const Plan& plan, const Workers& workers) {
  const AttentionKernels& kernel = kernels().attention;
  std::vector<SplitTask> splits;
  Arena measure;
  for (const TileTask& tile : plan.tiles) {
    for (int64_t n = 0; n < num_splits(tile.range); ++n) {
      splits.push_back({&tile, nth_split(tile.range, n)});
      for (int64_t g = 0; g < call.num_kv_heads; ++g) take_state(measure, tile.num_rows, call.head_size);
    }
  }
  const std::unique_ptr<Line[]> memory(new Line[measure.used]);
  Arena arena{memory.get()};
  std::vector<AttentionState> states;
  for (const SplitTask& split : splits) {
    for (int64_t g = 0; g < call.num_kv_heads; ++g) {
      states.push_back(take_state(arena, split.tile->num_rows, call.head_size));
    }
  }
  for_each_task(states.size(), workers.count, [&](int64_t task, int64_t worker) {
    const SplitTask& split = splits[task / call.num_kv_heads];
    kernel.attend(call, split.tile->tile, task % call.num_kv_heads, split.range,
                  workers[worker].scratch, states[task]);
  });
  int64_t first_split = 0;
  for (const TileTask& tile : plan.tiles) {
    for (int64_t g = 0; g < call.num_kv_heads; ++g) {
      const AttentionState* state = &states[first_split * call.num_kv_heads + g];
      for (int64_t n = 1; n < num_splits(tile.range); ++n) {
        kernel.merge(state[0], state[n * call.num_kv_heads], tile.num_rows, padded(call.head_size));
      }
      kernel.finish(call, tile.tile, g, state[0]);
    }
    first_split += num_splits(tile.range);
  }
}

}  // namespace

void tree_attention(const AttentionCall& call) {
  check_indices(call);
  const Plan plan = make_plan(call);
  const int64_t num_tiles = plan.tiles.size();
  if (num_tiles == 0) return;
  const int64_t threads = plan.work < kSerialWork ? 1 : num_threads();
  const bool few_tiles = num_tiles * call.num_kv_heads < kTasksPerThread * threads;
  const Workers workers(threads, plan.max_rows, call.head_size);
  if (threads > 1 && few_tiles && plan.num_splits > num_tiles) {
    run_by_splits(call, plan, workers);
  } else {
    run_by_tiles(call, plan, workers);
  }
}

}  // namespace fastspec::cpu
