// Sends and receives over Gloo; see torch/c10d_wire.h.
#include "torch/c10d_wire.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <chrono>
#include <cstring>

#include "base/error.h"

namespace axo {
namespace {

constexpr std::chrono::hours kLong{24 * 365};
constexpr std::size_t kSmall = 4096;  // the most bytes that are copied

at::Tensor bytes_at(const void* data, std::size_t bytes) {
  return at::from_blob(const_cast<void*>(data), {static_cast<std::int64_t>(bytes)}, at::kByte);
}

at::Tensor own_bytes(std::size_t bytes) { return at::empty({static_cast<std::int64_t>(bytes)}, at::kByte); }

at::Tensor own_copy(const void* data, std::size_t bytes) {
  at::Tensor copy = own_bytes(bytes);
  if (bytes != 0) std::memcpy(copy.mutable_data_ptr(), data, bytes);
  return copy;
}

}  // namespace

// Gloo keeps an operation that has failed or was ended. Where its memory is the caller's, who is about to leave it, the
// end of Gloo's buffer, and so of the last Work, takes the operation back; but then a peer's bytes for it stay in the
// socket, and Gloo's thread turns at full speed until the backend ends. So a small operation, as the next head of each
// peer always is one, has memory of its own, and is kept.
template <class Start>
void C10dWire::run(Works* works, int peer, const char* what, bool keep, const Start& start) {
  c10::intrusive_ptr<c10d::Work> work;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (closed_.count(peer) != 0) throw Error(std::string(what) + ": the wire is closed");
    (*works)[peer] = work = start();
  }
  std::string why = "the wire is closed";
  try {
    if (work->wait(std::chrono::duration_cast<std::chrono::milliseconds>(kLong))) return;
  } catch (const std::exception& e) {
    why = e.what();
  }
  if (!keep) {
    std::lock_guard<std::mutex> lock(mutex_);
    works->erase(peer);
    work.reset();
  }
  throw Error(std::string(what) + ": " + why);
}

void C10dWire::send(int to, int channel, const void* data, std::size_t bytes) {
  const bool small = bytes <= kSmall;
  std::vector<at::Tensor> tensors{small ? own_copy(data, bytes) : bytes_at(data, bytes)};
  run(&sending_, to, "send", small, [&] { return backend_->send(tensors, to, channel); });
}

void C10dWire::receive(int from, int channel, void* data, std::size_t bytes) {
  const bool small = bytes <= kSmall;
  std::vector<at::Tensor> tensors{small ? own_bytes(bytes) : bytes_at(data, bytes)};
  run(&receiving_, from, "receive", small, [&] { return backend_->recv(tensors, from, channel); });
  if (small && bytes != 0) std::memcpy(data, tensors[0].const_data_ptr(), bytes);
}

// Gloo itself does not always end a send to a peer that is gone: one that it was about to begin, at the peer's word.
void C10dWire::close(int peer) {
  std::lock_guard<std::mutex> lock(mutex_);
  closed_.insert(peer);
  for (const auto* works : {&sending_, &receiving_}) {
    if (const auto found = works->find(peer); found != works->end()) found->second->abort();
  }
}

}  // namespace axo
