// In what a reduction over several hosts adds up, and how it gets there and back.
//
// Partial sums of bf16 and fp16 stay in fp32, between hosts too, and are rounded once (with one rank a host
// the values themselves travel); ranks in order inside a host, then hosts in order of their first rank. avg divides
// once, at the end; that of integers sums in 64 bits.
#pragma once

#include <vector>

#include "hosts/core.h"

namespace axo::span {

using Buffer = std::vector<char>;

struct Numbers {
  DType own, sum;  // of the tensors, of partial results
  ReduceOp op;     // of partial results
  bool average;
  int ranks;

  Numbers(const Request& r, const Place& place);
  std::size_t item() const { return item_size(sum); }

  // `count` elements in `sum`: `in` itself, or a converted copy in `*space`.
  const char* widen(const char* in, std::size_t count, Buffer* space) const;
  // out = op over `inputs` (partial results in order), divided and rounded. `out` may be one of the inputs if own ==
  // sum.
  void finish(const std::vector<const void*>& inputs, char* out, std::size_t count) const;
};

}  // namespace axo::span
