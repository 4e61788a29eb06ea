// A process as others of its host see it: the page that it shares with them, and two signs that it is no more.
//
// The life word lies in the page: the kernel marks it FUTEX_OWNER_DIED when the progress thread dies, whatever the
// reason, before it frees the process's memory. Before a page is there, /proc tells whether the thread of another rank
// is exiting. A socket and a pidfd tell only after the memory is freed.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "memory/segment.h"
#include "progress/core_spread.h"

namespace axo {

// What a process shows its peers.
struct ProcessPage {
  static constexpr std::size_t kBlockedWords = 24;
  static constexpr std::uint64_t kMagic = 0x3165676150'6f7841ull;
  std::uint64_t magic;
  std::int32_t pid;
  std::uint64_t heap_bytes;
  alignas(64) std::atomic<std::uint32_t> life;  // thread id of the progress thread; FUTEX_OWNER_DIED once it is dead
  alignas(64) std::atomic<std::uint32_t> bell;  // counts wake-ups
  std::atomic<std::uint32_t> sleepers;          // threads that sleep, or are about to, on the bell
  // Where a thread of the process has been blocked for longer than a tick: for the messages of those who wait for it.
  alignas(64) std::atomic<std::uint32_t> blocked_version;  // odd while it changes
  std::atomic<std::int32_t> blocked_on;                    // the process that it waits for; 0 when it is not blocked
  std::atomic<std::uint64_t> blocked_text[kBlockedWords];
  // When the host's link to other hosts is free again (hosts/link_limit.h); the page of one process of a host counts.
  alignas(64) std::atomic<std::uint64_t> link_free;
  CoreRow cores;
};
inline constexpr std::size_t kPageBytes = 4096;

class Process {
 public:
  // Maps the page and the heap of a process; throws Error when a descriptor is something else.
  Process(int page, int heap);
  bool dead() const;
  int pid() const { return page_->pid; }
  // Wakes the process's sleepers. Call it after the store that they wait for.
  void ring() const;
  ProcessPage* page() const { return page_; }
  std::shared_ptr<const CoreRow> cores() const { return {mapping_, &page_->cores}; }  // keeps the page alone
  // Where the process is blocked, "" when it is not; and the process that it waits for there.
  std::string blocked(int* on) const;
  // For the process itself.
  void set_blocked(const std::string& text, int on);
  // The process's heap of shared buffers; null when this process has no room in its address space for it.
  char* heap() const { return heap_ ? heap_->base() : nullptr; }
  std::size_t heap_bytes() const { return heap_ ? heap_->bytes() : 0; }

 private:
  std::shared_ptr<Mapping> mapping_, heap_;
  ProcessPage* page_;
};

// The page of this process, ready for its peers. Its life word is for hold_life_word().
Fd make_process_page(std::size_t heap_bytes);
// The calling thread, which uses no robust mutex, lives as long as the process: the kernel watches the word for it.
void hold_life_word(ProcessPage& page);

// The thread of another rank that has come to meet, and does nothing else until it has met.
class RankThread {
 public:
  RankThread() = default;
  // `space` is process_space() of the rank that wrote the numbers: in another one they say nothing.
  RankThread(int pid, int tid, const std::string& space);
  // Whether the thread, and so its rank, is no more. False when that cannot be told.
  bool gone() const;
  int pid() const { return pid_; }

 private:
  Fd pidfd_;
  int pid_ = 0, tid_ = 0;
};

}  // namespace axo
