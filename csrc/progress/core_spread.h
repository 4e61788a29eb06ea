// Which core each thread of this host's ranks was on when it last called, and the way from a core that too many share.
//
// A scheduler that has woken two ranks on one core (both slept in a socket of Gloo's, say) may leave them there for
// many milliseconds beside a core that idles. Then each waits for the other's turn: an all_reduce of 1 MiB took 150-200
// us instead of 44, one of 1 KiB 30-50 instead of 4. So every thread that issues operations writes down its core where
// the other ranks see it, and one that waits on a core with at least two more of them than another core moves to that
// core.
//
// It stays free to go, but the kernel now takes its affinity for its own wish: cores that its cpuset gains later are
// not its. A rank that is bound to cores (taskset, a launcher) moves among these only.
#pragma once

#include <sched.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

namespace axo {

inline constexpr int kEntries = 16;

// In a process's page, a word for each thread that issues operations: milliseconds of the host's clock << 16 | 1 +
// core; 0: nobody yet. Of more threads than entries, those that called last have one.
struct CoreRow {
  alignas(64) std::atomic<std::uint64_t> entries[kEntries];
};

// Cores that this process may use.
int count_cores();

// Moves the calling thread to `core` and leaves it free to go. False where it is refused.
bool come_to(int core);

using Crowd = std::array<std::uint16_t, CPU_SETSIZE>;  // threads by core

// Where one of the threads on `core` shall go: the allowed core with the fewest, if it has at least two fewer; or -1.
int freer_core(int core, const Crowd& crowd, const cpu_set_t& allowed);

// What a waiting thread found on its core: `fair`: no more threads than its share; `moved`: more, and it was moved to
// another core; `crowded`: more, and no other core is better, so it should sleep and let the others run.
enum class Crowding { fair, moved, crowded };

class CoreSpread {
 public:
  using Rows = std::vector<std::shared_ptr<const CoreRow>>;

  // Who has not called for so long counts no more: it computes, or waits elsewhere, or is dead.
  static constexpr std::chrono::milliseconds kFresh{20};

  // `own` stays mapped as long as this process lives.
  explicit CoreSpread(CoreRow* own);
  // The rows of the processes of a communicator; those of the largest so far count.
  void meet(Rows rows);
  // The calling thread issues operations. Its core; or -1.
  int record_core();
  // The calling thread waits and nothing comes. Moves it where that helps, unless it has just been moved: what it knows
  // of the others is as old as their last call.
  Crowding spread();

 private:
  CoreRow* const own_;
  const int cores_ = count_cores();
  std::mutex mutex_;
  std::shared_ptr<const Rows> rows_;
};

}  // namespace axo
