// The queue, the arrivals, the messages and the failure of one communicator over several hosts; see hosts/core.h.
#include "hosts/core.h"

#include "hosts/socket_wire.h"

#include <sys/prctl.h>

#include <algorithm>
#include <cstring>
#include <thread>

namespace axo::hosts {
namespace {

constexpr std::chrono::seconds kHeard{1};   // for peers to answer that they know why a communicator ends
constexpr std::chrono::seconds kReason{2};  // for a frame that says more than what was noticed so far

// What ends the collective that runs; the reason stands in the core.
struct Failed : std::exception {};

// Of a communicator on the mesh; 0 is none.
std::uint64_t number_of(const std::string& key) { return std::max<std::uint64_t>(std::hash<std::string>{}(key), 1); }

// For an operation inside the host that `work` is made of.
CallOptions within(const WorkState& work) {
  CallOptions options;
  options.timeout = std::max(std::chrono::duration_cast<Milliseconds>(work.deadline() - Clock::now()), Milliseconds(1));
  return options;
}

}  // namespace

HostsCore::HostsCore(Membership membership)
    : CpuCore(membership.member, membership.timeout, number_of(membership.key)),
      m_(std::move(membership)),
      number_(number_of(m_.key)),
      peers_(m_.map.places.size()) {}

std::shared_ptr<HostsCore> HostsCore::create(Membership membership) {
  std::shared_ptr<HostsCore> core(new HostsCore(std::move(membership)));
  core->engine_.add(core);
  core->m_.mesh->add(core->number_, core);
  std::thread([core] { core->run(); }).detach();
  return core;
}

int HostsCore::rank_of(int wire_rank) const {
  const auto& places = m_.map.places;
  const auto at = std::find_if(places.begin(), places.end(), [&](const Place& p) { return p.wire == wire_rank; });
  return at == places.end() ? -1 : static_cast<int>(at - places.begin());
}

Head HostsCore::head(FrameKind frame, Stream stream) const {
  Head h;
  h.communicator = number_;
  h.frame = frame;
  h.stream = stream;
  return h;
}

void HostsCore::tell_all(const Head& h) {
  for (int r = 0; r < size(); ++r) {
    if (r != rank()) m_.mesh->post(wire_of(r), h);
  }
}

void HostsCore::queue(const WorkStatePtr* works, std::size_t count) {
  Lock lock(mutex_);
  for (const auto* work = works; work != works + count; ++work) {
    if ((*work)->request.point_to_point()) {
      messages_.insert(*work);
      fresh_.push_back(*work);
    } else {
      queue_.push_back(*work);
    }
  }
}

void HostsCore::start() {
  Lock lock(mutex_);
  const auto messages = std::exchange(fresh_, {});
  lock.unlock();
  changed_.notify_all();
  for (const auto& work : messages) submit_message(work);
}

// The communicator's thread: collectives in issue order, and the end.
void HostsCore::run() {
  ::prctl(PR_SET_NAME, "axo-hosts", 0, 0, 0);
  Lock lock(mutex_);
  for (;;) {
    const bool idle = queue_.empty() && messages_.empty();
    if (failed() && !(idle && drained_)) {
      end_all(lock);
    } else if (!failed() && !queue_.empty()) {
      execute(lock);
    } else if (closed_ && idle) {
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
      if (r != rank()) await(lock, [&] { return agrees(r); });
    }
  } catch (const std::exception& e) {
    if (!lock) lock.lock();
    // The reason of a Failed is known; others are such as std::bad_alloc.
    return fail(lock, {FailureKind::aborted, -1, "rank " + std::to_string(rank()) + ": " + e.what()});
  }
  for (Peer& p : peers_) {
    if (!p.operations.empty()) p.operations.pop_front();
  }
  queue_.pop_front();
  scratch_.clear();
  end_one(lock, std::exchange(running_, nullptr));
}

// An operation has ended well. Unlocks for its callbacks.
void HostsCore::end_one(Lock& lock, const WorkStatePtr& work) {
  messages_.erase(work);
  changed_.notify_all();
  const Ended ended{{work, nullptr}};
  settle(ended);
  lock.unlock();
  end(ended, false);
  lock.lock();
}

// Ends everything pending with the communicator's failure, after the peers have been told (the program may exit on its
// error) and when nobody touches the memory of what ends.
void HostsCore::end_all(Lock& lock) {
  lock.unlock();
  if (m_.inner) m_.inner->abort(failure_text());  // whoever has found the failure may not have come to that yet
  m_.mesh->drop(number_);
  lock.lock();
  Ended ended;
  for (const auto& work : queue_) ended.emplace_back(work, error_for(*work));
  for (const auto& work : messages_) ended.emplace_back(work, error_for(*work));
  queue_.clear();
  messages_.clear();
  sends_.clear();
  scratch_.clear();
  running_.reset();
  drained_ = true;
  lock.unlock();
  end(ended, true);
  lock.lock();
}

void HostsCore::await(Lock& lock, const std::function<bool()>& done) {
  while (!done()) {
    if (failed()) throw Failed{};
    changed_.wait(lock);
  }
}

void HostsCore::await(const Pieces& pieces) {
  Lock lock(mutex_);
  for (const auto& p : pieces) await(lock, [&] { return p->done; });
}

// Whether `rank` has come to the collective that runs and has issued the same.
bool HostsCore::agrees(int rank) const {
  const auto& operations = peer(rank).operations;
  return running_ && !operations.empty() && operations.front() == running_->request;
}

// Fails where `rank` has come to the collective that runs with another.
void HostsCore::compare(Lock& lock, int rank) {
  if (!running_ || peer(rank).operations.empty() || agrees(rank)) return;
  fail(lock, {FailureKind::mismatch, rank,
              "operation #" + std::to_string(running_->sequence()) + " differs between ranks: rank " +
                  std::to_string(member().rank) + ": " + words(running_->request) + "; rank " + std::to_string(rank) +
                  ": " + words(peer(rank).operations.front())});
}

char* HostsCore::scratch(std::size_t bytes) {
  scratch_.emplace_back(new char[std::max<std::size_t>(bytes, 1)]);
  return scratch_.back().get();
}

PiecePtr HostsCore::expect(int rank, char* data, std::size_t bytes) {
  auto piece = std::make_shared<Piece>(Piece{data, bytes});
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
  auto piece = std::make_shared<Piece>(Piece{const_cast<char*>(data), bytes});
  Lock lock(mutex_);
  piece->done = bytes == 0;
  if (piece->done) return piece;
  sends_[{rank, kCollectives}].push_back(piece);
  match(lock, {rank, kCollectives});
  return piece;
}

void HostsCore::inside(const std::function<std::vector<WorkPtr>(const CallOptions& options)>& issue) {
  try {
    for (const auto& work : issue(within(*running_))) work->wait();
    return;
  } catch (...) {
    if (!m_.inner->failure()) throw;
  }
  Lock lock(mutex_);
  await(lock, [] { return false; });  // judge() ends this communicator too
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
                         piece->message->describe() + " sends " + std::to_string(piece->bytes) + " bytes, rank " +
                             std::to_string(key.first) + place_of(key.first) + " receives " + std::to_string(bytes)});
    }
  }
  const auto sent = [self = self(), key, piece](bool ok) {
    Lock relock(self->mutex_);
    piece->leaving = false;
    if (!ok) return;  // the mesh will say that the peer is gone, once its last words have been read
    self->moved(relock, self->sends_, key);
    self->match(relock, key);
  };
  piece->leaving =
      m_.mesh->send(wire_of(key.first), head(FrameKind::data, key.second), piece->data, piece->bytes, sent);
}

