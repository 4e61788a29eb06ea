// Pages, life words and what /proc tells; see progress/process_life.h.
#include "progress/process_life.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>
#include <new>
#include <sstream>

#include "base/error.h"
#include "base/identity.h"

#if defined(__SANITIZE_THREAD__)
#define AXO_TSAN 1
#endif

namespace axo {
namespace {

// The published data must be visible before the sleeper count is read, and the sleeper's count before it looks at the
// data again: then one of the two sees the other. ThreadSanitizer knows no fences, so it gets the costlier form.
std::uint32_t sleepers_after_publish(std::atomic<std::uint32_t>& sleepers) {
#if defined(AXO_TSAN)
  return sleepers.fetch_add(0, std::memory_order_acq_rel);
#else
  std::atomic_thread_fence(std::memory_order_seq_cst);
  return sleepers.load(std::memory_order_relaxed);
#endif
}

// What /proc says of a thread: whether it is exiting, or gone. Its flags tell before its memory is freed. `seen`: the
// process is known to live, so that a first thread that is not shown may not be looked at.
bool exiting(int pid, int tid, bool seen) {
  constexpr unsigned long kExiting = 4;  // PF_EXITING
  const std::string folder = "/proc/" + std::to_string(pid);
  const Fd file(::open((folder + "/task/" + std::to_string(tid) + "/stat").c_str(), O_RDONLY | O_CLOEXEC));
  char text[1024];
  const ssize_t got = file ? ::read(file.get(), text, sizeof(text)) : -1;
  if (got <= 0) {
    // Gone, unless this process may open no more files, or this /proc shows nothing at all.
    if ((got < 0 && errno != ENOENT && errno != ESRCH) || (seen && pid == tid)) return false;
    return ::access(folder.c_str(), F_OK) == 0 || ::access("/proc/self/stat", F_OK) == 0;
  }
  const std::string line(text, static_cast<std::size_t>(got));
  const auto name_end = line.rfind(')');
  if (name_end == std::string::npos) return false;
  std::istringstream rest(line.substr(name_end + 1));
  char state = 0;
  long skipped = 0;
  unsigned long flags = 0;
  rest >> state;
  for (int i = 0; i < 5; ++i) rest >> skipped;  // parent, group, session, terminal, its group
  rest >> flags;
  return rest && (state == 'Z' || state == 'X' || (flags & kExiting) != 0);
}

}  // namespace

Process::Process(int page, int heap) : mapping_(map_segment(page, kPageBytes)) {
  page_ = reinterpret_cast<ProcessPage*>(mapping_->base());
  if (page_->magic != ProcessPage::kMagic) throw Error("shared memory: the page of a peer is not one of Axo's");
  try {
    heap_ = map_segment(heap, page_->heap_bytes);  // which also checks that it is of this size
  } catch (const Error&) {
    heap_ = nullptr;  // buffers in it will be staged
  }
}

bool Process::dead() const { return (page_->life.load(std::memory_order_acquire) & FUTEX_OWNER_DIED) != 0; }

void Process::ring() const {
  if (sleepers_after_publish(page_->sleepers) == 0) return;
  page_->bell.fetch_add(1);
  ::syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&page_->bell), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

std::string Process::blocked(int* on) const {
  char text[ProcessPage::kBlockedWords * 8];
  *on = 0;
  const std::uint32_t version = page_->blocked_version.load();
  if (version % 2 != 0) return "";
  const int peer = page_->blocked_on.load();
  for (std::size_t i = 0; i < ProcessPage::kBlockedWords; ++i) {
    const std::uint64_t word = page_->blocked_text[i].load();
    std::memcpy(text + 8 * i, &word, 8);
  }
  if (page_->blocked_version.load() != version) return "";
  *on = peer;
  return std::string(text, ::strnlen(text, sizeof(text)));
}

void Process::set_blocked(const std::string& text, int on) {
  page_->blocked_version.fetch_add(1);
  page_->blocked_on.store(on);
  char words[ProcessPage::kBlockedWords * 8] = {};
  const std::string part = clipped(text, sizeof(words));
  std::memcpy(words, part.data(), part.size());
  for (std::size_t i = 0; i < ProcessPage::kBlockedWords; ++i) {
    std::uint64_t word;
    std::memcpy(&word, words + 8 * i, 8);
    page_->blocked_text[i].store(word);
  }
  page_->blocked_version.fetch_add(1);
}

Fd make_process_page(std::size_t heap_bytes) {
  Fd fd = create_segment("axo-process", kPageBytes);
  const auto mapping = map_segment(fd.get(), kPageBytes);
  auto* page = new (mapping->base()) ProcessPage{};
  page->pid = ::getpid();
  page->heap_bytes = heap_bytes;
  page->magic = ProcessPage::kMagic;
  return fd;
}

void hold_life_word(ProcessPage& page) {
  // An entry of this thread's robust list. When the thread dies, however it dies, the kernel sets FUTEX_OWNER_DIED in
  // the word before the process's memory is freed. The list is ours, not the C library's. Only the word lies in shared
  // memory; the entry, with its pointers, stays private.
  static thread_local robust_list_head head;
  static thread_local robust_list entry;
  head.futex_offset = reinterpret_cast<char*>(&page.life) - reinterpret_cast<char*>(&entry);
  head.list_op_pending = nullptr;
  head.list.next = &entry;
  entry.next = &head.list;
  if (::syscall(SYS_set_robust_list, &head, sizeof(head)) != 0) return;
  page.life.store(static_cast<std::uint32_t>(::syscall(SYS_gettid)), std::memory_order_release);
}

RankThread::RankThread(int pid, int tid, const std::string& space) {
  if (pid <= 0 || tid <= 0 || space != process_space()) return;
  pidfd_ = Fd(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
  pid_ = pid;
  tid_ = tid;
}

bool RankThread::gone() const {
  if (pid_ == 0) return false;
  pollfd p{pidfd_.get(), POLLIN, 0};
  return (pidfd_ && ::poll(&p, 1, 0) > 0) || exiting(pid_, tid_, bool(pidfd_));
}

}  // namespace axo
