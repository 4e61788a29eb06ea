// Sends and receives over Gloo; see torch/c10d_wire.h.
#include "torch/c10d_wire.h"

#include <ATen/ops/from_blob.h>

#include <chrono>

#include "base/error.h"

namespace axo {
namespace {

constexpr std::chrono::hours kLong{24 * 365};

at::Tensor bytes_at(const void* data, std::size_t bytes) {
  return at::from_blob(const_cast<void*>(data), {static_cast<std::int64_t>(bytes)},
                       at::TensorOptions().dtype(at::kByte));
}

}  // namespace

template <class Start>
void C10dWire::run(Works* works, int peer, const char* what, const Start& start) {
  c10::intrusive_ptr<c10d::Work> work;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (closed_) throw Error(std::string(what) + ": the wire is closed");
    (*works)[peer] = work = start();
  }
  std::string why = "the wire is closed";
  try {
    if (work->wait(std::chrono::duration_cast<std::chrono::milliseconds>(kLong))) return;
  } catch (const std::exception& e) {
    why = e.what();
  }
  // Gloo keeps an operation that has failed or was ended, and a peer's bytes would still come to its memory, which the
  // caller is about to leave. Only the end of Gloo's buffer, and so of the last Work, takes the operation back.
  std::lock_guard<std::mutex> lock(mutex_);
  works->erase(peer);
  work.reset();
  throw Error(std::string(what) + ": " + why);
}

void C10dWire::send(int to, int channel, const void* data, std::size_t bytes) {
  std::vector<at::Tensor> tensors{bytes_at(data, bytes)};
  run(&sending_, to, "send", [&] { return backend_->send(tensors, to, channel); });
}

void C10dWire::receive(int from, int channel, void* data, std::size_t bytes) {
  std::vector<at::Tensor> tensors{bytes_at(data, bytes)};
  run(&receiving_, from, "receive", [&] { return backend_->recv(tensors, from, channel); });
}

void C10dWire::close() {
  std::lock_guard<std::mutex> lock(mutex_);
  closed_ = true;
  for (const auto* works : {&sending_, &receiving_}) {
    for (const auto& [peer, work] : *works) work->abort();
  }
}

}  // namespace axo
