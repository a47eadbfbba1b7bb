// The plan of an attention call: which query tile meets which keys, on which thread, with which
// memory.
#include "tree_attention.h"

#include <algorithm>
#include <memory>
#include <vector>

#include "arena.h"
#include "kernels.h"
#include "parallel.h"

namespace fastspec::cpu {
namespace {

constexpr int64_t kSplit = 512;       // keys; fixed, as the order of sums depends on it
constexpr int64_t kRowsPerTile = 64;  // of several KV heads
constexpr int64_t kRowsOfOneHead = 256;
constexpr int64_t kTasksPerThread = 4;  // fewer query tiles than this: contexts are split too
constexpr int64_t kSerialWork =
    1 << 20;  // multiply-adds that one thread does before another wakes up

// At least one, so that a tile that sees nothing has a state too.
int64_t num_splits(KeyRange range) {
  return std::max<int64_t>((range.last + kSplit - 1) / kSplit - range.first / kSplit, 1);
}

// Splits start at multiples of kSplit, whatever the range.
KeyRange nth_split(KeyRange range, int64_t n) {
  const int64_t start = (range.first / kSplit + n) * kSplit;
  return {std::max(start, range.first), std::min(start + kSplit, range.last)};
}

struct Plan {
  std::vector<Sight> sights;
  std::vector<QueryTile> tiles;
  int64_t max_rows = 0, max_padded_rows = 0, max_kv_heads = 0;  // of a tile
  int64_t num_splits = 0, work = 0;
};

// The first place after everything that a row sees.
int64_t end_of(const Sight& sight) {
  for (int64_t w = 2; w-- > 0;) {
    if (sight.nodes[w] != 0) return sight.root + w * 64 + 64 - __builtin_clzll(sight.nodes[w]);
  }
  return sight.places.last;
}

void add_tile(const AttentionCall& call, QueryTile tile, Plan& plan) {
  tile.keys = tile.shared = tile.sights[0].places;
  for (int64_t token = 0; token < tile.num_tokens; ++token) {
    const Sight& sight = tile.sights[token];
    tile.keys.first = std::min(tile.keys.first, sight.places.first);
    tile.keys.last = std::max(tile.keys.last, end_of(sight));
    tile.shared.first = std::max(tile.shared.first, sight.places.first);
    tile.shared.last = std::min(tile.shared.last, sight.places.last);
  }
  tile.keys.first = tile.keys.first / kKeyTile * kKeyTile;
  tile.num_rows = tile.num_kv_heads * tile.num_tokens * (call.num_heads / call.num_kv_heads);
  plan.tiles.push_back(tile);
  plan.max_rows = std::max(plan.max_rows, tile.num_rows);
  plan.max_padded_rows =
      std::max(plan.max_padded_rows, tile.num_kv_heads * padded(tile.num_rows / tile.num_kv_heads));
  plan.max_kv_heads = std::max(plan.max_kv_heads, tile.num_kv_heads);
  plan.num_splits += num_splits(tile.keys);
  plan.work += tile.num_rows * (tile.keys.last - tile.keys.first) * call.head_size * 2;
}

// Many tokens of one KV head, for which its keys are packed once, or few tokens of several heads,
// whose keys are neighbours in memory.
Plan make_plan(const AttentionCall& call) {
  Plan plan;
  plan.sights = sights_of(call);
  const int64_t group = call.num_heads / call.num_kv_heads;
  const int64_t most_tokens = std::max<int64_t>(1, kRowsOfOneHead / group);
  for (int64_t b = 0; b < call.batch; ++b) {
    const int64_t end = call.cu_rows[b + 1];
    for (int64_t token = call.cu_rows[b]; token < end; token += most_tokens) {
      const int64_t num_tokens = std::min(most_tokens, end - token);
      const int64_t most_heads = std::max<int64_t>(1, kRowsPerTile / (num_tokens * group));
      for (int64_t head = 0; head < call.num_kv_heads; head += most_heads) {
        const int64_t num_heads = std::min(most_heads, call.num_kv_heads - head);
        add_tile(call, {b, token, num_tokens, head, num_heads, 0, {}, {}, &plan.sights[token]},
                 plan);
      }
    }
  }
  return plan;
}

struct Worker {
  AttentionScratch scratch;
  AttentionState state, next;
};

AttentionState take_state(Arena& arena, int64_t rows, int64_t head_size) {
  return {arena.take(rows), arena.take(rows), arena.take(rows * padded(head_size))};
}

Worker take_worker(Arena& arena, const Plan& plan, int64_t head_size) {
  const int64_t rows = plan.max_rows;
  const int64_t depth = (head_size + kDepthPadding - 1) / kDepthPadding * kDepthPadding;
  const int64_t packed = (1 + plan.max_kv_heads) * kKeyTile * depth / 2;
  return {{arena.take(plan.max_padded_rows * depth), arena.take(packed), arena.take(packed),
           arena.take(rows * kKeyTile), arena.take(rows * kRowPadding), arena.take<uint64_t>(rows)},
          take_state(arena, rows, head_size),
          take_state(arena, rows, head_size)};
}

class Workers {
 public:
  Workers(int64_t count, const Plan& plan, int64_t head_size) : count(count) {
    Arena measure;
    for (int64_t i = 0; i < count; ++i) take_worker(measure, plan, head_size);
    memory_.reset(new Line[measure.used]);
    Arena arena{memory_.get()};
    for (int64_t i = 0; i < count; ++i) workers_.push_back(take_worker(arena, plan, head_size));
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
  for_each_task(plan.tiles.size(), workers.count, [&](int64_t task, int64_t worker) {
    const auto& [scratch, state, next] = workers[worker];
    const QueryTile& tile = plan.tiles[task];
    kernel.attend(call, tile, nth_split(tile.keys, 0), scratch, state);
    for (int64_t n = 1; n < num_splits(tile.keys); ++n) {
      kernel.attend(call, tile, nth_split(tile.keys, n), scratch, next);
      kernel.merge(state, next, tile.num_rows, padded(call.head_size));
    }
    kernel.finish(call, tile, state);
  });
}

struct SplitTask {
  const QueryTile* tile;
  KeyRange keys;
  AttentionState state;
};

// Few tiles on long contexts: every split is a task of its own and keeps its state for a second
// pass.
void run_by_splits(const AttentionCall& call, const Plan& plan, const Workers& workers) {
  const AttentionKernels& kernel = kernels().attention;
  std::vector<SplitTask> splits;
  Arena measure;
  for (const QueryTile& tile : plan.tiles) {
    for (int64_t n = 0; n < num_splits(tile.keys); ++n) {
      splits.push_back({&tile, nth_split(tile.keys, n), {}});
      take_state(measure, tile.num_rows, call.head_size);
    }
  }
  const std::unique_ptr<Line[]> memory(new Line[measure.used]);
  Arena arena{memory.get()};
  for (SplitTask& split : splits) {
    split.state = take_state(arena, split.tile->num_rows, call.head_size);
  }
  for_each_task(splits.size(), workers.count, [&](int64_t task, int64_t worker) {
    const SplitTask& split = splits[task];
    kernel.attend(call, *split.tile, split.keys, workers[worker].scratch, split.state);
  });
  const SplitTask* split = splits.data();
  for (const QueryTile& tile : plan.tiles) {
    for (int64_t n = 1; n < num_splits(tile.keys); ++n) {
      kernel.merge(split[0].state, split[n].state, tile.num_rows, padded(call.head_size));
    }
    kernel.finish(call, tile, split[0].state);
    split += num_splits(tile.keys);
  }
}

}  // namespace

void attention(const AttentionCall& call) {
  check_indices(call);
  const Plan plan = make_plan(call);
  const int64_t num_tiles = plan.tiles.size();
  if (num_tiles == 0) return;
  const int64_t threads = plan.work < kSerialWork ? 1 : num_threads();
  const Workers workers(threads, plan, call.head_size);
  if (threads > 1 && num_tiles < kTasksPerThread * threads && plan.num_splits > num_tiles) {
    run_by_splits(call, plan, workers);
  } else {
    run_by_tiles(call, plan, workers);
  }
}

}  // namespace fastspec::cpu
