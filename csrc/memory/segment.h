// Anonymous shared memory: a sealed memfd and its mapping. No name exists at any moment, so nothing can be left behind.
//
// The seals forbid any peer to change the size (which would turn an access into SIGBUS); `map` refuses a descriptor
// without them or of another size. A mapping is not inherited by forked children (MADV_DONTFORK). Pages cost memory
// when they are first touched, not when they are mapped.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

namespace axo {

// A file descriptor with an owner.
class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd) : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Fd& operator=(Fd&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Fd();
  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }

 private:
  int fd_ = -1;
};

// Shared memory of this process, unmapped with the last reference.
class Mapping {
 public:
  Mapping(void* base, std::size_t bytes);
  ~Mapping();
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  char* base() const { return base_; }
  std::size_t bytes() const { return bytes_; }

 private:
  char* base_;
  std::size_t bytes_;
  int pid_;  // the process that mapped it: a forked child owns no such pages
};

// Creates `bytes` of zeroed shared memory and seals its size. `label` is for /proc/PID/maps only.
Fd create_segment(const char* label, std::size_t bytes);

// Maps a segment of exactly `bytes`; throws Error when the descriptor is not a sealed memfd of that size. Two calls in
// one process for the same segment share one mapping, so that ranks that are threads see each other's atomics (and
// ThreadSanitizer sees them too).
std::shared_ptr<Mapping> map_segment(int fd, std::size_t bytes);

}  // namespace axo
