// Copies that know the machine: one for chunks that stay in the caches, one for results that do not fit into them.
//
// copy() takes string instructions for what is long. They write whole lines without fetching the old content; to fetch
// a line that a peer has read is to wait for that peer. (Between cores that share no cache they are 2-3 times as fast
// as vector stores.) They also read ahead across pages. On other processors copy() asks for the first lines of the next
// page while it copies a page: the prefetchers of today's processors stop at page borders. stream() also writes around
// the caches: a result beyond their size is not read before it is overwritten (a third less traffic) and does not push
// out what the ranks still need. Its stores are complete when it returns. Neither takes overlapping memory; to == from
// is allowed and does nothing.
#pragma once

#include <cstddef>

namespace axo {

// Lines that a prefetch ahead of a page asks for; enough to start the hardware's own prefetcher.
inline constexpr std::size_t kAheadBytes = 4096, kAheadLines = 4, kLine = 64;

// Asks for the beginning of the page after `p`. An address beyond the end of the memory does no harm.
inline void prefetch_ahead(const char* p) {
  for (std::size_t i = 0; i < kAheadLines; ++i) __builtin_prefetch(p + kAheadBytes + i * kLine, 0, 3);
}

void copy(void* to, const void* from, std::size_t bytes);
void stream(void* to, const void* from, std::size_t bytes);

}  // namespace axo
