// C10dStore and C10dWork: see torch/c10d_backend.h.
#include <pthread.h>

#include <condition_variable>
#include <deque>
#include <exception>
#include <thread>

#include "torch/c10d_launch.h"

namespace axo {

namespace {

// Completes futures, in order, on one thread that lives as long as the process. Started when the first is asked for.
class FutureThread {
 public:
  // Never destroyed: the thread may outlive static destruction. A forked child starts its own: it has inherited none.
  static FutureThread& get() {
    static const int registered = ::pthread_atfork(nullptr, nullptr, [] { current_.store(nullptr); });
    (void)registered;
    static std::mutex making;
    std::lock_guard<std::mutex> lock(making);
    if (current_.load() == nullptr) current_.store(new FutureThread);
    return *current_.load();
  }
  // Whether the caller runs inside a future's callback.
  static bool here() { return here_; }
  void post(std::function<void()> job) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      jobs_.push_back(std::move(job));
    }
    ready_.notify_one();
  }

 private:
  FutureThread() {
    std::thread([this] { run(); }).detach();
  }
  void run() {
    here_ = true;
    for (;;) {
      std::unique_lock<std::mutex> lock(mutex_);
      ready_.wait(lock, [this] { return !jobs_.empty(); });
      auto job = std::move(jobs_.front());
      jobs_.pop_front();
      lock.unlock();
      job();
    }
  }
  static inline std::atomic<FutureThread*> current_{nullptr};
  static inline thread_local bool here_ = false;
  std::mutex mutex_;
  std::condition_variable ready_;
  std::deque<std::function<void()>> jobs_;
};

// Runs `callback` once, when the last of `parts` is complete.
void when_all_complete(const std::vector<WorkPtr>& parts, std::function<void()> callback) {
  if (parts.empty()) return callback();
  auto left = std::make_shared<std::atomic<std::size_t>>(parts.size());
  auto shared = std::make_shared<std::function<void()>>(std::move(callback));
  for (const WorkPtr& part : parts) {
    part->on_completion([left, shared] {
      if (left->fetch_sub(1) == 1) (*shared)();
    });
  }
}

class Released {
 public:
  static void add(Tensors tensors) {
    std::lock_guard<std::mutex> lock(mutex_);
    lists_.push_back(std::move(tensors));
  }
  static void drain() {
    std::vector<Tensors> lists;  // dies after the lock is released
    std::lock_guard<std::mutex> lock(mutex_);
    lists.swap(lists_);
  }

 private:
  static inline std::mutex mutex_;
  static inline std::vector<Tensors> lists_;
};

}  // namespace

std::shared_ptr<Tensors> held_tensors() {
  Released::drain();
  return std::shared_ptr<Tensors>(new Tensors, [](Tensors* tensors) {
    Released::add(std::move(*tensors));
    delete tensors;
  });
}

void C10dStore::set(const std::string& key, const std::string& value) {
  store_->set(key, std::vector<std::uint8_t>(value.begin(), value.end()));
}

bool C10dStore::has(const std::string& key) {
  try {
    return store_->check({key});
  } catch (const c10::Error& e) {
    throw Error("rendezvous: the store failed at key '" + key + "': " + e.what_without_backtrace());
  }
}

std::string C10dStore::get(const std::string& key, Milliseconds timeout) {
  try {
    store_->wait({key}, timeout < Milliseconds::zero() ? store_->getTimeout() : timeout);
  } catch (const c10::DistStoreError& e) {
    throw Timeout("rendezvous: no rank has set key '" + key + "' within " + std::to_string(timeout.count()) +
                  " ms; a rank died at start-up, or never came");
  } catch (const c10::Error& e) {
    throw Error("rendezvous: the store failed at key '" + key + "': " + e.what_without_backtrace());
  }
  const std::vector<std::uint8_t> bytes = store_->get(key);
  return std::string(bytes.begin(), bytes.end());
}

void C10dStore::remove(const std::string& key) {
  try {
    store_->deleteKey(key);
  } catch (const std::exception&) {
    // Not every store can delete, and a server that has left with its process keeps nothing anyway.
  }
}

C10dWork::C10dWork(int rank, c10d::OpType op, const char* title, const Tensors& inputs, std::uint64_t sequence)
    : c10d::Work(rank, op, title, inputs), sequence_(sequence) {}

