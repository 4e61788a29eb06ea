// send and recv of a communicator that spans hosts: matched by (peer, tag) in issue order, not ordered against
// collectives.
//
// Inside a host they are those of `inner`. Between hosts a receive tells the sender what it wants; the sender's message
// thread then sends, so nothing is ever kept for a receive that may come.
#include <thread>

#include "hosts/core.h"

namespace axo::span {

void SpanCore::submit_message(const SpanWorkPtr& work) {
  const Request& r = work->request;
  if (p_.place.host[static_cast<std::size_t>(r.root)] == p_.place.host[static_cast<std::size_t>(p_.rank)]) {
    return submit_inside(work);
  }
  flight_->started(work->flight());
  const Key key{r.root, r.tag};
  bool start = false;
  {
    Lock lock(mutex_);
    (r.kind == Kind::send ? sends_ : recvs_)[key].push_back(work);
    start = !messages_run_;
    messages_run_ = true;
  }
  if (start) std::thread([self = shared_from_this()] { self->run_messages(); }).detach();
  if (r.kind == Kind::recv) {
    Head head;
    head.communicator = p_.number;
    head.frame = FrameKind::want;
    head.tag = r.tag;
    head.bytes = r.bytes();
    p_.mesh->post(p_.place.wire[static_cast<std::size_t>(r.root)], head);
  }
  changed_.notify_all();
}

void SpanCore::submit_inside(const SpanWorkPtr& work) {
  const Request& r = work->request;
  flight_->started(work->flight());
  {
    Lock lock(mutex_);
    ++inside_;
  }
  const auto end = [self = shared_from_this(), work](std::exception_ptr error) {
    if (error) {
      self->fail_inside(*work, error);
      Lock lock(self->mutex_);
      error = self->error_for(*work);
    }
    self->flight_->ended(work->flight(), error != nullptr);
    work->end(error);
    {
      Lock lock(self->mutex_);
      --self->inside_;
    }
    self->changed_.notify_all();
  };
  try {
    if (p_.inner == nullptr) throw Error(std::string(name_of(r.kind)) + ": got this rank itself, expected another");
    CallOptions options;
    options.timeout = std::chrono::duration_cast<Milliseconds>(work->deadline() - Clock::now());
    const int peer = p_.place.local[static_cast<std::size_t>(r.root)];
    const WorkPtr inner = r.kind == Kind::send ? p_.inner->send(r.in, r.count, r.dtype, peer, r.tag, options)
                                               : p_.inner->recv(r.out, r.count, r.dtype, peer, r.tag, options);
    // On a thread of its own when it failed: what follows may call into `inner`, which a completion must not.
    inner->on_completion([inner = inner.get(), end] {
      if (auto error = inner->exception()) {
        std::thread([end, error] { end(error); }).detach();
      } else {
        end(nullptr);
      }
    });
  } catch (...) {
    end(std::current_exception());
  }
}

// The next send whose receive is posted; null when there is none. Under mutex_.
SpanWorkPtr SpanCore::next_send(Failure* failure) {
  for (auto& [key, works] : sends_) {
    const auto wanted = wanted_.find(key);
    if (wanted == wanted_.end() || wanted->second.empty()) continue;
    SpanWorkPtr work = works.front();
    const std::uint64_t bytes = wanted->second.front();
    wanted->second.pop_front();
    if (wanted->second.empty()) wanted_.erase(wanted);
    if (bytes != work->request.bytes()) {
      *failure = {FailureKind::mismatch, key.first,
                  work->describe() + " sends " + std::to_string(work->request.bytes()) + " bytes, " +
                      rank_text(key.first) + " receives " + std::to_string(bytes)};
      return nullptr;
    }
    works.pop_front();
    if (works.empty()) sends_.erase(key);
    return work;
  }
  return nullptr;
}

// Ends everything pending with the communicator's failure.
void SpanCore::end_messages(Lock& lock) {
  await_told(lock);
  end_readers(lock);
  std::vector<std::pair<SpanWorkPtr, std::exception_ptr>> ended;
  for (auto* all : {&sends_, &recvs_}) {
    for (auto& [key, works] : *all) {
      for (auto& work : works) ended.emplace_back(work, error_for(*work));
    }
    all->clear();
  }
  lock.unlock();
  for (auto& [work, error] : ended) {
    flight_->ended(work->flight(), true);
    work->end(error);
  }
  if (!ended.empty()) FlightLog::get().write();
  lock.lock();
}

void SpanCore::run_messages() {
  Lock lock(mutex_);
  while (!ended_) {
    if (failure_.kind != FailureKind::none) {
      end_messages(lock);
      changed_.notify_all();
      changed_.wait(lock, [this] { return ended_ || !sends_.empty() || !recvs_.empty(); });
      continue;
    }
    Failure failure;
    Clock::time_point deadline = Clock::time_point::max();
    if (SpanWorkPtr work = next_send(&failure)) {
      sending_ = true;
      lock.unlock();
      std::exception_ptr error;
      try {
        send_pieces(
            *work, FrameKind::message,
            {{work->request.root, static_cast<char*>(const_cast<void*>(work->request.in)), work->request.bytes()}});
      } catch (const Failed&) {
        Lock relock(mutex_);
        error = error_for(*work);
      }
      flight_->ended(work->flight(), error != nullptr);
      work->end(error);
      lock.lock();
      sending_ = false;
      changed_.notify_all();
      continue;
    }
    for (const auto* all : {&sends_, &recvs_}) {
      for (const auto& [key, works] : *all) {
        const Peer& peer = peers_[static_cast<std::size_t>(key.first)];
        if (peer.left || peer.gone) failure = {FailureKind::peer_lost, key.first, peer.left ? "left" : "died"};
        for (const auto& work : works) {
          if (Clock::now() >= work->deadline()) failure = {FailureKind::timeout, -1, timeout_text(*work)};
          deadline = std::min(deadline, work->deadline());
        }
      }
    }
    if (failure.kind != FailureKind::none) {
      lock.unlock();
      fail(failure, true);
      lock.lock();
    } else if (deadline == Clock::time_point::max()) {
      changed_.wait(lock);
    } else {
      changed_.wait_until(lock, deadline);
    }
  }
}

}  // namespace axo::span
