// Processes of peers, told through the store; see device_peers.h.
#include "device_peers.h"

#include <unistd.h>

#include <algorithm>
#include <sstream>

namespace axo {
namespace {

constexpr const char* kLeft = "left";

// Launchers number the ranks of a host one after the other: further away there is nobody whom this rank could see, and
// thousands of ranks must not ask the store for thousands of keys each.
constexpr int kNear = 64;

}  // namespace

DevicePeers::DevicePeers(std::shared_ptr<Store> store, std::string key, int rank, int size)
    : store_(std::move(store)), key_(std::move(key)), rank_(rank), peers_(static_cast<std::size_t>(size)) {
  if (store_ == nullptr || size == 1) return;
  store_->set(place(rank_), std::to_string(::getpid()) + " " + host::process_space() + " " + host::host_identity());
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

// What another process has written: only a number, and a place that is our own, is believed.
void DevicePeers::learn(int rank) {
  if (!store_->has(place(rank))) return;
  const std::string told = store_->get(place(rank), Milliseconds(1000));
  Peer& peer = peers_[static_cast<std::size_t>(rank)];
  peer.known = true;
  peer.left = told == kLeft;
  std::istringstream text(told);
  std::string space, host;
  if (!(text >> peer.pid >> space) || !std::getline(text >> std::ws, host) || host != host::host_identity()) return;
  peer.process = host::Caller(peer.pid, peer.pid, space);
}

int DevicePeers::lost() {
  if (store_ == nullptr) return -1;
  std::lock_guard<std::mutex> lock(mutex_);
  try {
    const int first = std::max(rank_ - kNear, 0), end = std::min(rank_ + kNear, static_cast<int>(peers_.size()));
    for (int rank = first; rank < end; ++rank) {
      Peer& peer = peers_[static_cast<std::size_t>(rank)];
      if (rank == rank_ || peer.left) continue;
      if (!peer.known) learn(rank);
      if (!peer.process.gone()) continue;
      learn(rank);  // it may have left in peace since
      if (!peer.left) return rank;
    }
  } catch (const std::exception&) {  // the store has gone: what is known remains
  }
  return -1;
}

}  // namespace axo
