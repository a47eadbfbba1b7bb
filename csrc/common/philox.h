// Philox4x32-10 counter-based random numbers (Salmon et al., SC 2011), identical on host and
// device.
#pragma once
#include <cstdint>

#if defined(__CUDACC__)
#define FASTSPEC_HOST_DEVICE __host__ __device__
#else
#define FASTSPEC_HOST_DEVICE
#endif

namespace fastspec {

struct PhiloxBlock {
  uint32_t word[4];
};

FASTSPEC_HOST_DEVICE inline PhiloxBlock philox4x32_10(uint64_t key, const uint32_t counter[4]) {
  uint32_t c0 = counter[0], c1 = counter[1], c2 = counter[2], c3 = counter[3];
  uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t even = uint64_t{0xD2511F53u} * c0;
    const uint64_t odd = uint64_t{0xCD9E8D57u} * c2;
    const uint32_t next0 = static_cast<uint32_t>(odd >> 32) ^ c1 ^ k0;
    const uint32_t next2 = static_cast<uint32_t>(even >> 32) ^ c3 ^ k1;
    c1 = static_cast<uint32_t>(odd);
    c3 = static_cast<uint32_t>(even);
    c0 = next0;
    c2 = next2;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

// Word `index` of the sequence selected by (seed, position, stream).
inline uint32_t philox_word(uint64_t seed, uint64_t position, uint32_t stream, uint32_t index) {
  const uint32_t counter[4] = {static_cast<uint32_t>(position),
                               static_cast<uint32_t>(position >> 32), index / 4, stream};
  return philox4x32_10(seed, counter).word[index % 4];
}

// The word as a number in [0, 1) with 24 random bits.
inline float philox_uniform(uint64_t seed, uint64_t position, uint32_t stream, uint32_t index) {
  return static_cast<float>(philox_word(seed, position, stream, index) >> 8) * 0x1p-24f;
}

// The Gumbel noise of coupled rows: -ln of exponential numbers, drawn for groups of sixteen tokens
// with the same token / 256 and token % 16. The smallest of a group is a sixteenth of an
// exponential number, whichever token has it, and the excess of the others is exponential again:
// this has the distribution of sixteen independent numbers, and one word bounds them all.
constexpr uint32_t kLeastStream = 0x67756d62;
constexpr uint32_t kOthersStream = 0x67756d63;
constexpr uint32_t kGroup = 16;

// The index of a token's group; its place in the group is token / kGroup % kGroup.
inline uint32_t group_of(uint32_t token) {
  return token / (kGroup * kGroup) * kGroup + token % kGroup;
}

// A group's word encodes the place of its smallest number, and in 28 bits the number itself.
inline uint32_t least_place(uint32_t word) { return word % kGroup; }

}  // namespace fastspec
