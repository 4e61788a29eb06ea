#include "device/order_check.h"

#include <chrono>
#include <sstream>
#include <vector>

#include "base/deadline.h"
#include "base/error.h"

namespace axo {
namespace {

constexpr Milliseconds kPatience{250};
constexpr Milliseconds kGlance{20};

// What comes out of the store is outside input: lines that do not parse are skipped.
std::uint64_t number_in(const std::string& text) {
  std::uint64_t value = 0;
  for (char c : text) {
    if (c < '0' || c > '9') return 0;
    value = value * 10 + static_cast<std::uint64_t>(c - '0');
  }
  return value;
}

// First line: the operation. Each further line: a position, "<number> <key>".
std::string encode(const std::string& text, const OrderCheck::Positions& positions) {
  std::string all = text;
  for (const auto& [key, number] : positions) all += "\n" + std::to_string(number) + " " + key;
  return all;
}

std::string decode(const std::string& all, OrderCheck::Positions& positions) {
  std::istringstream lines(all);
  std::string text, line;
  std::getline(lines, text);
  while (std::getline(lines, line)) {
    const auto space = line.find(' ');
    if (space != std::string::npos) positions[line.substr(space + 1)] = number_in(line.substr(0, space));
  }
  return text;
}

}  // namespace

OrderCheck::OrderCheck(std::shared_ptr<Store> store, std::string key, std::string name, int rank, int size,
                       Milliseconds timeout)
    : store_(std::move(store)),
      key_(std::move(key)),
      name_(std::move(name)),
      rank_(rank),
      size_(size),
      timeout_(timeout) {}

std::uint64_t OrderCheck::publish(const std::string& text, const Positions& positions) {
  const std::uint64_t number = ++issued_;
  store_->set(key_ + "/op/" + std::to_string(number) + "/" + std::to_string(rank_), encode(text, positions));
  return number;
}

std::string OrderCheck::fetch(const std::string& key, int peer, const std::string& what, const std::string& text,
                              const std::function<void()>& cancelled, const std::function<void()>& while_waiting) {
  const Milliseconds timeout = timeout_;
  const auto end = deadline_after(timeout);
  while (true) {
    try {
      return store_->get(key, timeout < Milliseconds::zero() ? kPatience : std::min(kPatience, timeout));
    } catch (const Timeout&) {
    }
    cancelled();
    if (std::chrono::steady_clock::now() >= end) {
      throw Timeout(what + " of '" + name_ + "' (" + text + "): rank " + std::to_string(peer) +
                    " has not arrived after " + std::to_string(timeout.count()) + " ms");
    }
    while_waiting();
  }
}

void OrderCheck::verify(std::uint64_t number, const std::string& text, const Positions& positions,
                        const std::function<std::vector<Neighbour>()>& neighbours,
                        const std::function<void()>& cancelled) {
  const std::string what = "operation " + std::to_string(number);
  for (int step = 1; step < size_; ++step) {
    const int peer = (rank_ + step) % size_;
    const std::string key = key_ + "/op/" + std::to_string(number) + "/" + std::to_string(peer);
    const std::string theirs = fetch(key, peer, what, text, cancelled, [&] {
      const auto others = neighbours();
      say_waiting(number, text, peer, others);
      find_crossing(number, text, peer, others);
    });
    Positions their_positions;
    const std::string their_text = decode(theirs, their_positions);
    if (their_text != text) {
      throw Mismatch(what + " of '" + name_ + "' differs: rank " + std::to_string(rank_) + " issued " + text +
                     ", rank " + std::to_string(peer) + " issued " + their_text);
    }
    for (const auto& [other, mine] : positions) {
      const auto found = their_positions.find(other);
      if (found == their_positions.end() || found->second == mine) continue;
      throw Mismatch(what + " of '" + name_ + "' (" + text + ") has another place in the order: before it rank " +
                     std::to_string(rank_) + " issued " + std::to_string(mine) + " operations of '" + other +
                     "', rank " + std::to_string(peer) + " issued " + std::to_string(found->second));
    }
  }
}

// Every communicator has a board with a line a rank: in which operation of which communicator the rank waits, for whom.
void OrderCheck::say_waiting(std::uint64_t number, const std::string& text, int peer,
                             const std::vector<Neighbour>& neighbours) {
  const std::string line = std::to_string(number) + " " + std::to_string(peer) + " " + key_ + "\n" + text;
  for (const auto& other : neighbours) store_->set(other.key + "/at/" + std::to_string(other.rank), line);
}

void OrderCheck::find_crossing(std::uint64_t number, const std::string& text, int peer,
                               const std::vector<Neighbour>& neighbours) {
  std::string line;
  try {
    line = store_->get(key_ + "/at/" + std::to_string(peer), kGlance);
  } catch (const Timeout&) {
    return;
  }
  std::istringstream words(line);
  std::string at, for_whom, where, their_text;
  words >> at >> for_whom >> where;
  std::getline(words, their_text);  // the rest of the first line
  std::getline(words, their_text);
  for (const auto& other : neighbours) {
    // The peer waits for this rank, in an operation that this rank has yet to issue.
    if (other.key == where && where != key_ && number_in(for_whom) == static_cast<std::uint64_t>(other.rank) &&
        number_in(at) > other.issued) {
      throw Mismatch("crossed order: rank " + std::to_string(rank_) + " of '" + name_ + "' waits in operation " +
                     std::to_string(number) + " (" + text + ") for rank " + std::to_string(peer) +
                     ", which waits in operation " + at + " of '" + other.name + "' (" + their_text +
                     ") for this rank");
    }
  }
}

void OrderCheck::publish_send(const Operation& send) {
  const std::string number = std::to_string(++sent_[send.root]);
  store_->set(key_ + "/send/" + std::to_string(rank_) + "/" + std::to_string(send.root) + "/" + number, words(send));
}

void OrderCheck::verify_recv(const Operation& recv, const std::function<void()>& cancelled) {
  const int peer = recv.root;
  Operation expected = recv;
  expected.kind = Kind::send;
  expected.root = rank_;
  const auto number = std::to_string(++received_[peer]);
  const std::string key = key_ + "/send/" + std::to_string(peer) + "/" + std::to_string(rank_) + "/" + number;
  const std::string theirs = fetch(key, peer, "transfer " + number, words(recv), cancelled, [] {});
  if (theirs != words(expected)) {
    throw Mismatch("transfer " + number + " of '" + name_ + "' differs: rank " + std::to_string(rank_) + " issued " +
                   words(recv) + ", rank " + std::to_string(peer) + " issued " + theirs);
  }
}

}  // namespace axo
