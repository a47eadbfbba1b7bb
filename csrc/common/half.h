// Conversion of 16-bit floats, one value at a time: exact to float, nearest even from float.
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

inline uint32_t bits_from_float(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

inline uint16_t bfloat16_from_float(float value) {
  const uint32_t bits = bits_from_float(value);
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return static_cast<uint16_t>(is_nan ? (bits >> 16) | 0x40u : rounded);
}

// Adding 0.5 rounds values that become subnormal to multiples of 2^-24.
inline uint16_t float16_from_float(float value) {
  const uint32_t sign = (bits_from_float(value) >> 16) & 0x8000u;
  const uint32_t bits = bits_from_float(value) & 0x7fffffffu;
  uint32_t half = (bits - 0x38000000u + 0xfffu + ((bits >> 13) & 1u)) >> 13;
  if (bits < 0x38800000u) half = bits_from_float(float_from_bits(bits) + 0.5f) - 0x3f000000u;
  if (bits >= 0x477ff000u) half = 0x7c00u;
  if (bits > 0x7f800000u) half = 0x7e00u;
  return static_cast<uint16_t>(half | sign);
}

}  // namespace fastspec
