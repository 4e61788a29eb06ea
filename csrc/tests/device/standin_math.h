// Elements of the stand-in's collectives: through double, which is exact for the small integers that the tests use.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "device/nccl_api.h"

namespace standin {

inline std::size_t bytes_of(int type) {
  static constexpr std::size_t kBytes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
  return kBytes[type];
}

inline double half_value(std::uint16_t bits, int mantissa, int bias) {
  const int exponent = (bits & 0x7fff) >> mantissa;
  const double fraction = std::ldexp(bits & ((1 << mantissa) - 1), -mantissa);
  const double size = exponent == 0 ? std::ldexp(fraction, 1 - bias) : std::ldexp(1 + fraction, exponent - bias);
  return bits & 0x8000 ? -size : size;
}

// Rounds to nearest, ties to even; for values within the format's normal range.
inline std::uint16_t half_bits(double value, int mantissa, int bias) {
  if (value == 0) return 0;
  int exponent = 0;
  const double fraction = std::frexp(std::fabs(value), &exponent);  // [0.5, 1)
  const auto field = static_cast<std::uint16_t>(exponent - 1 + bias);
  const auto low = static_cast<int>(std::nearbyint(std::ldexp(2 * fraction - 1, mantissa)));
  return static_cast<std::uint16_t>((value < 0 ? 0x8000 : 0) | ((field << mantissa) + low));
}

template <class T>
double get(const void* data, std::size_t i) {
  T x;
  std::memcpy(&x, static_cast<const char*>(data) + i * sizeof(T), sizeof(T));
  return static_cast<double>(x);
}
template <class T>
void put(void* data, std::size_t i, T x) {
  std::memcpy(static_cast<char*>(data) + i * sizeof(T), &x, sizeof(T));
}

inline double element(const void* data, std::size_t i, int type) {
  switch (type) {
    case axo::kNcclInt8:
      return get<std::int8_t>(data, i);
    case axo::kNcclUint8:
      return get<std::uint8_t>(data, i);
    case axo::kNcclInt32:
      return get<std::int32_t>(data, i);
    case axo::kNcclInt64:
      return get<std::int64_t>(data, i);
    case axo::kNcclFloat16:
      return half_value(static_cast<std::uint16_t>(get<std::uint16_t>(data, i)), 10, 15);
    case axo::kNcclBfloat16:
      return half_value(static_cast<std::uint16_t>(get<std::uint16_t>(data, i)), 7, 127);
    case axo::kNcclFloat32:
      return get<float>(data, i);
    default:
      return get<double>(data, i);
  }
}

inline std::vector<double> load(const void* data, std::size_t count, int type, double factor) {
  std::vector<double> values(count);
  for (std::size_t i = 0; i < count; ++i) values[i] = factor * element(data, i, type);
  return values;
}

inline void store(void* data, const std::vector<double>& values, int type) {
  for (std::size_t i = 0; i < values.size(); ++i) {
    const double x = values[i];
    switch (type) {
      case axo::kNcclInt8:
        put(data, i, static_cast<std::int8_t>(x));
        break;
      case axo::kNcclUint8:
        put(data, i, static_cast<std::uint8_t>(x));
        break;
      case axo::kNcclInt32:
        put(data, i, static_cast<std::int32_t>(x));
        break;
      case axo::kNcclInt64:
        put(data, i, static_cast<std::int64_t>(x));
        break;
      case axo::kNcclFloat16:
        put(data, i, half_bits(x, 10, 15));
        break;
      case axo::kNcclBfloat16:
        put(data, i, half_bits(x, 7, 127));
        break;
      case axo::kNcclFloat32:
        put(data, i, static_cast<float>(x));
        break;
      default:
        put(data, i, x);
    }
  }
}

inline void combine(std::vector<double>& sum, const std::vector<double>& other, int op) {
  for (std::size_t i = 0; i < sum.size(); ++i) {
    const double x = other[i];
    switch (op) {
      case axo::kNcclProd:
        sum[i] *= x;
        break;
      case axo::kNcclMax:
        sum[i] = std::max(sum[i], x);
        break;
      case axo::kNcclMin:
        sum[i] = std::min(sum[i], x);
        break;
      default:
        sum[i] += x;
    }
  }
}

}  // namespace standin
