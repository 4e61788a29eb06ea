// C10dStore and C10dWork: see torch/c10d_backend.h.
#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <thread>

#include <torch/csrc/autograd/graph_task.h>

#include "torch/c10d_launch.h"
#include "torch/future_thread.h"
#include "torch/held.h"

namespace axo {

namespace {

constexpr std::chrono::microseconds kLongestPause{20000};

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

// Lets others have the GIL while this thread waits for a mutex, whose holder may want it.
class WithoutGil {
 public:
  explicit WithoutGil(bool waits = true) {
    if (waits && PyGILState_Check() != 0) release_.emplace();
  }

 private:
  std::optional<pybind11::gil_scoped_release> release_;
};

// The works whose last steps nobody has made yet.
class Undelivered {
 public:
  void add(c10::intrusive_ptr<C10dWork> work) {
    std::lock_guard<std::mutex> lock(mutex_);
    works_.push_back(std::move(work));
    any_.store(true, std::memory_order_release);
  }
  // The caller holds a reference.
  void remove(const C10dWork* work) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto is_it = [work](const auto& each) { return each.get() == work; };
    works_.erase(std::remove_if(works_.begin(), works_.end(), is_it), works_.end());
    any_.store(!works_.empty(), std::memory_order_release);
  }
  std::vector<c10::intrusive_ptr<C10dWork>> all() {
    if (!any_.load(std::memory_order_acquire)) return {};
    std::lock_guard<std::mutex> lock(mutex_);
    return works_;
  }

 private:
  std::mutex mutex_;
  std::vector<c10::intrusive_ptr<C10dWork>> works_;
  std::atomic<bool> any_{false};
};

// Never destroyed: threads may outlive statics. A forked child begins anew: its copy of the parent's may be locked.
std::atomic<Undelivered*> current{nullptr};
Undelivered& undelivered() {
  static const int registered = [] {
    current = new Undelivered;
    return ::pthread_atfork(nullptr, nullptr, [] { current = new Undelivered; });
  }();
  (void)registered;
  return *current;
}

}  // namespace

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

// Looks now and then, since a store's own wait prints a warning for each time limit that passes, and each kind of store
// throws another error then.
std::string C10dStore::get(const std::string& key, Milliseconds timeout) {
  const auto start = std::chrono::steady_clock::now();
  const auto limit = timeout < Milliseconds::zero() ? store_->getTimeout() : timeout;
  for (auto pause = std::chrono::microseconds(200); !has(key); pause = std::min(2 * pause, kLongestPause)) {
    if (std::chrono::steady_clock::now() - start >= limit) {
      throw Timeout("rendezvous: no rank has set key '" + key + "' within " + std::to_string(limit.count()) +
                    " ms; a rank died at start-up, or never came");
    }
    std::this_thread::sleep_for(pause);
  }
  const std::vector<std::uint8_t> bytes = store_->get(key);
  return std::string(bytes.begin(), bytes.end());
}

C10dWork::C10dWork(int rank, c10d::OpType op, const char* title, const Tensors& inputs, std::uint64_t sequence,
                   std::chrono::milliseconds timeout)
    : WorkOfTorch(rank, op, title, inputs), sequence_(sequence), timeout_(timeout) {}

void C10dWork::start(std::vector<WorkPtr> parts, Tensors outputs, std::vector<Step> last_steps, at::Device device) {
  if (!device.is_cpu()) device_ = device;
  for (WorkPtr& part : parts) parts_.push_back(std::move(part));
  for (at::Tensor& output : outputs) outputs_.push_back(std::move(output));
  for (Step& step : last_steps) last_steps_.push_back(std::move(step));
  if (recordFunctionEndCallback_) {  // the profiler is on
    when_all_complete(parts_, recordFunctionEndCallback_);
    recordFunctionEndCallback_ = nullptr;
  }
}

