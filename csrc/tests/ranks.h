// Ranks for tests: threads of this process, or forked processes, over a store in shared memory.
#pragma once

#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "base/identity.h"
#include "base/store.h"
#include "host/communicator.h"
#include "tests/check.h"

namespace ranks {

using Comm = std::shared_ptr<axo::Communicator>;

// A store that threads and forked children share: a table in anonymous shared memory.
class TableStore final : public axo::Store {
 public:
  TableStore() {
    void* p = ::mmap(nullptr, sizeof(Table), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) throw std::runtime_error("mmap");
    table_ = new (p) Table{};
  }
  ~TableStore() override { ::munmap(table_, sizeof(Table)); }

  void set(const std::string& key, const std::string& value) override {
    Entry& e = table_->entries[table_->next.fetch_add(1) % kEntries];
    std::strncpy(e.key, key.c_str(), sizeof(e.key) - 1);
    std::strncpy(e.value, value.c_str(), sizeof(e.value) - 1);
    e.ready.store(1, std::memory_order_release);
  }
  std::string get(const std::string& key, axo::Milliseconds timeout) override {
    const auto end = std::chrono::steady_clock::now() + timeout;
    for (;;) {
      if (const Entry* e = find(key)) return e->value;
      if (std::chrono::steady_clock::now() > end) throw axo::Timeout("store: no key " + key);
      std::this_thread::sleep_for(std::chrono::microseconds(300));
    }
  }
  bool has(const std::string& key) override { return find(key) != nullptr; }

 private:
  static constexpr int kEntries = 256;
  struct Entry {
    std::atomic<int> ready;
    char key[60];
    char value[960];
  };
  const Entry* find(const std::string& key) const {
    for (const auto& e : table_->entries) {
      if (e.ready.load(std::memory_order_acquire) == 1 && key == e.key) return &e;
    }
    return nullptr;
  }
  struct Table {
    std::atomic<int> next;
    Entry entries[kEntries];
  };
  Table* table_;
};

// What ranks tell each other before they have a communicator, as axo.comm.rendezvous does it for the product: who they
// are and where they listen.
class Meeting {
 public:
  Meeting(axo::Store& store, std::string key, int rank, int size, axo::Milliseconds timeout)
      : store_(store), key_(std::move(key)), rank_(rank), end_(std::chrono::steady_clock::now() + timeout) {
    if (size == 1) return;
    leader_ = std::make_shared<axo::host::Leader>();
    const std::string thread = std::to_string(::getpid()) + " " + std::to_string(::syscall(SYS_gettid));
    store_.set(at(rank), thread + " " + axo::process_space() + " " + leader_->address().text());
    others_.resize(static_cast<std::size_t>(size));
    for (int r = 0; r < size; ++r) await(r);
  }
  const std::shared_ptr<axo::host::Leader>& leader() const { return leader_; }
  std::string address(int rank) const { return others_.empty() ? "" : others_[static_cast<std::size_t>(rank)].address; }
  // A rank is lost, as the others shall hear: those that see this one end because of it.
  void tell(const axo::PeerLost& lost) { store_.set(key_ + "/lost", std::to_string(lost.peer()) + " " + lost.what()); }
  // Throws Failure for a rank that has come and died.
  void look() const {
    look_at_store();
    for (std::size_t r = 0; r < others_.size(); ++r) {
      if (!others_[r].thread.gone()) continue;
      look_at_store();
      throw axo::Failure{
          axo::FailureKind::peer_lost, static_cast<int>(r),
          "rank " + std::to_string(r) + " (process " + std::to_string(others_[r].thread.pid()) + ") died"};
    }
  }

