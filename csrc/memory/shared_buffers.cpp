// The heap of shared buffers; see memory/shared_buffers.h.
#include "memory/shared_buffers.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <string>

#include "base/error.h"

namespace axo {
namespace {

constexpr std::size_t kPage = 4096;

std::size_t heap_bytes() {
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
  return std::size_t{1} << 30;  // their shadow memory does not like terabytes
#else
  const auto pages = static_cast<std::size_t>(std::max(1L, ::sysconf(_SC_PHYS_PAGES)));
  const std::size_t twice = 2 * pages * static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  return std::min(twice, std::size_t{1} << 41) / kPage * kPage;
#endif
}

}  // namespace

SharedHeap& SharedHeap::get() {
  static std::mutex mutex;
  static SharedHeap* heap = nullptr;  // never destroyed: buffers may outlive statics
  std::lock_guard<std::mutex> lock(mutex);
  if (heap == nullptr || heap->pid_ != ::getpid()) heap = new SharedHeap;
  return *heap;
}

SharedHeap::SharedHeap() : fd_(create_segment("axo-heap", heap_bytes())), bytes_(heap_bytes()), pid_(::getpid()) {
  holes_[0] = bytes_;
}

std::shared_ptr<void> SharedHeap::allocate(std::size_t wanted) {
  const std::size_t bytes = (std::max<std::size_t>(wanted, 1) + kPage - 1) / kPage * kPage;
  std::lock_guard<std::mutex> lock(mutex_);
  if (!mapping_) mapping_ = map_segment(fd_.get(), bytes_);
  const auto hole = std::find_if(holes_.begin(), holes_.end(), [&](const auto& h) { return h.second >= bytes; });
  if (wanted > bytes_ || hole == holes_.end()) {
    throw Error("empty_shared: no room for " + std::to_string(wanted) + " bytes in the heap of " +
                std::to_string(bytes_) + " bytes");
  }
  const std::uint64_t offset = hole->first;
  const std::size_t rest = hole->second - bytes;
  holes_.erase(hole);
  if (rest > 0) holes_[offset + bytes] = rest;
  // The deleter holds the mapping; in a forked child, where the memory does not exist, it does nothing.
  return std::shared_ptr<void>(mapping_->base() + offset, [this, offset, bytes, keep = mapping_](void*) {
    if (pid_ == ::getpid()) free(offset, bytes);
  });
}

void SharedHeap::free(std::uint64_t offset, std::size_t bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  ::madvise(mapping_->base() + offset, bytes, MADV_REMOVE);  // the pages go back to the system, for all processes
  const auto at = holes_.emplace(offset, bytes).first;
  const auto next = std::next(at);
  if (next != holes_.end() && at->first + at->second == next->first) {
    at->second += next->second;
    holes_.erase(next);
  }
  if (at != holes_.begin()) {
    const auto previous = std::prev(at);
    if (previous->first + previous->second == at->first) {
      previous->second += at->second;
      holes_.erase(at);
    }
  }
}

bool SharedHeap::find(const void* p, std::size_t bytes, std::uint64_t* offset) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!mapping_) return false;
  const auto at = reinterpret_cast<std::uintptr_t>(p), base = reinterpret_cast<std::uintptr_t>(mapping_->base());
  if (at < base || at - base > bytes_ || bytes > bytes_ - (at - base)) return false;
  *offset = at - base;
  return true;
}

std::shared_ptr<void> allocate_shared(std::size_t bytes) { return SharedHeap::get().allocate(bytes); }

}  // namespace axo
