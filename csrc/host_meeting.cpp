// Identities, callers and the errors of a meeting; see host_meeting.h.
#include "host_meeting.h"

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <sstream>

namespace axo::host {
namespace {

// What /proc says of a thread: whether it is exiting, or gone. Its flags tell before its memory is freed.
bool exiting(int pid, int tid) {
  constexpr unsigned long kExiting = 4;  // PF_EXITING
  const std::string folder = "/proc/" + std::to_string(pid);
  std::ifstream file(folder + "/task/" + std::to_string(tid) + "/stat");
  std::string line;
  std::getline(file, line);
  const auto name_end = line.rfind(')');
  if (name_end == std::string::npos) {
    // Gone, unless this /proc shows nothing at all.
    return ::access(folder.c_str(), F_OK) == 0 || ::access("/proc/self/stat", F_OK) == 0;
  }
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

void Meeting::raise(const Refusal& r) const {
  char waited[48];
  std::snprintf(waited, sizeof(waited), "; waited %.3f s", std::chrono::duration<double>(Clock::now() - start).count());
  const std::string text =
      what + " (rank " + std::to_string(rank) + " of " + std::to_string(size) + "): " + r.text + waited;
  if (r.kind == FailureKind::peer_lost) throw PeerLost(text, r.peer);
  if (r.kind == FailureKind::timeout) throw Timeout(text);
  throw Error(r.text);
}

Clock::time_point deadline_after(Milliseconds timeout) {
  constexpr auto kForever = std::chrono::hours(24 * 365);
  return Clock::now() + (timeout < Milliseconds::zero() ? kForever : std::min<Milliseconds>(timeout, kForever));
}

Caller::Caller(int pid, int tid, const std::string& space) {
  if (pid <= 0 || tid <= 0 || space != process_space()) return;
  pidfd_ = Fd(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
  pid_ = pid;
  tid_ = tid;
}

bool Caller::gone() const {
  if (pid_ == 0) return false;
  pollfd p{pidfd_.get(), POLLIN, 0};
  return (pidfd_ && ::poll(&p, 1, 0) > 0) || exiting(pid_, tid_);
}

}  // namespace axo::host
