// How many thread blocks share a row: pure functions of sizes and versions.
#pragma once
#include "cuda/launch.h"

namespace fastspec::cuda {

// Of a device and the code that it has.
struct Limits {
  int64_t multiprocessors;
  int64_t shared_bytes;  // that one block may have
  bool clusters;
};

// Whether blocks may share a row: the device has clusters from sm_90 on, and so has the code if it
// was compiled for that. PTX of sm_80 has no barrier between blocks, whatever runs it.
constexpr bool has_clusters(const Image& image, int64_t device_major) {
  return device_major >= 9 && image.ptx_version >= 90 && image.binary_version >= 90;
}

constexpr int64_t kFixedSharedBytes = 17 * 1024;  // what a block needs beside the staged row

// Of the rows that a kernel handles at once, one per team.
struct RowShape {
  int64_t size;           // of the vocabulary
  int64_t element_bytes;  // 2 or 4
};

constexpr RowShape shape_of(const Logits& logits) {
  if (logits.data == nullptr) return {0, 2};
  return {logits.size, logits.element == Element::kFloat32 ? 4 : 2};
}

// The shape of rows that have room for either.
constexpr RowShape larger_of(const RowShape& a, const RowShape& b) {
  return {a.size > b.size ? a.size : b.size,
          a.element_bytes > b.element_bytes ? a.element_bytes : b.element_bytes};
}

// Shared memory for its part of a row, which may start anywhere in 16 bytes: units of 8 logits.
constexpr int64_t staged_bytes(const RowShape& row, int64_t cluster, int64_t threads) {
  const int64_t warps = threads / 32;
  const int64_t units = (row.size + 7 + 7) / 8;
  return (units + cluster * warps - 1) / (cluster * warps) * warps * 8 * row.element_bytes;
}

constexpr bool fits(const RowShape& row, const Plan& plan, const Limits& limits) {
  return staged_bytes(row, plan.cluster, plan.threads) + kFixedSharedBytes <= limits.shared_bytes;
}

// Whether a multiprocessor has shared memory for two blocks; it has 1 KiB more than one may have,
// and keeps 1 KiB for each.
constexpr bool fits_twice(const RowShape& row, const Plan& plan, const Limits& limits) {
  const int64_t bytes = staged_bytes(row, plan.cluster, plan.threads) + kFixedSharedBytes;
  return 2 * (bytes + 1024) <= limits.shared_bytes + 1024;
}

// The smallest cluster that holds a row and gives every multiprocessor a block. Where some get
// several, two of half as many threads share one, so that one works while the other waits.
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
