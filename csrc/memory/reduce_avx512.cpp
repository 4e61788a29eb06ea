// The reduction loops of memory/reduce_loops.inc for x86-64 with AVX512. Empty on other machines.
#if defined(__x86_64__)
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "memory/copy.h"
#include "memory/reduce.h"

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,prefer-vector-width=512")
namespace axo {
namespace {
namespace avx512 {
#include "memory/reduce_loops.inc"
}  // namespace avx512
}  // namespace

detail::ReduceFn detail::reduce_avx512(DType dtype, ReduceOp op) { return avx512::pick(dtype, op); }

}  // namespace axo
#pragma GCC pop_options
#endif