// The front piece of a stream has left, or has come.
void HostsCore::moved(Lock& lock, Queues& queues, const Key& key) {
  const auto found = queues.find(key);
  if (found == queues.end()) return;  // it has failed meanwhile
  const PiecePtr piece = found->second.front();
  found->second.pop_front();
  if (found->second.empty()) queues.erase(found);
  piece->done = true;
  changed_.notify_all();
  if (piece->message) end_one(lock, piece->message);
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
  if (rank < 0) throw Error("a frame for '" + member().name + "', which the sender is not in");
  const Key key{rank, h.stream};
  Lock lock(mutex_);
  switch (h.frame) {
    case FrameKind::begin:
      peer(rank).operations.push_back(h.operation);
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
      peer(rank).left = true;
      break;
    case FrameKind::abort:
      peer(rank).heard = true;
      fail(lock, told_by(rank, size(), h.failure, h.peer, h.text, kInline));
      break;
  }
  changed_.notify_all();
}

bool HostsCore::progress(bool check) {
  if (!check) return false;
  const std::exception_ptr inside = m_.inner ? m_.inner->failure() : nullptr;  // it calls back: not under mutex_
  Lock lock(mutex_);
  judge(lock, inside);
  return false;
}

// Fails where something waits for a rank that is lost, or is late, or where `inner` has failed. A rank may be lost
// while the mesh has what it was sent: the mesh then calls back.
void HostsCore::judge(Lock& lock, const std::exception_ptr& inside) {
  const auto lose = [&](int rank) { fail(lock, {FailureKind::peer_lost, rank, loss_of(rank)}); };
  for (int r = 0; running_ && r < size(); ++r) {
    if (lost(r) && peer(r).operations.empty()) return lose(r);
  }
  for (const Queues* queues : {&sends_, &receives_}) {
    for (const auto& [key, pieces] : *queues) {
      if (lost(key.first) && !pieces.front()->leaving) return lose(key.first);
    }
  }
  std::vector<WorkStatePtr> works(messages_.begin(), messages_.end());
  if (running_) works.push_back(running_);
  for (const auto& work : works) {
    if (Clock::now() >= work->deadline()) return fail(lock, {FailureKind::timeout, rank(), timeout_text(*work)});
  }
  if (!inside) return;
  if (inside_failed_ == Clock::time_point{}) inside_failed_ = Clock::now();
  const Failure failure = failure_inside(inside);
  // Who gave up, was late or issued another operation has sent a frame that says more.
  if (failure.kind == FailureKind::peer_lost || Clock::now() >= inside_failed_ + kReason) fail(lock, failure);
}

