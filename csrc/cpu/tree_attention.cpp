#include "tree_attention.h"

#include <algorithm>

#include "kernels.h"

namespace fastspec::cpu {
namespace {

constexpr int64_t kSplit = 512;       // keys; fixed, because the order of sums depends on it
constexpr int64_t kRowsPerTile = 64;  // of several KV heads
constexpr int64_t kRowsOfOneHead = 256;
constexpr int64_t kTasksPerWorker = 4;       // with fewer query tiles, contexts are split as well
constexpr int64_t kWorkPerThread = 1 << 19;  // multiply-adds

// At least one, so that a tile that sees nothing also has a state.
int64_t num_splits(KeyRange range) {
  return std::max<int64_t>((range.last + kSplit - 1) / kSplit - range.first / kSplit, 1);
}

// Splits start at multiples of kSplit, whatever the range.
KeyRange nth_split(KeyRange range, int64_t n) {
  const int64_t start = (range.first / kSplit + n) * kSplit;
  return {std::max(start, range.first), std::min(start + kSplit, range.last)};
}

// The end of everything that a row sees.
int64_t end_of(const Sight& sight) {
  for (int64_t w = 2; w-- > 0;) {
    if (sight.nodes[w] != 0) return sight.root + w * 64 + 64 - __builtin_clzll(sight.nodes[w]);
  }
  return sight.places.last;
}

// The keys that the tokens of a tile see.
void look(QueryTile& tile) {
  tile.keys = tile.shared = tile.sights[0].places;
  for (int64_t token = 0; token < tile.num_tokens; ++token) {
    const Sight& sight = tile.sights[token];
    tile.keys.first = std::min(tile.keys.first, sight.places.first);
    tile.keys.last = std::max(tile.keys.last, end_of(sight));
    tile.shared.first = std::max(tile.shared.first, sight.places.first);
    tile.shared.last = std::min(tile.shared.last, sight.places.last);
  }
  tile.keys.first = tile.keys.first / kKeyTile * kKeyTile;
}

AttentionState take_state(Arena& arena, int64_t rows, int64_t head_size) {
  return {arena.take(rows), arena.take(rows), arena.take(rows * padded(head_size))};
}

// The number of equal shares into which each sequence's pairs of a head and a token are cut: one
// for each worker if there is little work, which whole heads do not divide equally.
int64_t num_shares(const AttentionCall& call, int64_t num_workers) {
  int64_t tasks = 0;
  for (int64_t b = 0; b < call.batch; ++b) {
    tasks += call.num_kv_heads * num_splits({0, call.context_lens[b]});
  }
  return tasks % num_workers == 0 || tasks >= kTasksPerWorker * num_workers ? 1 : num_workers;
}

}  // namespace

int64_t work_of(const AttentionCall& call) {
  int64_t pairs = 0;
  for (int64_t b = 0; b < call.batch; ++b) {
    const int64_t num_rows = call.cu_rows[b + 1] - call.cu_rows[b];
    int64_t keys = call.context_lens[b];
    if (call.sliding_window > 0) keys = std::min(keys, call.sliding_window + num_rows);
    pairs += num_rows * keys;
  }
  return pairs * call.num_heads * call.head_size * 2;
}

PagedAttention::PagedAttention(const AttentionCall& call, int64_t num_workers)
    : sights_(sights_of(call)) {
  add_tiles(call, num_workers);
  const int64_t num_tiles = tiles_.size();
  int64_t total = 0;
  for (const QueryTile& tile : tiles_) total += num_splits(tile.keys);
  if (num_workers > 1 && num_tiles < kTasksPerWorker * num_workers && total > num_tiles) {
    for (int64_t t = 0; t < num_tiles; ++t) {
      for (int64_t n = 0; n < num_splits(tiles_[t].keys); ++n) {
        splits_.push_back({t, nth_split(tiles_[t].keys, n)});
      }
    }
  }
  memory_.emplace([&](Arena& arena) { return take_memory(call.head_size, num_workers, arena); });
}

// Many tokens of one KV head, whose keys are packed once for them, or, if there are enough tiles
// for all workers, few tokens of several heads, whose keys are adjacent in memory. Tiles of a head
// follow each other, so that a worker reads few heads.
void PagedAttention::add_tiles(const AttentionCall& call, int64_t num_workers) {
  const int64_t group = call.num_heads / call.num_kv_heads, shares = num_shares(call, num_workers);
  const int64_t heads_of_worker =
      num_workers == 1
          ? call.num_kv_heads
          : std::max<int64_t>(1, call.batch * call.num_kv_heads / (kTasksPerWorker * num_workers));
  for (int64_t b = 0; b < call.batch; ++b) {
    const int64_t first = call.cu_rows[b], count = call.cu_rows[b + 1] - first;
    const int64_t most_tokens =
        std::clamp<int64_t>(count, 1, std::max<int64_t>(1, kRowsOfOneHead / group));
    const int64_t most_heads =
        std::clamp<int64_t>(kRowsPerTile / (most_tokens * group), 1, heads_of_worker);
    int64_t end_of_share = 0, num_begun = 0;  // in pairs of a head and a token
    for (int64_t head = 0; head < call.num_kv_heads; head += most_heads) {
      const int64_t num_heads = std::min(most_heads, call.num_kv_heads - head);
      for (int64_t token = 0, num_tokens; token < count; token += num_tokens) {
        const int64_t at = head * count + token;
        if (shares == 1 || at >= end_of_share) shares_.push_back(tiles_.size());
        while (end_of_share <= at) end_of_share = call.num_kv_heads * count * ++num_begun / shares;
        num_tokens = std::min({most_tokens, count - token, end_of_share - at});
        const int64_t num_rows = num_heads * num_tokens * group;
        tiles_.push_back({b,
                          first + token,
                          num_tokens,
                          head,
                          num_heads,
                          num_rows,
                          {},
                          {},
                          &sights_[first + token]});
        look(tiles_.back());
      }
    }
  }
}

PagedAttention::Memory PagedAttention::take_memory(int64_t head_size, int64_t num_workers,
                                                   Arena& arena) const {
  int64_t rows = 0, padded_rows = 0, kv_heads = 0;  // maxima of a tile
  for (const QueryTile& tile : tiles_) {
    const int64_t heads = tile.num_kv_heads;
    rows = std::max(rows, tile.num_rows);
    padded_rows = std::max(padded_rows, heads * padded(tile.num_rows / heads));
    kv_heads = std::max(kv_heads, heads);
  }
  const int64_t depth = (head_size + kDepthPadding - 1) / kDepthPadding * kDepthPadding;
  const int64_t packed = (1 + kv_heads) * kKeyTile * depth / 2;
  Memory memory;
  for (int64_t i = 0; i < num_workers; ++i) {
    const AttentionScratch scratch = {arena.take(padded_rows * depth), arena.take(packed),
                                      arena.take(packed),
                                      // For AMX, twice the size: it reads past the last rows.
                                      arena.take(padded_rows * kKeyTile),
                                      arena.take(rows * kRowPadding), arena.take<uint64_t>(rows)};
    memory.workers.push_back(
        {scratch, take_state(arena, rows, head_size), take_state(arena, rows, head_size)});
  }
  for (const Split& split : splits_) {
    memory.splits.push_back(take_state(arena, tiles_[split.tile].num_rows, head_size));
  }
  return memory;
}

void PagedAttention::run(const AttentionCall& call, Team::Member& member) const {
  const AttentionKernels& kernel = kernels().attention;
  const Memory& memory = **memory_;
  const Worker& worker = memory.workers[member.worker];
  const int64_t num_tiles = tiles_.size(), num_splits = splits_.size();
  if (num_splits == 0) {
    const int64_t num_shares = shares_.size();
    member.share(num_shares, [&](int64_t task) {
      const int64_t share = num_shares - 1 - task;  // later tokens see more keys: the longest first
      const int64_t end = task == 0 ? num_tiles : shares_[share + 1];
      for (int64_t t = shares_[share]; t < end; ++t) attend_all(call, tiles_[t], worker);
    });
    return;
  }
  member.share(num_splits, [&](int64_t n) {
    const Split& split = splits_[n];
    kernel.attend(call, tiles_[split.tile], split.keys, worker.scratch, memory.splits[n]);
  });
  // The first split of each tile merges the others.
  member.share(num_splits, [&](int64_t n) {
    const int64_t t = splits_[n].tile;
    if (n > 0 && splits_[n - 1].tile == t) return;
    for (int64_t next = n + 1; next < num_splits && splits_[next].tile == t; ++next) {
      kernel.merge(memory.splits[n], memory.splits[next], tiles_[t].num_rows,
                   padded(call.head_size));
    }
    kernel.finish(call, tiles_[t], memory.splits[n]);
  });
}

// Processes all splits of a query tile.
void PagedAttention::attend_all(const AttentionCall& call, const QueryTile& tile,
                                const Worker& worker) const {
  const AttentionKernels& kernel = kernels().attention;
  kernel.attend(call, tile, nth_split(tile.keys, 0), worker.scratch, worker.state);
  for (int64_t n = 1; n < num_splits(tile.keys); ++n) {
    kernel.attend(call, tile, nth_split(tile.keys, n), worker.scratch, worker.next);
    kernel.merge(worker.state, worker.next, tile.num_rows, padded(call.head_size));
  }
  kernel.finish(call, tile, worker.state);
}

void attention(const AttentionCall& call) {
  check_indices(call);
  if (call.num_rows == 0) return;
  const int64_t workers = workers_for(work_of(call), kWorkPerThread);
  const PagedAttention plan(call, workers);
  Team(workers, PagedAttention::kPhases).run([&](Team::Member& member) { plan.run(call, member); });
}

}  // namespace fastspec::cpu