 private:
  struct Other {
    axo::RankThread thread;
    std::string address;
  };
  std::string at(int rank) const { return key_ + "/" + std::to_string(rank); }
  void look_at_store() const {
    if (!store_.has(key_ + "/lost")) return;
    const std::string told = store_.get(key_ + "/lost", axo::Milliseconds(1000));
    throw axo::Failure{axo::FailureKind::peer_lost, std::atoi(told.c_str()), told.substr(told.find(' ') + 1)};
  }
  void await(int rank) {
    while (!store_.has(at(rank))) {
      try {
        look();
      } catch (const axo::Failure& failure) {
        const axo::PeerLost lost(failure.text + "; waited a while", failure.peer);
        tell(lost);
        throw lost;
      }
      if (std::chrono::steady_clock::now() > end_) {
        throw axo::Timeout("rank " + std::to_string(rank_) + ": rank " + std::to_string(rank) + " has not come");
      }
      std::this_thread::sleep_for(std::chrono::microseconds(300));
    }
    std::istringstream card(store_.get(at(rank), axo::Milliseconds(1000)));
    int pid = 0, tid = 0;
    std::string space, socket, token;
    card >> pid >> tid >> space >> socket >> token;
    Other& other = others_[static_cast<std::size_t>(rank)];
    if (rank != rank_) other.thread = axo::RankThread(pid, tid, space);
    other.address = socket + " " + token;
  }

  axo::Store& store_;
  const std::string key_;
  const int rank_;
  const std::chrono::steady_clock::time_point end_;
  std::shared_ptr<axo::host::Leader> leader_;
  std::vector<Other> others_;
};

inline Comm connect(axo::Store& store, int rank, int size, axo::Milliseconds timeout = axo::Milliseconds(60000),
                    const std::string& key = "world") {
  axo::HostOptions options;
  options.name = key;
  options.timeout = timeout;
  const auto limit =
      timeout < axo::Milliseconds::zero() ? axo::Milliseconds(60000) : std::min(timeout, axo::Milliseconds(60000));
  Meeting meeting(store, key, rank, size, limit);
  try {
    return axo::create_host_communicator(meeting.leader(), meeting.address(0), rank, size, options,
                                         [&] { meeting.look(); });
  } catch (const axo::PeerLost& lost) {
    meeting.tell(lost);
    throw;
  }
}

// Runs fn(rank) on n threads; the first exception is thrown here.
inline void threads(int n, const std::function<void(int)>& fn) {
  std::mutex mutex;
  std::string error;
  std::vector<std::thread> all;
  for (int r = 0; r < n; ++r) {
    all.emplace_back([&, r] {
      try {
        fn(r);
      } catch (const std::exception& e) {
        std::lock_guard<std::mutex> lock(mutex);
        if (error.empty()) error = "rank " + std::to_string(r) + ": " + e.what();
      }
    });
  }
  for (auto& t : all) t.join();
  if (!error.empty()) throw check::Failed(error);
}

// The same with a communicator of the n threads.
inline void with_threads(int n, const std::function<void(Comm)>& fn,
                         axo::Milliseconds timeout = axo::Milliseconds(60000)) {
  TableStore store;
  threads(n, [&](int r) {
    Comm comm = connect(store, r, n, timeout);
    fn(comm);
    comm->shutdown();
  });
}

// In a forked child: runs fn(rank) and leaves with 0, or 1 after an exception.
[[noreturn]] inline void be_rank(int rank, const std::function<void(int)>& fn) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);  // nobody outlives the test, however it ends
  check::children().count = 0;
  ::alarm(100);
  int status = 0;
  try {
    fn(rank);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "rank %d: %s\n", rank, e.what());
    status = 1;
  }
  ::_exit(status);
}

// Waits for children; how each ended: 0 well, 1 with an exception, 128 + s by signal s.
inline std::vector<int> reap(const std::vector<pid_t>& pids) {
  std::vector<int> ends;
  for (pid_t pid : pids) {
    int status = 0;
    ::waitpid(pid, &status, 0);
    ends.push_back(WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status));
  }
  check::children().count = 0;
  return ends;
}

// Runs fn(rank) in n forked processes and returns how each ended.
inline std::vector<int> processes(int n, const std::function<void(int)>& fn) {
  std::vector<pid_t> pids;
  std::fflush(stdout);
  for (int r = 0; r < n; ++r) {
    const pid_t pid = ::fork();
    if (pid < 0) throw std::runtime_error("fork");
    if (pid == 0) be_rank(r, fn);
    pids.push_back(pid);
    check::children().add(pid);
  }
  return reap(pids);
}

inline void all_well(const std::vector<int>& ends) {
  for (std::size_t r = 0; r < ends.size(); ++r) {
    if (ends[r] != 0) throw check::Failed("rank " + std::to_string(r) + " ended with " + std::to_string(ends[r]));
  }
}

inline axo::CallOptions blocking() {
  axo::CallOptions options;
  options.blocking = true;
  return options;
}

}  // namespace ranks
