// Sends and receives over Gloo; see torch/c10d_wire.h.
#include "torch/c10d_wire.h"

#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <chrono>

#include "base/error.h"

namespace axo {
namespace {

using Milliseconds = std::chrono::milliseconds;
constexpr std::chrono::hours kLong{24 * 365};

at::Tensor bytes_at(const void* data, std::size_t bytes) {
  return at::from_blob(const_cast<void*>(data), {static_cast<std::int64_t>(bytes)},
                       at::TensorOptions().dtype(at::kByte));
}

class GlooSending final : public Wire::Sending {
 public:
  explicit GlooSending(c10::intrusive_ptr<c10d::Work> work) : work_(std::move(work)) {}
  void wait(std::chrono::steady_clock::time_point deadline) override {
    const auto now = std::chrono::steady_clock::now();
    const auto longest = std::chrono::duration_cast<Milliseconds>(kLong);
    const auto left = deadline - now > kLong ? longest : std::chrono::duration_cast<Milliseconds>(deadline - now);
    try {
      work_->wait(std::max(left, Milliseconds(1)));
    } catch (const std::exception& e) {
      throw Error(std::string("send: ") + e.what());
    }
  }

 private:
  const c10::intrusive_ptr<c10d::Work> work_;
};

}  // namespace

std::unique_ptr<Wire::Sending> C10dWire::send(int to, int channel, const void* data, std::size_t bytes) {
  std::vector<at::Tensor> tensors{bytes_at(data, bytes)};
  return std::make_unique<GlooSending>(backend_->send(tensors, to, channel));
}

void C10dWire::receive(int from, int channel, void* data, std::size_t bytes) {
  std::vector<at::Tensor> tensors{bytes_at(data, bytes)};
  c10::intrusive_ptr<c10d::Work> work;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (closed_) throw Error("receive: the wire is closed");
    work = backend_->recv(tensors, from, channel);
    receiving_[from] = work;
  }
  try {
    if (work->wait(std::chrono::duration_cast<Milliseconds>(kLong))) return;
  } catch (const std::exception& e) {
    throw Error(std::string("receive: ") + e.what());
  }
  throw Error("receive: the wire is closed");
}

void C10dWire::close() {
  std::lock_guard<std::mutex> lock(mutex_);
  closed_ = true;
  for (const auto& [peer, work] : receiving_) work->abort();
}

}  // namespace axo
