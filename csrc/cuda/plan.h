// How many thread blocks share a row: pure functions of sizes and versions.
#pragma once
#include "cuda/launch.h"

namespace fastspec::cuda {

// Limits of a device and its kernel code.
struct Limits {
  int64_t multiprocessors;
  int64_t shared_bytes;  // maximum per block
  bool clusters;
};

// Whether blocks may share a row: devices have clusters from sm_90 on, and the code must be
// compiled for that. PTX of sm_80 has no barrier between blocks, whatever device runs it.
constexpr bool has_clusters(const Image& image, int64_t device_major) {
  return device_major >= 9 && image.ptx_version >= 90 && image.binary_version >= 90;
}

constexpr int64_t kFixedSharedBytes = 17 * 1024;  // needed by a block in addition to the staged row

// The shape of the rows that a kernel processes at once, one per team.
struct RowShape {
  int64_t size;           // of the vocabulary
  int64_t element_bytes;  // 2 or 4
};

constexpr RowShape shape_of(const Logits& logits) {
  if (logits.data == nullptr) return {0, 2};
  return {logits.size, logits.element == Element::kFloat32 ? 4 : 2};
}

// A shape with room for either.
constexpr RowShape larger_of(const RowShape& a, const RowShape& b) {
  return {a.size > b.size ? a.size : b.size,
          a.element_bytes > b.element_bytes ? a.element_bytes : b.element_bytes};
}

// Shared memory for a block's part of a row, in units of 8 logits; rows may start anywhere in 16
// bytes.
constexpr int64_t staged_bytes(const RowShape& row, int64_t cluster, int64_t threads) {
  const int64_t warps = threads / 32;
  const int64_t units = (row.size + 7 + 7) / 8;
  return (units + cluster * warps - 1) / (cluster * warps) * warps * 8 * row.element_bytes;
}

constexpr bool fits(const RowShape& row, const Plan& plan, const Limits& limits) {
  return staged_bytes(row, plan.cluster, plan.threads) + kFixedSharedBytes <= limits.shared_bytes;
}

// Whether a multiprocessor has shared memory for two blocks; it has 1 KiB more than the maximum per
// block, and reserves 1 KiB for each.
constexpr bool fits_twice(const RowShape& row, const Plan& plan, const Limits& limits) {
  const int64_t bytes = staged_bytes(row, plan.cluster, plan.threads) + kFixedSharedBytes;
  return 2 * (bytes + 1024) <= limits.shared_bytes + 1024;
}

// The smallest cluster that fits a row and gives every multiprocessor a block. If some get several,
// two with half as many threads share one, so that one works while the other waits.
constexpr Plan choose_plan(const RowShape& row, int64_t num_rows, const Limits& limits) {
  Plan plan = {1, 512, 0};
  while (limits.clusters && plan.cluster < 8 &&
         (num_rows * plan.cluster < limits.multiprocessors || !fits(row, plan, limits))) {
    plan.cluster *= 2;
  }
  Plan halves = {plan.cluster, 256, 0};
  while (limits.clusters && halves.cluster < 8 && !fits_twice(row, halves, limits)) {
    halves.cluster *= 2;
  }
  const bool shared = num_rows * plan.cluster > limits.multiprocessors;
  if (shared && fits_twice(row, halves, limits)) plan = halves;
  plan.staged = fits(row, plan, limits);
  return plan;
}

}  // namespace fastspec::cuda
