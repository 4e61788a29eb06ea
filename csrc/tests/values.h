// Test data and the serial oracle: every element of every rank is a function of (rank, index), so that each rank can
// compute what all of them should see. The oracle reduces in double or in wide integers, one element at a time; the
// values are small integers, so that every float format represents inputs and results exactly and equality is exact.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "base/types.h"

namespace values {

using axo::DType;
using axo::ReduceOp;
using Bytes = std::vector<char>;

// Whole numbers of small magnitude; sums and products over up to 16 ranks stay exact in bf16 (8 bits of mantissa).
inline int small(int rank, std::size_t i, ReduceOp op) {
  const auto h = static_cast<unsigned>(rank * 7 + static_cast<int>(i % 8191) * 13 + static_cast<int>(i / 8191) * 5);
  if (op == ReduceOp::product) return h % 5 == 0 ? 2 : (h % 3 == 0 ? -1 : 1);
  return static_cast<int>(h % 9) - 3;
}

inline std::uint16_t half_bits(float f, bool brain) {
  // Exact for the small values and their averages over 2, 4, 8, 16 ranks.
  std::uint32_t x;
  std::memcpy(&x, &f, 4);
  if (brain) {
    const std::uint32_t r = x + 0x7fffu + ((x >> 16) & 1u);
    return static_cast<std::uint16_t>(r >> 16);
  }
  if (f == 0) return static_cast<std::uint16_t>((x >> 16) & 0x8000u);
  int e;
  const float m = std::frexp(std::fabs(f), &e);  // f = m * 2^e, m in [0.5, 1)
  const double scaled = std::nearbyint(static_cast<double>(m) * 2048.0);
  const auto mantissa = static_cast<std::uint32_t>(scaled);
  const std::uint32_t bits = (static_cast<std::uint32_t>(e - 1 + 15) << 10) + (mantissa - 1024u);
  return static_cast<std::uint16_t>(bits | ((x >> 16) & 0x8000u));
}

inline void put(Bytes& to, std::size_t i, DType dtype, double v) {
  char* p = to.data() + i * axo::item_size(dtype);
  const auto store = [&](auto x) { std::memcpy(p, &x, sizeof(x)); };
  switch (dtype) {
    case DType::float64:
      return store(v);
    case DType::float32:
      return store(static_cast<float>(v));
    case DType::bfloat16:
      return store(half_bits(static_cast<float>(v), true));
    case DType::float16:
      return store(half_bits(static_cast<float>(v), false));
    case DType::int64:
      return store(static_cast<std::int64_t>(v));
    case DType::int32:
      return store(static_cast<std::int32_t>(v));
    case DType::int16:
      return store(static_cast<std::int16_t>(v));
    case DType::int8:
      return store(static_cast<std::int8_t>(v));
    case DType::uint8:
      return store(static_cast<std::uint8_t>(static_cast<std::int64_t>(v)));
    case DType::boolean:
      return store(static_cast<std::uint8_t>(v != 0));
    default:
      std::memset(p, static_cast<int>(v) & 0xff, axo::item_size(dtype));
  }
}

// What rank `rank` holds at index i, as a number.
inline double input(int rank, std::size_t i, DType dtype, ReduceOp op) {
  const int v = small(rank, i, op);
  if (dtype == DType::boolean) return v > 0;
  if (dtype == DType::uint8) return static_cast<std::uint8_t>(v);
  return v;
}

inline Bytes make(int rank, std::size_t first, std::size_t count, DType dtype, ReduceOp op) {
  Bytes b(count * axo::item_size(dtype));
  for (std::size_t i = 0; i < count; ++i) put(b, i, dtype, input(rank, first + i, dtype, op));
  return b;
}

inline bool is_float(DType d) {
  return d == DType::float64 || d == DType::float32 || d == DType::bfloat16 || d == DType::float16;
}

// The reduction of index i over n ranks.
inline void put_reduced(Bytes& to, std::size_t at, int n, std::size_t i, DType dtype, ReduceOp op) {
  double f = input(0, i, dtype, op);
  auto k = static_cast<std::int64_t>(f);
  for (int r = 1; r < n; ++r) {
    const double g = input(r, i, dtype, op);
    const auto m = static_cast<std::int64_t>(g);
    switch (op) {
      case ReduceOp::sum:
      case ReduceOp::avg:
        f += g;
        k += m;
        break;
      case ReduceOp::product:
        f *= g;
        k = static_cast<std::int64_t>(static_cast<std::uint64_t>(k) * static_cast<std::uint64_t>(m));
        break;
      case ReduceOp::min:
        f = g < f ? g : f;
        k = m < k ? m : k;
        break;
      case ReduceOp::max:
        f = g > f ? g : f;
        k = m > k ? m : k;
        break;
      case ReduceOp::bit_and:
        k &= m;
        break;
      case ReduceOp::bit_or:
        k |= m;
        break;
      case ReduceOp::bit_xor:
        k ^= m;
        break;
    }
  }
  if (op == ReduceOp::avg) {
    f = dtype == DType::float64 ? f / n : static_cast<double>(static_cast<float>(f) / static_cast<float>(n));
    k /= n;
  }
  if (is_float(dtype)) return put(to, at, dtype, f);
  char* p = to.data() + at * axo::item_size(dtype);
  if (dtype == DType::boolean) {
    *p = static_cast<char>(op == ReduceOp::bit_xor ? (k & 1) : k != 0);
  } else {
    std::memcpy(p, &k, axo::item_size(dtype));  // little endian: wraps
  }
}

inline Bytes reduced(int n, std::size_t first, std::size_t count, DType dtype, ReduceOp op) {
  Bytes b(count * axo::item_size(dtype));
  for (std::size_t i = 0; i < count; ++i) put_reduced(b, i, n, first + i, dtype, op);
  return b;
}

}  // namespace values
