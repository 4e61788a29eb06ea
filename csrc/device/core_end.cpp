// A device communicator's end: what a failure tells whom, the library's abort, shutdown.
//
// Ends do not wait for each other. The library's abort returns when the communicator's kernels are over, and when the
// device is idle, since it frees memory. One of them may stand behind a kernel of another communicator that only that
// one's abort ends. So a communicator that has failed is aborted on a thread of its own, and the watchdog goes on
// looking after the others. The thread is made by a failure, never by an operation, and holds the communicator.
// Whoever shuts it down waits for the thread for a while: at the end of a Python program that is comm/communicator.py.
#include <algorithm>
#include <chrono>
#include <string>
#include <thread>

#include "base/deadline.h"
#include "base/failure.h"
#include "device/core.h"

namespace axo {
namespace {

constexpr std::chrono::seconds kPatient{2};  // how long an abort waits for its turn, and a shutdown for the abort
constexpr std::chrono::milliseconds kLettingGo{500};

// Whether `done` becomes true in that time.
template <class Done>
bool within(Clock::duration time, const Done& done) {
  const auto until = Clock::now() + time;
  while (!done()) {
    if (Clock::now() >= until) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

}  // namespace

// To the flight recorder and to the other ranks, once.
void DeviceCore::tell_failure() {
  Failure failure;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (failure_told_ || !started_) return;
    failure_told_ = true;
    failure = failure_of(error_);
  }
  const bool lost = failure.kind == FailureKind::peer_lost && failure.peer >= 0;
  flight_->failure(failure.text);
  write_flight_file();
  if (store_ && !heard_) {
    try {
      store_->set(key_ + "/abort", (lost ? kToldLost + std::to_string(failure.peer) : kToldAborted) + " rank " +
                                       std::to_string(rank()) + ": " + failure.text);
    } catch (const std::exception&) {  // peers will see their own timeout
    }
  }
}

// At every look. A communicator that is being made may have no handle yet.
void DeviceCore::clean_up_failure() {
  tell_failure();
  if (ending_) return;
  if (comm_ || (making_ && __atomic_load_n(&slot_, __ATOMIC_ACQUIRE))) {
    if (!ending_.exchange(true)) end_elsewhere();
  } else if (!making_) {
    std::deque<DeviceWorkPtr> works;
    std::lock_guard<std::mutex> lock(mutex_);
    if (!ending_) works.swap(pending_);  // the device has let go of their tensors
  }
}

// By whoever has set `ending_`, on another thread: the abort may wait for graphs that only their own thread drops.
void DeviceCore::end_elsewhere() {
  Watchdog::elsewhere([core = shared_from_this()] {
    core->gpu().set_device(core->context_->device());
    core->end_library();
  });
}

// On a thread of its own.
void DeviceCore::end_library() {
  NcclComm comm = nullptr;
  {
    // A call that is under way ends soon and gives its turn up. One that hangs is freed by the abort alone. NCCL's
    // guide wants no thread inside then; but it sets its flags first and frees later, and there is no other way out.
    auto turn = context_->queue().try_turn();
    within(kPatient, [&] {
      if (!turn) turn = context_->queue().try_turn();
      return turn || hangs();
    });
    comm = take_library();
  }  // and the turn goes back: the others go on, or end
  if (comm) nccl()->CommAbort(comm);
  ending_ = false;
  context_->watchdog().wake();
}

// The library's end waits, within the call, for the graphs that captured the communicator; and so does an abort.
void DeviceCore::check_graphs() const {
  // The runtime lets go of a graph a little after the program has.
  if (within(kLettingGo, [this] { return *graphs_ <= 0; })) return;
  throw Error("communicator '" + member_.name + "' is held by graphs that captured it; drop them first");
}

void DeviceCore::shutdown() {
  std::deque<DeviceWorkPtr> works;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (closed_) return;
    works = pending_;
  }
  if (!failed()) check_graphs();
  for (const auto& work : works) {
    try {
      const auto left = std::chrono::duration_cast<Milliseconds>(work->deadline() - Clock::now());
      work->synchronize(std::max(left, Milliseconds(0)));
    } catch (...) {  // the work keeps its error for whoever waits for it
      fail(std::current_exception());
    }
  }
  if (levels_) levels_->inside->shutdown(), levels_->between->shutdown();
  context_->release_dropped();
  DeviceGuard guard(gpu(), context_->device());
  bool ends = false;
  if (!failed()) {
    const auto turn = context_->queue().turn();
    peers_->leave();
    try {
      drop_registrations();
      call("ncclCommFinalize", [&] { return nccl()->CommFinalize(comm_); });
      nccl().check(nccl()->CommDestroy(comm_), "ncclCommDestroy");
      comm_ = nullptr;
    } catch (...) {
      ends = !ending_.exchange(true);
      fail(std::current_exception());
    }
  }
  if (failed()) {
    if (ends || !ending_.exchange(true)) end_elsewhere();
    within(kPatient, [this] { return !ending_; });
  }
  const auto turn = context_->queue().turn();
  close();
}

// Nothing here waits for the device: a kernel of another communicator may be stuck on it.
void DeviceCore::close() {
  std::deque<DeviceWorkPtr> works;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (closed_) return;
    closed_ = true;
    if (!ending_) works.swap(pending_);  // else kernels may still use their tensors: the watchdog drops them
  }
  if (started_) context_->reserve_ctas(-reserved_ctas());
  own_last_ = {};
  if (owns_stream_) gpu().destroy_stream(stream_);
}

// The handle, for whoever aborts it. Within a turn, or when nobody else has the communicator any more.
NcclComm DeviceCore::take_library() {
  NcclComm comm = comm_.exchange(nullptr);
  if (!comm && making_) {
    comm = __atomic_load_n(&slot_, __ATOMIC_ACQUIRE);
    if (comm && !making_.exchange(false)) comm = nullptr;  // whoever makes it has it now
  }
  if (!comm) return nullptr;
  // The library frees what was registered with the communicator.
  std::lock_guard<std::mutex> lock(mutex_);
  registrations_.clear();
  windows_.clear();
  return comm;
}

DeviceCore::~DeviceCore() {
  // Nobody can wait for peers here: a communicator that is dropped without shutdown is aborted, on this rank only.
  try {
    DeviceGuard guard(gpu(), context_->device());
    NcclComm comm = take_library();
    if (comm && *graphs_ <= 0) {  // else it stays, with what it holds: the abort would wait for the graphs
      const auto ended = std::make_shared<std::atomic<bool>>(false);
      Watchdog::elsewhere([context = context_, comm, ended] {
        context->gpu().set_device(context->device());
        context->nccl()->CommAbort(comm);
        *ended = true;
      });
      if (!Watchdog::is_this_thread()) within(kPatient, [&] { return ended->load(); });
    }
    close();
  } catch (...) {  // the runtime is going away with the process
  }
}

}  // namespace axo
