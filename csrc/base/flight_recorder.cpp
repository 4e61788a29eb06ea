// Rings of operations and their JSON lines; see base/flight_recorder.h.
#include "base/flight_recorder.h"

#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "base/error.h"
#include "base/identity.h"

namespace axo {
namespace {

// Set by the signal handler, which may do no more than that.
std::atomic<bool> g_asked{false};
static_assert(std::atomic<bool>::is_always_lock_free);

void on_signal(int) { g_asked.store(true, std::memory_order_relaxed); }

void append_quoted(std::string* to, const std::string& text) {
  *to += '"';
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      *to += '\\';
      *to += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      char code[8];
      std::snprintf(code, sizeof(code), "\\u%04x", c);
      *to += code;
    } else {
      *to += c;
    }
  }
  *to += '"';
}

double seconds(Clock::time_point t) { return std::chrono::duration<double>(t.time_since_epoch()).count(); }

// RANK as torchrun sets it, or null.
std::string world_rank() {
  const char* text = std::getenv("RANK");
  char* end = nullptr;
  const long rank = text == nullptr ? -1 : std::strtol(text, &end, 10);
  return rank >= 0 && end != text ? std::to_string(rank) : "null";
}

void append_time(std::string* to, const char* key, Clock::time_point t) {
  char text[64];
  if (t == Clock::time_point{}) {
    std::snprintf(text, sizeof(text), ", \"%s\": null", key);
  } else {
    std::snprintf(text, sizeof(text), ", \"%s\": %.9f", key, seconds(t));
  }
  *to += text;
}

}  // namespace

std::uint64_t FlightRecorder::issued(const Operation& operation, std::uint64_t sequence, Clock::time_point time) {
  std::lock_guard<std::mutex> lock(mutex_);
  Entry& entry = ring_[next_ % kEntries];
  entry = Entry{};
  entry.operation = operation;
  entry.sequence = sequence;
  entry.issued = time;
  return next_++;
}

// Null when the ring has overwritten it, or never had it.
FlightRecorder::Entry* FlightRecorder::find(std::uint64_t number) {
  return number < next_ && number + kEntries >= next_ ? &ring_[number % kEntries] : nullptr;
}

void FlightRecorder::started(std::uint64_t number) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (Entry* e = find(number)) e->started = Clock::now();
}

void FlightRecorder::ended(std::uint64_t number, bool failed, Clock::time_point time) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (Entry* e = find(number)) {
    e->ended = time;
    e->failed = failed;
  }
}

void FlightRecorder::failure(const std::string& text) {
  std::lock_guard<std::mutex> lock(mutex_);
  failure_ = text;
}

void FlightRecorder::append_lines(std::string* to) const {
  const auto now = Clock::now();
  const double epoch =
      std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count() - seconds(now);
  std::string where = ", \"id\": \"" + std::to_string(id_) + "\", \"rank\": " + std::to_string(member_.rank) +
                      ", \"size\": " + std::to_string(member_.size) + ", \"world_rank\": " + world_rank() +
                      ", \"host\": ";
  append_quoted(&where, host_name());
  where += ", \"pid\": " + std::to_string(::getpid());
  std::lock_guard<std::mutex> lock(mutex_);
  for (std::uint64_t i = next_ > kEntries ? next_ - kEntries : 0; i < next_; ++i) {
    const Entry& e = ring_[i % kEntries];
    const bool ended = e.ended != Clock::time_point{}, started = e.started != Clock::time_point{};
    *to += "{\"communicator\": ";
    append_quoted(to, member_.name);
    const Operation& o = e.operation;
    *to += where + ", \"op\": \"" + name_of(o.kind) + "\", \"sequence\": " + std::to_string(e.sequence) +
           ", \"dtype\": \"" + name_of(o.dtype) + "\", \"count\": " + std::to_string(o.count) + ", \"reduce\": ";
    *to += o.reduces() ? "\"" + std::string(name_of(o.op)) + "\"" : "null";
    *to += ", \"root\": " + (o.root < 0 ? "null" : std::to_string(o.root)) + ", \"tag\": " + std::to_string(o.tag) +
           ", \"state\": \"" +
           (e.failed  ? "failed"
            : ended   ? "done"
            : started ? "running"
                      : "queued") +
           "\"";
    append_time(to, "issued", e.issued);
    append_time(to, "started", e.started);
    append_time(to, "ended", e.ended);
    append_time(to, "written", now);
    char text[48];
    std::snprintf(text, sizeof(text), ", \"epoch\": %.6f, \"failure\": ", epoch);
    *to += text;
    if (failure_.empty()) {
      *to += "null";
    } else {
      append_quoted(to, failure_);
    }
    *to += "}\n";
  }
}

