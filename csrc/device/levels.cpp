// The levels of a communicator, and an operation's rounds; see device/levels.h.
#include "device/levels.h"

#include <algorithm>

#include "base/deadline.h"
#include "device/core.h"
#include "device/rendezvous.h"

namespace axo {

bool Levels::take(const Operation& operation) const {
  const auto from = least.find(operation.kind);
  return from != least.end() && Composition::composes(operation) && composition.bytes(operation) >= from->second;
}

void DeviceCore::compose() {
  if (options_.composed.empty() || options_.split_share || size() < 4) return;
  std::vector<std::string> hosts;
  const auto place = [this](int r) { return key_ + "/host/" + std::to_string(r); };
  store_->set(place(rank()), host_of_library());
  for (int r = 0; r < size(); ++r) hosts.push_back(store_->get(place(r), limited(timeout())));
  const int local = static_cast<int>(std::count(hosts.begin(), hosts.end(), hosts[0])), count = size() / local;
  for (std::size_t r = 0, k = static_cast<std::size_t>(local); r < hosts.size(); ++r) {
    if (hosts[r] != hosts[r / k * k] || std::count(hosts.begin(), hosts.end(), hosts[r]) != local) return;
  }
  std::map<Kind, std::size_t> least;
  for (const auto& one : options_.composed) {
    if (one.hosts == count && one.local == local) least[one.kind] = one.least;
  }
  if (least.empty()) return;
  auto levels = std::make_shared<Levels>(Levels{Composition(rank(), count, local), nullptr, nullptr, std::move(least)});
  levels->inside = split(rank() / local, rank(), member_.name + " inside a host", options_.max_ctas);
  levels->between = split(rank() % local, rank(), member_.name + " between hosts", options_.max_ctas);
  for (const auto& part : {levels->inside, levels->between}) {
    part->graphs_ = graphs_;
    std::lock_guard<std::mutex> lock(part->mutex_);
    part->whole_ = weak_from_this();
  }
  std::lock_guard<std::mutex> lock(mutex_);
  levels_ = std::move(levels);
}

LibraryCalls::LibraryCalls(DeviceCore& core, const Request& request, bool may_be_composed)
    : core_(core), r_(request), whole_(core, request) {
  if (may_be_composed && core.levels() && core.levels()->take(request)) levels_ = core.levels();
}

std::size_t LibraryCalls::count(std::size_t round) const {
  return round >= rounds() ? 0 : levels_ ? composed_[round].size() : 1;
}

LibraryCall& LibraryCalls::at(std::size_t round, std::size_t i) { return levels_ ? composed_[round][i] : whole_; }

void LibraryCalls::before(std::size_t round, GpuStream stream) {
  if (levels_ && round == 0) {
    const std::size_t bytes = levels_->composition.scratch_bytes(r_);
    if (bytes > 0) scratch_ = core_.gpu().allocate(bytes, stream);
    steps_ = levels_->composition.steps(r_, scratch_);
    composed_ = std::vector<std::vector<LibraryCall>>(steps_.size());
    for (std::size_t i = 0; i < steps_.size(); ++i) {
      for (const Request& part : steps_[i].requests) composed_[i].emplace_back(core(i), part);
    }
  }
  for (std::size_t i = 0; i < count(round); ++i) at(round, i).before(stream);
}

int LibraryCalls::call(std::size_t round, GpuStream stream) {
  int result = kNcclSuccess;
  for (std::size_t i = 0; i < count(round) && (result == kNcclSuccess || result == kNcclInProgress); ++i) {
    result = at(round, i).call(stream);
  }
  return result;
}

void LibraryCalls::after(std::size_t round, GpuStream stream) {
  for (std::size_t i = 0; i < count(round); ++i) at(round, i).after(stream);
  if (round + 1 == rounds() && scratch_) core_.gpu().release(scratch_, stream);
}

bool LibraryCalls::several(std::size_t round) {
  return count(round) > 1 || (count(round) == 1 && at(round, 0).several());
}

DeviceCore& LibraryCalls::core(std::size_t round) const {
  return !levels_ || round >= rounds() ? core_ : steps_[round].inside ? *levels_->inside : *levels_->between;
}

}  // namespace axo
