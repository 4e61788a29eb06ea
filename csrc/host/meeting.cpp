// Identities, callers and the errors of a meeting; see host/meeting.h.
#include "host/meeting.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <sstream>

#include "base/deadline.h"

namespace axo::host {
namespace {

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

void Meeting::raise(const Refusal& r) const {
  const std::string text = what + " (rank " + std::to_string(rank) + " of " + std::to_string(size) + "): " + r.text +
                           "; waited " + seconds_since(start);
  if (r.kind == FailureKind::peer_lost) throw PeerLost(text, r.peer);
  if (r.kind == FailureKind::timeout) throw Timeout(text);
  throw Error(r.text);
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
  return (pidfd_ && ::poll(&p, 1, 0) > 0) || exiting(pid_, tid_, bool(pidfd_));
}

}  // namespace axo::host