void HostsCore::submit_message(const WorkStatePtr& work) {
  const Request& r = work->request;
  flight_->started(work->flight());
  if (m_.map.host_of(r.root) == m_.map.host_of(rank())) return submit_inside(work);
  const Key key{r.root, r.tag};
  const bool sends = r.kind == Kind::send;
  char* data = static_cast<char*>(sends ? const_cast<void*>(r.in) : r.out);
  Lock lock(mutex_);
  if (failed()) return;  // it ends with the others
  (sends ? sends_ : receives_)[key].push_back(std::make_shared<Piece>(Piece{data, r.bytes(), work}));
  if (sends) return match(lock, key);
  Head h = head(FrameKind::want, r.tag);
  h.bytes = r.bytes();
  m_.mesh->post(wire_of(r.root), h);
}

// A message to or from a rank of this host. Where `inner` has failed, judge() ends it.
void HostsCore::submit_inside(const WorkStatePtr& work) {
  const Request& r = work->request;
  const int peer = m_.map.local_of(r.root);
  try {
    const WorkPtr inner = r.kind == Kind::send ? m_.inner->send(r.in, r.count, r.dtype, peer, r.tag, within(*work))
                                               : m_.inner->recv(r.out, r.count, r.dtype, peer, r.tag, within(*work));
    inner->on_completion([self = self(), work, inner = inner.get()] {
      if (inner->exception()) return;
      Lock lock(self->mutex_);
      self->end_one(lock, work);
    });
  } catch (const Error&) {
    if (!m_.inner->failure()) throw;
  }
}

// The first failure counts. All others are told, also by a rank that was told itself: then who has told it knows that
// it was heard. Unlocks.
void HostsCore::fail(Lock& lock, const Failure& failure) {
  if (!set_failure(failure)) return;
  receives_.clear();
  Head h = head(FrameKind::abort);
  h.failure = failure.kind;
  h.peer = failure.peer;
  std::strncpy(h.text, clipped(failure.text, kInline - 1).c_str(), kInline - 1);
  tell_all(h);
  changed_.notify_all();
  lock.unlock();
  if (m_.inner) m_.inner->abort(failure.text);  // frees the collective that runs; its end calls back
  lock.lock();
}