FlightLog& FlightLog::get() {
  static std::mutex mutex;
  static FlightLog* log = new FlightLog;  // never destroyed: threads of the core outlive statics
  static int pid = ::getpid();
  std::lock_guard<std::mutex> lock(mutex);
  if (pid != ::getpid()) {
    log = new FlightLog;
    pid = ::getpid();
  }
  return *log;
}

void FlightLog::add(const std::shared_ptr<FlightRecorder>& recorder) {
  std::lock_guard<std::mutex> lock(mutex_);
  recorders_.erase(std::remove_if(recorders_.begin(), recorders_.end(), [](const auto& r) { return r.expired(); }),
                   recorders_.end());
  recorders_.push_back(recorder);
}

void FlightLog::set_directory(const std::string& directory, int signal) {
  if (signal > 0) {
    struct sigaction action{};
    action.sa_handler = on_signal;
    action.sa_flags = SA_RESTART;
    sigemptyset(&action.sa_mask);
    if (::sigaction(signal, &action, nullptr) != 0) {
      throw Error("flight recorder: signal " + std::to_string(signal) + ": " + std::strerror(errno));
    }
  }
  std::lock_guard<std::mutex> lock(mutex_);
  directory_ = directory;
}

void FlightLog::poll() {
  if (g_asked.exchange(false, std::memory_order_relaxed)) get().write();
}

std::string FlightLog::lines() {
  std::lock_guard<std::mutex> lock(mutex_);
  std::string text;
  for (const auto& weak : recorders_) {
    if (const auto recorder = weak.lock()) recorder->append_lines(&text);
  }
  return text;
}

// To a temporary name first: a reader never sees half a file. One thread at a time: communicators may fail together.
std::string FlightLog::write() {
  std::lock_guard<std::mutex> writing(write_mutex_);
  std::string directory;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    directory = directory_;
  }
  if (directory.empty()) return "";
  const std::string text = lines();
  const std::string path = directory + "/axo-flight-" + std::to_string(::getpid()) + ".jsonl";
  const std::string temporary = path + ".part";
  // A new file and no link of another user's to a file of ours; what a process of this number left is ours to remove.
  ::unlink(temporary.c_str());
  const int descriptor = ::open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0644);
  FILE* file = descriptor < 0 ? nullptr : ::fdopen(descriptor, "w");
  if (file == nullptr) {
    if (descriptor >= 0) ::close(descriptor);
    std::fprintf(stderr, "axo: flight recorder: cannot write %s: %s\n", temporary.c_str(), std::strerror(errno));
    return "";
  }
  const bool written = std::fwrite(text.data(), 1, text.size(), file) == text.size();
  if (std::fclose(file) != 0 || !written || std::rename(temporary.c_str(), path.c_str()) != 0) {
    std::fprintf(stderr, "axo: flight recorder: cannot write %s: %s\n", path.c_str(), std::strerror(errno));
    ::unlink(temporary.c_str());
    return "";
  }
  return path;
}

void set_flight_directory(const std::string& directory, int signal) {
  FlightLog::get().set_directory(directory, signal);
}

std::string write_flight_file() { return FlightLog::get().write(); }

std::string flight_lines() { return FlightLog::get().lines(); }

}  // namespace axo