void C10dWork::start(std::vector<WorkPtr> parts, Tensors outputs, std::vector<Copy> copies, at::Device device) {
  if (!device.is_cpu()) device_ = device;
  for (WorkPtr& part : parts) parts_.push_back(std::move(part));
  for (at::Tensor& output : outputs) outputs_.push_back(std::move(output));
  for (Copy& copy : copies) copies_.push_back(std::move(copy));
  if (recordFunctionEndCallback_) {  // the profiler is on
    when_all_complete(parts_, recordFunctionEndCallback_);
    recordFunctionEndCallback_ = nullptr;
  }
}

bool C10dWork::parts_completed() const {
  for (const WorkPtr& part : parts_) {
    if (!part->is_completed()) return false;
  }
  return true;
}

bool C10dWork::isCompleted() {
  if (!parts_completed()) return false;
  if (!exception()) finish_copies();
  return true;
}

bool C10dWork::isSuccess() const { return parts_completed() && !exception(); }

std::exception_ptr C10dWork::exception() const {
  for (const WorkPtr& part : parts_) {
    if (auto error = part->exception()) return error;
  }
  return nullptr;
}

Tensors C10dWork::result() {
  wait(::kNoTimeout);
  return outputs_;
}

void C10dWork::synchronize() { wait(::kNoTimeout); }

bool C10dWork::wait(std::chrono::milliseconds timeout) {
  for (const WorkPtr& part : parts_) {
    if (timeout > std::chrono::milliseconds::zero()) {
      part->synchronize(timeout);
    } else if (device_.is_cpu()) {
      part->wait();
    } else {
      part->wait_on(current_stream(device_));
    }
  }
  finish_copies();
  if (future_ && !device_.is_cpu()) future_->wait();  // it made the copies, on a stream of its own
  Released::drain();
  return true;
}

int C10dWork::sourceRank() const {
  for (const WorkPtr& part : parts_) {
    if (part->source() >= 0) return part->source();
  }
  return c10d::Work::sourceRank();  // throws: not a recv, or not complete
}

void C10dWork::finish_copies() {
  std::lock_guard<std::mutex> lock(copies_mutex_);
  at::NoGradGuard no_grad;
  for (const Copy& copy : copies_) copy.to.copy_(copy.from);
  copies_.clear();
}

c10::intrusive_ptr<c10::ivalue::Future> C10dWork::getFuture() {
  {
    std::lock_guard<std::mutex> lock(future_mutex_);
    if (future_) return future_;
    const auto type = c10::ListType::create(c10::TensorType::get());
    const auto devices = device_.is_cpu() ? std::vector<at::Device>{} : std::vector<at::Device>{device_};
    future_ = c10::make_intrusive<c10::ivalue::Future>(type, devices);
  }
  if (!device_.is_cpu()) {
    complete_future_in_order();
    return future_;
  }
  // A callback that issues a collective may wait for its future (torch's PowerSGD hook does), which only this thread
  // could complete: so wait for the operation at once.
  if (parts_completed() || FutureThread::here()) {
    complete_future();
  } else {
    auto self = c10::intrusive_ptr<C10dWork>::unsafe_reclaim_from_nonowning(this);
    when_all_complete(parts_, [self] { FutureThread::get().post([self] { self->complete_future(); }); });
  }
  return future_;
}

void C10dWork::complete_future() {
  try {
    wait(::kNoTimeout);
    future_->markCompleted(c10::IValue(outputs_));
  } catch (...) {
    future_->setErrorIfNeeded(std::current_exception());
  }
}

// The future remembers where the streams that are current here stand: so one is made current that comes after the
// operation.
void C10dWork::complete_future_in_order() {
  const c10::impl::VirtualGuardImpl guard(device_.type());
  const at::Device place = guard.exchangeDevice(device_);
  const c10::Stream before = guard.exchangeStream(guard.getStreamFromGlobalPool(device_));
  try {
    for (const WorkPtr& part : parts_) part->wait_on(current_stream(device_));
    finish_copies();
    future_->markCompleted(c10::IValue(outputs_));
  } catch (...) {
    future_->setErrorIfNeeded(std::current_exception());
  }
  guard.exchangeStream(before);
  guard.exchangeDevice(place);
}

float C10dWork::getDuration() const {
  double seconds = 0;
  for (const WorkPtr& part : parts_) seconds = std::max(seconds, part->seconds());
  return static_cast<float>(seconds * 1e3);
}

}  // namespace axo