// What ended `inner`, for the ranks of all hosts.
Failure HostsCore::failure_inside(const std::exception_ptr& error) const {
  Failure failure = failure_of(error);
  if (failure.kind == FailureKind::peer_lost && failure.peer >= 0) {
    failure.peer = m_.map.ranks_on(m_.map.host_of(rank()))[static_cast<std::size_t>(failure.peer)];
    failure.text = failure.text.find(" left;") != std::string::npos ? "left" : "died";
  }
  return failure;
}

void HostsCore::fail_split(const std::exception_ptr& error) {
  const Failure failure = failure_inside(error);
  Lock lock(mutex_);
  if (failure.kind != FailureKind::peer_lost) changed_.wait_for(lock, kReason, [this] { return failed(); });
  fail(lock, failure);
  lock.unlock();
  try {
    std::rethrow_exception(error);
  } catch (const Error&) {
    std::rethrow_exception(error_at("split on " + member().words()));
  }  // another exception, such as an interrupt, is the caller's
}

void HostsCore::abort(const Failure& failure) {
  if (engine_.forked()) return;
  Lock lock(mutex_);
  if (!ended_) fail(lock, failure);  // else the others' operations are not its affair
}

// A process that ends with bytes unread resets its connections, and peers lose what they have not read of it.
void HostsCore::until_heard(Milliseconds at_most) {
  if (engine_.forked() || !failed()) return;
  const auto end = Clock::now() + at_most;
  Lock lock(mutex_);
  for (int r = 0; r < size(); ++r) {
    const auto waits = [&] { return r != rank() && !peer(r).heard && !lost(r) && Clock::now() < end; };
    while (waits()) changed_.wait_for(lock, kTick);  // nobody tells of a loss
  }
}

void HostsCore::shutdown() {
  if (engine_.forked()) return;
  release();
  engine_.wait(*this, [this] { return ended_.load(); }, Clock::time_point::max());
}

void HostsCore::release() {
  if (engine_.forked()) return;
  close();
  Lock lock(mutex_);  // the communicator's thread has seen it, or waits
  changed_.notify_all();
}

void HostsCore::leave(Lock& lock) {
  lock.unlock();
  until_heard(kHeard);
  tell_all(head(FrameKind::leave));
  m_.mesh->drop(number_);
  if (m_.inner) m_.inner->shutdown();
  m_.mesh->remove(number_);
  engine_.remove(this);
  lock.lock();
  ended_ = true;
  engine_.self()->ring();
}

std::string HostsCore::loss_of(int rank) const {
  if (peer(rank).left) return "left";
  if (!m_.mesh->silent(wire_of(rank))) return "died";
  std::string ranks;
  for (int r : m_.map.ranks_on(m_.map.host_of(rank))) ranks += (ranks.empty() ? "" : ", ") + std::to_string(r);
  return "is lost: its host (ranks " + ranks + ") has answered nothing for " + std::to_string(kSilence.count() / 1000) +
         " s";
}

// Under mutex_.
std::string HostsCore::timeout_text(const WorkState& work) const {
  const std::string text = work.timed_out() + " in " + work.title();
  const auto named = [&](int r) { return "rank " + std::to_string(r) + place_of(r); };
  if (work.request.point_to_point()) return text + "; " + named(work.request.root) + " did not answer";
  const auto has_come = [&](int r) { return r == rank() || !peer(r).operations.empty(); };
  std::string owed;
  for (const auto& [key, pieces] : receives_) {
    const Piece& piece = *pieces.front();
    if (key.second != kCollectives || !agrees(key.first)) continue;
    owed += "; " + named(key.first) + " owes " + std::to_string(piece.bytes - piece.moved) + " of " +
            std::to_string(piece.bytes) + " bytes";
  }
  return text + arrivals(has_come, [&](int r) { return named(r) + (lost(r) ? ", " + loss_of(r) : ""); }) + owed;
}

}  // namespace axo::hosts
