// One row of logits, divided into a range of units per warp of a team.
#pragma once
#include "cuda/team.cuh"

namespace fastspec::cuda {

struct Row {
  const void* data;
  const int32_t* bitmask;  // or null
  int64_t size;
  Element element;
};

__device__ __forceinline__ int64_t bytes_of(Element element) {
  return element == Element::kFloat32 ? 4 : 2;
}

__device__ __forceinline__ Row row_of(const Logits& logits, int64_t index, int64_t offset = 0) {
  const int64_t first = (index * logits.row_stride + offset) * bytes_of(logits.element);
  const bool masked = logits.bitmask != nullptr;
  return {static_cast<const char*>(logits.data) + first,
          masked ? logits.bitmask + index * logits.bitmask_stride : nullptr, logits.size,
          logits.element};
}

__device__ __forceinline__ bool is_allowed(const Row& row, int64_t token) {
  return row.bitmask == nullptr || (__ldg(row.bitmask + token / 32) >> (token % 32) & 1) != 0;
}

// The bits of one logit.
__device__ __forceinline__ uint32_t bits_at(const Row& row, int64_t token) {
  return is_wide(row.element) ? __ldg(static_cast<const uint32_t*>(row.data) + token)
                              : __ldg(static_cast<const uint16_t*>(row.data) + token);
}

// One logit; -inf outside the vocabulary.
__device__ __forceinline__ float logit_at(const Row& row, int64_t token) {
  if (token < 0 || token >= row.size || !is_allowed(row, token)) return -infinity();
  return widen(bits_at(row, token), row.element);
}

// Whether each token from `first` on is allowed, one bit each; arbitrary outside the row.
__device__ __forceinline__ uint32_t allowed_bits(const Row& row, int64_t first) {
  if (row.bitmask == nullptr) return ~0u;
  const int64_t start = larger(first, 0), index = start / 32;
  const uint32_t low = __ldg(row.bitmask + index);
  const uint32_t high = index + 1 < (row.size + 31) / 32 ? __ldg(row.bitmask + index + 1) : 0;
  return __funnelshift_r(low, high, start % 32) << (start - first);
}

// The unit with -inf for tokens that are not allowed.
__device__ __forceinline__ Raw keep(const Raw& raw, uint32_t allowed, Element element) {
  uint32_t words[kUnit] = {raw.low.x,  raw.low.y,  raw.low.z,  raw.low.w,
                           raw.high.x, raw.high.y, raw.high.z, raw.high.w};
  const uint32_t off = element == Element::kFloat16 ? 0xfc00fc00u : 0xff80ff80u;
#pragma unroll
  for (int j = 0; j < kUnit; ++j) {
    if (is_wide(element)) {
      if ((allowed >> j & 1) == 0) words[j] = 0xff800000u;
    } else if (j < kUnit / 2) {
      const uint32_t pair = allowed >> (2 * j);
      const uint32_t kept = (pair & 1 ? 0xffffu : 0u) | (pair & 2 ? 0xffff0000u : 0u);
      words[j] = (words[j] & kept) | (off & ~kept);
    }
  }
  return {{words[0], words[1], words[2], words[3]}, {words[4], words[5], words[6], words[7]}};
}

__device__ __forceinline__ const void* address_of(const Row& row, int64_t token) {
  return static_cast<const char*>(row.data) + token * bytes_of(row.element);
}

__device__ __forceinline__ bool is_aligned(const void* address) {
  return reinterpret_cast<uintptr_t>(address) % sizeof(uint4) == 0;
}

// The logits of kUnit tokens from `first` on, which may lie partly outside the row, or be masked.
__device__ __forceinline__ Raw load_tokens(const Row& row, int64_t first) {
  const uint32_t all = (1u << kUnit) - 1;
  uint32_t inside = all;
  if (first < 0) inside &= all << -first;
  if (first + kUnit > row.size) inside &= all >> smaller(first + kUnit - row.size, kUnit);
  const uint32_t allowed = inside == 0 ? 0 : inside & allowed_bits(row, first);
  const bool wide = is_wide(row.element);
  if (inside == all && is_aligned(address_of(row, first))) {
    const Raw raw = load_unit(address_of(row, first), wide);
    return allowed == all ? raw : keep(raw, allowed, row.element);
  }
  uint32_t words[kUnit] = {};
#pragma unroll
  for (int j = 0; j < kUnit; ++j) {
    if ((inside >> j & 1) == 0) continue;
    const uint32_t bits = bits_at(row, first + j);
    if (wide) {
      words[j] = bits;
    } else {
      words[j / 2] |= bits << (j % 2 * 16);
    }
  }
  const Raw raw = {{words[0], words[1], words[2], words[3]},
                   {words[4], words[5], words[6], words[7]}};
  return keep(raw, allowed, row.element);
}

// The passes of a team over one row. Each warp has a range of consecutive tokens. If kStaged, the
// first pass copies the row, masked by the bitmask, to shared memory, from which later passes read
// it.
template <bool kStaged>
class RowView {
 public:
  __device__ RowView(const Team& team, const Row& row) : row_(row), lane_(team.lane()) {
    const int64_t bytes = bytes_of(row.element);
    lead_ = static_cast<int>(reinterpret_cast<uintptr_t>(row.data) % sizeof(uint4) / bytes);
    const int64_t units = (row.size + lead_ + kUnit - 1) / kUnit;
    per_warp_ = (units + team.num_warps() - 1) / team.num_warps();
    begin_ = smaller(team.warp() * per_warp_, units);
    end_ = smaller(begin_ + per_warp_, units);
    stage_ = team.stage() + team.block_warp() * per_warp_ * (is_wide(row.element) ? 2 : 1);
  }

