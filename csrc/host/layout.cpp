// Offsets of the shared segment; see host/layout.h.
#include "host/layout.h"

#include <algorithm>

namespace axo::host {
namespace {

constexpr std::size_t kPage = 4096;
constexpr std::size_t kSlot = 128 * 1024;
constexpr std::size_t kSmallestPart = 4096;

std::size_t round_up(std::size_t n, std::size_t to) { return (n + to - 1) / to * to; }

}  // namespace

Layout::Layout(int ranks) : n_(ranks) {
  const auto n = static_cast<std::size_t>(ranks);
  slot_ = std::max(kSlot, n * kSmallestPart);
  part_ = slot_ / std::max<std::size_t>(n - 1, 1) / 64 * 64;
  states_ = kPage;
  rows_ = round_up(states_ + n * sizeof(RankState), kPage);
  stages_ = round_up(rows_ + n * n * kHeaders * sizeof(std::uint64_t), kPage);
  results_ = round_up(stages_ + n * kDepth * slot_, kPage);
  channels_ = round_up(results_ + n * kDepth * part_, kPage);
  bytes_ = round_up(channels_ + n * n * sizeof(Channel), kPage);
}

}  // namespace axo::host
