#include "device/launch_queue.h"

#include <algorithm>

#include "device/core.h"

namespace axo {
namespace {

// The checks of AXO_CHECK=1. The library has been told nothing yet, so a mismatch hangs nobody.
void compare_with_peers(const std::vector<DeviceWorkPtr>& works) {
  if (!works.front()->core().order_check()) return;
  const auto cores = works.front()->core().context().watchdog().cores();
  const auto positions_beside = [&](const DeviceCore& own) {
    OrderCheck::Positions positions;
    for (const auto& core : cores) {
      if (core.get() != &own && core->order_check()) positions[core->key()] = core->order_check()->issued();
    }
    return positions;
  };
  const auto neighbours = [&] {
    std::vector<OrderCheck::Neighbour> all;
    for (const auto& core : cores) {
      if (core->order_check())
        all.push_back({core->key(), core->member().name, core->rank(), core->order_check()->issued()});
    }
    return all;
  };
  // The places before this launch: inside a group the order does not matter.
  std::vector<OrderCheck::Positions> positions;
  for (const auto& work : works) positions.push_back(positions_beside(work->core()));

  std::vector<std::uint64_t> numbers;
  for (std::size_t i = 0; i < works.size(); ++i) {
    OrderCheck* check = works[i]->core().order_check();
    const Operation& op = works[i]->request;
    if (op.kind == Kind::send) check->publish_send(op);
    numbers.push_back(op.point_to_point() ? 0 : check->publish(words(op), positions[i]));
  }
  for (std::size_t i = 0; i < works.size(); ++i) {
    DeviceCore& core = works[i]->core();
    const Operation& op = works[i]->request;
    const auto cancelled = [&] { core.check_usable(); };
    if (!op.point_to_point()) {
      core.order_check()->verify(numbers[i], words(op), positions[i], neighbours, cancelled);
    } else if (op.kind == Kind::recv) {
      core.order_check()->verify_recv(op, cancelled);
    }
  }
}

// One launch: the works and what they have in common.
class Turn {
 public:
  explicit Turn(const std::vector<DeviceWorkPtr>& works)
      : works_(works), context_(works.front()->core().context()), gpu_(context_.gpu()), nccl_(context_.nccl()) {}

  void run() {
    for (const auto& work : works_) work->issued(work->core().next_sequence(), &work->core().flight());
    compare_with_peers(works_);
    order();
    EventPtr start = starts();
    std::size_t rounds = 0;
    for (const auto& work : works_) rounds = std::max(rounds, work->library_calls.rounds());
    for (std::size_t round = 0; round < rounds; ++round) {
      for (const auto& work : works_) work->library_calls.before(round, work->stream);
      call(round);
      for (const auto& work : works_) work->library_calls.after(round, work->stream);
    }
    finish(start);
  }

 private:
  Capture capture_of(GpuStream stream) {
    for (const auto& [known, capture] : captures_) {
      if (known == stream) return capture;
    }
    captures_.emplace_back(stream, gpu_.capture_info(stream));
    return captures_.back().second;
  }

  void order() {
    std::vector<std::pair<GpuStream, GpuStream>> joined;  // (stream, caller) with an edge
    for (const auto& work : works_) {
      const std::pair<GpuStream, GpuStream> edge(work->stream, work->caller);
      const bool known = std::find(joined.begin(), joined.end(), edge) != joined.end();
      work->core().order(edge.first, edge.second, work->after_caller && !known, capture_of(edge.second));
      if (work->after_caller) joined.push_back(edge);
    }
  }

  EventPtr starts() {
    if (!works_.front()->core().timing() || capture_of(works_.front()->caller).active()) return {};
    EventPtr event = context_.events().take(true);
    gpu_.record(event->handle(), works_.front()->stream);
    return event;
  }

  void call(std::size_t round) {
    const bool grouped = works_.size() > 1 || works_.front()->library_calls.several(round);
    int result = kNcclSuccess;
    const auto enter = [&] {
      for (const auto& work : works_) {
        work->library_calls.core(round).enter(name_of(work->request.kind), work->deadline());
      }
    };
    if (!grouped) {
      enter();
      result = works_.front()->library_calls.call(round, works_.front()->stream);
    } else {
      nccl_.check(nccl_->GroupStart(), "ncclGroupStart");
      enter();
      for (const auto& work : works_) {
        result = work->library_calls.call(round, work->stream);
        if (result != kNcclSuccess && result != kNcclInProgress) break;
      }
      const int end = nccl_->GroupEnd();  // also after a failed call, or the library would stay inside the group
      if (result == kNcclSuccess || result == kNcclInProgress) result = end;
    }
    std::exception_ptr error;
    for (const auto& work : works_) {
      try {
        work->library_calls.core(round).leave(result);
      } catch (...) {
        if (!error) error = std::current_exception();
      }
    }
    if (error) std::rethrow_exception(error);
  }

  void finish(const EventPtr& start) {
    std::vector<std::pair<GpuStream, EventPtr>> ends;
    for (const auto& work : works_) {
      auto end = std::find_if(ends.begin(), ends.end(), [&](const auto& e) { return e.first == work->stream; });
      const Capture capture = capture_of(work->caller);
      if (end == ends.end()) {
        EventPtr event = context_.events().take(start != nullptr);
        if (capture.active()) event->set_captured();
        gpu_.record(event->handle(), work->stream);
        end = ends.emplace(ends.end(), work->stream, std::move(event));
      }
      work->core().launched(work, start, end->second, capture);
    }
  }

  const std::vector<DeviceWorkPtr>& works_;
  DeviceContext& context_;
  const GpuRuntime& gpu_;
  const NcclApi& nccl_;
  std::vector<std::pair<GpuStream, Capture>> captures_;
};

}  // namespace

void LaunchQueue::issue(const std::vector<DeviceWorkPtr>& all) {
  if (all.empty()) return;
  std::vector<DeviceWorkPtr> works;
  std::exception_ptr unusable;
  const auto lock = turn();
  for (const auto& work : all) {
    try {
      work->core().check_usable();
      works.push_back(work);
    } catch (...) {
      unusable = std::current_exception();
      work->finish(unusable);
    }
  }
  if (works.empty()) std::rethrow_exception(unusable);
  // One order between communicators on all ranks, whatever the order of the calls inside a group was: with a shared
  // stream it would otherwise be the order of execution.
  std::stable_sort(works.begin(), works.end(),
                   [](const DeviceWorkPtr& a, const DeviceWorkPtr& b) { return a->core().key() < b->core().key(); });
  try {
    DeviceContext& context = works.front()->core().context();
    DeviceGuard guard(context.gpu(), context.device());
    Turn(works).run();
  } catch (...) {
    // Some ranks may have launched what others have not: the communicators cannot go on.
    std::exception_ptr error = std::current_exception();
    for (const auto& work : works) {
      if (const auto first = work->core().failure()) error = first;  // what the call's own error comes from
    }
    for (const auto& work : works) {
      work->core().fail(error);
      work->finish(error);
    }
    std::rethrow_exception(error);
  }
}

}  // namespace axo
