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
