// The 16-bit float formats, one value at a time; both conversions are exact.
#pragma once
#include <cstdint>
#include <cstring>

namespace fastspec {

inline float float_from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

inline float bfloat16_to_float(uint16_t bits) { return float_from_bits(uint32_t{bits} << 16); }

inline float float16_to_float(uint16_t bits) {
  const uint32_t magnitude = bits & 0x7fffu;
  const float value = magnitude > 0x7bffu ? float_from_bits((magnitude << 13) | 0x7f800000u)
                                          : float_from_bits(magnitude << 13) * 0x1p112f;
  return (bits & 0x8000u) != 0 ? -value : value;
}

}  // namespace fastspec
