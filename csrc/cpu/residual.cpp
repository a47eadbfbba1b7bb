#include "residual.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <numeric>

#include "common/half.h"
#include "parallel.h"

namespace fastspec::cpu {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

inline float same(float x) { return x; }

// The logits of tokens in the columns of a row, -inf if a token has none; with masks, because a
// branch on which tokens a drafter has is unpredictable.
template <class T, float (*kToFloat)(T)>
void take_columns(const Row& row, const int32_t* columns, int64_t size, float* out) {
  constexpr uint32_t kMinusInfinity = 0xff800000;
  const T* logits = static_cast<const T*>(row.logits.at(0));
  const auto count = static_cast<uint32_t>(row.logits.size);
  for (int64_t i = 0; i < size; ++i) {
    const auto column = static_cast<uint32_t>(columns[i]);  // a negative one becomes out of range
    const uint32_t known = column < count ? ~uint32_t{0} : 0;
    const float x = kToFloat(logits[column & known]);
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof(bits));
    bits = (bits & known) | (kMinusInfinity & ~known);
    std::memcpy(out + i, &bits, sizeof(bits));
  }
}

}  // namespace

void Draft::weigh(int64_t begin, int64_t size, float* out) const {
  if (known_weights != nullptr) {
    std::copy_n(known_weights + begin, size, out);
    return;
  }
  if (token_map == nullptr) {
    const int64_t known = std::max<int64_t>(0, std::min(size, row->logits.size - begin));
    row->kernels().weigh(row->logits.at(begin), known, row->weighting, 1.0f, out);
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
  sampling_kernels().rows[kType].weigh(logits, size, row->weighting, 1.0f, out);
}

Residual::Residual(const Row& target, const Draft& draft, double factor)
    : target_(target), draft_(draft) {
  if (draft.row == nullptr) return;
  constexpr double kMost = 0x1p100;  // a draft's weights vanish against it, and sums can hold it
  const double ratio = factor * draft.row->sum / target.sum;
  ratio_ = static_cast<float>(std::min(ratio, kMost));
  unit_ = ratio > kMost ? kMost * target.sum / factor : draft.row->sum;
}

double Residual::sum(int64_t chunk) const {
  if (target_.chunk_sums[chunk] <= 0) return 0;
  const int64_t position = draft_.token - chunk * kChunk;
  const bool holds_token = position >= 0 && position < target_.chunk_size(chunk);
  if (draft_.row == nullptr && !holds_token) return target_.chunk_sums[chunk];
  return weigh(chunk, nullptr) / unit_;
}

std::vector<double> Residual::sums() const {
  std::vector<double> sums(chunks());
  parallel_for(chunks(), weighings_per_thread(2 * kChunk),  // of two rows
               [&](int64_t chunk) { sums[chunk] = sum(chunk); });
  return sums;
}

int64_t Residual::draw(const double* chunk_sums, double uniform) const {
  const double total = std::accumulate(chunk_sums, chunk_sums + chunks(), 0.0);
  if (!(total > 0)) return -1;
  double before = 0;
  const int64_t chunk = draw_chunk(chunk_sums, chunks(), uniform * total, &before);
  float weights[kChunk];
  weigh(chunk, weights);
  const double bound = (uniform * total - before) * unit_;
  return chunk * kChunk + draw_from(weights, target_.chunk_size(chunk), bound);
}

// Returns the sum of one chunk's weights, and fills them in where `weights` is not null.
double Residual::weigh(int64_t chunk, float* weights) const {
  const int64_t begin = chunk * kChunk, size = target_.chunk_size(chunk);
  float known[kChunk];
  Subtrahend draft{known, size, {}};
  int kind = kKnown;
  if (draft_.row == nullptr) {
    std::fill(known, known + size, 0.0f);
    if (draft_.token >= begin && draft_.token < begin + size) {
      known[draft_.token - begin] = kInfinity;
    }
  } else if (draft_.known_weights != nullptr) {
    draft.data = draft_.known_weights + begin;
  } else if (draft_.token_map != nullptr) {
    draft_.weigh(begin, size, known);
  } else {
    const Logits& logits = draft_.row->logits;
    draft = {logits.at(begin), logits.size - begin, draft_.row->weighting};
    kind = static_cast<int>(logits.type);
  }
  return target_.kernels().excess[kind](target_.logits.at(begin), size, target_.maxima_of(chunk),
                                        target_.weighting, ratio_, draft, weights);
}

}  // namespace fastspec::cpu
