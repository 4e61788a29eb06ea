// The queue, the arrivals, the messages and the failure of one communicator over several hosts; see hosts/core.h.
#include "hosts/core.h"

#include <sys/prctl.h>

#include <algorithm>
#include <cstring>
#include <thread>

namespace axo::hosts {
namespace {

constexpr std::chrono::seconds kFlush{5};   // for peers to read why a communicator ends
constexpr std::chrono::seconds kReason{2};  // for a message that says more than what was noticed so far

}  // namespace

HostsCore::HostsCore(Membership membership)
    : CpuCore(membership.member, membership.timeout, membership.number),
      m_(std::move(membership)),
      peers_(m_.map.wire.size()) {}

std::shared_ptr<HostsCore> HostsCore::create(Membership membership) {
  std::shared_ptr<HostsCore> core(new HostsCore(std::move(membership)));
  core->engine_.add(core);
  core->m_.mesh->add(core->m_.number, core);
  std::thread([core] { core->run(); }).detach();
  return core;
}

int HostsCore::rank_of(int wire_rank) const {
  const auto at = std::find(m_.map.wire.begin(), m_.map.wire.end(), wire_rank);
  if (at == m_.map.wire.end()) throw Error("a frame for '" + member().name + "', which the sender is not in");
  return static_cast<int>(at - m_.map.wire.begin());
}

Head HostsCore::head(FrameKind frame, Stream stream) const {
  Head h;
  h.communicator = m_.number;
  h.frame = frame;
  h.stream = stream;
  return h;
}

void HostsCore::tell_all(const Head& h) {
  for (int r = 0; r < size(); ++r) {
    if (r != rank()) m_.mesh->post(wire_of(r), h);
  }
}

void HostsCore::launch(const std::vector<WorkStatePtr>& works) {
  std::vector<HostsWorkPtr> messages;
  try {
    check_usable(name_of(works.front()->request.kind));
    Lock lock(mutex_);
    if (closing_) throw Error("the communicator is closed");  // by another thread, just now
    for (const auto& state : works) {
      const auto work = std::static_pointer_cast<HostsWork>(state);
      const bool message = work->request.point_to_point();
      work->issued(message ? next_message_++ : next_sequence_++, flight_.get());
      if (!message) {
        queue_.push_back(work);
        continue;
      }
      messages_.insert(work);
      messages.push_back(work);
      pending.fetch_add(1);
      engine_.started();
    }
  } catch (const Error&) {
    for (const auto& work : works) work->refuse(std::current_exception());
  }
  for (const auto& work : messages) submit_message(work);
  changed_.notify_all();
  engine_.watch();
}

// The communicator's thread: collectives in issue order, and the end.
void HostsCore::run() {
  ::prctl(PR_SET_NAME, "axo-hosts", 0, 0, 0);
  Lock lock(mutex_);
  for (;;) {
    const bool pending_any = !queue_.empty() || !messages_.empty();
    if (failed() && (pending_any || !told_)) {
      end_all(lock);
    } else if (!failed() && !queue_.empty()) {
      execute(lock);
    } else if (closing_ && !pending_any) {
      return leave(lock);
    } else {
      changed_.wait(lock);
    }
  }
}

// Runs the front of the queue. A collective that is complete here stays complete, whatever fails later.
void HostsCore::execute(Lock& lock) {
  running_ = queue_.front();
  flight_->started(running_->flight());
  for (int r = 0; r < size(); ++r) compare(lock, r);
  lock.unlock();
  try {
    run_collective(*this, running_->request);
    lock.lock();
    for (int r = 0; r < size(); ++r) {
      if (r != rank()) await(lock, r, [&] { return agrees(r); });
    }
  } catch (const std::exception& e) {
    if (!lock) lock.lock();
    // The reason of a Failed stands in failure_; others are such as std::bad_alloc.
    return fail(lock, {FailureKind::aborted, -1, "rank " + std::to_string(rank()) + ": " + e.what()});
  }
  for (Peer& p : peers_) {
    if (!p.operations.empty()) p.operations.pop_front();
  }
  queue_.pop_front();
  scratch_.clear();
  end(lock, std::exchange(running_, nullptr));
}

// An operation has ended well. Unlocks for its callbacks.
void HostsCore::end(Lock& lock, const HostsWorkPtr& work) {
  if (messages_.erase(work) != 0) {
    pending.fetch_sub(1);
    engine_.finished();
  }
  changed_.notify_all();
  lock.unlock();
  flight_->ended(work->flight(), false);
  work->complete(nullptr);
  engine_.self()->ring();  // threads that wait for it
  lock.lock();
}

// Ends everything pending with the communicator's failure, after the peers have been told (the program may exit on its
// error) and when nobody touches the memory of what ends.
void HostsCore::end_all(Lock& lock) {
  lock.unlock();
  if (m_.inner) m_.inner->abort(failure_.text);
  m_.mesh->flush(m_.number, Clock::now() + kFlush);
  m_.mesh->drop(m_.number);
  lock.lock();
  std::vector<HostsWorkPtr> ended(queue_.begin(), queue_.end());
  ended.insert(ended.end(), messages_.begin(), messages_.end());
  pending.fetch_sub(static_cast<int>(messages_.size()));
  for (std::size_t i = 0; i < messages_.size(); ++i) engine_.finished();
  queue_.clear();
  messages_.clear();
  sends_.clear();
  scratch_.clear();
  running_.reset();
  told_ = true;
  raised_ |= !ended.empty();
  lock.unlock();
  for (const auto& work : ended) flight_->ended(work->flight(), true);
  FlightLog::get().write();
  for (const auto& work : ended) {
    work->complete(error_at(work->describe(), "; waited " + seconds_since(work->issue_time())));
  }
  engine_.self()->ring();
  lock.lock();
}

// Waits for `done`, which depends on rank `on`. While `piece` is being sent, `on` may be lost: the mesh then calls
// back.
void HostsCore::await(Lock& lock, int on, const std::function<bool()>& done, const Piece* piece) {
  while (!done()) {
    if (failed()) throw Failed{};
    if (peer(on).lost() && (piece == nullptr || !piece->leaving)) {
      fail(lock, loss_of(on));
    } else if (changed_.wait_until(lock, running_->deadline()) == std::cv_status::timeout && !failed() && !done()) {
      fail(lock, {FailureKind::timeout, -1, timeout_text(*running_)});
    }
  }
}

void HostsCore::await(const Pieces& pieces) {
  Lock lock(mutex_);
  for (const auto& p : pieces) await(lock, p->rank, [&] { return p->done; }, p.get());
}

// Whether `rank` has come to the collective that runs and has issued the same.
bool HostsCore::agrees(int rank) const {
  return peer(rank).begun > running_->sequence() && peer(rank).operations.front() == running_->request;
}

// Fails where `rank` has come to the collective that runs with another.
void HostsCore::compare(Lock& lock, int rank) {
  if (!running_ || peer(rank).operations.empty() || agrees(rank)) return;
  const Operation &mine = running_->request, &theirs = peer(rank).operations.front();
  fail(lock, {FailureKind::mismatch, rank,
              "#" + std::to_string(running_->sequence()) + " differs: rank " + std::to_string(member().rank) +
                  " issued " + words(mine) + ", rank " + std::to_string(rank) + " issued " + words(theirs)});
}

char* HostsCore::scratch(std::size_t bytes) {
  scratch_.emplace_back(new char[std::max<std::size_t>(bytes, 1)]);
  return scratch_.back().get();
}

PiecePtr HostsCore::expect(int rank, char* data, std::size_t bytes) {
  auto piece = std::make_shared<Piece>(Piece{rank, data, bytes});
  Lock lock(mutex_);
  piece->done = bytes == 0;
  if (!piece->done) receives_[{rank, kCollectives}].push_back(piece);
  return piece;
}

void HostsCore::begin() {
  Head h = head(FrameKind::begin);
  h.operation = running_->request;
  tell_all(h);
}

PiecePtr HostsCore::send(int rank, const char* data, std::size_t bytes) {
  auto piece = std::make_shared<Piece>(Piece{rank, const_cast<char*>(data), bytes});
  Lock lock(mutex_);
  piece->done = bytes == 0;
  if (piece->done) return piece;
  sends_[{rank, kCollectives}].push_back(piece);
  match(lock, {rank, kCollectives});
  return piece;
}

void HostsCore::inside(const std::function<std::vector<WorkPtr>(const CallOptions& options)>& issue) {
  CallOptions options;
  const auto left = std::chrono::duration_cast<Milliseconds>(running_->deadline() - Clock::now());
  options.timeout = std::max(left, Milliseconds(1));
  bool bad = false;
  const auto guarded = [&](const std::function<void()>& step) {
    try {
      step();
    } catch (...) {
      if (!std::exchange(bad, true)) fail_by(running_.get(), std::current_exception());
    }
  };
  std::vector<WorkPtr> works;
  guarded([&] { works = issue(options); });
  for (const auto& w : works) guarded([&] { w->wait(); });  // all of them: they hold memory of this collective
  if (bad) throw Failed{};
}

// Lets the next piece of a stream leave when the peer has a place for it; one at a time.
void HostsCore::match(Lock& lock, const Key& key) {
  const auto sends = sends_.find(key);
  if (failed() || sends == sends_.end() || sends->second.front()->leaving) return;
  const PiecePtr piece = sends->second.front();
  if (key.second == kCollectives) {
    if (!agrees(key.first)) return;
  } else {
    const auto wanted = wanted_.find(key);
    if (wanted == wanted_.end()) return;
    const std::uint64_t bytes = wanted->second.front();
    wanted->second.pop_front();
    if (wanted->second.empty()) wanted_.erase(wanted);
    if (bytes != piece->bytes) {
      return fail(lock, {FailureKind::mismatch, key.first,
                         piece->message->describe() + " sends " + std::to_string(piece->bytes) + " bytes, " +
                             rank_text(key.first) + " receives " + std::to_string(bytes)});
    }
  }
  const auto sent = [self = self(), key](bool ok) {
    Lock relock(self->mutex_);
    if (!ok) {  // the peer's last words may be under way
      self->changed_.wait_for(relock, kReason, [&] { return self->failed() || self->peer(key.first).gone; });
      return self->fail(relock, self->loss_of(key.first));
    }
    self->moved(relock, self->sends_, key);
    self->match(relock, key);
  };
  piece->leaving =
      m_.mesh->send(wire_of(key.first), head(FrameKind::data, key.second), piece->data, piece->bytes, sent);
}

Failure HostsCore::loss_of(int rank) const { return {FailureKind::peer_lost, rank, peer(rank).left ? "left" : "died"}; }

// The front piece of a stream has left, or has come.
void HostsCore::moved(Lock& lock, Queues& queues, const Key& key) {
  const auto found = queues.find(key);
  if (found == queues.end()) return;  // it has failed meanwhile
  const PiecePtr piece = found->second.front();
  found->second.pop_front();
  if (found->second.empty()) queues.erase(found);
  piece->done = true;
  changed_.notify_all();
  if (piece->message) end(lock, piece->message);
}

char* HostsCore::place(int from, const Head& h) {
  const int rank = rank_of(from);
  Lock lock(mutex_);
  if (failed()) return nullptr;
  const auto found = receives_.find({rank, h.stream});
  if (found == receives_.end()) throw Error("bytes that nobody has asked for");
  const Piece& in = *found->second.front();
  if (h.total == in.bytes && h.bytes <= in.bytes - in.moved) return in.data + in.moved;
  fail(lock, {FailureKind::mismatch, rank,
              "rank " + std::to_string(rank) + " sends " + std::to_string(h.total) + " bytes, rank " +
                  std::to_string(member().rank) + " receives " + std::to_string(in.bytes)});
  return nullptr;
}

void HostsCore::arrived(int from, const Head& h) {
  const int rank = rank_of(from);
  const Key key{rank, h.stream};
  Lock lock(mutex_);
  Peer& p = peer(rank);
  switch (h.frame) {
    case FrameKind::begin:
      ++p.begun;
      p.operations.push_back(h.operation);
      compare(lock, rank);
      match(lock, {rank, kCollectives});
      break;
    case FrameKind::want:
      wanted_[key].push_back(h.bytes);
      match(lock, key);
      break;
    case FrameKind::data:
      if (const auto found = receives_.find(key); found != receives_.end()) {
        Piece& in = *found->second.front();
        in.moved += h.bytes;
        if (in.moved >= in.bytes) moved(lock, receives_, key);
      }
      break;
    case FrameKind::leave:
      p.left = true;
      break;
    case FrameKind::abort:
      Failure failure{h.failure, h.peer, std::string(h.text, ::strnlen(h.text, kInline))};
      if (!failure.valid(size())) {
        failure = {FailureKind::aborted, -1, "rank " + std::to_string(rank) + " aborted without a valid reason"};
      }
      fail(lock, failure, false);
      break;
  }
  changed_.notify_all();
}

void HostsCore::lost(int from) {
  const auto at = std::find(m_.map.wire.begin(), m_.map.wire.end(), from);
  if (at == m_.map.wire.end()) return;
  Lock lock(mutex_);
  peer(static_cast<int>(at - m_.map.wire.begin())).gone = true;
  changed_.notify_all();
}

// Messages that are late, or whose peer is gone. Collectives are judged where they wait.
bool HostsCore::progress(bool check) {
  if (!check) return false;
  Lock lock(mutex_);
  for (const auto& work : std::set<HostsWorkPtr>(messages_)) {
    const int root = work->request.root;
    const auto sends = sends_.find({root, work->request.tag});
    const Piece* next = sends == sends_.end() ? nullptr : sends->second.front().get();
    const bool leaving = next != nullptr && next->message == work && next->leaving;
    if (peer(root).lost() && !leaving) fail(lock, loss_of(root));
    if (Clock::now() >= work->deadline()) fail(lock, {FailureKind::timeout, -1, timeout_text(*work)});
  }
  return false;
}

void HostsCore::submit_message(const HostsWorkPtr& work) {
  const Request& r = work->request;
  flight_->started(work->flight());
  if (m_.map.host_of(r.root) == m_.map.host_of(rank())) return submit_inside(work);
  const Key key{r.root, r.tag};
  const bool sends = r.kind == Kind::send;
  char* data = static_cast<char*>(sends ? const_cast<void*>(r.in) : r.out);
  Lock lock(mutex_);
  if (failed()) return;  // it ends with the others
  (sends ? sends_ : receives_)[key].push_back(std::make_shared<Piece>(Piece{r.root, data, r.bytes(), work}));
  if (sends) return match(lock, key);
  Head h = head(FrameKind::want, r.tag);
  h.bytes = r.bytes();
  m_.mesh->post(wire_of(r.root), h);
}

// A message to or from a rank of this host.
void HostsCore::submit_inside(const HostsWorkPtr& work) {
  const Request& r = work->request;
  CallOptions options;
  options.timeout = std::chrono::duration_cast<Milliseconds>(work->deadline() - Clock::now());
  const int peer = m_.map.local_of(r.root);
  try {
    const WorkPtr inner = r.kind == Kind::send ? m_.inner->send(r.in, r.count, r.dtype, peer, r.tag, options)
                                               : m_.inner->recv(r.out, r.count, r.dtype, peer, r.tag, options);
    inner->on_completion([self = self(), work, inner = inner.get()] {
      if (const auto error = inner->exception()) {
        // On a thread of its own: what follows calls into `inner`, which a completion must not.
        std::thread([self, work, error] { self->fail_by(work.get(), error); }).detach();
      } else {
        Lock lock(self->mutex_);
        self->end(lock, work);
      }
    });
  } catch (...) {
    fail_by(work.get(), std::current_exception());
  }
}

// The first failure counts. `tell`: this rank has found it, and the others shall know. Unlocks.
void HostsCore::fail(Lock& lock, const Failure& failure, bool tell) {
  if (failed()) return;
  failure_ = failure;
  if (tell && failure.kind == FailureKind::peer_lost && failure.peer == rank()) {
    failure_ = {FailureKind::aborted, -1, failure.text};  // this rank has given up; here nobody is lost
  }
  receives_.clear();
  flight_->failure(failure.kind == FailureKind::peer_lost ? rank_text(failure.peer) + " " + failure.text
                                                          : failure.text);
  if (tell) {
    Head h = head(FrameKind::abort);
    h.failure = failure.kind;
    h.peer = failure.peer;
    std::strncpy(h.text, clipped(failure.text, kInline - 1).c_str(), kInline - 1);
    tell_all(h);
  }
  changed_.notify_all();
  lock.unlock();
  if (m_.inner) m_.inner->abort(failure.text);  // frees the collective that runs; its end calls back
  lock.lock();
}

// What an operation inside the host ended with, for the ranks of all hosts. `work`: the operation that used it; null: a
// split.
void HostsCore::fail_by(const HostsWork* work, const std::exception_ptr& error) {
  const auto& neighbours = m_.map.ranks_on(m_.map.host_of(rank()));
  Lock lock(mutex_);
  // A rank that gave up, or issued another operation, has sent a message that says more: wait for it a little.
  const auto fail_late = [&](const Failure& failure) {
    changed_.wait_for(lock, kReason, [this] { return failed(); });
    fail(lock, failure);
  };
  try {
    std::rethrow_exception(error);
  } catch (const PeerLost& e) {
    const bool left = std::strstr(e.what(), " left;") != nullptr;
    const int peer = e.peer() < 0 ? -1 : neighbours[static_cast<std::size_t>(e.peer())];
    fail(lock, {FailureKind::peer_lost, peer, left ? "left" : "died"});
  } catch (const Timeout& e) {
    fail(lock, {FailureKind::timeout, -1, work != nullptr ? timeout_text(*work) : e.what()});
  } catch (const Mismatch& e) {
    fail_late({FailureKind::mismatch, -1, e.what()});
  } catch (const std::exception& e) {
    fail_late({FailureKind::aborted, -1, e.what()});
  }
}

void HostsCore::fail_split(const std::exception_ptr& error) {
  fail_by(nullptr, error);
  try {
    std::rethrow_exception(error);
  } catch (const Error&) {
    Lock lock(mutex_);
    raised_ = true;
    std::rethrow_exception(error_at("split on " + member().words()));
  }  // another exception, such as an interrupt, is the caller's
}

Milliseconds HostsCore::set_timeout(Milliseconds timeout) {
  if (m_.inner) m_.inner->set_timeout(timeout);  // of a split inside the host
  return CpuCore::set_timeout(timeout);
}

void HostsCore::abort(const Failure& failure) {
  if (engine_.forked()) return;
  Lock lock(mutex_);
  if (!ended_) fail(lock, failure);  // else the others' operations are not its affair
}

void HostsCore::shutdown() {
  if (engine_.forked()) return;
  release();
  engine_.wait(*this, [this] { return ended_.load(); }, Clock::time_point::max());
}

void HostsCore::release() {
  if (engine_.forked()) return;
  Lock lock(mutex_);
  closing_ = true;
  changed_.notify_all();
}

void HostsCore::leave(Lock& lock) {
  lock.unlock();
  tell_all(head(FrameKind::leave));
  m_.mesh->flush(m_.number, Clock::now() + kFlush);
  if (m_.inner) m_.inner->shutdown();
  m_.mesh->remove(m_.number);
  engine_.remove(this);
  lock.lock();
  ended_ = true;
  engine_.self()->ring();
}

std::string HostsCore::rank_text(int rank) const {
  if (rank < 0) return "a rank";
  return "rank " + std::to_string(rank) + " (host " + m_.map.names[static_cast<std::size_t>(m_.map.host_of(rank))] +
         ")";
}

// Under mutex_.
std::string HostsCore::timeout_text(const HostsWork& work) const {
  const std::string text = "rank " + std::to_string(rank()) + " timed out after " + seconds_since(work.issue_time()) +
                           " in " + work.describe();
  if (work.request.point_to_point()) return text + "; " + rank_text(work.request.root) + " did not answer";
  const auto has_come = [&](int r) { return r == rank() || peer(r).begun > work.sequence(); };
  return text +
         arrivals(has_come, [&](int r) { return rank_text(r) + (peer(r).lost() ? ", " + loss_of(r).text : ""); });
}

std::exception_ptr HostsCore::failure() {
  Lock lock(mutex_);
  return failed() ? error_at(member().words()) : nullptr;
}

// What failure_, once set, is for the caller.
std::exception_ptr HostsCore::error_at(const std::string& where, const std::string& waited) const {
  const std::string who = failure_.kind == FailureKind::peer_lost ? rank_text(failure_.peer) : "";
  return error_of(failure_, where + ": ", who, waited);
}

void HostsCore::check_usable(const char* what) const {
  check_not_forked(what);
  const std::string at = std::string(what) + " on " + member().words();
  Lock lock(mutex_);
  // A rank that comes after the failure learns of it as those who waited did; what it calls then is Aborted.
  if (failed() && !std::exchange(raised_, true)) std::rethrow_exception(error_at(at));
  if (failed()) {
    const std::string who = failure_.kind == FailureKind::peer_lost ? rank_text(failure_.peer) + " " : "";
    throw Aborted(at + ": the communicator is aborted: " + who + failure_.text);
  }
  if (closing_) throw Error(at + ": the communicator is closed");
}

}  // namespace axo::hosts