void C10dWork::launched() {
  if (last_steps_.empty()) return;
  if (!device_.is_cpu()) return finish_in_order([] {});
  if (parts_completed()) return finish();
  auto self = c10::intrusive_ptr<C10dWork>::unsafe_reclaim_from_nonowning(this);
  steps_left_ = true;
  undelivered().add(self);
  // The core's thread keeps no reference: the end of a Work may want the GIL.
  when_all_complete(
      parts_, [self = std::move(self)]() mutable { FutureThread::post([self = std::move(self)] { self->finish(); }); });
}

void C10dWork::deliver_completed() {
  for (const auto& work : undelivered().all()) {
    if (work->parts_completed()) work->finish();
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
  finish();
  deliver_completed();
  return true;
}

bool C10dWork::isSuccess() const { return parts_completed() && !exception(); }

std::exception_ptr C10dWork::exception() const {
  if (auto error = part_exception()) return error;
  return step_failed_ ? step_exception_ : nullptr;
}

std::exception_ptr C10dWork::part_exception() const {
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
  finish();
  if (step_failed_) std::rethrow_exception(step_exception_);
  deliver_completed();
  release_now();
  return true;
}

int C10dWork::sourceRank() const {
  for (const WorkPtr& part : parts_) {
    if (part->source() >= 0) return part->source();
  }
  return c10d::Work::sourceRank();  // throws: not a recv, or not complete
}

// On a device the steps run on the stream that is current; on another one, later, the caller comes after them.
void C10dWork::finish() {
  const auto steps = std::make_shared<std::vector<Step>>();  // ends after the lock: it may want the GIL
  const WithoutGil others_may_run(device_.is_cpu() && steps_left_);
  std::lock_guard<std::mutex> lock(finish_mutex_);
  steps->swap(last_steps_);
  if (!steps->empty() && !part_exception()) {
    try {
      for (const Step& step : *steps) step();
    } catch (...) {
      step_exception_ = std::current_exception();
      step_failed_ = true;
    }
  }
  if (steps_left_.exchange(false)) undelivered().remove(this);
  if (device_.is_cpu() || (steps->empty() && !copied_)) return;
  const c10::Stream stream = c10::impl::VirtualGuardImpl(device_.type()).getStream(device_);
  if (steps->empty()) return copied_->block(stream);
  copied_.emplace(device_.type());
  copied_->record(stream);
  if (!parts_.empty()) parts_.back()->keep_until(current_stream(device_), by_program(steps));
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
    // The future remembers where the streams that are current here stand.
    finish_in_order([this] { future_->markCompleted(c10::IValue(outputs_)); });
    return future_;
  }
  // Wait for the operation at once in a callback, which may wait for the future of a collective that it issues, though
  // only this thread could complete it; and in a hook of DistributedDataParallel that is written in Python: its
  // callbacks issue collectives and change state of the next hooks (torch's PowerSGD does both), so they run before it
  // returns, as they do with NCCL.
  // A message is left out: its peer may wait for one that this thread sends or receives next.
  const bool in_hook =
      !c10d::isP2POp(opType_) && torch::autograd::get_current_graph_task_id() >= 0 && PyGILState_Check() != 0;
  if (parts_completed() || FutureThread::here() || in_hook) {
    const WithoutGil others_may_run(in_hook);
    complete_future();
    return future_;
  }
  auto self = c10::intrusive_ptr<C10dWork>::unsafe_reclaim_from_nonowning(this);
  when_all_complete(parts_, [self = std::move(self)]() mutable {
    FutureThread::post([self = std::move(self)] { self->complete_future(); });
  });
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

void C10dWork::finish_in_order(const std::function<void()>& then) {
  const c10::impl::VirtualGuardImpl guard(device_.type());
  const at::Device place = guard.exchangeDevice(device_);
  const c10::Stream before = guard.exchangeStream(guard.getStreamFromGlobalPool(device_));
  try {
    for (const WorkPtr& part : parts_) part->wait_on(current_stream(device_));
    finish();
    then();
  } catch (...) {
    if (future_) future_->setErrorIfNeeded(std::current_exception());
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
