#include "compact_kv.h"

#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "parallel.h"

namespace fastspec::cpu {
namespace {

constexpr int64_t kBytesPerThread = 1 << 16;

// Offsets in bytes from the start of a layer.
struct Move {
  int64_t from, to;
};

[[noreturn]] void fail(const std::string& field, int64_t b, const std::string& what, int64_t got) {
  throw std::invalid_argument(field + "[" + std::to_string(b) + "]: " + what + ", got " +
                              std::to_string(got));
}

int64_t offset_of(const CompactCall& call, int64_t b, int64_t place) {
  const int64_t capacity = call.max_blocks * call.block_size;
  if (place >= capacity) {
    fail("prefix_lens", b,
         "the nodes of path leave the " + std::to_string(capacity) + " places of block_table",
         call.prefix_lens[b]);
  }
  const int64_t block = call.block_table[b * call.table_stride + place / call.block_size];
  if (block < 0 || block >= call.num_blocks) {
    fail("block_table", b,
         "expected blocks from 0 to " + std::to_string(call.num_blocks - 1) +
             " for the nodes of path",
         block);
  }
  return block * call.block_stride + place % call.block_size * call.slot_stride;
}

void add_moves(const CompactCall& call, int64_t b, std::vector<Move>& moves) {
  const int64_t length = call.accepted_len[b], prefix = call.prefix_lens[b];
  if (length > call.num_nodes) {
    fail("accepted_len", b,
         "expected at most " + std::to_string(call.num_nodes) + " (the nodes of path)", length);
  }
  for (int64_t i = 0; i < length; ++i) {
    const int64_t node = call.path[b * call.path_stride + i];
    if (node < 0) return;
    if (prefix < 0) fail("prefix_lens", b, "expected >= 0", prefix);
    const Move move = {offset_of(call, b, prefix + node), offset_of(call, b, prefix + 1 + i)};
    if (move.from != move.to) moves.push_back(move);
  }
}

// All reads come before all writes, regardless of the order of nodes.
void run_moves(const CompactCall& call, const std::vector<Move>& moves, char* layer) {
  const std::unique_ptr<char[]> entries(new char[moves.size() * call.slot_bytes]);
  char* entry = entries.get();
  for (const Move& move : moves) {
    std::memcpy(entry, layer + move.from, call.slot_bytes);
    entry += call.slot_bytes;
  }
  entry = entries.get();
  for (const Move& move : moves) {
    std::memcpy(layer + move.to, entry, call.slot_bytes);
    entry += call.slot_bytes;
  }
}

}  // namespace

void compact_kv(const CompactCall& call) {
  std::vector<Move> moves;
  for (int64_t b = 0; b < call.batch; ++b) add_moves(call, b, moves);
  if (moves.empty()) return;
  const int64_t num_tasks = call.num_layers * 2;
  const int64_t bytes = num_tasks * static_cast<int64_t>(moves.size()) * call.slot_bytes;
  for_each_task(num_tasks, workers_for(bytes, kBytesPerThread), [&](int64_t task, int64_t) {
    run_moves(call, moves, call.caches[task % 2] + task / 2 * call.layer_stride);
  });
}

}  // namespace fastspec::cpu
