// Processes of peers, told through the store; see device/peers.h.
#include "device/peers.h"

#include <unistd.h>

#include <set>
#include <sstream>

#include "base/error.h"
#include "base/identity.h"

namespace axo {
namespace {

constexpr const char* kLeft = "left";

// Launchers number the ranks of a host one after the other. So the look goes outwards from this rank and ends at the
// first one of another host, after some that have not come, or here: thousands of ranks must not ask the store for
// thousands of keys each.
constexpr int kNear = 64, kAbsent = 4;
constexpr Milliseconds kGlance{20};  // for a key that may be absent

struct Living {
  std::mutex mutex;
  std::set<DevicePeers*> all;
};

Living& living() {
  static auto* const living = new Living;  // outlives whoever is destroyed at exit
  return *living;
}

}  // namespace

DevicePeers::DevicePeers(std::shared_ptr<Store> store, std::string key, int rank, int size)
    : store_(std::move(store)), key_(std::move(key)), rank_(rank), peers_(static_cast<std::size_t>(size)) {
  if (store_ == nullptr || size == 1) return;
  try {
    store_->set(place(rank_), std::to_string(::getpid()) + " " + process_space() + " " + host_identity());
  } catch (const std::exception&) {  // the store has gone: the others cannot see this rank, and that is all
  }
  std::lock_guard<std::mutex> lock(living().mutex);
  living().all.insert(this);
}

DevicePeers::~DevicePeers() {
  std::lock_guard<std::mutex> lock(living().mutex);
  living().all.erase(this);
}

std::string DevicePeers::place(int rank) const { return key_ + "/process/" + std::to_string(rank); }

std::string DevicePeers::title(int rank) {
  std::lock_guard<std::mutex> lock(mutex_);
  const Peer& peer = peers_[static_cast<std::size_t>(rank)];
  return "rank " + std::to_string(rank) + " (process " + std::to_string(peer.pid) + ")";
}

void DevicePeers::leave() {
  if (store_ == nullptr || peers_.size() == 1) return;
  try {
    store_->set(place(rank_), kLeft);
  } catch (const std::exception&) {  // the store has gone first
  }
}

void DevicePeers::leave_all() {
  std::lock_guard<std::mutex> lock(living().mutex);
  for (DevicePeers* each : living().all) each->leave();
}

// What another process has written: only a number, and a place that is our own, is believed.
bool DevicePeers::learn(int rank) {
  std::string told;
  try {
    told = store_->get(place(rank), kGlance);
  } catch (const Timeout&) {
    return false;
  }
  Peer& peer = peers_[static_cast<std::size_t>(rank)];
  peer.known = true;
  peer.left = told == kLeft;
  std::istringstream text(told);
  std::string space, host;
  if (!(text >> peer.pid >> space) || !std::getline(text >> std::ws, host) || host != host_identity()) return true;
  peer.here = true;
  peer.process = RankThread(peer.pid, peer.pid, space);
  return true;
}

int DevicePeers::lost_towards(int step) {
  int absent = 0;
  for (int i = 1; i <= kNear && absent < kAbsent; ++i) {
    const int rank = rank_ + i * step;
    if (rank < 0 || rank >= static_cast<int>(peers_.size())) break;
    Peer& peer = peers_[static_cast<std::size_t>(rank)];
    if (!peer.known && !learn(rank)) {
      ++absent;
      continue;
    }
    if (peer.left) continue;
    if (!peer.here) break;
    if (!peer.process.gone()) continue;
    learn(rank);  // it may have left in peace since
    if (!peer.left) return rank;
  }
  return -1;
}

int DevicePeers::lost() {
  if (store_ == nullptr) return -1;
  std::lock_guard<std::mutex> lock(mutex_);
  try {
    const int below = lost_towards(-1);
    return below >= 0 ? below : lost_towards(1);
  } catch (const std::exception&) {  // the store has gone
    return -1;
  }
}

}  // namespace axo