  __device__ const Row& row() const { return row_; }
  __device__ int64_t begin() const { return begin_; }
  __device__ int64_t end() const { return end_; }
  __device__ int64_t first_token(int64_t unit) const { return unit * kUnit - lead_; }

  // The first pass: calls visit(logits of a unit, first token). Padding is -inf. Global memory is
  // slow, so several loads are in flight at once.
  template <class Visit>
  __device__ void first_pass(const Visit& visit) const {
    constexpr int kAhead = 4;
    const bool wide = is_wide(row_.element);
    const int64_t easy_begin = row_.bitmask != nullptr ? end_ : lead_ > 0 ? 1 : 0;
    const int64_t easy_end = smaller(end_, (row_.size + lead_) / kUnit);
    const auto consume = [&](const Raw& raw, int64_t unit) {
      if (kStaged) to_stage(raw, unit);
      visit_raw(raw, unit, visit);
    };
    for (int64_t unit = begin_ + lane_; unit < end_;) {
      if (unit >= easy_begin && unit + (kAhead - 1) * kWarp < easy_end) {
        Raw raw[kAhead];
#pragma unroll
        for (int i = 0; i < kAhead; ++i)
          raw[i] = load_unit(address_of(row_, first_token(unit + i * kWarp)), wide);
#pragma unroll
        for (int i = 0; i < kAhead; ++i) consume(raw[i], unit + i * kWarp);
        unit += kAhead * kWarp;
      } else {
        consume(load(unit), unit);
        unit += kWarp;
      }
    }
  }

  // Later passes read from shared memory, or the second-level cache.
  template <class Visit>
  __device__ void pass(const Visit& visit) const {
    const auto next = [&](int64_t unit) { return kStaged ? from_stage(unit) : load(unit); };
    Raw ahead = {};
#pragma unroll 1
    for (int64_t unit = begin_ + lane_ - kWarp; unit < end_; unit += kWarp) {
      const Raw raw = ahead;
      if (unit + kWarp < end_) ahead = next(unit + kWarp);
      if (unit >= begin_) visit_raw(raw, unit, visit);
    }
  }

  // One unit of the warp's range.
  __device__ void read(int64_t unit, float (&x)[kUnit]) const {
    (kStaged ? from_stage(unit) : load(unit)).unpack(row_.element, x);
  }

 private:
  template <class Visit>
  __device__ __forceinline__ void visit_raw(const Raw& raw, int64_t unit,
                                            const Visit& visit) const {
    float x[kUnit];
    raw.unpack(row_.element, x);
    visit(x, first_token(unit));
  }

  __device__ Raw load(int64_t unit) const { return load_tokens(row_, first_token(unit)); }

  __device__ __forceinline__ void to_stage(const Raw& raw, int64_t unit) const {
    stage_[unit - begin_] = raw.low;
    if (is_wide(row_.element)) stage_[unit - begin_ + per_warp_] = raw.high;
  }

  __device__ __forceinline__ Raw from_stage(int64_t unit) const {
    Raw raw;
    raw.low = stage_[unit - begin_];
    raw.high = is_wide(row_.element) ? stage_[unit - begin_ + per_warp_] : raw.low;
    return raw;
  }

  Row row_;
  int64_t begin_, end_, per_warp_;  // units
  uint4* stage_;                    // of this warp
  int lead_;                        // elements between the 16-byte boundary before the row and it
  int lane_;
};

}  // namespace fastspec::cuda
