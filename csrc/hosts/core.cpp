// The queue, the arrivals and the failure of one communicator over several hosts; see hosts/core.h.
#include "hosts/core.h"

#include <algorithm>
#include <cstring>
#include <thread>

namespace axo::span {
namespace {

constexpr std::chrono::seconds kFlush{5};
constexpr std::chrono::milliseconds kAskPeriod{250};  // between looks for an interrupt

}  // namespace

SpanCore::SpanCore(SpanParts parts)
    : engine_(ProgressEngine::get()),
      p_(std::move(parts)),
      member_{p_.name, p_.rank, size()},
      flight_(std::make_shared<FlightRecorder>(member(), p_.number)),
      peers_(p_.place.wire.size()) {}

std::shared_ptr<SpanCore> SpanCore::create(SpanParts parts) {
  std::shared_ptr<SpanCore> core(new SpanCore(std::move(parts)));
  FlightLog::get().add(core->flight_);
  core->p_.mesh->add(core->p_.number, core);
  std::thread([core] { core->run(); }).detach();
  return core;
}

int SpanCore::rank_of(int wire_rank) const {
  const auto at = std::find(p_.place.wire.begin(), p_.place.wire.end(), wire_rank);
  return at == p_.place.wire.end() ? -1 : static_cast<int>(at - p_.place.wire.begin());
}

void SpanCore::launch(const std::vector<WorkStatePtr>& works) {
  for (const auto& work : works) {
    try {
      check_usable("group_end");
      submit({std::static_pointer_cast<SpanWork>(work)});
    } catch (...) {
      work->refuse(std::current_exception());
    }
  }
}

void SpanCore::submit(const std::vector<SpanWorkPtr>& works) {
  std::vector<SpanWorkPtr> messages;
  Failure failure;
  {
    Lock lock(mutex_);
    if (closing_) {  // by another thread, since check_usable: the communicator's own may have ended
      lock.unlock();
      for (const auto& work : works) {
        work->refuse(std::make_exception_ptr(Error(work->describe() + ": the communicator is closed")));
      }
      return;
    }
    for (const auto& work : works) {
      const bool message = work->request.point_to_point();
      work->issued(message ? next_message_++ : next_sequence_++, flight_.get());
      if (message) {
        messages.push_back(work);
        continue;
      }
      mine_[work->sequence()] = work->request;
      for (int r = 0; r < size(); ++r) {
        auto& ahead = peers_[static_cast<std::size_t>(r)].ahead;
        const auto found = ahead.find(work->sequence());
        if (found == ahead.end()) continue;
        compare(r, work->sequence(), found->second, &failure);
        ahead.erase(found);
      }
      queue_.push_back(work);
    }
    inside_ += static_cast<int>(messages.size());  // a shutdown waits until they are where it can see them
  }
  if (failure.kind != FailureKind::none) fail(failure, true);
  changed_.notify_all();
  if (messages.empty()) return;
  for (const auto& work : messages) submit_message(work);
  {
    Lock lock(mutex_);
    inside_ -= static_cast<int>(messages.size());
  }
  changed_.notify_all();
}

// The communicator's thread: collectives in issue order.
void SpanCore::run() {
  for (;;) {
    SpanWorkPtr work;
    {
      Lock lock(mutex_);
      changed_.wait(lock, [this] { return !queue_.empty() || closing_; });
      if (queue_.empty()) break;
      work = queue_.front();
    }
    execute(work);
    finish(work);
  }
  {
    Lock lock(mutex_);
    changed_.wait(lock, [this] { return sends_.empty() && recvs_.empty() && !sending_ && inside_ == 0; });
  }
  leave();
}

void SpanCore::execute(const SpanWorkPtr& work) {
  {
    Lock lock(mutex_);
    if (failure_.kind != FailureKind::none) return;
  }
  flight_->started(work->flight());
  Head head;
  head.frame = FrameKind::begin;
  head.sequence = work->sequence();
  head.operation = work->request;
  tell_all(head);
  try {
    run_collective(*this, *work);
  } catch (const Failed&) {
    // The reason stands in failure_.
  } catch (const std::exception& e) {  // such as std::bad_alloc
    fail({FailureKind::aborted, p_.rank, "rank " + std::to_string(p_.rank) + ": " + e.what()}, true);
  }
}

// Ends a collective: well, or with the communicator's failure.
void SpanCore::finish(const SpanWorkPtr& work) {
  std::exception_ptr error;
  {
    Lock lock(mutex_);
    queue_.pop_front();
    if (failure_.kind != FailureKind::none) {
      await_told(lock);
      error = error_for(*work);
    }
    const auto behind = std::min_element(peers_.begin(), peers_.end(), [this](const Peer& a, const Peer& b) {
      return (&a == &peers_[static_cast<std::size_t>(p_.rank)] ? ~0ull : a.begun) <
             (&b == &peers_[static_cast<std::size_t>(p_.rank)] ? ~0ull : b.begun);
    });
    mine_.erase(mine_.begin(), mine_.lower_bound(std::min(behind->begun, work->sequence() + 1)));
  }
  flight_->ended(work->flight(), error != nullptr);
  if (error) FlightLog::get().write();
  work->end(error);
  changed_.notify_all();
}

// Of what has failed, collective or messages: nobody writes to its memory from here on.
void SpanCore::end_readers(Lock& lock) {
  const auto idle = [this] {
    return std::none_of(peers_.begin(), peers_.end(), [](const Peer& p) { return p.reading; });
  };
  if (!changed_.wait_until(lock, Clock::now() + kPatience, idle)) {
    lock.unlock();
    p_.mesh->close();  // a peer stopped in the middle of a frame that goes there
    lock.lock();
    changed_.wait(lock, idle);
  }
  for (Peer& peer : peers_) peer.want = nullptr;
}

void SpanCore::tell_all(Head head) {
  head.communicator = p_.number;
  for (int r = 0; r < size(); ++r) {
    if (r != p_.rank) p_.mesh->post(p_.place.wire[static_cast<std::size_t>(r)], head);
  }
}

// The first failure counts. `tell`: this rank has found it, and the others shall know.
void SpanCore::fail(const Failure& failure, bool tell) {
  {
    Lock lock(mutex_);
    if (failure_.kind != FailureKind::none) return;
    failure_ = failure;
  }
  flight_->failure(failure.kind == FailureKind::peer_lost ? rank_text(failure.peer) + " " + failure.text
                                                          : failure.text);
  alarm_.notify_all();
  if (tell) {
    Head head;
    head.frame = FrameKind::abort;
    head.failure = failure.kind;
    head.peer = failure.peer;
    std::strncpy(head.text, clipped(failure.text, kInline - 1).c_str(), kInline - 1);
    tell_all(head);
  }
  if (p_.inner) p_.inner->abort(failure.text);
  FlightLog::get().write();  // again when what is pending has ended
  {
    Lock lock(mutex_);
    told_ = true;
  }
  changed_.notify_all();
}

// What is pending ends only after the peers have been told: the program may exit on its error.
void SpanCore::await_told(Lock& lock) {
  changed_.wait(lock, [this] { return told_; });
  lock.unlock();
  p_.mesh->flush(Clock::now() + kFlush);
  lock.lock();
}

// Waits for `done`, which depends on rank `on` (-1: on nobody in particular).
void SpanCore::await(Lock& lock, const SpanWork& work, int on, const std::function<bool()>& done) {
  for (;;) {
    if (done()) return;
    if (failure_.kind != FailureKind::none) throw Failed{};
    Failure failure;
    if (on >= 0) {
      const Peer& peer = peers_[static_cast<std::size_t>(on)];
      if (peer.left || peer.gone) failure = {FailureKind::peer_lost, on, peer.left ? "left" : "died"};
    }
    if (failure.kind == FailureKind::none) {
      if (changed_.wait_until(lock, work.deadline()) != std::cv_status::timeout || done()) continue;
      failure = {FailureKind::timeout, -1, timeout_text(work)};
    }
    lock.unlock();
    fail(failure, true);
    throw Failed{};
  }
}

void SpanCore::await_all(const SpanWork& work) {
  Lock lock(mutex_);
  for (int r = 0; r < size(); ++r) {
    if (r == p_.rank) continue;
    await(lock, work, r, [&] { return peers_[static_cast<std::size_t>(r)].begun > work.sequence(); });
  }
}

void SpanCore::inside(const SpanWork& work, const InnerCall& issue) {
  CallOptions options;
  const auto left = std::chrono::duration_cast<Milliseconds>(work.deadline() - Clock::now());
  options.timeout = std::max(left, Milliseconds(1));
  std::exception_ptr error;
  std::vector<WorkPtr> works;
  try {
    works = issue(options);
    for (const auto& w : works) w->wait();
    return;
  } catch (...) {
    error = std::current_exception();
  }
  fail_inside(work, error);
  for (const auto& w : works) {  // they hold memory of this collective
    try {
      w->wait();
    } catch (const std::exception&) {
      // Told already.
    }
  }
  throw Failed{};
}

// What an operation inside the host ended with, for the ranks of all hosts.
void SpanCore::fail_inside(const SpanWork& work, const std::exception_ptr& error) {
  fail_by(error, [&] {
    Lock lock(mutex_);
    return timeout_text(work);
  });
}

void SpanCore::fail_split(const std::exception_ptr& error) {
  fail_by(error, [&] {
    try {
      std::rethrow_exception(error);
    } catch (const std::exception& e) {
      return std::string(e.what());
    }
  });
  try {
    std::rethrow_exception(error);
  } catch (const Error&) {
    Lock lock(mutex_);
    raised_ = true;
    std::rethrow_exception(error_at(
        "split on '" + p_.name + "' (rank " + std::to_string(p_.rank) + " of " + std::to_string(size()) + "): ", ""));
  }  // another exception, such as an interrupt, is the caller's
}

void SpanCore::fail_by(const std::exception_ptr& error, const std::function<std::string()>& late) {
  const auto& neighbours = p_.place.hosts[static_cast<std::size_t>(p_.place.host[static_cast<std::size_t>(p_.rank)])];
  try {
    std::rethrow_exception(error);
  } catch (const PeerLost& e) {
    const bool left = std::strstr(e.what(), " left;") != nullptr;
    const int peer = e.peer() < 0 ? -1 : neighbours[static_cast<std::size_t>(e.peer())];
    fail({FailureKind::peer_lost, peer, left ? "left" : "died"}, true);
  } catch (const Timeout&) {
    fail({FailureKind::timeout, -1, late()}, true);
  } catch (const Mismatch& e) {
    fail({FailureKind::mismatch, -1, e.what()}, true);
  } catch (const std::exception& e) {
    // Another rank of this host has given up, and its reason is under way.
    {
      Lock lock(mutex_);
      changed_.wait_until(lock, Clock::now() + std::chrono::seconds(2),
                          [this] { return failure_.kind != FailureKind::none; });
    }
    fail({FailureKind::aborted, -1, e.what()}, true);
  }
}

void SpanCore::abort(const std::string& reason) {
  if (engine_.forked()) return;
  {
    Lock lock(mutex_);
    if (ended_) return;  // this rank has left: what the others do there is not its affair
  }
  fail({FailureKind::aborted, -1, reason}, true);
}

void SpanCore::shutdown() {
  if (engine_.forked()) return;
  release();
  Lock lock(mutex_);
  while (!changed_.wait_for(lock, kAskPeriod, [this] { return ended_; })) {
    lock.unlock();
    check_interrupt();  // what is pending goes on without the caller
    lock.lock();
  }
}

void SpanCore::release() {
  if (engine_.forked()) return;
  {
    Lock lock(mutex_);
    closing_ = true;
  }
  changed_.notify_all();
}

void SpanCore::leave() {
  Head head;
  head.frame = FrameKind::leave;
  tell_all(head);
  p_.mesh->flush(Clock::now() + kFlush);
  if (p_.inner) p_.inner->shutdown();
  p_.mesh->remove(p_.number);
  {
    Lock lock(mutex_);
    ended_ = true;
  }
  changed_.notify_all();
}

}  // namespace axo::span
