// Rings of operations and their JSON lines; see base/flight_recorder.h.
#include "base/flight_recorder.h"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "progress/engine.h"
#include "base/error.h"
#include "base/identity.h"

namespace axo {
namespace host {
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

double seconds(FlightEntry::Time t) { return std::chrono::duration<double>(t.time_since_epoch()).count(); }

// RANK as torchrun sets it, or null.
std::string world_rank() {
  const char* text = std::getenv("RANK");
  char* end = nullptr;
  const long rank = text == nullptr ? -1 : std::strtol(text, &end, 10);
  return rank >= 0 && end != text ? std::to_string(rank) : "null";
}

void append_time(std::string* to, const char* key, FlightEntry::Time t) {
  char text[64];
  if (t == FlightEntry::Time{}) {
    std::snprintf(text, sizeof(text), ", \"%s\": null", key);
  } else {
    std::snprintf(text, sizeof(text), ", \"%s\": %.9f", key, seconds(t));
  }
  *to += text;
}

}  // namespace

std::uint64_t FlightRecorder::issued(const FlightEntry& entry) {
  std::lock_guard<std::mutex> lock(mutex_);
  ring_[next_ % kEntries] = entry;
  return next_++;
}

// Null when the ring has overwritten it.
FlightEntry* FlightRecorder::find(std::uint64_t number) {
  return number + kEntries >= next_ ? &ring_[number % kEntries] : nullptr;
}

void FlightRecorder::started(std::uint64_t number) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (FlightEntry* e = find(number)) e->started = std::chrono::steady_clock::now();
}

void FlightRecorder::ended(std::uint64_t number, bool failed) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (FlightEntry* e = find(number)) {
    e->ended = std::chrono::steady_clock::now();
    e->failed = failed;
  }
}

void FlightRecorder::failure(const std::string& text) {
  std::lock_guard<std::mutex> lock(mutex_);
  failure_ = text;
}

void FlightRecorder::append_lines(std::string* to) const {
  const auto now = std::chrono::steady_clock::now();
  const double epoch =
      std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count() - seconds(now);
  std::string where = ", \"id\": \"" + std::to_string(id_) + "\", \"rank\": " + std::to_string(rank_) +
                      ", \"size\": " + std::to_string(size_) + ", \"world_rank\": " + world_rank() + ", \"host\": ";
  append_quoted(&where, host_name());
  where += ", \"pid\": " + std::to_string(::getpid());
  std::lock_guard<std::mutex> lock(mutex_);
  for (std::uint64_t i = next_ > kEntries ? next_ - kEntries : 0; i < next_; ++i) {
    const FlightEntry& e = ring_[i % kEntries];
    const bool ended = e.ended != FlightEntry::Time{}, started = e.started != FlightEntry::Time{};
    *to += "{\"communicator\": ";
    append_quoted(to, name_);
    *to += where + ", \"op\": \"" + e.op + "\", \"sequence\": " + std::to_string(e.sequence) + ", \"dtype\": \"" +
           name_of(e.dtype) + "\", \"count\": " + std::to_string(e.count) + ", \"reduce\": ";
    *to += e.reduce ? "\"" + std::string(e.reduce) + "\"" : "null";
    *to += ", \"root\": " + (e.root < 0 ? "null" : std::to_string(e.root)) + ", \"tag\": " + std::to_string(e.tag) +
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
  if (g_asked.exchange(false, std::memory_order_relaxed)) write();
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
  FILE* file = std::fopen(temporary.c_str(), "we");
  if (file == nullptr) {
    std::fprintf(stderr, "axo: flight recorder: cannot write %s: %s\n", temporary.c_str(), std::strerror(errno));
    return "";
  }
  const bool written = std::fwrite(text.data(), 1, text.size(), file) == text.size();
  if (std::fclose(file) != 0 || !written || std::rename(temporary.c_str(), path.c_str()) != 0) {
    std::fprintf(stderr, "axo: flight recorder: cannot write %s: %s\n", path.c_str(), std::strerror(errno));
    return "";
  }
  return path;
}

}  // namespace host

void set_flight_directory(const std::string& directory, int signal) {
  host::Engine::get().flight().set_directory(directory, signal);
}

std::string write_flight_file() { return host::Engine::get().flight().write(); }

std::string flight_lines() { return host::Engine::get().flight().lines(); }

}  // namespace axo
