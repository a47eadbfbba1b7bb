#include "residual.h"

#include <algorithm>
#include <limits>
#include <numeric>

#include "common/half.h"

namespace fastspec::cpu {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

inline float same(float x) { return x; }

// The logits of tokens in the columns of a row, -inf where a token has none.
template <class T, float (*kToFloat)(T)>
void take_columns(const Row& row, const int32_t* columns, int64_t size, float* out) {
  const T* logits = static_cast<const T*>(row.logits.at(0));
  const auto count = static_cast<uint32_t>(row.logits.size);
  for (int64_t i = 0; i < size; ++i) {
    const auto column = static_cast<uint32_t>(columns[i]);  // a negative one is beyond all
    const float x = kToFloat(logits[column < count ? column : 0]);
    out[i] = column < count ? x : -kInfinity;
  }
}

}  // namespace

void Draft::probs(int64_t begin, int64_t size, float* out) const {
  if (known_probs != nullptr) {
    std::copy_n(known_probs + begin, size, out);
    return;
  }
  const auto factor = static_cast<float>(1.0 / row->sum);
  if (token_map == nullptr) {
    const int64_t known = std::max<int64_t>(0, std::min(size, row->logits.size - begin));
    row->kernels().weigh(row->logits.at(begin), known, row->weighting, factor, out);
    std::fill(out + known, out + size, 0.0f);
    return;
  }
  float logits[kChunk];
  const auto take = row->logits.type == Element::kFloat32 ? take_columns<float, same>
                    : row->logits.type == Element::kBFloat16
                        ? take_columns<uint16_t, bfloat16_to_float>
                        : take_columns<uint16_t, float16_to_float>;
  take(*row, token_map + begin, size, logits);
  constexpr int kType = static_cast<int>(Element::kFloat32);
  sampling_kernels().rows[kType].weigh(logits, size, row->weighting, factor, out);
}

double Residual::sum(int64_t chunk) const {
  if (target_.chunk_sums[chunk] <= 0) return 0;
  const int64_t position = draft_.token - chunk * kChunk;
  const bool holds_token = position >= 0 && position < target_.chunk_size(chunk);
  if (draft_.row == nullptr && !holds_token) return target_.chunk_sums[chunk];
  float weights[kChunk];
  return weigh(chunk, weights);
}

int64_t Residual::draw(const double* chunk_sums, double uniform) const {
  const double total = std::accumulate(chunk_sums, chunk_sums + chunks(), 0.0);
  if (!(total > 0)) return -1;
  double before = 0;
  const int64_t chunk = draw_chunk(chunk_sums, chunks(), uniform * total, &before);
  float weights[kChunk];
  weigh(chunk, weights);
  return chunk * kChunk + draw_from(weights, kChunk, uniform * total - before);
}

// Fills kChunk weights and returns their sum.
double Residual::weigh(int64_t chunk, float* weights) const {
  constexpr int64_t kBlock = 1024;  // what passes through memory stays in the nearest cache
  const int64_t end = target_.chunk_size(chunk);
  // A point mass only takes its token out, so the scale of the other weights does not matter.
  const double factor = draft_.row == nullptr ? 1.0 : factor_ / target_.sum;
  std::fill(weights, weights + kChunk, 0.0f);
  double sum = 0;
  for (int64_t i = 0; i < end; i += kBlock) {
    const int64_t begin = chunk * kChunk + i, size = std::min(kBlock, end - i);
    if (draft_.row != nullptr) {
      draft_.probs(begin, size, weights + i);
    } else if (draft_.token >= begin && draft_.token < begin + size) {
      weights[draft_.token - chunk * kChunk] = kInfinity;
    }
    sum += target_.kernels().subtract(target_.logits.at(begin), size, target_.weighting,
                                      static_cast<float>(factor), weights + i);
  }
  return sum;
}

}  // namespace fastspec::cpu
