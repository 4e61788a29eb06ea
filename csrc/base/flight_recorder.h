// The flight recorder: the last operations of every communicator of a process, written out when one fails or on a
// signal.
//
// A file is JSON lines, one operation a line, so that the files of all ranks can be concatenated and sorted:
// communicator, id (one for all its ranks), rank, size, world_rank (of the launcher, or null), host, pid, op, sequence
// (collectives and messages count separately), dtype, count, reduce, root, tag, state
// ("queued", "running", "done", "failed"), issued, started, ended (seconds of CLOCK_MONOTONIC, which all processes of a
// host share; null where it has not happened), written (the time of writing), epoch (what to add for seconds since
// 1970), failure (null or text). Recording is always on and costs three short critical sections an operation. Nothing
// is written to disk before a directory is set.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "base/operation.h"

namespace axo {

// Where flight files go ("" = nowhere, the default); with `signal` > 0 that signal makes the process write one. A file
// is named axo-flight-PID.jsonl, is replaced as a whole, and is written by a thread of Axo, never by the signal
// handler.
void set_flight_directory(const std::string& directory, int signal);
// Writes the file now and returns its path; "" when there is no directory or no communicator was ever made.
std::string write_flight_file();
// The lines themselves, for all living communicators of this process.
std::string flight_lines();

// The ring of one communicator.
class FlightRecorder {
 public:
  static constexpr std::uint64_t kEntries = 256;
  static constexpr std::uint64_t kNone = ~std::uint64_t{0};  // the number of what was never issued

  // `id` is equal on all ranks of a communicator, and differs between communicators of one name; 0: unknown.
  explicit FlightRecorder(Member member, std::uint64_t id = 0) : member_(std::move(member)), id_(id) {}
  // Returns the number to give to started() and ended().
  std::uint64_t issued(const Operation& operation, std::uint64_t sequence, Clock::time_point time);
  void started(std::uint64_t number);
  void ended(std::uint64_t number, bool failed, Clock::time_point time = Clock::now());
  void failure(const std::string& text);
  void append_lines(std::string* to) const;

 private:
  struct Entry {
    Operation operation;
    std::uint64_t sequence = 0;
    Clock::time_point issued{}, started{}, ended{};
    bool failed = false;
  };
  Entry* find(std::uint64_t number);

  const Member member_;
  const std::uint64_t id_;
  mutable std::mutex mutex_;
  std::vector<Entry> ring_{kEntries};
  std::uint64_t next_ = 0;
  std::string failure_;
};

// All recorders of a process, and where they are written.
class FlightLog {
 public:
  // Of this process; a forked child begins a new one.
  static FlightLog& get();
  void add(const std::shared_ptr<FlightRecorder>& recorder);
  void set_directory(const std::string& directory, int signal);
  // Writes when the signal has come. The threads of the core that wake now and then call it.
  static void poll();
  std::string write();
  std::string lines();

 private:
  std::mutex write_mutex_;
  std::mutex mutex_;
  std::string directory_;
  std::vector<std::weak_ptr<FlightRecorder>> recorders_;
};

}  // namespace axo
