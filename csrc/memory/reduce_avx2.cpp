// The reduction loops of memory/reduce_loops.inc for x86-64 with AVX2. Empty on other machines.
#if defined(__x86_64__)
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "memory/copy.h"
#include "memory/reduce.h"

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
namespace axo {
namespace {
namespace avx2 {
#include "memory/reduce_loops.inc"
}  // namespace avx2
}  // namespace

detail::ReduceFn detail::reduce_avx2(DType dtype, ReduceOp op) { return avx2::pick(dtype, op); }

}  // namespace axo
#pragma GCC pop_options
#endif
