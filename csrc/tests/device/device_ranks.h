// Ranks as threads over the stand-in: one device, one context, one caller's stream each.
#pragma once

#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#include "device/communicator.h"
#include "device/context.h"
#include "standin.h"
#include "tests/check.h"

namespace device {

using axo::CallOptions;
using axo::DeviceOptions;
using axo::DType;
using axo::Milliseconds;
using axo::ReduceOp;
using Comm = std::shared_ptr<axo::DeviceCommunicator>;

// "cuda", "cuda13", "old" or "hip": which stand-ins this process uses.
const std::string& family();
inline bool is_hip() { return family() == "hip"; }
inline bool is_old() { return family() == "old"; }
// One stream for all communicators of a rank, since their library orders no launches.
inline bool shares_a_stream() { return is_hip() || is_old(); }
const char* running();  // the test's name
// One of every minor version from 2.18 on, and both of 2.28, where windows changed: those that the family may be.
std::vector<int> versions();
// Threads that this process has made so far, whoever made them.
long threads_made();
// From here on no thread can be made, as at a limit of the system.
void refuse_threads(bool refuse);
// The folder of this family's libraries.
std::string folder();

class MapStore final : public axo::Store {
 public:
  void set(const std::string& key, const std::string& value) override {
    std::lock_guard<std::mutex> lock(mutex_);
    if (broken_) throw axo::Error("the store is gone");
    if (pretended_.count(key) == 0) values_[key] = value;
    changed_.notify_all();
  }
  // From here on the key has this value, whatever a rank sets.
  void pretend(const std::string& key, const std::string& value) {
    set(key, value);
    std::lock_guard<std::mutex> lock(mutex_);
    pretended_.insert(key);
  }
  std::string get(const std::string& key, Milliseconds timeout) override {
    std::unique_lock<std::mutex> lock(mutex_);
    if (broken_) throw axo::Error("the store is gone");
    if (!changed_.wait_for(lock, timeout, [&] { return values_.count(key) > 0; })) {
      throw axo::Timeout("store: no key " + key);
    }
    return values_[key];
  }
  void break_down() {
    std::lock_guard<std::mutex> lock(mutex_);
    broken_ = true;
  }
  bool has(const std::string& key) {
    std::lock_guard<std::mutex> lock(mutex_);
    return values_.count(key) > 0;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::string, std::string> values_;
  std::set<std::string> pretended_;
  bool broken_ = false;
};

std::shared_ptr<axo::DeviceContext> new_context(int device);

// One rank's side: made on the rank's thread.
struct Rank {
  std::shared_ptr<MapStore> store;
  int rank, size;
  std::shared_ptr<axo::DeviceContext> context;
  void* stream;  // the caller's

  Comm connect(const std::string& key = "world", DeviceOptions options = {}) {
    options.name = options.name == "world" ? key : options.name;
    options.device = rank;
    options.context = context;
    return axo::create_device_communicator(store, key, rank, size, options);
  }
  CallOptions on_stream(bool blocking = false) const {
    CallOptions options;
    options.stream = stream;
    options.blocking = blocking;
    return options;
  }
};

// The same ranks with a cap. RCCL keeps to none, and Axo says so; there they go without.
inline Comm capped(const Comm& comm, int max_ctas, const std::string& name) {
  if (!is_hip()) return comm->capped(max_ctas, name);
  CHECK_THROWS(axo::Error, "capped: library: got rccl, expected nccl", comm->capped(max_ctas, name));
  return std::dynamic_pointer_cast<axo::DeviceCommunicator>(comm->split(0, comm->rank(), name));
}

// Runs fn on n threads; the first exception is thrown here, and so is a broken rule of the library.
void ranks(int n, const std::function<void(Rank&)>& fn);

inline constexpr Milliseconds kPatience{15000};  // a test may take 25 s

// Rank 0 alone calls on `stuck`, blocking: only its own abort ends that kernel, at its time limit. Then `gate` opens.
inline void call_that_is_stuck(Rank& me, const Comm& stuck, const CallOptions& options, standin::Gate& gate) {
  float x = 1;
  std::shared_ptr<axo::Work> work;
  if (me.rank == 0) work = stuck->all_reduce(&x, &x, 1, DType::float32, ReduceOp::sum, options);
  gate.open();
  if (work) CHECK_THROWS(axo::Timeout, "on 'stuck'", work->synchronize(axo::kNoTimeout));
}

// Holds ranks until all n have come; again and again. A rank that has failed does not come.
class Meet {
 public:
  explicit Meet(int n) : size_(n) {}
  void here() {
    std::unique_lock<std::mutex> lock(mutex_);
    const int round = round_;
    if (++come_ == size_) {
      come_ = 0;
      ++round_;
      changed_.notify_all();
    }
    if (!changed_.wait_for(lock, kPatience, [&] { return round_ != round; })) {
      check::fail(__FILE__, __LINE__, "other ranks did not come within 15 s");
    }
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int size_, come_ = 0, round_ = 0;
};

// Waits for what another thread does. What has not come by then is a failure that says what still lives.
inline void eventually(const std::function<bool()>& happened, const char* file = __builtin_FILE(),
                       int line = __builtin_LINE()) {
  const auto until = std::chrono::steady_clock::now() + kPatience;
  while (!happened()) {
    if (std::chrono::steady_clock::now() > until) {
      check::fail(file, line,
                  "has not come within 15 s; alive: " + std::to_string(standin::live_events()) + " events, " +
                      std::to_string(standin::live_streams()) + " streams, " +
                      std::to_string(standin::live_allocations()) + " allocations");
    }
    std::this_thread::sleep_for(Milliseconds(2));
  }
}

template <class T>
std::string text(const std::vector<T>& values) {
  std::string all;
  for (const auto& value : values) {
    if constexpr (std::is_same_v<T, std::string>) {
      all += (all.empty() ? "" : "; ") + value;
    } else {
      all += (all.empty() ? "" : " ") + std::to_string(value);
    }
  }
  return all;
}

// What rank `rank` brings in the tests of collectives: small integers, which every dtype holds exactly.
using Values = std::vector<float>;

inline float value(int rank, std::size_t i) { return static_cast<float>((rank + 1) * 10 + static_cast<int>(i % 7)); }
inline Values values(int rank, std::size_t n) {
  Values v(n);
  for (std::size_t i = 0; i < n; ++i) v[i] = value(rank, i);
  return v;
}

// This thread's calls without those that carry no order: device, capture and error questions.
std::vector<std::string> sequence();

}  // namespace device
