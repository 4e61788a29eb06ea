// Buffers that collectives use in place: memory that every rank of the host has mapped.
//
// A process has one heap for them: a sealed memfd of twice the machine's memory, of which only touched pages cost
// anything; its descriptor travels with the rendezvous. A collective whose buffers all lie in heaps needs no staging:
// each rank reads its peers' buffers itself. all_reduce wants both buffers shared on all ranks, reduce_scatter and
// all_gather the input, broadcast the root's data; whatever does not qualify is staged as usual, with the same bits.
// Forked children do not inherit the memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

#include "memory/segment.h"

namespace axo {

// Zeroed memory, aligned to pages, given back with the last reference. Throws Error when the heap is full.
std::shared_ptr<void> allocate_shared(std::size_t bytes);

// The heap of this process.
class SharedHeap {
 public:
  // Made at the first call; a forked child has one of its own.
  static SharedHeap& get();
  int fd() const { return fd_.get(); }
  std::size_t bytes() const { return bytes_; }
  std::shared_ptr<void> allocate(std::size_t bytes);
  // Where [p, p + bytes) lies in the heap; false when it is not, or not fully, inside.
  bool find(const void* p, std::size_t bytes, std::uint64_t* offset);

 private:
  SharedHeap();
  void free(std::uint64_t offset, std::size_t bytes);

  Fd fd_;
  std::size_t bytes_;
  int pid_;
  std::mutex mutex_;
  std::shared_ptr<Mapping> mapping_;            // made at the first allocation
  std::map<std::uint64_t, std::size_t> holes_;  // free ranges: offset -> bytes
};

}  // namespace axo
