// Issuing and waiting, on one host and on several; see progress/cpu_communicator.h.
#include "progress/cpu_communicator.h"

#include <thread>

namespace axo {

CpuCore::CpuCore(Member member, Milliseconds timeout, std::uint64_t id)
    : engine_(ProgressEngine::get()),
      flight_(std::make_shared<FlightRecorder>(member, id)),
      member_(std::move(member)),
      timeout_(timeout) {
  FlightLog::get().add(flight_);
}

void CpuCore::check_not_forked(const char* what) const {
  if (!engine_.forked()) return;
  throw Error(std::string(what) + " on '" + member_.name +
              "': the communicator belongs to the parent process; connect again after fork");
}

void CpuCore::check_usable(const char* what) const {
  check_not_forked(what);
  const bool closed = closed_.load(std::memory_order_acquire);
  if (!failed() && !closed) return;
  const std::string where = std::string(what) + " on " + member_.words() + ": ";
  if (!failed()) throw Error(where + "the communicator is closed");
  const bool first = !told_.exchange(true);
  std::lock_guard<std::mutex> lock(failure_mutex_);
  // A failure that came while nothing was pending here: this call is the first to tell it.
  if (first && (failure_.kind == FailureKind::peer_lost || failure_.kind == FailureKind::mismatch)) {
    std::rethrow_exception(error(failure_, where, " before the call; waited 0 s"));
  }
  throw Aborted(where + "the communicator is aborted: " + failure_.words());
}

void CpuCore::submit(const WorkStatePtr& work, bool blocking) {
  take(&work, 1);
  if (!blocking) engine_.watch();
}

void CpuCore::launch(const std::vector<WorkStatePtr>& works) {
  try {
    check_usable("group_end");
  } catch (...) {
    for (const auto& work : works) work->refuse(std::current_exception());
    return;
  }
  take(works.data(), works.size());
  engine_.watch();
}

void CpuCore::take(const WorkStatePtr* works, std::size_t count) {
  std::unique_lock<std::mutex> lock(queue_mutex_);
  if (closed_.load(std::memory_order_relaxed)) {  // by another thread, since check_usable
    lock.unlock();
    const auto error = std::make_exception_ptr(Error(member_.words() + ": the communicator is closed"));
    for (std::size_t i = 0; i < count; ++i) works[i]->refuse(error);
    return;
  }
  for (std::size_t i = 0; i < count; ++i) {
    works[i]->issued(works[i]->request.point_to_point() ? next_message_++ : next_sequence_++, flight_.get());
    pending.fetch_add(1);
    engine_.started();
  }
  queue(works, count);
  lock.unlock();
  start();
}

bool CpuCore::close() {
  std::lock_guard<std::mutex> lock(queue_mutex_);
  return closed_.exchange(true);
}

void CpuCore::settle(const Ended& ended) {
  const auto now = Clock::now();
  for (const auto& [work, error] : ended) {
    flight_->ended(work->flight(), error != nullptr, now);
    work->settle(error, now);
  }
}

void CpuCore::end(const Ended& ended, bool tell) {
  if (tell) {
    const auto now = Clock::now();
    for (const auto& [work, error] : ended) flight_->ended(work->flight(), error != nullptr, now);
    FlightLog::get().write();
    for (const auto& [work, error] : ended) work->settle(error, now);
  }
  if (ended.empty()) return;
  for (const auto& [work, error] : ended) {
    work->call_back();
    engine_.finished();
    pending.fetch_sub(1);
  }
  engine_.self()->ring();  // threads that wait for these works
}

bool CpuCore::set_failure(const Failure& failure) {
  {
    std::lock_guard<std::mutex> lock(failure_mutex_);
    if (failure_.kind != FailureKind::none) return false;
    failure_ = failure;
    if (failure.kind == FailureKind::peer_lost && failure.peer == rank()) {
      failure_ = {FailureKind::aborted, -1, failure.text};  // here nobody is lost
    }
    failed_.store(true, std::memory_order_release);
  }
  flight_->failure(failure.words());
  return true;
}

std::string CpuCore::failure_text() const {
  std::lock_guard<std::mutex> lock(failure_mutex_);
  return failure_.text;
}

// `failure` is failure_, as it is told at `where`.
std::exception_ptr CpuCore::error(const Failure& failure, const std::string& where, const std::string& waited) const {
  const bool named = failure.names_peer() && failure.peer != rank();
  const std::string place = named && failure.kind == FailureKind::peer_lost ? place_of(failure.peer) : "";
  return error_of(failure, where, named ? "rank " + std::to_string(failure.peer) + place : "", waited);
}

std::exception_ptr CpuCore::error_at(const std::string& where) const {
  std::lock_guard<std::mutex> lock(failure_mutex_);
  return error(failure_, where + ": ", "");
}

std::exception_ptr CpuCore::error_for(const WorkState& work) const {
  told_.store(true);
  std::lock_guard<std::mutex> lock(failure_mutex_);
  // The operation that failed is named once: not again where it is this one.
  Failure failure = failure_;
  const bool collective = !work.request.point_to_point();
  const std::string own = failure.kind == FailureKind::timeout ? " in " + work.title() + ";"
                          : collective                         ? "operation #" + std::to_string(work.sequence()) + " "
                                                               : "none";
  const auto at = failure.text.find(own);
  if (failure.kind == FailureKind::timeout && at != std::string::npos) failure.text.erase(at, own.size() - 1);
  if (failure.kind == FailureKind::mismatch && at == 0) failure.text.erase(0, own.size());
  return error(failure, work.describe() + ": ", "; waited " + seconds_since(work.issue_time()));
}

std::exception_ptr CpuCore::failure() { return failed() ? error_at(member_.words()) : nullptr; }

std::string CpuCore::arrivals(const std::function<bool(int)>& has_come,
                              const std::function<std::string(int)>& missing) const {
  std::string here, away;
  for (int r = 0; r < size(); ++r) {
    std::string& list = has_come(r) ? here : away;
    list += (list.empty() ? "" : ", ") + (&list == &here ? std::to_string(r) : missing(r));
  }
  return "; arrived: " + (here.empty() ? "none" : here) + "; not arrived: " + (away.empty() ? "none" : away);
}

CpuWork::CpuWork(std::shared_ptr<CpuCore> core, Request r, const CallOptions& options)
    : WorkState(std::move(r), options, core->timeout()), core_(std::move(core)) {}

void CpuWork::wait_until(Clock::time_point deadline) {
  core_->check_not_forked("wait");
  core_->engine().wait(*core_, [this] { return is_completed(); }, deadline);
}

WorkPtr CpuCommunicator::issue(Request r, const CallOptions& options) {
  core_->check_usable(name_of(r.kind));
  check_group(r, options);
  release_now();
  const auto work = make_work(std::move(r), options);
  if (record_in_group(core_, work)) return work;
  core_->submit(work, options.blocking);
  if (!options.blocking) return work;
  try {
    work->wait();
  } catch (...) {
    // Interrupted (set_interrupt_check): the caller's buffers are its own again, so the operation must end.
    if (!work->is_completed()) abort(work->describe() + " was interrupted");
    while (!work->is_completed()) {
      core_->progress(false);
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    throw;
  }
  return work;
}

}  // namespace axo
