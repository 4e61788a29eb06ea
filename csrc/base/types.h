// Element types, reduce operations and byte counts: the vocabulary of every collective.
//
// Knows no Python and no torch. A dtype that can be moved but not reduced (fp8, complex) is marked so: a
// collective that reduces refuses it, one that moves bytes takes it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace axo {

enum class DType : std::uint8_t {
  float64,
  float32,
  bfloat16,
  float16,
  int64,
  int32,
  int16,
  int8,
  uint8,
  boolean,
  // Moved, never reduced.
  float8_e4m3fn,
  float8_e5m2,
  float8_e4m3fnuz,
  float8_e5m2fnuz,
  complex64,
  complex128,
};
inline constexpr int kDTypeCount = 16;

enum class ReduceOp : std::uint8_t { sum, avg, product, min, max, bit_and, bit_or, bit_xor };
inline constexpr int kReduceOpCount = 8;

// Bytes of one element.
std::size_t item_size(DType dtype);
const char* name_of(DType dtype);
const char* name_of(ReduceOp op);
// Whether `op` is defined on `dtype`: bit operations want integers or bool, fp8 and complex reduce not at all.
// avg on integers divides towards zero, as NCCL does.
bool can_reduce(DType dtype, ReduceOp op);

}  // namespace axo
